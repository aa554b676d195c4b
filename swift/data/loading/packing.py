"""Whole examples into rows of fixed capacity: all at once, or one after another as they come.

`pack` is best-fit decreasing over capacity buckets, for examples that are all at hand. `OpenRows` is best-fit with a
bounded number of open rows, for those that aren't (99.9 % full on chat-like lengths, where `pack` reaches 99.998 %).

In `pack`, examples are taken from the longest to the shortest; each goes into the fullest open row that still has
room. Rows are kept in one bucket per remaining capacity, so finding the fullest that fits is a binary search over the
capacities in use. Examples of equal length come in the order they are given, so another order gives other rows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")

# Rows that are filled side by side: more of them fill little better, and a checkpoint holds their examples.
OPEN_ROWS = 32


def pack(lengths: np.ndarray, order: np.ndarray, capacity: int) -> list[list[int]]:
    """Put every example into exactly one row.

    Args:
        lengths: int [examples], tokens of each example, none above `capacity`.
        order: int [n], the examples to pack; ties between equal lengths go by this order.
        capacity: tokens per row.

    Returns:
        Rows as lists of example numbers.

    Raises:
        ValueError: an example is longer than the capacity.
    """
    sizes = lengths[order]
    if len(sizes) and sizes.max() > capacity:
        raise ValueError(f"an example of {sizes.max()} tokens doesn't fit into rows of {capacity}")
    longest_first = order[np.argsort(-sizes, kind="stable")]
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # remaining capacity -> rows with just that left
    capacities: list[int] = []  # sorted keys of open_rows
    for example in longest_first.tolist():
        size = int(lengths[example])
        at = bisect_left(capacities, size)
        if at == len(capacities):
            row, left = len(rows), capacity
            rows.append([])
        else:
            left = capacities[at]
            bucket = open_rows[left]
            row = bucket.pop()
            if not bucket:
                del open_rows[left]
                capacities.pop(at)
        rows[row].append(example)
        left -= size
        if left:
            if left not in open_rows:
                open_rows[left] = []
                insort(capacities, left)
            open_rows[left].append(row)
    return rows


def packing_efficiency(rows: list[list[int]], lengths: np.ndarray, capacity: int) -> float:
    """Share of the rows' slots that hold tokens."""
    tokens = sum(int(lengths[example]) for row in rows for example in row)
    return tokens / (len(rows) * capacity) if rows else 1.0


class OpenRows(Generic[T]):
    """Rows that are being filled: an example goes into the fullest row that has room for it.

    Where there is none and `limit` rows are open, the fullest is closed to make place. What comes out is a function of
    the examples' lengths in their order, and of the rows that were open before.

    Args:
        capacity: tokens per row.
        limit: rows open at once.
    """

    def __init__(self, capacity: int, limit: int = OPEN_ROWS) -> None:
        self.capacity = capacity
        self.limit = limit
        self._rows: dict[int, list[tuple[int, T]]] = {}  # number -> (length, item)
        self._room: list[tuple[int, int]] = []  # sorted (tokens left, number)
        self._next = 0

    def add(self, length: int, item: T) -> list[list[T]]:
        """Put an example in; gives the rows that this closes, at most two.

        Raises:
            ValueError: it is longer than a row.
        """
        if length > self.capacity:
            raise ValueError(f"an example of {length} tokens doesn't fit into rows of {self.capacity}")
        closed: list[list[T]] = []
        at = bisect_left(self._room, (length, -1))
        if at < len(self._room):
            left, number = self._room.pop(at)
        else:
            if len(self._room) >= self.limit:
                closed.append(self._close(self._room.pop(0)[1]))
            left, number = self.capacity, self._next
            self._rows[number] = []
            self._next += 1
        self._rows[number].append((length, item))
        if left > length:
            insort(self._room, (left - length, number))
        else:
            closed.append(self._close(number))
        return closed

    def flush(self) -> list[list[T]]:
        """Close all rows; their examples are packed anew, so that the last rows are as full as they can be."""
        pairs = [pair for _, row in sorted(self._rows.items()) for pair in row]
        self._rows.clear()
        self._room.clear()
        self._next = 0
        lengths = np.array([length for length, _ in pairs], dtype=np.int64)
        return [[pairs[i][1] for i in row] for row in pack(lengths, np.arange(len(pairs)), self.capacity)]

    def rows(self) -> list[tuple[int, list[T]]]:
        """The open rows with their numbers; `restore` takes them back."""
        return [(number, [item for _, item in row]) for number, row in sorted(self._rows.items())]

    def restore(self, rows: Sequence[tuple[int, Sequence[tuple[int, T]]]], following: int) -> None:
        """Go on with open rows of (length, item); `following` is the number that the next new row gets."""
        self._rows = {number: list(row) for number, row in rows}
        left = {number: self.capacity - sum(length for length, _ in row) for number, row in self._rows.items()}
        self._room = sorted((room, number) for number, room in left.items())
        self._next = following

    @property
    def following(self) -> int:
        """The number of the next new row."""
        return self._next

    def _close(self, number: int) -> list[T]:
        return [item for _, item in self._rows.pop(number)]
