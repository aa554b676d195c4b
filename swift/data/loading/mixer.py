"""Which source the next document comes from.

Given shares, the mixer deals documents out so evenly that after any number of them no source is a whole document away
from its share. It draws nothing at random: its state is one integer for each source, and the same state gives the same
choices on every machine. Shares may change while documents are drawn (a curriculum).

Source: Tijdeman, "The chairman assignment problem" (1980): of the sources whose deficit is at least 1/(2S-2), take the
one whose deadline comes first; deviation from the quota stays at most 1 - 1/(2S-2). (The simpler rule "largest deficit"
leaves it: with 17 sources of unequal shares it strays by 1.14 documents.)

This file knows nothing of files or tokens.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Shares are integers of this sum, so that arithmetic is exact.
UNIT = 1 << 32


class Mixer:
    """Chooses a source, again and again.

    Args:
        shares: what each source should get, in any unit; at least one above 0.
        credits: the state of an earlier mixer (`state`).

    A source that has ended is taken out with `remove`; the others then share what it would have got.
    """

    def __init__(self, shares: Sequence[float], credits: Sequence[int] | None = None) -> None:
        self._credits = list(credits) if credits is not None else [0] * len(shares)
        self.set_shares(shares)

    def set_shares(self, shares: Sequence[float]) -> None:
        """From now on, deal by these shares; what a source is behind or ahead stays."""
        self._shares = whole_shares(shares)
        self._active = [k for k, share in enumerate(self._shares) if share]
        rivals = max(1, 2 * len(self._active) - 2)
        self._threshold = UNIT / rivals
        self._latest = UNIT - UNIT / rivals if rivals > 1 else UNIT / 2

    @property
    def shares(self) -> list[float]:
        """The shares in force; they sum to 1."""
        return [share / UNIT for share in self._shares]

    def draw(self) -> int:
        """The number of the source whose turn it is."""
        credits, shares, threshold = self._credits, self._shares, self._threshold
        chosen, soonest = -1, 0.0
        for k in self._active:
            credits[k] += shares[k]
            if credits[k] >= threshold:
                deadline = (self._latest - credits[k]) / shares[k]
                if chosen < 0 or deadline < soonest:
                    chosen, soonest = k, deadline
        if chosen < 0:  # possible only after shares changed: what was owed went to a source that left
            chosen = max(self._active, key=lambda k: (credits[k], -k))
        credits[chosen] -= UNIT
        return chosen

    def remove(self, source: int) -> bool:
        """Take a source out; tell whether any is left."""
        shares = [0 if k == source else share for k, share in enumerate(self._shares)]
        self._credits[source] = 0
        if not any(shares):
            self._shares, self._active = shares, []
            return False
        self.set_shares(shares)
        return True

    def state(self) -> list[int]:
        """What the choices still to come depend on, beside the shares: each source's deficit, in 1/UNIT documents."""
        return list(self._credits)


def whole_shares(shares: Sequence[float]) -> list[int]:
    """Integers that sum to `UNIT`, in these proportions; what rounding leaves goes to the largest remainders.

    Raises:
        ValueError: a share is negative or not a number, or all are 0.
    """
    if not shares or not all(0 <= share < float("inf") for share in shares) or not any(shares):
        raise ValueError(f"shares must be at least 0, and one above it: {list(shares)}")
    total = sum(shares)
    exact = [share / total * UNIT for share in shares]
    whole = [max(1, int(value)) if value else 0 for value in exact]
    by_remainder = sorted((k for k, w in enumerate(whole) if w), key=lambda k: (int(exact[k]) - exact[k], k))
    for k in by_remainder[: max(0, UNIT - sum(whole))]:
        whole[k] += 1
    whole[max(range(len(whole)), key=lambda k: (whole[k], -k))] += UNIT - sum(whole)
    return whole


def shares_by_size(sizes: Sequence[float], temperature: float) -> list[float]:
    """Shares in proportion to size^(1/T): 1 keeps the sizes' proportions, a large T makes all equal.

    Source: Conneau & Lample, "Cross-lingual language model pretraining" (2019), section 3.1, with alpha = 1/T.
    """
    logs = np.log(np.maximum(np.asarray(sizes, dtype=np.float64), 1e-9)) / temperature
    raised = np.where(np.asarray(sizes) > 0, np.exp(logs - logs.max()), 0.0)
    return (raised / raised.sum()).tolist()


@dataclass(frozen=True)
class ShareSchedule:
    """Shares as a function of the step: straight lines between points, constant before the first and after the last.

    Attributes:
        steps: ascending steps of the points; shares: the shares at each point.
    """

    steps: tuple[int, ...]
    shares: tuple[tuple[float, ...], ...]

    @classmethod
    def constant(cls, shares: Sequence[float]) -> ShareSchedule:
        """Shares that never change."""
        return cls((0,), (tuple(shares),))

    @property
    def constant_from(self) -> int:
        """The step from which on nothing changes any more."""
        return self.steps[-1]

    def at(self, step: int) -> tuple[float, ...]:
        """The shares at a step."""
        after = bisect.bisect_right(self.steps, step)
        if after == 0:
            return self.shares[0]
        if after == len(self.steps):
            return self.shares[-1]
        begin, end = self.steps[after - 1], self.steps[after]
        part = (step - begin) / (end - begin)
        pairs = zip(self.shares[after - 1], self.shares[after], strict=True)
        return tuple((1 - part) * before + part * then for before, then in pairs)
