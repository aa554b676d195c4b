"""Transforms of words: synonyms put in place or added, words swapped, words left out.

The last four follow EDA (Wei and Zou 2019, "Easy Data Augmentation"), with protected spans, casing and punctuation
kept. Only synonyms need a language.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from swift.config.fields import setting
from swift.data.augment.language import FUNCTION_WORDS
from swift.data.augment.synonyms import SynonymTable, read_table, shipped_table
from swift.data.augment.text import Words, capitalised, is_unspaced, like, uncapitalised
from swift.data.augment.transform import TRANSFORMS, Request, Unchanged, WordTransform

_TRIES = 8


@dataclass(kw_only=True)
class _SynonymTransform(WordTransform):
    """What replacing by synonyms and inserting them have in common."""

    table: str | None = setting(None, help='JSON file {"word": ["synonym", …]}; null: the English table that ships')
    language: str | None = setting(None, help="with a table of your own: its language; null: used on every text")
    senses: int = setting(1, help="how many of a word's most frequent senses may be meant")
    multiword: bool = setting(False, help="also synonyms of several words")
    ambiguous: bool = setting(False, help="also words that mean something else in more than half of their uses")

    def check(self) -> None:
        super().check()
        self.require(self.senses >= 1, "senses", "must be at least 1")
        self.require(self.language is None or self.table is not None, "language", "goes with a table of your own")

    def open(self, *, offline: bool = False) -> None:
        self._table: SynonymTable = read_table(Path(self.table)) if self.table else shipped_table()

    def _require_language(self, request: Request) -> None:
        wanted = self.language if self.table else "en"
        if wanted and request.language != wanted:
            raise Unchanged("unsupported_language")

    def _synonyms(self, words: Words, place: int) -> list[str]:
        """Synonyms of the word at a place, in its casing; none for names and small words."""
        word = words.parts[place]
        lower = word.lower()
        if self.table is None and (lower in FUNCTION_WORDS or len(word) < 3):
            return []
        if word[0].isupper() and not word.isupper() and not words.starts_sentence(place):
            return []  # a name
        found = self._table.of(lower, senses=self.senses, multiword=self.multiword, ambiguous=self.ambiguous)
        return [like(other, word) for other in found if other != lower]


@TRANSFORMS.register("synonym_replacement")
@dataclass(kw_only=True)
class SynonymReplacement(_SynonymTransform):
    """Replaces n words by synonyms in the same form and casing."""

    name: ClassVar[str] = "synonym_replacement"

    def rewrite(self, request: Request) -> str:
        self._require_language(request)
        words, rng = Words.of(request.text, self.kinds), request.rng
        wanted = self.number(len(words.free))
        for place in _shuffled(words.free, rng):
            if wanted <= 0:
                break
            choices = self._synonyms(words, place)
            if not choices:
                continue
            words.parts[place] = choices[rng.integers(len(choices))]
            if self.table is None:
                _agree_article(words, place)
            wanted -= 1
        return str(words)


def _agree_article(words: Words, place: int) -> None:
    """Make the `a` or `an` right before a replaced word fit it."""
    if place < 3 or words.parts[place - 1] != " ":
        return
    article = words.parts[place - 2]
    if article in ("a", "an", "A", "An"):
        words.parts[place - 2] = like("an" if has_vowel_sound(words.parts[place]) else "a", article)


def has_vowel_sound(word: str) -> bool:
    """Whether `an` stands before an English word: by its letters, with the common exceptions (`hour`, `university`)."""
    word = word.lower()
    if re.match(r"hour|hono[u]?r|honest|heir", word):
        return True
    if re.match(r"eu|ew|uni(?!n|m)|us[aeu]|ut[eio]|uran|ubi|one\b|once\b", word):
        return False
    return word.startswith(("a", "e", "i", "o", "u"))


@TRANSFORMS.register("random_insertion")
@dataclass(kw_only=True)
class RandomInsertion(_SynonymTransform):
    """Adds n synonyms of words of the text, each between two words that a single space parts."""

    name: ClassVar[str] = "random_insertion"

    def rewrite(self, request: Request) -> str:
        self._require_language(request)
        words, rng = Words.of(request.text, self.kinds), request.rng
        gaps = [place for place in range(2, len(words.parts) - 1, 2) if words.parts[place] == " "]
        if not gaps:
            raise Unchanged("nothing_to_change")
        wanted = self.number(len(words.free))
        for place in _shuffled(words.free, rng):
            if wanted <= 0:
                break
            choices = self._synonyms(words, place)
            if not choices:
                continue
            other = choices[rng.integers(len(choices))]
            if words.starts_sentence(place):
                other = uncapitalised(other)
            gap = gaps[rng.integers(len(gaps))]
            words.parts[gap] += other + " "
            wanted -= 1
        return str(words)


@TRANSFORMS.register("random_swap")
@dataclass(kw_only=True)
class RandomSwap(WordTransform):
    """Swaps n pairs of words; in scripts without spaces, of characters. Works in every language."""

    name: ClassVar[str] = "random_swap"

    distance: int = setting(0, help="how many words apart the two may be; 0: any number")

    def check(self) -> None:
        super().check()
        self.require(self.distance >= 0, "distance", "must be at least 0")

    def rewrite(self, request: Request) -> str:
        words, rng = Words.of(request.text, self.kinds), request.rng
        free = words.free
        if len(free) < 2:
            raise Unchanged("too_short")
        done: set[tuple[int, int]] = set()
        for _ in range(self.number(len(free))):
            for _ in range(_TRIES):  # the same pair again would undo the swap
                pair = self._pair(len(free), rng)
                if pair not in done:
                    done.add(pair)
                    _swap(words, free[pair[0]], free[pair[1]], english=request.language == "en")
                    break
        return str(words)

    def _pair(self, num_words: int, rng: np.random.Generator) -> tuple[int, int]:
        """Two different places in reach of each other, in order."""
        first = int(rng.integers(num_words))
        reach = self.distance or num_words
        low, high = max(0, first - reach), min(num_words - 1, first + reach)
        second = low + int(rng.integers(high - low))  # every other place in reach, equally often
        second += second >= first
        return (first, second) if first < second else (second, first)


def _swap(words: Words, first: int, second: int, *, english: bool) -> None:
    """Exchange two words; a capital that only marks the beginning of a sentence stays where it is."""
    for place, other in ((first, second), (second, first)):
        if words.starts_sentence(place) and not words.starts_sentence(other):
            initial, inner = words.parts[place], words.parts[other]
            if initial[:1].isupper() and not initial.isupper():
                initial = _without_initial_capital(initial, english)
                inner = capitalised(inner)
            words.parts[place], words.parts[other] = inner, initial
            return
    words.parts[first], words.parts[second] = words.parts[second], words.parts[first]


def _without_initial_capital(word: str, english: bool) -> str:
    """A sentence's first word elsewhere: small if that is how it is written, which is only known of English words."""
    small = uncapitalised(word)
    return small if english and (small in FUNCTION_WORDS or small in shipped_table()) else word


