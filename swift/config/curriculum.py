"""What `--curriculum` says: shares of sources, or of difficulty bins, that change as the run goes on.

    {"weights": [[0, [0.9, 0.1]], [2000, [0.5, 0.5]]]}
    {"difficulty": "length", "bins": 4, "weights": [[0, [1, 0, 0, 0]], [1000, [1, 1, 1, 1]]]}
    {"difficulty": "score", "bins": [0.3, 0.7], "weights": [[0, [1, 0, 0]], [500, [1, 1, 1]]]}

The first gives shares of the datasets at optimizer steps; between two of them shares change in a straight line. The
second and third put examples into bins from easy to hard, by their number of tokens or by a numeric column; `bins` is
a number of bins with equally many examples, or the borders between them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

from swift.core.errors import did_you_mean

_KEYS = ("weights", "difficulty", "bins")
LENGTH = "length"


@dataclass(frozen=True)
class Curriculum:
    """A curriculum that was read and found sound.

    Attributes:
        steps: ascending; weights: at each of them, one share for each source or bin.
        difficulty: `length`, a column, or None when the shares are those of sources.
        bins: how many; borders: between them, where they were given.
    """

    steps: tuple[int, ...]
    weights: tuple[tuple[float, ...], ...]
    difficulty: str | None = None
    bins: int = 0
    borders: tuple[float, ...] = ()


def read_curriculum(value: dict[str, Any]) -> Curriculum:
    """Read a curriculum.

    Raises:
        ValueError: with what is wrong in it.
    """
    for key in value:
        if key not in _KEYS:
            raise ValueError(
                f"has no key {key!r}. {did_you_mean(key, _KEYS) or 'Its keys are ' + ', '.join(_KEYS)}".strip()
            )
    steps, weights = _points(value.get("weights"))
    if "difficulty" not in value:
        if "bins" in value:
            raise ValueError('has bins, but no "difficulty" to put examples into them by ("length", or a column)')
        return Curriculum(steps, weights)
    difficulty = value["difficulty"]
    if not isinstance(difficulty, str) or not difficulty:
        raise ValueError(f'"difficulty" is "length" or the name of a column, not {difficulty!r}')
    bins, borders = _bins(value.get("bins"))
    if len(weights[0]) != bins:
        raise ValueError(f"has {bins} bins, but {len(weights[0])} weights at a step")
    return Curriculum(steps, weights, difficulty, bins, borders)


def _points(value: Any) -> tuple[tuple[int, ...], tuple[tuple[float, ...], ...]]:
    form = '"weights" is a list of [step, [weight, …]], such as [[0, [0.9, 0.1]], [2000, [0.5, 0.5]]]'
    if not isinstance(value, list) or not value:
        raise ValueError(form)
    steps: list[int] = []
    weights: list[tuple[float, ...]] = []
    for point in value:
        if not (isinstance(point, list) and len(point) == 2 and _whole(point[0]) and isinstance(point[1], list)):
            raise ValueError(f"{form}; {point!r} isn't one")
        step, shares = point
        if not shares or not all(_number(share) and share >= 0 for share in shares) or not any(shares):
            raise ValueError(f"the weights at step {step} must be numbers from 0 on, one above it: {shares!r}")
        if steps and step <= steps[-1]:
            raise ValueError(f"its steps must rise: {step} comes after {steps[-1]}")
        if weights and len(shares) != len(weights[0]):
            raise ValueError(f"has {len(shares)} weights at step {step} and {len(weights[0])} before")
        steps.append(step)
        total = math.fsum(shares)
        weights.append(tuple(share / total for share in shares))
    return tuple(steps), tuple(weights)


def _bins(value: Any) -> tuple[int, tuple[float, ...]]:
    if _whole(value) and value >= 2:
        return value, ()
    if isinstance(value, list) and value and all(_number(border) for border in value):
        if any(b <= a for a, b in itertools.pairwise(value)):
            raise ValueError(f"the borders of its bins must rise: {value}")
        return len(value) + 1, tuple(float(border) for border in value)
    raise ValueError('"bins" is a number of bins from 2 on, or a list of rising borders between them')


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
