"""Watches over what preference runs log, and says when they go wrong in a way that the loss doesn't show.

A watch is fed every logged line and gives a warning once, or None. All that it remembers comes from these lines, so a
resumed run feeds it the lines of its history again. It knows names of metrics only, and no model, method or setting.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

LINES = 5  # logged lines that are averaged where the start is known, as it is with a reference
LINES_TWICE = 10  # where the start has to be measured too
FULL_STEPS = 200  # at the full learning rate, before "always" and "never" say anything
SIDES = ("chosen", "rejected")


class Watch(Protocol):
    """Sees every logged line."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """A warning, once in a run, or None. What isn't a finite number in `metrics` is taken as not logged."""
        ...


def make_watches() -> list[Watch]:
    """Those that every run has; where a run logs none of their metrics they stay silent."""
    return [Displacement(), PairAccuracy(), ReferencePoint()]


@dataclass
class Average:
    """Mean and scatter of what was added (Welford's way)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # summed squared distances from the mean

    def add(self, value: float) -> None:
        self.count += 1
        before = value - self.mean
        self.mean += before / self.count
        self.squares += before * (value - self.mean)

    @property
    def error(self) -> float:
        """The standard error of the mean; 0 of fewer than two values."""
        return math.sqrt(self.squares / (self.count - 1) / self.count) if self.count > 1 else 0.0


def average(values: Iterable[float]) -> Average:
    """Of these values."""
    found = Average()
    for value in values:
        found.add(value)
    return found


class Course:
    """A metric's start, known or averaged over its first `lines` values, and its last `lines` values."""

    def __init__(self, lines: int, start: float | None = None) -> None:
        self.start_known = start is not None
        self.start = Average(mean=start or 0.0)
        self._last: deque[float] = deque(maxlen=lines)
        self._lines = lines
        self._jumps = Average()  # squared, from each line to the next: scatter without the trend
        self._before: float | None = None

    def add(self, value: float) -> None:
        if self._before is not None:
            self._jumps.add((value - self._before) ** 2 / 2)
        self._before = value
        if self.start_known or self.start.count == self._lines:
            self._last.append(value)
        else:
            self.start.add(value)

    def change(self) -> tuple[float, float] | None:
        """How far it has moved from its start, and the standard error of that; None while there is too little.

        Few lines may agree by accident, so they are taken to scatter as much as lines of the whole run do.
        """
        if len(self._last) < self._lines:
            return None
        now = average(self._last)
        usual = math.sqrt(self._jumps.mean * (1 / self._lines + (0 if self.start_known else 1 / self._lines)))
        return now.mean - self.start.mean, max(usual, math.hypot(now.error, self.start.error))


