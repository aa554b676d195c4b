"""Guesses of the next tokens, for speculative decoding: from the text so far, or by a smaller model.

A guess never changes an answer: the engine keeps it only where it would have chosen the same token. What a guesser
remembers of a sequence is let go of when the sequence has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol
from weakref import WeakKeyDictionary

from swift.inference.choosing.drafting import PromptLookup
from swift.inference.paged.blocks import BlockPool
from swift.inference.paged.runner import ModelRunner
from swift.inference.paged.sequence import Piece, Placement, Sequence


class Guesser(Protocol):
    """Fills in `Sequence.drafts`."""

    def guess(self, sequences: list[Sequence]) -> None:
        """Guess for sequences that are answering."""
        ...

    def keep_only(self, sequences: Iterable[Sequence]) -> None:
        """All others have ended."""
        ...


class LookupGuesser:
    """Guesses that what followed the last tokens before will follow them again; costs next to nothing.

    Args:
        num_drafts: tokens guessed at most.
    """

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._lookups: WeakKeyDictionary[Sequence, PromptLookup] = WeakKeyDictionary()

    def guess(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if sequence not in self._lookups:
                self._lookups[sequence] = PromptLookup(self._num_drafts)
            sequence.drafts = tuple(self._lookups[sequence].draft(sequence.tokens, self._num_drafts))

    def keep_only(self, sequences: Iterable[Sequence]) -> None:
        """Nothing to do: a lookup goes with its sequence."""


@dataclass
class _Shadow:
    """What the smaller model has of a sequence."""

    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0


class ModelGuesser:
    """Guesses greedily with a smaller model, which has a cache of its own.

    A sequence for which its cache has no room gets no guesses.

    Args:
        runner: of the smaller model; its vocabulary is the large one's.
        pool: blocks of its cache.
        num_drafts: tokens guessed.
        max_tokens: tokens of a forward pass at most.
    """

    def __init__(self, runner: ModelRunner, pool: BlockPool, num_drafts: int, max_tokens: int) -> None:
        self._runner = runner
        self._pool = pool
        self._num_drafts = num_drafts
        self._max_tokens = max_tokens
        self._shadows: dict[Sequence, _Shadow] = {}

    def guess(self, sequences: list[Sequence]) -> None:
        ready = [sequence for sequence in sequences if self._follow(sequence)]
        for _ in range(self._num_drafts):
            ready = [s for s in ready if self._has_room(self._shadows[s])]
            for start in range(0, len(ready), self._max_tokens):
                group = ready[start : start + self._max_tokens]
                pieces = [self._piece(s, 1) for s in group]
                for sequence, token in zip(group, self._runner.run(pieces).argmax(dim=-1).tolist(), strict=True):
                    shadow = self._shadows[sequence]
                    shadow.num_computed += 1
                    shadow.tokens.append(token)
        for sequence in sequences:
            sequence.drafts = tuple(self._shadows[sequence].tokens[len(sequence.tokens) :])

    def keep_only(self, sequences: Iterable[Sequence]) -> None:
        alive = set(sequences)
        for sequence in [s for s in self._shadows if s not in alive]:
            self._pool.release(reversed(self._shadows.pop(sequence).blocks))

    def _follow(self, sequence: Sequence) -> bool:
        """Compute everything but the newest token of the text as it is now; False where there is no room."""
        shadow = self._shadows.setdefault(sequence, _Shadow())
        agreed = zip(shadow.tokens, sequence.tokens, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], agreed))
        shadow.tokens = list(sequence.tokens)
        shadow.num_computed = min(shadow.num_computed, same, len(shadow.tokens) - 1)
        if not self._has_room(shadow):
            return False
        while (left := len(shadow.tokens) - 1 - shadow.num_computed) > 0:
            count = min(left, self._max_tokens)
            self._runner.run([self._piece(sequence, count, wanted=False)])
            shadow.num_computed += count
        return True

    def _has_room(self, shadow: _Shadow) -> bool:
        missing = -(-len(shadow.tokens) // self._pool.block_size) - len(shadow.blocks)
        if missing > self._pool.num_free:
            return False
        for _ in range(missing):
            block = self._pool.allocate()
            assert block is not None
            shadow.blocks.append(block)
        return True

    def _piece(self, sequence: Sequence, count: int, *, wanted: bool = True) -> Piece:
        """The next tokens of a shadow, as the runner takes them."""
        shadow = self._shadows[sequence]
        start = shadow.num_computed
        tokens = shadow.tokens[start : start + count]
        return Piece(Placement(shadow.blocks), start, tokens, 0, range(count - 1, count) if wanted else range(0))
