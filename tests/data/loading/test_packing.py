"""Best-fit decreasing: nothing lost, nothing over capacity, and rows nearly full."""

import numpy as np
import pytest

from swift.data.loading.packing import pack, packing_efficiency


def sft_lengths(count, seed=0):
    """Log-normal lengths as in chat data, at most 4096."""
    generator = np.random.default_rng(seed)
    return np.clip(generator.lognormal(5.5, 1.1, count), 8, 4096).astype(np.int32)


def test_every_example_once_and_no_row_over_capacity():
    lengths = sft_lengths(3000)
    rows = pack(lengths, np.arange(3000), 4096)
    assert sorted(example for row in rows for example in row) == list(range(3000))
    assert all(sum(lengths[row]) <= 4096 for row in rows)


def test_efficiency_on_sft_lengths():
    lengths = sft_lengths(100_000)
    rows = pack(lengths, np.arange(len(lengths)), 4096)
    assert packing_efficiency(rows, lengths, 4096) >= 0.999


def test_takes_the_fullest_row_that_fits():
    # rows open with 10 - 7 = 3 and 10 - 6 = 4 left; the 3 must go into the row with exactly 3 left
    lengths = np.array([7, 6, 3, 4])
    assert pack(lengths, np.arange(4), 10) == [[0, 2], [1, 3]]


def test_order_decides_between_equals():
    lengths = np.array([5, 5, 5, 5])
    assert pack(lengths, np.array([3, 1, 2, 0]), 10) == [[3, 1], [2, 0]]


def test_too_long_is_refused():
    with pytest.raises(ValueError, match="11 tokens"):
        pack(np.array([11]), np.array([0]), 10)


def test_nothing_to_pack():
    assert pack(np.array([], dtype=np.int32), np.array([], dtype=np.int64), 10) == []
