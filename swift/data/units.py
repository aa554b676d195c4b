"""What is trained on together: a preference pair, a query with its candidates, a labelled text.

A unit is one example of the token store, so order, packing, mixing and resuming treat it like any other. Its *parts*
lie end to end behind a *prefix* that all of them begin with (the prompt), which is there once; prefix and part together
are a *sequence*. The notes beside the example's tokens say where parts begin, what they are, and what else is known of
the unit.

Knows nothing of tokenizers, of batches or of what a value means.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

NO_NOTES = np.zeros(0, np.float64)  # of an example that is one sequence to predict the next token in


class Kind(IntEnum):
    """What a part is among those of its unit."""

    CHOSEN = 0
    REJECTED = 1
    ANCHOR = 2
    POSITIVE = 3
    NEGATIVE = 4
    PLAIN = 5


@dataclass(frozen=True)
class Unit:
    """How an example is divided.

    Attributes:
        prefix: tokens at its head that every part begins with; may be 0.
        lengths: tokens of each part, behind the prefix.
        kinds: of each part (`Kind`).
        values: of the unit: labels, a margin; what they mean is the method's business.
    """

    prefix: int
    lengths: tuple[int, ...]
    kinds: tuple[int, ...]
    values: tuple[float, ...] = ()

    def notes(self) -> np.ndarray:
        """The unit as float64 numbers, for the store."""
        head = (self.prefix, len(self.lengths), *self.lengths, *self.kinds)
        return np.array([*head, *self.values], dtype=np.float64)

    @classmethod
    def read(cls, notes: np.ndarray) -> Unit:
        """What `notes` gave."""
        numbers = notes.tolist()
        count = int(numbers[1])
        lengths, kinds = numbers[2 : 2 + count], numbers[2 + count : 2 + 2 * count]
        return cls(int(numbers[0]), tuple(map(int, lengths)), tuple(map(int, kinds)), tuple(numbers[2 + 2 * count :]))

    def parts(self) -> Iterator[slice]:
        """Where each part lies in the example."""
        start = self.prefix
        for length in self.lengths:
            yield slice(start, start + length)
            start += length

    @property
    def written_out(self) -> int:
        """Tokens of all sequences, the prefix counted with each."""
        return sum(self.lengths) + self.prefix * len(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.prefix + max(self.lengths)


def written_out_lengths(lengths: np.ndarray, notes: list[np.ndarray]) -> np.ndarray:
    """int32 [examples]: their tokens when every sequence has the prefix to itself."""
    return np.array(
        [Unit.read(note).written_out if len(note) else length for length, note in zip(lengths, notes, strict=True)],
        dtype=np.int32,
    )
