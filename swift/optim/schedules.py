"""Learning-rate schedules: pure functions of the step, so a resumed run needs no state for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from swift.config.training import OptimizerConfig
from swift.core.registry import Registry


@dataclass(frozen=True)
class Schedule:
    """Factor on the peak learning rate.

    Attributes:
        shape: factor after warm-up as a function of progress in [0, 1].
        warmup_steps: steps that rise linearly from 1/warmup to 1.
        total_steps: optimizer steps of the run.
    """

    shape: Callable[[float], float]
    warmup_steps: int
    total_steps: int

    def factor(self, step: int) -> float:
        """The factor for optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        span = max(1, self.total_steps - self.warmup_steps)
        return self.shape(min(1.0, (step - self.warmup_steps) / span))


Shape = Callable[[OptimizerConfig, int, int], Callable[[float], float]]
SHAPES: Registry[Shape] = Registry("learning-rate schedule")


@SHAPES.register("constant")
@SHAPES.register("constant_with_warmup")
def _constant(config: OptimizerConfig, warmup_steps: int, total_steps: int) -> Callable[[float], float]:
    return lambda progress: 1.0


@SHAPES.register("linear")
def _linear(config: OptimizerConfig, warmup_steps: int, total_steps: int) -> Callable[[float], float]:
    floor = config.min_lr_ratio
    return lambda progress: floor + (1 - floor) * (1 - progress)


@SHAPES.register("cosine")
@SHAPES.register("cosine_with_min_lr")
def _cosine(config: OptimizerConfig, warmup_steps: int, total_steps: int) -> Callable[[float], float]:
    floor = config.min_lr_ratio
    return lambda progress: floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


@SHAPES.register("polynomial")
def _polynomial(config: OptimizerConfig, warmup_steps: int, total_steps: int) -> Callable[[float], float]:
    floor = config.min_lr_ratio
    return lambda progress: floor + (1 - floor) * (1 - progress) ** 2


@SHAPES.register("inverse_sqrt")
def _inverse_sqrt(config: OptimizerConfig, warmup_steps: int, total_steps: int) -> Callable[[float], float]:
    """sqrt(warmup / step), as in "Attention Is All You Need", section 5.3; one step of warm-up if there is none."""
    start = max(1, warmup_steps)
    span = max(1, total_steps - warmup_steps)
    return lambda progress: max(config.min_lr_ratio, math.sqrt(start / (start + progress * span)))


@SHAPES.register("wsd")
def _warmup_stable_decay(config: OptimizerConfig, warmup_steps: int, total_steps: int) -> Callable[[float], float]:
    """Flat, then linear decay over the last `decay_ratio` of all steps (MiniCPM, arXiv 2404.06395, section 4)."""
    span = max(1, total_steps - warmup_steps)
    decay = min(1.0, max(1, round(config.decay_ratio * total_steps)) / span)
    floor = config.min_lr_ratio

    def shape(progress: float) -> float:
        into = max(0.0, (progress - (1 - decay)) / decay)
        return floor + (1 - floor) * (1 - into)

    return shape


def build_schedule(config: OptimizerConfig, total_steps: int) -> Schedule:
    """The schedule that the settings ask for, for a run of `total_steps` optimizer steps."""
    warmup = config.warmup_steps or math.ceil(config.warmup_ratio * total_steps)
    return Schedule(SHAPES[config.lr_scheduler_type](config, warmup, total_steps), warmup, total_steps)