class FullRate:
    """How long the learning rate has stopped rising."""

    def __init__(self) -> None:
        self._peak, self._step, self._lines = 0.0, 0, 0

    def add(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Take a line in; returns whether it still rose."""
        rate = _number(metrics, "learning_rate") or 0.0
        self._lines += 1
        rose = rate > self._peak
        if rose:
            self._peak, self._step, self._lines = rate, step, 0
        return rose

    def is_long(self, step: int) -> bool:
        """Whether enough steps and lines have passed since."""
        return step - self._step >= FULL_STEPS and self._lines >= LINES_TWICE


def _number(metrics: Mapping[str, Any], name: str) -> float | None:
    value = metrics.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _at_reference(metrics: Mapping[str, Any]) -> bool:
    """Whether a line shows the model as its reference is, up to rounding, as the first does in most runs."""
    ratios = []
    for name in SIDES:
        logps, reference = _number(metrics, f"logps/{name}"), _number(metrics, f"logps/ref_{name}")
        if logps is not None and reference is not None:
            ratios.append(abs(logps - reference) <= 0.01 * abs(reference))
    return bool(ratios) and all(ratios)


class _Side:
    """The log-probabilities of one kind of answers: against the reference, or else by the reward.

    A reward without a reference is proportional to the log-probability, perhaps per token; then it scatters less, as
    answers differ in length, so changes are taken from it and scaled.
    """

    def __init__(self, first: Mapping[str, Any], name: str) -> None:
        self._name = name
        self.with_reference = _number(first, f"logps/ref_{name}") is not None
        self.from_reference = _at_reference(first)
        self._course = Course(LINES, 0.0) if self.from_reference else Course(LINES_TWICE)
        self._level, self._reward = Average(), Average()

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Take a line in; one without these answers changes nothing."""
        logps, reference = _number(metrics, f"logps/{self._name}"), _number(metrics, f"logps/ref_{self._name}")
        reward = _number(metrics, f"rewards/{self._name}")
        if logps is None or reward is None or (reference is None) is self.with_reference:
            return
        self._course.add(reward if reference is None else logps - reference)
        self._level.add(logps if reference is None else reference)
        self._reward.add(reward)

    def fall(self) -> tuple[float, float, float] | None:
        """By how many nats answers became less likely, its standard error, and what share of their log-probability that
        is; None while there is too little to tell."""
        change, level = self._course.change(), self._level.mean
        if change is None or not level or not (self.with_reference or self._reward.mean):
            return None
        unit = 1.0 if self.with_reference else level / self._reward.mean
        return -change[0] * unit, change[1] * abs(unit), -change[0] * unit / abs(level)


class Displacement:
    """Likelihood displacement (Razin et al., arXiv 2410.08847; Pal et al., arXiv 2402.13228): both answers of pairs
    become less likely while the margin between them grows, so what the model says instead is neither.

    It is told when chosen answers have lost 5 % of their log-probability and a nat at least, by more than four times
    what the lines scatter, and rejected ones have lost more.
    """

    share, nats, errors = 0.05, 1.0, 4.0

    def __init__(self) -> None:
        self._sides: dict[str, _Side] = {}
        self._told = False

    def log(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """See `Watch`."""
        for name in SIDES:
            if name not in self._sides and _number(metrics, f"logps/{name}") is not None:
                self._sides[name] = _Side(metrics, name)
            if name in self._sides:
                self._sides[name].add(metrics)
        if self._told or len(self._sides) < len(SIDES):
            return None
        falls = [self._sides[name].fall() for name in SIDES]
        if falls[0] is None or falls[1] is None:
            return None
        (chosen, error, share), (rejected, _, rejected_share) = falls[0], falls[1]
        clear = chosen >= self.nats and share >= self.share and chosen > self.errors * error
        if not clear or rejected <= chosen:
            return None
        self._told = True
        than = "the reference's" if self._sides["chosen"].from_reference else "at the start"
        return (
            f"step {step}: the margin grows, but both answers become less likely (likelihood displacement): the "
            f"log-probability of chosen ones is {chosen:.1f} ({share:.0%}) lower than {than}, of rejected ones "
            f"{rejected:.1f} ({rejected_share:.0%}); the model may learn to say something else altogether. "
            f"{self._advice(metrics)}"
        )

    def _advice(self, metrics: Mapping[str, Any]) -> str:
        """By what the line holds: KTO logs no margin, and `nll` is the term that holds the chosen answers up."""
        calmer = "or lower --learning_rate"
        if not self._sides["chosen"].with_reference:
            more = "a larger" if "nll" in metrics else "some"
            return f"Give the chosen answers {more} --cpo_alpha (orpo: lower --beta), {calmer}"
        if _number(metrics, "rewards/margins") is None:
            return f"Raise --desirable_weight or --beta, {calmer}"
        if "nll" in metrics:
            return f"Raise --rpo_alpha or --beta, {calmer}"
        return f"Add --rpo_alpha 1, take --loss_type apo_zero, raise --beta, {calmer}"


class PairAccuracy:
    """Pairs that can't be told apart, or that could be from the beginning.

    At chance is an accuracy that is known to be within 0.05 of one half, in lines of the full learning rate, while the
    margin doesn't even seem to have grown. It isn't looked for where log-probabilities are compared without a
    reference, or with another model's: these say at first which answer is shorter, or which model wrote it.
    """

    near, errors, easy_step = 0.05, 2.0, 20

    def __init__(self) -> None:
        self._lines = 0
        self._start: Average | None = None  # of the margin; None: it can't be known
        self._start_known = self._always_zero = self._always_right = True
        self._margin, self._accuracy = Average(), Average()
        self._rate = FullRate()
        self._told = False

    def log(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """See `Watch`."""
        margin, accuracy = _number(metrics, "rewards/margins"), _number(metrics, "rewards/accuracies")
        if margin is None or accuracy is None:
            return None
        if self._rate.add(step, metrics):
            self._margin, self._accuracy = Average(), Average()
        self._always_zero &= margin == 0
        self._lines += 1
        if self._lines == 1:
            self._start_known = margin == 0 or _at_reference(metrics)
            self._start = Average() if self._start_known or "logps/chosen" not in metrics else None
            if margin == 0:  # the model is its reference: nothing to be right about
                return None
        self._always_right &= accuracy > 0.999
        if self._start is not None and not self._start_known and self._start.count < LINES_TWICE:
            self._start.add(margin)
        else:
            self._margin.add(margin)
        self._accuracy.add(accuracy)
        warning = None if self._told else self._fault(step)
        self._told |= warning is not None
        return warning

    def _fault(self, step: int) -> str | None:
        if self._always_zero and self._rate.is_long(step):
            return (
                f"step {step}: rewards/margins is exactly 0 in every line: chosen and rejected are the same answers, "
                "or no weight changes. Look at a few rows, and at --learning_rate (bfloat16 loses small steps)"
            )
        if self._always_right and self._lines > LINES and step >= self.easy_step:
            return (
                f"step {step}: rewards/accuracies has been 1 from the start: something simple tells chosen from "
                "rejected answers, such as their length, format or last token. Look at a few rows before you trust the "
                "model to have learnt what they were meant to teach"
            )
        if self._start is None or self._margin.count < LINES_TWICE or not self._rate.is_long(step):
            return None
        grown = self._margin.mean - self._start.mean
        at_chance = abs(self._accuracy.mean - 0.5) + self.errors * self._accuracy.error <= self.near
        if not at_chance or grown > math.hypot(self._margin.error, self._start.error):
            return None
        return (
            f"step {step}: rewards/accuracies stays at chance ({self._accuracy.mean:.2f} so far), and the margin has "
            f"not grown ({grown:+.2g}). Look whether chosen and rejected are the same, swapped at random, or cut off "
            "before they differ (--max_length), and try a larger --learning_rate"
        )


class ReferencePoint:
    """KTO's z0, an estimate of a divergence, that is cut off at 0 for long."""

    def __init__(self) -> None:
        self._lines = self._began = 0
        self._rate = FullRate()
        self._told = False

    def log(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """See `Watch`."""
        z0 = _number(metrics, "kto_z0")
        if z0 is None:
            return None
        self._rate.add(step, metrics)
        if z0 != 0:
            self._lines = 0
            return None
        if not self._lines:
            self._began = step
        self._lines += 1
        long = self._lines >= LINES_TWICE and step - self._began >= FULL_STEPS
        if self._told or not long or not self._rate.is_long(step):
            return None
        self._told = True
        return (
            f"step {step}: kto_z0 has been 0 since step {self._began}: answers under other prompts have become no "
            "likelier than under the reference, so rows are compared with 0, as in apo_zero_unpaired. If rewards fall, "
            "raise --desirable_weight or lower --undesirable_weight; if they don't move, raise --learning_rate; larger "
            "steps (--gradient_accumulation_steps) make the estimate steadier"
        )
