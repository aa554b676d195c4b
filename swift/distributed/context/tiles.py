"""Which rectangles of attention's score matrix a rank has to work out, given the segments of the whole row.

A row is segments laid end to end, each attending to itself alone, and every rank holds contiguous chunks of it. Of two
different chunks, the later one's queries see the earlier one's keys only inside the one segment that reaches from one
into the other: a prefix of the queries, a suffix of the keys, and, but for a sliding window, every key of them. Inside
one chunk each segment is a triangle of its own. So packed rows need neither padding per document nor a mask.

Whole numbers only: this file knows nothing of tensors.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple


class Span(NamedTuple):
    """Positions [start, end) of the row, found from index `at` on in a tensor."""

    start: int
    end: int
    at: int


class Tile(NamedTuple):
    """Queries [q_start, q_end) of one tensor against keys [k_start, k_end) of another.

    Attributes:
        ahead: how far in the row the first query is behind the first key. Query i of the tile sees key j where
            j <= ahead + i, and, with a window, ahead + i - j < window; it sees at least one.
    """

    q_start: int
    q_end: int
    k_start: int
    k_end: int
    ahead: int

    @property
    def num_queries(self) -> int:
        return self.q_end - self.q_start

    @property
    def num_keys(self) -> int:
        return self.k_end - self.k_start

    @property
    def triangular(self) -> bool:
        """The queries' own keys."""
        return self.ahead == 0 and self.num_keys == self.num_queries

    @property
    def full(self) -> bool:
        """Every key comes before every query."""
        return self.ahead >= self.num_keys - 1

    def within(self, window: int | None) -> bool:
        """Whether a sliding window hides nothing of it."""
        return window is None or self.ahead + self.num_queries <= window


def cross(borders: list[int], queries: Span, keys: Span, window: int | None) -> list[Tile]:
    """Tiles of some queries against some keys: the queries' own, others before them, or both.

    Args:
        borders: of the segments in the row, from 0 to its length.
        window: positions a query looks back at, itself included.
    """
    tiles = []
    for number in range(bisect_right(borders, queries.start) - 1, len(borders) - 1):
        start, end = borders[number], borders[number + 1]
        if start >= min(queries.end, keys.end):
            break
        first_query, first_key = max(start, queries.start), max(start, keys.start)
        last_query, last_key = min(end, queries.end), min(end, keys.end)
        if window is not None:
            first_key = max(first_key, first_query - window + 1)
            last_query = min(last_query, last_key + window - 1)
        if first_query < last_query and first_key < last_key:
            q_start, k_start = first_query - queries.start + queries.at, first_key - keys.start + keys.at
            q_end, k_end = q_start + last_query - first_query, k_start + last_key - first_key
            tiles.append(Tile(q_start, q_end, k_start, k_end, first_query - first_key))
    return tiles


def place_spans(length: int, size: int, rank: int) -> list[Span]:
    """The chunks that place `rank` of a ring of `size` holds (see `batches`), one behind the other in its tensors."""
    if size == 1:
        return [Span(0, length, 0)]
    chunk = length // (2 * size)
    return [Span(n * chunk, (n + 1) * chunk, i * chunk) for i, n in enumerate((rank, 2 * size - 1 - rank))]


def ring_tiles(borders: list[int], size: int, rank: int, window: int | None) -> list[list[Tile]]:
    """For each step of the ring, the tiles of this rank's queries against the keys that are there then.

    At step s these are the keys of place rank - s.
    """
    own = place_spans(borders[-1], size, rank)
    steps = []
    for step in range(size):
        there = place_spans(borders[-1], size, (rank - step) % size)
        pairs = [(queries, keys) for queries in own for keys in there if keys.start <= queries.start]
        steps.append([tile for pair in pairs for tile in cross(borders, *pair, window)])
    return steps


def gathered_tiles(borders: list[int], size: int, rank: int, window: int | None) -> list[Tile]:
    """Tiles of this rank's queries against the keys of the whole row, in its order."""
    tiles = []
    for queries in place_spans(borders[-1], size, rank):
        before = Span(0, queries.start, 0)
        own = Span(queries.start, queries.end, queries.start)
        tiles += cross(borders, queries, before, window) + cross(borders, queries, own, window)
    return tiles


def whole_tiles(borders: list[int], size: int, rank: int) -> list[Tile]:
    """The same without a window, one tile for each segment's queries in each chunk: all the keys that these see."""
    spans = place_spans(borders[-1], size, rank)
    return [tile for queries in spans for tile in cross(borders, queries, Span(0, queries.end, 0), None)]
