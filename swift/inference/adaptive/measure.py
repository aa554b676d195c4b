"""How long a running backend takes from token to token, by requests as they are served."""

from __future__ import annotations

import queue
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swift.core.errors import SwiftError
from swift.inference.backends.base import Backend
from swift.inference.requests import Request, SamplingParams, Update

Clock = Callable[[], float]

NUM_TOKENS = 32  # of an answer
_ROUNDS = 3  # after one that isn't counted, in which loops are compiled and memory is first touched


def token_ms(backend: Backend, prompts: Sequence[list[int]], concurrency: int, clock: Clock) -> tuple[float, float]:
    """Milliseconds between two tokens of an answer, while `concurrency` answers are computed together.

    The median over the answers, of the fastest of some rounds: what else the machine does only ever adds time.

    Returns:
        the milliseconds, and how many times as long the slowest round took.

    Args:
        backend: a started one.
        prompts: short ones.
        clock: seconds; read whenever tokens come.

    Raises:
        SwiftError: a prompt can't be answered.
    """
    rounds = [_round(backend, prompts, concurrency, clock, number) for number in range(_ROUNDS + 1)]
    fastest, slowest = min(rounds[1:]), max(rounds[1:])
    return 1000 * fastest, slowest / fastest if fastest else 1.0


def _round(backend: Backend, prompts: Sequence[list[int]], concurrency: int, clock: Clock, number: int) -> float:
    """Seconds between two tokens."""
    done: queue.SimpleQueue[_Timed | SwiftError] = queue.SimpleQueue()
    params = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
    for k in range(concurrency):
        timed = _Timed(done, clock)
        request = Request(f"measure-{concurrency}-{number}-{k}", list(prompts[k % len(prompts)]), params)
        backend.submit(request, timed.take)
    found = []
    for _ in range(concurrency):
        timed_or_error = done.get()
        if isinstance(timed_or_error, SwiftError):
            raise timed_or_error
        found.append(timed_or_error.seconds)
    return statistics.median(found)


@dataclass
class _Timed:
    """Takes one request's updates with the times at which they come."""

    done: queue.SimpleQueue[_Timed | SwiftError]
    clock: Clock
    first: float | None = None
    last: float = 0.0
    tokens: int = 0  # after those of the first update

    def take(self, update: Update) -> None:
        if update.tokens:
            self.last = self.clock()
            if self.first is None:
                self.first = self.last
            else:
                self.tokens += len(update.tokens)
        if update.finish_reason is not None:
            self.done.put(update.error or self)

    @property
    def seconds(self) -> float:
        assert self.first is not None
        return (self.last - self.first) / max(1, self.tokens)
