"""In which order the stages of a pipeline run the micro-batches of a step: PyTorch's schedules, chosen and fed.

With P ranks, v stages on each and m micro-batches a step, ranks idle for this part of a step, and hold the activations
of so many micro-batches at once (those of all layers of a rank; rank 0 holds most):

    gpipe        all forward, then all backward           (P - 1) / (m + P - 1)      m
    1f1b         backward as early as possible            (P - 1) / (m + P - 1)      P - rank
    interleaved  1f1b over v smaller pieces of layers     (P - 1) / (v m + P - 1)    P + (P - 1) / v
    zbv          weights' gradients fill the gaps, v = 2  nearly 0 from m = 2 P on   P, on all ranks

(GPipe: arXiv 1811.06965; 1F1B: 2006.09503; interleaved: 2104.04473; zero bubble, V-shaped: 2401.10241, section 6.)
Stages are taken to be equally long; for zbv, forward, input-gradient and weight-gradient passes too, and it recomputes
recomputed activations for both halves of a backward pass. Beside activations, PyTorch's stages keep a buffer for what
is received of each micro-batch of a step, hidden states and gradients: 2 m x tokens x hidden size for each stage.

This file knows nothing of models or losses: it runs modules that take the number of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from swift.config.parallel import ParallelConfig
from swift.core.errors import UsageError

SCHEDULES: dict[str, Callable[..., Any]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
}
# Schedules that compute gradients of inputs and of weights apart.
SPLIT_BACKWARD = ("zbv",)


def stages_per_rank(config: ParallelConfig) -> int:
    """Pieces of layers that a rank holds.

    Raises:
        UsageError: the schedule can't have that many.
    """
    schedule, asked = config.pipeline_schedule, config.pipeline_stages_per_rank
    default = 2 if schedule in ("interleaved", "zbv") else 1
    if asked is None or asked == default or (schedule == "interleaved" and asked > 1):
        return asked or default
    if asked == 1:
        fix = "--pipeline_schedule 1f1b, which has one piece a rank"
    elif schedule == "zbv":
        fix = "--pipeline_schedule interleaved, or leave --pipeline_stages_per_rank out: zbv has two"
    else:
        fix = "--pipeline_schedule interleaved"
    raise UsageError(
        f"--pipeline_schedule {schedule} can't have {asked} stages a rank", where="--pipeline_stages_per_rank", fix=fix
    )


def stages_of_rank(schedule: str, rank: int, size: int, per_rank: int) -> list[int]:
    """The stages that `rank` of `size` holds, in order: r and 2 P - 1 - r for zbv, else r, r + P, r + 2 P, ..."""
    if schedule == "zbv":
        return [rank, 2 * size - 1 - rank]
    return [rank + size * turn for turn in range(per_rank)]


def rank_of_stage(schedule: str, stage: int, size: int) -> int:
    """The rank that holds `stage`."""
    return 2 * size - 1 - stage if schedule == "zbv" and stage >= size else stage % size


def micro_batches_needed(schedule: str, count: int, size: int) -> int:
    """The least number of micro-batches, `count` or more, that the schedule can run; the further ones may be empty."""
    if schedule == "interleaved":  # rounds of at least `size` micro-batches, all of the same length
        while count % max(1, count // size):
            count += 1
    return count


def schedule_for(schedule: str, count: int, num_stages: int) -> str:
    """The schedule that runs `count` micro-batches as `schedule` would.

    PyTorch's 1f1b wants as many micro-batches as stages. With fewer, its first backward pass waits for the last forward
    pass anyway on all stages but the last, which is gpipe's order, and no more activations are held than there are
    micro-batches.
    """
    return "gpipe" if schedule == "1f1b" and count < num_stages else schedule


def idle_share(count: int, size: int, per_rank: int) -> float:
    """The part of a step in which a rank waits, by the table above; not for zbv."""
    return (size - 1) / (per_rank * count + size - 1)


def schedule_notes(config: ParallelConfig, micro_batches: int) -> list[str]:
    """What a user should know of a step of `micro_batches` under these settings; empty if nothing."""
    schedule, size = config.pipeline_schedule, config.pipeline_parallel_size
    if size == 1:
        return []
    notes = []
    needed = micro_batches_needed(schedule, micro_batches, size)
    if needed > micro_batches:
        notes.append(
            f"pipeline: {needed - micro_batches} empty micro-batches are added to each step of {micro_batches}, as "
            f"{schedule} runs {needed} at least; --gradient_accumulation_steps {needed} would use them"
        )
    idle = 0.0 if schedule == "zbv" else idle_share(needed, size, stages_per_rank(config))
    if idle > 0.2:
        notes.append(
            f"pipeline: ranks wait for {100 * idle:.0f} % of a step of {micro_batches} micro-batches; more of them "
            "(--gradient_accumulation_steps) make it less"
        )
    return notes
