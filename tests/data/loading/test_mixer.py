"""Sources get their shares exactly, at every moment, from a state of a few integers."""

import numpy as np
import pytest

from swift.data.loading.mixer import UNIT, Mixer, ShareSchedule, shares_by_size, whole_shares


@pytest.mark.parametrize("alpha", [0.1, 0.3, 1.0, 10.0])
@pytest.mark.parametrize("sources", [1, 2, 3, 9, 25])
def test_no_source_is_ever_a_document_from_its_share(sources, alpha):
    rng = np.random.default_rng(sources)
    for _ in range(6):
        shares = rng.dirichlet(np.full(sources, alpha))
        if not shares.any():
            continue
        mixer, counts = Mixer(shares.tolist()), np.zeros(sources)
        for drawn in range(1, 1200):
            counts[mixer.draw()] += 1
            assert np.abs(shares * drawn - counts).max() < 1 + 1e-4


def test_largest_deficit_alone_would_not_do():
    """The bound is no accident: the simpler rule breaks it on weights that this mixer holds it for."""
    rng, worst = np.random.default_rng(0), 0.0
    for _ in range(150):
        sources = int(rng.integers(2, 30))
        shares = rng.dirichlet(np.full(sources, rng.choice([0.1, 0.3, 1, 10])))
        counts = np.zeros(sources)
        for drawn in range(1, 1500):
            counts[int(np.argmax(shares * drawn - counts))] += 1
            worst = max(worst, float(np.abs(shares * drawn - counts).max()))
    assert worst > 1


def test_goes_on_from_its_state():
    shares = [0.5, 0.3, 0.2]
    mixer = Mixer(shares)
    whole = [mixer.draw() for _ in range(400)]
    for at in (1, 17, 399):
        first = Mixer(shares)
        begun = [first.draw() for _ in range(at)]
        second = Mixer(shares, first.state())
        assert begun + [second.draw() for _ in range(400 - at)] == whole


def test_equal_shares_take_turns_in_order():
    mixer = Mixer([1, 1, 1])
    assert [mixer.draw() for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_a_source_that_ends_leaves_its_share_to_the_others():
    mixer = Mixer([0.5, 0.25, 0.25])
    for _ in range(101):
        mixer.draw()
    assert mixer.remove(0)
    counts = np.bincount([mixer.draw() for _ in range(1000)], minlength=3)
    assert counts[0] == 0
    assert abs(counts[1] - 500) <= 2
    assert mixer.remove(1)
    assert mixer.draw() == 2
    assert not mixer.remove(2)


def test_shares_that_are_no_shares():
    for wrong in ([], [0, 0], [1, -1], [float("nan"), 1], [float("inf"), 1]):
        with pytest.raises(ValueError, match="shares must be"):
            whole_shares(wrong)


def test_whole_shares_sum_up_and_lose_no_source():
    for shares in ([1, 1, 1], [1e-12, 1], [3, 0, 7], [0.1] * 10):
        whole = whole_shares(shares)
        assert sum(whole) == UNIT
        assert [w > 0 for w in whole] == [s > 0 for s in shares]


def test_temperature():
    sizes = [1000, 10]
    assert shares_by_size(sizes, 1.0) == pytest.approx([1000 / 1010, 10 / 1010])
    assert shares_by_size(sizes, 2.0) == pytest.approx([10 / 11, 1 / 11])  # square roots: 31.6 and 3.16
    assert shares_by_size(sizes, 1e9) == pytest.approx([0.5, 0.5])
    assert shares_by_size([10, 0], 2.0) == [1.0, 0.0]


def test_schedule_runs_straight_between_its_points():
    schedule = ShareSchedule((10, 20), ((1.0, 0.0), (0.5, 0.5)))
    assert schedule.at(0) == schedule.at(10) == (1.0, 0.0)
    assert schedule.at(15) == pytest.approx((0.75, 0.25))
    assert schedule.at(20) == schedule.at(999) == (0.5, 0.5)


def test_changing_shares_are_followed():
    schedule = ShareSchedule((0, 1000), ((1.0, 0.0), (0.0, 1.0)))
    mixer, counts, wanted = Mixer(schedule.at(0)), np.zeros(2), np.zeros(2)
    for step in range(1000):
        mixer.set_shares(schedule.at(step))
        wanted += schedule.at(step)
        counts[mixer.draw()] += 1
        assert np.abs(counts - wanted).max() < 1.01
