"""Best-fit decreasing over capacity buckets: whole examples into rows of fixed capacity.

Examples are taken from the longest to the shortest; each goes into the fullest open row that still has room. Rows are
kept in one bucket per remaining capacity, so finding the fullest that fits is a binary search over the capacities in
use. Examples of equal length come in the order they are given, so another order gives other rows.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np


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
