"""The fast path gives the reference's ids or isn't used; what becomes of every text is counted."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from swift.data.token_files import fast_tokenizer
from swift.data.token_files.fast_tokenizer import FastTokenizer, awkward_texts

WORDS = ["paris", "rain", "Zürich", "1234", "\n", "\t", "def f():", "天气", "—", "don't", "👍🏽", "x" * 30]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_tokenizer, "LEAST_CHARACTERS", 1000)


def texts(count: int, seed: int = 1) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(0, 80))) for _ in range(count)]


def by_the_book(tokenizer: Any, batch: Sequence[str], special: bool) -> list[list[int]]:
    return [tokenizer(text, add_special_tokens=special).input_ids for text in batch]


class Wrong:
    """Right on most texts; wrong where `bad` is in them."""

    def __init__(self, tokenizer: Any, bad: str) -> None:
        self.tokenizer, self.bad, self.calls = tokenizer, bad, 0

    def encode_batch(self, batch: Sequence[str]) -> list[np.ndarray]:
        self.calls += 1
        ids = by_the_book(self.tokenizer, batch, special=False)
        return [np.array([7] if self.bad in text else i, np.int32) for text, i in zip(batch, ids)]


@pytest.mark.parametrize("special", [True, False])
def test_gigatoken_gives_the_ids_of_the_reference(tokenizer: Any, special: bool) -> None:
    pytest.importorskip("gigatoken")
    batch = [*texts(60), *(text for text in awkward_texts())]
    fast = FastTokenizer(tokenizer)
    found = fast.encode_batch(batch, special=special)
    assert [ids.tolist() for ids in found] == by_the_book(tokenizer, batch, special)
    assert all(ids.dtype == np.int32 for ids in found)
    assert fast.report() == {"tokenised_fast": len(batch)}, fast.why_not


def test_what_is_put_around_a_text(tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    bos, eos = "<|endoftext|>", "<|im_end|>"
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in (bos, eos)}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A {eos} {eos}", special_tokens=list(ids.items())
    )
    batch = texts(40)
    fast = FastTokenizer(tokenizer, Wrong(tokenizer, "kangaroo"))
    found = fast.encode_batch(batch)
    assert found[0].tolist()[0] == ids[bos] and found[0].tolist()[-2:] == [ids[eos]] * 2
    assert [i.tolist() for i in found] == by_the_book(tokenizer, batch, True)
    assert fast.counts["tokenised_fast"] == 40


def test_texts_with_special_tokens_go_to_the_reference(tokenizer: Any) -> None:
    batch = [*texts(40), "a <|im_end|> b", "<|im_start|>user", "<| not one", "<|endoftext|>"]
    fast = FastTokenizer(tokenizer, Wrong(tokenizer, "<|im"))
    assert [ids.tolist() for ids in fast.encode_batch(batch)] == by_the_book(tokenizer, batch, True)
    assert fast.report() == {"tokenised_fast": 41, "added_in_text": 3, "tokenised_reference": 3}


def test_a_difference_on_the_sample_sends_the_batch_to_the_reference(tokenizer: Any) -> None:
    fast = FastTokenizer(tokenizer, Wrong(tokenizer, "kangaroo"))
    good, bad = texts(40), [f"kangaroo {text}" for text in texts(40)]
    assert [ids.tolist() for ids in fast.encode_batch(bad)] == by_the_book(tokenizer, bad, True)
    assert fast.report() == {"fast_path_differed": 40, "tokenised_reference": 40}
    fast.encode_batch(good)  # another batch is judged for itself
    assert fast.counts["tokenised_fast"] == 40


def test_an_engine_that_fails_the_fixed_texts_is_never_used(tokenizer: Any) -> None:
    engine = Wrong(tokenizer, "天")
    fast = FastTokenizer(tokenizer, engine)
    batch = texts(40)
    for _ in range(2):
        assert [ids.tolist() for ids in fast.encode_batch(batch)] == by_the_book(tokenizer, batch, True)
    assert engine.calls == 1 and "天" in str(fast.report()["why_not"])
    assert fast.counts["tokenised_reference"] == 80


def test_small_batches_stay_with_the_reference(tokenizer: Any) -> None:
    engine = Wrong(tokenizer, "kangaroo")
    fast = FastTokenizer(tokenizer, engine)
    assert [ids.tolist() for ids in fast.encode_batch(["one", "", "two"])] == by_the_book(
        tokenizer, ["one", "", "two"], True
    )
    assert engine.calls == 0 and fast.report() == {"tokenised_reference": 3}
    assert fast.encode_batch([]) == []


def test_normalisers_that_could_make_added_tokens(tokenizer: Any) -> None:
    from tokenizers import AddedToken, normalizers

    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFC()])
    assert FastTokenizer(tokenizer, Wrong(tokenizer, "kangaroo"))._start()
    tokenizer.add_tokens([AddedToken("<tool>", normalized=True)])
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    fast = FastTokenizer(tokenizer, Wrong(tokenizer, "kangaroo"))
    batch = [*texts(40), "<TOOL>"]
    assert [ids.tolist() for ids in fast.encode_batch(batch)] == by_the_book(tokenizer, batch, True)
    assert "normaliser" in str(fast.why_not)


def test_it_travels_to_worker_processes(tokenizer: Any) -> None:
    pytest.importorskip("gigatoken")
    fast = FastTokenizer(tokenizer)
    batch = texts(40)
    before = [ids.tolist() for ids in fast.encode_batch(batch)]
    again = pickle.loads(pickle.dumps(fast))
    assert [ids.tolist() for ids in again.encode_batch(batch)] == before
    assert again.why_not is None


def test_the_encoder_gives_the_same_examples_with_and_without(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gigatoken")
    from swift.config.data import TemplateConfig
    from swift.data.encoding.encode import ChatEncoder
    from swift.data.rows import Row, RowRef

    rows = [Row(RowRef("a", i), [], text=text + "." * 9) for i, text in enumerate(texts(60))]
    settings = TemplateConfig(use_chat_template=False, max_length=50, truncation_strategy="split", loss_scale="all")
    fast = ChatEncoder(tokenizer, settings)
    with_it = fast.encode_batch(rows)
    assert fast.counts["tokenised_fast"] == 60
    monkeypatch.setattr(fast_tokenizer, "LEAST_CHARACTERS", 1 << 40)
    without = ChatEncoder(tokenizer, settings).encode_batch(rows)
    for left, right, row in zip(with_it, without, rows, strict=True):
        assert [p.input_ids.tolist() for p in left] == [p.input_ids.tolist() for p in right]
        assert [p.loss_weights.tolist() for p in left] == [p.loss_weights.tolist() for p in right]
        whole = [*tokenizer(row.text).input_ids, tokenizer.eos_token_id]
        assert [i for piece in left for i in piece.input_ids.tolist()] == whole[: sum(len(p.input_ids) for p in left)]
        assert all(piece.loss_weights.tolist() == [0.0, *[1.0] * (len(piece.input_ids) - 1)] for piece in left)
