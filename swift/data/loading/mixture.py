"""Sources mixed into one sequence of documents, epoch after epoch.

A `Mixture` says how: in which shares, changing at which steps, how often each source may be passed through, and when an
epoch ends. `Documents` carries it out: a function of its flows and of how many documents were drawn, so its state is a
few integers beside the flows' own.

This file knows nothing of files, tokens or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swift.data.loading.flow import Document, Flow
from swift.data.loading.mixer import Mixer, ShareSchedule

FIRST, ALL, ONCE = "first_exhausted", "all_exhausted", "all_exhausted_without_replacement"


@dataclass(frozen=True)
class Mixture:
    """How sources are mixed.

    Attributes:
        shares: of the sources, by step. Steps are counted in documents: step s begins with document
            s x `documents_per_step` of the run, so that reading ahead changes nothing.
        stopping: when an epoch ends (`FIRST`, `ALL`, `ONCE`).
        passes: how often each source may be passed through in an epoch; infinite for no limit. A part of a pass needs
            a flow that knows its size, or a whole pass before it.
    """

    shares: ShareSchedule
    stopping: str
    passes: tuple[float, ...]
    documents_per_step: float = 1.0

    @classmethod
    def of(
        cls,
        shares: ShareSchedule,
        stopping: str,
        passes: Sequence[float] = (),
        documents_per_step: float = 1.0,
    ) -> Mixture:
        """A mixture whose `passes` default to one, or to no limit when shorter sources repeat."""
        default = math.inf if stopping == ALL else 1.0
        return cls(shares, stopping, tuple(passes) or (default,) * len(shares.shares[0]), documents_per_step)

    def shares_behind(self, documents: int) -> tuple[float, ...]:
        """The shares by which the next document is drawn."""
        return self.shares.at(min(int(documents / self.documents_per_step), self.shares.constant_from))

    def identity(self) -> tuple[Any, ...]:
        """What decides which documents are drawn."""
        return (self.shares.steps, self.shares.shares, self.stopping, self.passes, self.documents_per_step)

    def documents(self, sizes: Sequence[float]) -> float:
        """About how many documents an epoch has that begins at step 0, from the sources' sizes.

        Exact to a document for each source where shares are constant; infinite if the epoch never ends.
        """
        allowed = [size * times for size, times in zip(sizes, self.passes)]
        left = {k for k, size in enumerate(sizes) if any(point[k] for point in self.shares.shares) and size}
        drawn, taken, waiting = 0.0, [0.0] * len(sizes), set(left)
        while left and (self.stopping != ALL or waiting):
            step = int(drawn / self.documents_per_step)
            shares = _usable(self.shares.at(step), left)
            ends = {k: allowed[k] - taken[k] for k in left if shares[k]}
            if self.stopping == ALL:  # the first time through counts, whether or not it may go on
                ends |= {k: min(ends[k], sizes[k] - taken[k]) for k in waiting if k in ends}
            until = min(ends[k] / shares[k] for k in ends)
            if math.isinf(until):
                return math.inf
            if step < self.shares.constant_from:  # shares change with the next step
                rest = (step + 1) * self.documents_per_step - drawn
                until = min(until, max(rest, 1e-9, math.ulp(drawn)))  # always on, however the quotient was rounded
            drawn += until
            for k in ends:
                taken[k] += shares[k] * until
                if taken[k] >= sizes[k] - 1e-6:
                    waiting.discard(k)
                if taken[k] >= allowed[k] - 1e-6:
                    left.discard(k)
                    if self.stopping == FIRST:
                        return drawn
        return drawn


def _usable(shares: Sequence[float], left: set[int]) -> list[float]:
    """The shares of the sources that are left; if none of them has any now, the first of them gets all."""
    kept = [share if k in left else 0.0 for k, share in enumerate(shares)]
    total = sum(kept)
    return [share / total for share in kept] if total else [float(k == min(left)) for k in range(len(kept))]


class Documents:
    """The mixed sequence: `next` gives document after document, None at the end of an epoch, then the next epoch.

    Attributes:
        drawn: documents given in the whole run. epoch: of the next document.
    """

    def __init__(self, flows: Sequence[Flow], mixture: Mixture) -> None:
        self.flows = list(flows)
        self.mixture = mixture
        self.drawn = 0
        wanted = {k for k in range(len(flows)) if any(point[k] for point in mixture.shares.shares)}
        self._matter = {k for k in wanted if self.flows[k].size != 0}  # an empty source ends no epoch
        self._begin(0)

    @property
    def shares(self) -> list[float]:
        """The shares in force."""
        return self._mixer.shares

    def next(self) -> Document | None:
        """The next document; None where an epoch ends."""
        if not self._left:
            self._begin(self.epoch + 1)
        while self._left:
            if self._step() != self._shares_of:
                self._set_shares()
            source = self._mixer.draw()
            while source in self._left:
                document = self.flows[source].next() if self._given[source] < self._allowed(source) else None
                if document is not None:
                    self._given[source] += 1
                    self.drawn += 1
                    return document
                self._pass_ended(source)
        return None

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        self._left = set(self._matter)
        self._waiting = set(self._matter)  # sources that weren't through yet
        self._turns = [0] * len(self.flows)
        self._given = [0] * len(self.flows)  # documents of the pass in hand
        self._lengths: list[int | None] = [flow.size for flow in self.flows]
        self._mixer = Mixer([1.0] * len(self.flows))
        for flow in self.flows:
            flow.begin(epoch, 0)
        self._set_shares()

    def _step(self) -> int:
        return min(int(self.drawn / self.mixture.documents_per_step), self.mixture.shares.constant_from)

    def _set_shares(self) -> None:
        self._shares_of = self._step()
        self._mixer.set_shares(_usable(self.mixture.shares.at(self._shares_of), self._left))

    def _allowed(self, source: int) -> float:
        """Documents that may be taken in the pass in hand."""
        part, length = self.mixture.passes[source] - self._turns[source], self._lengths[source]
        if part >= 1:
            return math.inf
        if length is None:
            raise ValueError(f"source {source}: a part of a first pass can't be taken of a source of unknown size")
        return math.ceil(part * length - 1e-9)

    def _pass_ended(self, source: int) -> None:
        """Go on with the source's next pass, or without it, or end the epoch."""
        spent = True
        if self._given[source] < self._allowed(source):  # the flow itself came to its end
            self._lengths[source] = self._given[source]
            self._turns[source] += 1
            spent = self._turns[source] >= self.mixture.passes[source] or not self._given[source]
            self._given[source] = 0
        self._waiting.discard(source)
        if (spent and self.mixture.stopping == FIRST) or (self.mixture.stopping == ALL and not self._waiting):
            self._left.clear()
        elif spent:
            self._left.discard(source)
            self._mixer.remove(source)
            if self._left:
                self._set_shares()
        else:
            self.flows[source].begin(self.epoch, self._turns[source])

    def state(self) -> dict[str, Any]:
        """The position, as plain JSON values."""
        return {
            "epoch": self.epoch,
            "drawn": self.drawn,
            "deficits": self._mixer.state(),
            "shares_of": self._shares_of,
            "left": sorted(self._left),
            "waiting": sorted(self._waiting),
            "turns": list(self._turns),
            "given": list(self._given),
            "lengths": list(self._lengths),
            "flows": [flow.state() for flow in self.flows],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a position."""
        self.epoch, self.drawn = state["epoch"], state["drawn"]
        self._left, self._waiting = set(state["left"]), set(state["waiting"])
        self._turns, self._given, self._lengths = list(state["turns"]), list(state["given"]), list(state["lengths"])
        self._shares_of = state["shares_of"]
        for flow, own in zip(self.flows, state["flows"], strict=True):
            flow.load_state(own)
        if self._left:
            shares = _usable(self.mixture.shares.at(self._shares_of), self._left)
            self._mixer = Mixer(shares, state["deficits"])
