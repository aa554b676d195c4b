"""One table of scripts without spaces, with one meaning for all that count words."""

from __future__ import annotations

import pytest

from swift.data.augment.text import _UNSPACED_CHARACTER
from swift.data.dedup.tokens import CLASSES
from swift.data.operators.characters import ALPHA, UNSPACED, character_table
from swift.data.operators.html_blocks import _WIDE
from swift.data.scripts import UNSPACED_BLOCKS


@pytest.mark.parametrize("letter", "中ไຂကកのカꞏབ𠀀々ｶㇰaé한".replace("ꞏ", ""))
def test_all_agree(letter: str) -> None:
    code = ord(letter)
    expected = any(first <= code <= last for first, last in UNSPACED_BLOCKS)
    assert expected == (letter not in "aé한")
    assert bool(_UNSPACED_CHARACTER.match(letter)) == bool(_WIDE.match(letter)) == expected
    assert (CLASSES[code] == 2) == expected
    assert bool(character_table()[code] & UNSPACED) == expected and character_table()[code] & ALPHA


def test_blocks_rise() -> None:
    edges = [edge for block in UNSPACED_BLOCKS for edge in block]
    assert edges == sorted(set(edges))
