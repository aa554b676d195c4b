"""Which of the measured ways is taken: a table, without a model, a clock or a file.

The most exact one that is fast enough and good enough; if none is fast enough, the fastest that is good enough; never
one that isn't good enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from swift.core.errors import ModelError

Verdict = Literal["fits", "too slow", "not good enough", "can't be run"]


@dataclass(frozen=True)
class Rules:
    """What is asked of a way to run the model.

    Attributes:
        latency_ms: between two tokens, at most.
        concurrency: requests computed together for which that is meant.
        max_loss_increase: in nats per token, over the most exact way; None where nothing tells the loss.
    """

    latency_ms: float
    concurrency: int
    max_loss_increase: float | None


@dataclass(frozen=True)
class Trial:
    """What was measured of one way.

    Attributes:
        name: of the candidate.
        exact: see `Candidate`.
        token_ms: number of requests computed together -> milliseconds between two tokens of one. Empty where the loss
            is enough to turn it down.
        unsteadiness: by which factor rounds at the concurrency of the rules differed.
        memory_bytes: that it took; None where the system doesn't tell.
        loss: mean per token of the evaluation answers, in nats; None where there are none.
        problem: why it can't be run; None where it can.
    """

    name: str
    exact: bool
    token_ms: dict[int, float] = field(default_factory=dict)
    memory_bytes: int | None = None
    loss: float | None = None
    problem: str | None = None
    unsteadiness: float = 1.0


def verdicts(trials: Sequence[Trial], rules: Rules) -> list[Verdict]:
    """What the rules say to each trial; losses are held against that of the first exact one that could be run."""
    reference = reference_loss(trials)
    return [_verdict(trial, rules, reference) for trial in trials]


def reference_loss(trials: Sequence[Trial]) -> float | None:
    """The loss that others are held against."""
    return next((trial.loss for trial in trials if trial.exact and trial.problem is None), None)


def too_lossy(loss: float, reference: float, rules: Rules) -> bool:
    """Whether that loss is more than the rules allow; true for nan."""
    assert rules.max_loss_increase is not None
    return not loss - reference <= rules.max_loss_increase


def settled(trials: Sequence[Trial], rules: Rules) -> bool:
    """Whether the last one fits, so that less exact ones needn't be measured."""
    return bool(trials) and verdicts(trials, rules)[-1] == "fits"


def decide(trials: Sequence[Trial], rules: Rules) -> int:
    """The place of the one to take; `trials` come most exact first.

    Raises:
        ModelError: none can be run, or none of the exact ones, so that nothing tells what is good enough.
    """
    found = verdicts(trials, rules)
    if "fits" in found:
        return found.index("fits")
    slow = [place for place, verdict in enumerate(found) if verdict == "too slow"]
    if not slow:
        first = next(trial for trial in trials if trial.problem is not None)
        raise ModelError(
            f"no way to run the model is known to be good enough; {first.name}: {first.problem}",
            where="--adaptive",
            fix="leave out --adaptive to see the whole message",
        )
    return min(slow, key=lambda place: trials[place].token_ms[rules.concurrency])


def _verdict(trial: Trial, rules: Rules, reference: float | None) -> Verdict:
    if trial.problem is not None:
        return "can't be run"
    if rules.max_loss_increase is None:
        good = trial.exact
    elif reference is None or trial.loss is None:
        good = False
    else:
        good = not too_lossy(trial.loss, reference, rules)
    if not good:
        return "not good enough"
    return "fits" if trial.token_ms[rules.concurrency] <= rules.latency_ms else "too slow"
