"""Keeping the pace: steps as large as the wanted time allows, on machines whose steps cost what we say."""

from __future__ import annotations

import random

import pytest

from swift.inference.paged.pace import Pace
from swift.inference.paged.scheduler import Limits


def settled(pace: Pace, fixed: float, each: float, *, noise: float = 0.0, start: int = 512) -> Limits:
    """The limits after steps that use all the room they are given, but now and then less."""
    draw = random.Random(0)
    limits = Limits(64, start)
    for k in range(200):
        tokens = limits.tokens if k % 5 else max(4, limits.tokens // 2)
        seconds = (fixed + each * tokens) * (1 + noise * draw.uniform(-1, 1))
        limits = pace.limits_after(tokens, seconds)
    return limits


def test_the_largest_step_that_takes_the_wanted_time():
    limits = settled(Pace(Limits(64, 512), 0.1), fixed=0.03, each=0.001)
    assert limits.tokens == pytest.approx(70, abs=2)
    assert limits.requests == 64


def test_noise_moves_it_little():
    limits = settled(Pace(Limits(64, 512), 0.1), fixed=0.03, each=0.001, noise=0.1)
    assert limits.tokens == pytest.approx(70, rel=0.25)


def test_requests_are_held_back_when_even_their_tokens_are_too_many():
    limits = settled(Pace(Limits(64, 512), 0.05), fixed=0.03, each=0.001)
    assert limits.requests == limits.tokens == pytest.approx(20, abs=1)


def test_the_users_limits_are_never_passed():
    limits = settled(Pace(Limits(8, 64), 10.0), fixed=0.001, each=0.0001, start=64)
    assert (limits.requests, limits.tokens) == (8, 64)


def test_a_machine_that_is_too_slow_still_goes_on():
    limits = settled(Pace(Limits(8, 64), 0.01), fixed=0.5, each=0.1, start=64)
    assert (limits.requests, limits.tokens) == (4, 4)


def test_it_follows_a_machine_that_becomes_slower():
    pace = Pace(Limits(64, 512), 0.1)
    before = settled(pace, fixed=0.02, each=0.0005)
    after = settled(pace, fixed=0.02, each=0.002, start=before.tokens)
    assert before.tokens == pytest.approx(160, abs=3)
    assert after.tokens == pytest.approx(40, abs=3)