@TRANSFORMS.register("random_deletion")
@dataclass(kw_only=True)
class RandomDeletion(WordTransform):
    """Leaves n words out (in scripts without spaces, characters), never the last one. Works in every language."""

    name: ClassVar[str] = "random_deletion"

    def rewrite(self, request: Request) -> str:
        words, rng = Words.of(request.text, self.kinds), request.rng
        num_free = len(words.free)
        others = len(words.parts) // 2 - num_free  # protected spans
        wanted = min(self.number(num_free), num_free - (0 if others else 1))
        if wanted <= 0:
            raise Unchanged("too_short")
        gone: set[int] = set()
        for place in _shuffled(words.free, rng):
            if len(gone) >= wanted:
                break
            if _can_go(words, place, gone):
                gone.add(place)
        return _without(words, gone)


def _can_go(words: Words, place: int, gone: set[int]) -> bool:
    """Whether a word may go, besides those that are gone: no empty brackets or lines, no doubled punctuation."""
    parts, left, right = words.parts, place, place
    while left - 2 in gone:
        left -= 2
    while right + 2 in gone:
        right += 2
    if any(gap.strip() or "\n" in gap for gap in parts[left + 1 : right : 2]):
        return False
    before, after = parts[left - 1], parts[right + 1]
    at_start, at_end = left == 1, right == len(parts) - 2
    if (before.strip() or at_start or "\n" in before) and (after.strip() or at_end or "\n" in after):
        return False  # it stands alone between two marks, or in its line
    if is_unspaced(parts[place]):
        return True
    if not (at_start or before[-1:].isspace()):
        return False
    if words.starts_sentence(left):
        return after[:1].isspace()
    return at_end or after[:1].isspace() or after[0] in ",.;:!?…"


def _without(words: Words, gone: set[int]) -> str:
    """The text without some words and their spaces; a sentence's capital goes on to what is its first word then."""
    free = frozenset(words.free)
    pieces: list[str] = []
    capital = trim = False
    for place in range(1, len(words.parts), 2):
        gap, word = words.parts[place - 1], words.parts[place]
        was_trimmed, trim = trim, False
        gap = gap.lstrip(" \t") if was_trimmed else gap
        if place in gone:
            capital = capital or (words.starts_sentence(place) and word[:1].isupper())
            if is_unspaced(word) or place == 1 or "\n" in gap:
                pieces.append(gap)
                trim = not is_unspaced(word)
            else:
                pieces.append(gap.rstrip(" \t"))
                trim = was_trimmed
            continue
        pieces += [gap, capitalised(word) if capital and place in free else word]
        capital = False
    pieces.append(words.parts[-1].lstrip(" \t") if trim else words.parts[-1])
    return "".join(pieces)


def _shuffled(places: list[int], rng: np.random.Generator) -> list[int]:
    return [places[index] for index in rng.permutation(len(places))]
