"""An index of the n-grams of reference texts, and where in another text any of them occurs.

N-grams are of `dedup.tokens`: words in spaced scripts, code points in others. A reference counts as written without
spaces if most of its tokens are single code points; its n-grams are longer then, since a code point says less than a
word. A reference shorter than an n-gram is one n-gram. Knows nothing of operators and of where references come from.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from swift.data.dedup.minhash import ngram_hashes
from swift.data.dedup.tokens import Tokens, join_texts, tokenise

_SINGLE_BYTES = 4  # a token of at most that many bytes that begins above ASCII is taken for a single code point


@dataclass(frozen=True)
class Match:
    """A stretch of a text whose n-grams occur in references.

    Attributes:
        start, end: bytes of the text in UTF-8.
        reference: number of the first reference with the first of the n-grams.
        tokens: in the stretch.
    """

    start: int
    end: int
    reference: int
    tokens: int


@dataclass
class NgramIndex:
    """N-grams of references: add all, `freeze`, then look texts up.

    Args:
        width: tokens of an n-gram in spaced scripts.
        single_width: in scripts without spaces.
        shortest: references with fewer tokens aren't indexed.
    """

    width: int
    single_width: int
    shortest: int
    references: int = 0
    too_short: int = 0
    _building: dict[int, list[tuple[np.ndarray, int]]] = field(default_factory=dict)
    _tables: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def add(self, text: str) -> int:
        """Index a reference; returns its number."""
        buffer, borders = join_texts([text])
        tokens = tokenise(buffer, borders)
        number = self.references
        self.references += 1
        count = len(tokens.hashes)
        if count < self.shortest or count == 0:
            self.too_short += 1
            return number
        width = min(count, self.single_width if _unspaced(buffer, tokens) else self.width)
        self._building.setdefault(width, []).append((np.unique(ngram_hashes(tokens.hashes, width)), number))
        return number

    def freeze(self) -> None:
        """Sort what was added, so that it can be looked up."""
        for width, parts in self._building.items():
            hashes = np.concatenate([part for part, _ in parts])
            owners = np.repeat([number for _, number in parts], [len(part) for part, _ in parts])
            order = np.lexsort([owners, hashes])
            hashes, owners = hashes[order], owners[order]
            first = np.append(True, hashes[1:] != hashes[:-1])
            self._tables[width] = hashes[first], owners[first]
        self._building = {}

    def find(self, texts: list[str]) -> list[list[Match]]:
        """For each text the stretches that occur in references, in order; those that touch are one."""
        if not texts:
            return []
        buffer, borders = join_texts(texts)
        tokens = tokenise(buffer, borders)
        hits: list[list[tuple[int, int, int]]] = [[] for _ in texts]
        for width, (hashes, owners) in self._tables.items():
            grams = ngram_hashes(tokens.hashes, width)
            if not len(grams):
                continue
            places = np.minimum(np.searchsorted(hashes, grams), len(hashes) - 1)
            for at in np.flatnonzero(hashes[places] == grams).tolist():
                text = int(np.searchsorted(tokens.offsets, at, side="right")) - 1
                if at + width <= tokens.offsets[text + 1]:  # an n-gram over the border of two texts is none
                    hits[text].append((at, at + width, int(owners[places[at]])))
        return [_joined(found, tokens, int(borders[number])) for number, found in enumerate(hits)]


def _unspaced(buffer: np.ndarray, tokens: Tokens) -> bool:
    single = (buffer[tokens.starts] >= 0xE0) & (tokens.ends - tokens.starts <= _SINGLE_BYTES)
    return 2 * int(single.sum()) > len(tokens.hashes)


def _joined(hits: list[tuple[int, int, int]], tokens: Tokens, base: int) -> list[Match]:
    """Stretches of tokens that overlap or touch become one."""
    matches: list[Match] = []
    open_start = open_end = reference = -1
    for start, end, owner in [*sorted(hits), (1 << 62, 1 << 62, -1)]:
        if open_start >= 0 and start > open_end:
            first, last = int(tokens.starts[open_start]) - base, int(tokens.ends[open_end - 1]) - base
            matches.append(Match(first, last, reference, open_end - open_start))
            open_start = -1
        if open_start < 0:
            open_start, open_end, reference = start, end, owner
        open_end = max(open_end, end)
    return matches
