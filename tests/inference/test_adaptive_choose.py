"""The decision table of adaptive inference."""

from __future__ import annotations

from math import nan

import pytest

from swift.core.errors import ModelError
from swift.inference.adaptive.choose import Rules, Trial, decide, settled, verdicts

RULES = Rules(latency_ms=10, concurrency=4, max_loss_increase=0.1)


def trial(name: str, ms: float, loss: float | None, *, exact: bool = False) -> Trial:
    return Trial(name, exact, {1: ms / 2, 4: ms}, None, loss)


def broken(name: str, *, exact: bool = False) -> Trial:
    return Trial(name, exact, problem="too large")


CASES = {
    "the exact one is fast enough": ([trial("a", 9, 2.0, exact=True), trial("b", 1, 2.0)], "a"),
    "exactly fast enough": ([trial("a", 10, 2.0, exact=True), trial("b", 1, 2.0)], "a"),
    "a less exact one": ([trial("a", 30, 2.0, exact=True), trial("b", 9, 2.09), trial("c", 1, 2.0)], "b"),
    "the next one is not good enough": (
        [trial("a", 30, 2.0, exact=True), trial("b", 9, 2.2), trial("c", 8, 2.05)],
        "c",
    ),
    "better than the exact one": ([trial("a", 30, 2.0, exact=True), trial("b", 9, 1.0)], "b"),
    "none is fast enough": ([trial("a", 30, 2.0, exact=True), trial("b", 12, 2.05), trial("c", 11, 2.0)], "c"),
    "only a bad one is fast enough": ([trial("a", 30, 2.0, exact=True), trial("b", 1, 2.2)], "a"),
    "loss is not a number": ([trial("a", 30, 2.0, exact=True), trial("b", 1, nan)], "a"),
    "no loss": ([trial("a", 30, 2.0, exact=True), trial("b", 1, None)], "a"),
    "one can't be run": ([trial("a", 30, 2.0, exact=True), broken("b"), trial("c", 1, 2.0)], "c"),
    "another exact one is the measure": (
        [broken("a", exact=True), trial("b", 30, 5.0, exact=True), trial("c", 1, 5.05)],
        "c",
    ),
    "the time at one request is not what is asked": ([trial("a", 19, 2.0, exact=True), trial("b", 2, 2.0)], "b"),
}


@pytest.mark.parametrize("case", CASES)
def test_which_one_is_taken(case: str) -> None:
    trials, wanted = CASES[case]
    assert trials[decide(trials, RULES)].name == wanted


def test_without_rows_only_exact_ones() -> None:
    rules = Rules(10, 4, None)
    trials = [trial("a", 30, None, exact=True), trial("b", 20, None, exact=True), trial("c", 1, None)]
    assert verdicts(trials, rules) == ["too slow", "too slow", "not good enough"]
    assert decide(trials, rules) == 1


def test_no_exact_one_can_be_run() -> None:
    """Then nothing tells how good the others have to be."""
    with pytest.raises(ModelError, match="a: too large"):
        decide([broken("a", exact=True), trial("b", 1, 2.0)], RULES)


def test_no_more_are_measured_once_one_fits() -> None:
    slow, bad, good = trial("a", 30, 2.0, exact=True), trial("b", 1, 9.0), trial("c", 1, 2.0)
    assert not settled([], RULES)
    assert not settled([slow], RULES)
    assert not settled([slow, bad], RULES)
    assert settled([slow, bad, good], RULES)
    assert settled([trial("a", 3, 2.0, exact=True)], RULES)
