"""The tiles of all ranks together are causal attention within segments: every pair of tokens once, none besides."""

from __future__ import annotations

import numpy as np
import pytest

from swift.distributed.context.tiles import Tile, gathered_tiles, place_spans, ring_tiles

LENGTH = 48
ROWS = {
    "one document": [0, 48],
    "40 tiny ones": [0, *range(1, 33), *range(34, 48, 2), 48],
    "borders on chunks": [0, 6, 12, 24, 36, 42, 48],
    "shorter than a chunk": [0, 3, 5, 9, 10, 14, 17, 20, 26, 29, 31, 37, 40, 44, 48],
    "very different": [0, 1, 30, 32, 47, 48],
}


def visible(borders: list[int], window: int | None) -> np.ndarray:
    position = np.arange(LENGTH)
    segment = np.searchsorted(borders, position, side="right")
    pairs = (segment[:, None] == segment) & (position[:, None] >= position)
    return pairs if window is None else pairs & (position[:, None] - position < window)


def draw(pairs: np.ndarray, tile: Tile, queries: np.ndarray, keys: np.ndarray, window: int | None) -> None:
    """Count the pairs of a tile; `queries` and `keys` are the positions that the tensors hold."""
    i, j = np.arange(tile.num_queries)[:, None], np.arange(tile.num_keys)
    seen = j <= tile.ahead + i
    if window is not None:
        seen &= tile.ahead + i - j < window
    assert seen.any(1).all(), "a query of the tile sees nothing"
    assert tile.full == bool((j <= tile.ahead + i).all())
    assert tile.within(window) == bool((seen == (j <= tile.ahead + i)).all())
    rows, columns = queries[tile.q_start : tile.q_end], keys[tile.k_start : tile.k_end]
    assert len(rows) == tile.num_queries and len(columns) == tile.num_keys
    assert rows[0] - columns[0] == tile.ahead
    pairs[np.ix_(rows, columns)] += seen


def held(size: int, rank: int) -> np.ndarray:
    return np.concatenate([np.arange(span.start, span.end) for span in place_spans(LENGTH, size, rank)])


@pytest.mark.parametrize("window", [None, 1, 4, 11, 100])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("row", ROWS)
def test_every_pair_once(row, size, window):
    borders = ROWS[row]
    travelling, gathered = np.zeros((LENGTH, LENGTH), int), np.zeros((LENGTH, LENGTH), int)
    for rank in range(size):
        for step, tiles in enumerate(ring_tiles(borders, size, rank, window)):
            for tile in tiles:
                draw(travelling, tile, held(size, rank), held(size, (rank - step) % size), window)
        for tile in gathered_tiles(borders, size, rank, window):
            draw(gathered, tile, held(size, rank), np.arange(LENGTH), window)
    assert (travelling == visible(borders, window)).all()
    assert (gathered == visible(borders, window)).all()


@pytest.mark.parametrize("row", ROWS)
def test_other_ranks_keys_are_one_rectangle_a_pair_of_chunks(row):
    for rank in range(4):
        own, *others = ring_tiles(ROWS[row], 4, rank, None)
        assert all(tile.triangular or tile.full for tile in own)
        for tiles in others:
            assert len(tiles) <= 2 and all(tile.full for tile in tiles)


def test_places_have_as_much_to_do():
    work = []
    for rank in range(4):
        tiles = [tile for step in ring_tiles([0, 4800], 4, rank, None) for tile in step]
        work.append(sum(t.num_queries * t.num_keys / (2 if t.triangular else 1) for t in tiles))
    assert len(set(work)) == 1


def test_nothing_to_do_where_no_segment_reaches():
    steps = ring_tiles([0, 12, 24, 36, 48], 2, 0, None)  # segments are chunks
    assert [len(tiles) for tiles in steps] == [2, 0]
