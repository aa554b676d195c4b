"""More micro-batches for faster ranks, by their measured speed.

A step's micro-batches are the same ones however they are dealt, and the loss is divided by the weight of all of them,
so who runs which changes nothing but the time: a step takes as long as its slowest rank. Every few steps the ranks tell
each other how long they computed for a token; the shares move towards those whose slowest rank is done first.

It knows nothing of models, and of the loader only that it takes shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from swift.training.trainer import Trainer
from swift.training.trainer_parts import Callback

# Steps between two looks at the clock.
MEASURED_STEPS = 4
# Weight of what was measured last in the average.
SMOOTHING = 0.5
# A change must promise to make the slowest rank faster by this, or noise would move shares to and fro.
LEAST_GAIN = 0.03


class _Timed(Protocol):
    busy_s: float
    busy_tokens: int


class MicroBatchBalance(Callback):
    """Measures the ranks and sets the loader's shares. Every rank has one, and all of them decide alike.

    Args:
        strategy: measures the computation of a step.
        world_size: ranks; micro_batches: on each of them on average.
    """

    def __init__(self, strategy: _Timed, world_size: int, micro_batches: int) -> None:
        self.shares = [micro_batches] * world_size
        self._strategy = strategy
        self._seconds = self._tokens = 0.0
        self._steps = 0
        self._speeds: list[float] | None = None  # seconds per token of each rank

    def after_phase(self, trainer: Trainer, phase: str) -> None:
        if phase != "rescale":
            return
        self._steps += 1
        if self._steps > 1:  # the first step warms up
            self._seconds += self._strategy.busy_s
            self._tokens += self._strategy.busy_tokens
        if self._steps % MEASURED_STEPS:
            return
        measured = trainer.parts.group.gather(self._seconds / max(self._tokens, 1.0))
        self._seconds = self._tokens = 0.0
        if self.learn(measured):
            trainer.parts.loader.set_shares(self.shares)
            words = ", ".join(map(str, self.shares))
            trainer.parts.monitor.event("balance", f"micro-batches of ranks from now on: {words}", shares=self.shares)

    def learn(self, measured: Sequence[float]) -> bool:
        """Take in the seconds per token of each rank; whether the shares changed."""
        before = self._speeds or measured
        self._speeds = [SMOOTHING * new + (1 - SMOOTHING) * old for new, old in zip(measured, before, strict=True)]
        shares = rebalance(self.shares, self._speeds)
        changed = shares != self.shares
        self.shares = shares
        return changed


def rebalance(shares: Sequence[int], seconds: Sequence[float]) -> list[int]:
    """The next shares: micro-batches go one by one from the rank that is done last to the one that would be done
    first with it, an eighth of all at most, as long as that makes the slowest faster.

    Args:
        shares: micro-batches of each rank now; their sum stays, and each keeps at least one.
        seconds: that a rank takes for a micro-batch, in any unit.
    """
    new = list(shares)
    ranks = range(len(new))

    def slowest(of: Sequence[int]) -> float:
        return max(of[r] * seconds[r] for r in ranks)

    for _ in range(max(1, sum(shares) // 8)):
        giver = max((r for r in ranks if new[r] > 1), key=lambda r: new[r] * seconds[r], default=None)
        if giver is None:
            break
        taker = min((r for r in ranks if r != giver), key=lambda r: (new[r] + 1) * seconds[r], default=giver)
        if (new[taker] + 1) * seconds[taker] >= new[giver] * seconds[giver]:
            break
        new[giver] -= 1
        new[taker] += 1
    return new if slowest(new) < (1 - LEAST_GAIN) * slowest(shares) else list(shares)
