"""Continuous batching against static batches on bursty traffic: the real scheduler, on a clock of its own.

A step takes as long as one of the packaged model does: a part that any step costs, and a part for each of its tokens.
Answers end at very different lengths, as answers do. Utilisation is the share of the places of a batch in which
something is computed, over the time in which anybody has something to be computed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from statistics import mean

import pytest
from test_scheduler import World

from swift.inference.paged.runner import MIN_ROWS

PLACES = 32
STEP_S, TOKEN_S = 0.043, 0.0046


@dataclass
class Run:
    """What became of a trace.

    Attributes:
        busy_s: seconds in which something was computed.
        filled_s: the same, times the share of places that were in use.
        end_s: when the last answer was there.
        latencies_s: from a request's arrival to its last token.
    """

    busy_s: float = 0.0
    filled_s: float = 0.0
    end_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)

    @property
    def utilisation(self) -> float:
        return self.filled_s / self.busy_s


def bursts(seed: int) -> list[tuple[float, int, int]]:
    """Arrival (seconds), tokens of the prompt, tokens of the answer: ten bursts, answers of 60 tokens in the mean."""
    draw = random.Random(seed)
    trace, now = [], 0.0
    for _ in range(10):
        now += draw.expovariate(1 / 20)
        for _ in range(draw.randrange(8, 56)):
            answer = 1 + min(int(draw.expovariate(1 / 60)), 400)
            trace.append((now + draw.random(), draw.randrange(10, 90), answer))
    return sorted(trace)


def replay(trace: list[tuple[float, int, int]], *, static: bool) -> Run:
    """Let requests arrive, and compute until all are answered.

    Args:
        static: who comes while a batch is computed waits until all of it have ended.
    """
    world = World(num_blocks=4000, size=16, requests=PLACES, tokens=512)
    scheduler = world.scheduler
    run, now, coming = Run(), 0.0, list(trace)
    while coming or scheduler.running or scheduler.waiting:
        idle = not (scheduler.running or scheduler.waiting)
        if idle:
            now = max(now, coming[0][0])
        room = len(coming) if not static else PLACES * idle
        while room and coming and coming[0][0] <= now:
            _, prompt, answer = coming.pop(0)
            world.add([world.made] * prompt, answer)
            room -= 1
        ended = world.step()
        seconds = STEP_S + TOKEN_S * max(MIN_ROWS, world.sizes[-1])
        now += seconds
        run.busy_s += seconds
        run.filled_s += seconds * (len(scheduler.running) + len(ended)) / PLACES
        run.latencies_s += [now - trace[sequence.arrival - 1][0] for sequence in ended]
    run.end_s = now
    return run


@pytest.mark.parametrize("seed", range(4))
def test_continuous_batching_fills_batches_that_static_ones_leave_empty(seed):
    trace = bursts(seed)
    static, continuous = replay(trace, static=True), replay(trace, static=False)
    assert len(static.latencies_s) == len(continuous.latencies_s) == len(trace)
    assert continuous.utilisation >= 1.4 * static.utilisation
    assert mean(continuous.latencies_s) < mean(static.latencies_s)
    assert continuous.end_s <= static.end_s
