"""Student and teacher must count the same tokens."""

from __future__ import annotations

import pytest

from swift.core.errors import ModelError
from swift.methods.vocabulary import check_same_vocabulary


def test_equal_tokenizers_give_the_number_of_ids(tokenizer, base_tokenizer):
    assert check_same_vocabulary(tokenizer, base_tokenizer) == 2048


def test_the_first_difference_is_named(tokenizer, base_tokenizer):
    base_tokenizer.add_tokens(["<zebra>", "<gnu>"])
    with pytest.raises(ModelError, match=r"id 2048 is no token for the student and '<zebra>'.*2 of 2050"):
        check_same_vocabulary(tokenizer, base_tokenizer)
    tokenizer.add_tokens(["<okapi>"])
    with pytest.raises(ModelError, match="id 2048 is '<okapi>' for the student and '<zebra>' for the teacher"):
        check_same_vocabulary(tokenizer, base_tokenizer)
