"""Computes the steps of our engine with llama.cpp: its texts and blocks, told in llama.cpp's cells and sequences.

The engine deals in blocks, which texts that begin alike share and which keep what they hold until their place is
needed. llama.cpp knows sequences: numbers that cells carry, one or several, and that a token sees the cells of. Each
text that runs has a number. When it ends, the number stays on its cells as long as a block of it may be found again;
a text that finds blocks shares their cells. A block that is given to somebody else is first taken off all numbers that
carry it, so the cells never hold more than the blocks do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from swift.inference.gguf.library import GgufCache, Row
from swift.inference.paged.sequence import Piece


@dataclass
class _Text:
    """A text in the cache.

    Attributes:
        number: llama.cpp's.
        blocks: those of the engine, as when it was last computed.
        length: tokens that are computed.
    """

    number: int
    blocks: list[int] = field(default_factory=list)
    length: int = 0


class GgufRunner:
    """What the engine asks of a runner.

    Args:
        running: the texts that hold blocks now.
        block_size: tokens of a block.
        numbers: how many sequences the cache has.
        kept: how many of them may stay with texts that have ended; 0 where nothing is found again.

    Attributes:
        cache: to be set before anything runs; None while the engine sleeps.
        forget: to be set; makes the engine forget the blocks that it could find again.
    """

    def __init__(
        self,
        running: Callable[[], Collection[Any]],
        block_size: int,
        *,
        numbers: int,
        kept: int,
    ) -> None:
        self._running = running
        self.forget: Callable[[], None] = lambda: None
        self._size = block_size
        self._numbers = numbers
        self._most_kept = kept
        self._cache: GgufCache | None = None
        self._reset()

    def _reset(self) -> None:
        self._free = list(range(self._numbers - 1, -1, -1))
        self._texts: dict[Any, _Text] = {}
        self._kept: list[_Text] = []
        self._places: dict[int, int] = {}  # block -> its place in every text that has it
        self._carriers: dict[int, set[int]] = {}  # block -> numbers on its cells

    @property
    def cache(self) -> GgufCache | None:
        return self._cache

    @cache.setter
    def cache(self, cache: GgufCache | None) -> None:
        """An empty one, or none: whoever sets it sees to it that the engine has forgotten its blocks."""
        self._cache = cache
        self._reset()

    def run(self, pieces: Sequence[Piece[Any]]) -> torch.Tensor:
        """Compute the pieces.

        Returns:
            fp32 [wanted rows, vocab], in the order of `pieces` and of `Piece.wants`.
        """
        assert self._cache is not None, "the engine sleeps"
        self._take_leave()
        for piece in pieces:
            if piece.sequence not in self._texts:
                self._enter(piece)
        for piece in pieces:
            self._take_blocks(piece.sequence)
            self._texts[piece.sequence].length = piece.start + len(piece.tokens)
        rows = [
            Row(token, piece.start + k, self._texts[piece.sequence].number, k in piece.wants)
            for piece in pieces
            for k, token in enumerate(piece.tokens)
        ]
        scores = self._cache.compute(rows)
        if len(self._kept) > self._most_kept:  # not earlier: texts of this step had found blocks
            self._forget_kept()
        return scores

    def copy_block(self, source: int, target: int) -> None:
        """Only beam search copies blocks, and that isn't offered."""
        raise NotImplementedError

    def _take_leave(self) -> None:
        """Texts that have ended, or gave their blocks up: the engine computes a step before these start again."""
        running = set(self._running())
        for sequence in [sequence for sequence in self._texts if sequence not in running]:
            text = self._texts.pop(sequence)
            if self._most_kept and text.length >= self._size:
                self._kept.append(text)
            else:
                self._drop(text)

    def _enter(self, piece: Piece[Any]) -> None:
        """A text that comes; what it found in the cache is shared."""
        assert self._cache is not None
        text = _Text(self._free.pop())
        found = piece.start // self._size
        for place, block in enumerate(piece.sequence.blocks[:found]):
            carriers = self._carriers[block]
            self._cache.share(next(iter(carriers)), text.number, place * self._size, (place + 1) * self._size)
            carriers.add(text.number)
        text.blocks = list(piece.sequence.blocks[:found])
        self._texts[piece.sequence] = text

    def _take_blocks(self, sequence: Any) -> None:
        """Blocks that are new to a text: whatever their cells held is gone."""
        assert self._cache is not None
        text = self._texts[sequence]
        for place in range(len(text.blocks), len(sequence.blocks)):
            block = sequence.blocks[place]
            before = self._places.get(block, 0) * self._size
            for number in self._carriers.get(block, ()):
                self._cache.remove(number, before, before + self._size)
            self._places[block], self._carriers[block] = place, {text.number}
        text.blocks = list(sequence.blocks)

    def _forget_kept(self) -> None:
        """There are no numbers left for texts that ended; they are forgotten together."""
        self.forget()
        for text in self._kept:
            self._drop(text)
        self._kept = []

    def _drop(self, text: _Text) -> None:
        assert self._cache is not None
        self._cache.remove(text.number)
        for block in text.blocks:
            self._carriers.get(block, set()).discard(text.number)
        self._free.append(text.number)
