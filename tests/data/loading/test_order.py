"""The order visits everything once, at any place, the same way on every machine, and looks random."""

import numpy as np
import pytest

from swift.data.loading.order import FeistelOrder

SIZES = [0, 1, 2, 3, 5, 16, 255, 256, 257, 1000, 65_537, 300_001]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("seed", [0, 42])
def test_everything_once(n, seed):
    assert np.array_equal(np.sort(FeistelOrder(n, seed, 3)[:]), np.arange(n))


@pytest.mark.parametrize("n", [1, 7, 1000, 70_000])
def test_any_place_is_reached_alone(n):
    order, whole = FeistelOrder(n, 9, 2), FeistelOrder(n, 9, 2)[:]
    assert len(order) == n
    assert list(order) == whole.tolist()
    for at in {0, n // 3, n - 1, -1, -n}:
        assert order[at] == whole[at]
        assert isinstance(order[at], int)
    assert np.array_equal(order[n // 4 : n // 2 : 3], whole[n // 4 : n // 2 : 3])
    assert np.array_equal(order[::-1], whole[::-1])
    places = np.random.default_rng(0).integers(0, n, (3, 5))
    assert np.array_equal(order[places], whole[places])


def test_places_that_are_not_there():
    for at in (5, -6, np.array([0, 5])):
        with pytest.raises(IndexError, match="5 places"):
            FeistelOrder(5, 0, 0)[at]


def test_a_place_far_inside_a_huge_order():
    order = FeistelOrder(10**15, 1, 0)
    far = order[10**14 : 10**14 + 1000]
    assert len(np.unique(far)) == 1000
    assert 0 <= far.min() < far.max() < 10**15
    assert far[7] == order[10**14 + 7]


def test_the_order_never_changes_between_versions():
    """Checkpoints hold places of it. If this must change, ORDER_VERSION has to change with it."""
    assert FeistelOrder(10, 42, 0)[:].tolist() == [4, 7, 2, 3, 1, 5, 8, 6, 9, 0]
    assert FeistelOrder(10**9, 42, 1)[:4].tolist() == [745169672, 428314842, 732558318, 683210454]


def test_seed_epoch_and_stream_all_matter():
    orders = [FeistelOrder(500, *key)[:].tolist() for key in ((1, 0), (1, 1), (2, 0), (1, 0, 0), (1, 0, 1), (-1, 0))]
    assert len({tuple(order) for order in orders}) == len(orders)


def test_looks_random():
    """Over 400 orders: neighbours are uncorrelated, every number is equally likely at every place."""
    n, repeats = 200, 400
    orders = np.array([FeistelOrder(n, seed, 0)[:] for seed in range(repeats)])
    assert abs(np.corrcoef(orders[:, :-1].ravel(), orders[:, 1:].ravel())[0, 1]) < 0.02
    adjacent = np.mean(np.abs(np.diff(orders, axis=1)) == 1)
    assert abs(adjacent - 2 / n) < 0.001
    spread = (n / np.sqrt(12)) / np.sqrt(repeats)  # of the mean of `repeats` uniform draws
    assert 0.8 * spread < orders.mean(axis=0).std() < 1.2 * spread
    counts = np.bincount(orders[:, 0], minlength=n)
    chi_square = ((counts - repeats / n) ** 2 / (repeats / n)).sum()
    assert chi_square < n + 4 * np.sqrt(2 * n)
