"""The sizes of a run's axes, worked out from the settings, the number of processes and the model's shape. No torch.

What is impossible is refused together with the nearest sizes that are possible: those that change the fewest settings
by the least.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from swift.config.context import resolve_context
from swift.config.model_shape import ModelShape as ModelShape
from swift.config.model_shape import read_model_shape as read_model_shape
from swift.config.parallel import ParallelConfig
from swift.config.resolve import Problem, raise_problems
from swift.core.errors import UsageError

# outermost first; see `swift.distributed.mesh` for what each is
BASIC_AXES = ("pp", "dp_replicate", "dp_shard", "ring", "ulysses", "tp")


@dataclass(frozen=True)
class Degrees:
    """Sizes of the basic axes, and of `ep`, which divides dp_shard x ring x ulysses."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    ring: int = 1
    ulysses: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        return math.prod(getattr(self, axis) for axis in BASIC_AXES)

    @property
    def cp(self) -> int:
        return self.ring * self.ulysses

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        return self.fsdp // self.ep

    def words(self) -> str:
        """Such as `pp 2 x dp_shard 4 x tp 2`, axes of size 1 left out."""
        shown = [f"{axis} {getattr(self, axis)}" for axis in BASIC_AXES if getattr(self, axis) > 1]
        shown += [f"ep {self.ep} inside"] if self.ep > 1 else []
        return " x ".join(shown) or "one process"


# what the user sets -> how it is called in messages
_SIZES = {
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "sequence_parallel_size": "cp",
    "expert_parallel_size": "ep",
}


def needs_shape(config: ParallelConfig) -> bool:
    """Whether the sizes depend on the model: copies and shards of all of it are possible for any."""
    return config.parallel == "auto" or any(getattr(config, name) > 1 for name in _SIZES)


def resolve_degrees(
    config: ParallelConfig, world_size: int, shape: ModelShape | None, *, ranks_per_node: int | None = None
) -> Degrees:
    """The sizes of all axes.

    Without fsdp every data-parallel rank is a replica (experts are shared by as few of them as it takes); with fsdp2
    all of them share one; hsdp shares within a node and replicates across nodes.

    Args:
        shape: None will do unless `needs_shape(config)`.
        ranks_per_node: for hsdp; default: what the launcher said (LOCAL_WORLD_SIZE), else all.

    Raises:
        UsageError: what is asked for is impossible; it names the nearest possible sizes.
    """
    raise_problems(degree_problems(config, world_size, shape, ranks_per_node=ranks_per_node), subject="the parallelism")
    tp, pp, cp = config.tensor_parallel_size, config.pipeline_parallel_size, config.sequence_parallel_size
    ring, ulysses = (cp, 1) if shape is None else _context(config, shape)
    replicate, shard = _data_parallel(config, world_size // (tp * pp * cp), ranks_per_node)
    return Degrees(pp, replicate, shard, ring, ulysses, tp, config.expert_parallel_size)


def degree_problems(
    config: ParallelConfig, world_size: int, shape: ModelShape | None, *, ranks_per_node: int | None = None
) -> list[Problem]:
    """What is impossible about the sizes, each with the nearest possible ones as its fix.

    Args:
        shape: None where the model isn't known yet: then only the number of processes decides.
    """
    faults = list(_faults(config, world_size, shape, ranks_per_node))
    if not faults:
        return []
    near = nearest_possible(config, world_size, shape, ranks_per_node=ranks_per_node)
    fix = _flags(config, near) if near is not None else None
    return [
        Problem(
            message,
            " and ".join(f"--{name}" for name in names),
            " or ".join(part for part in (own, fix) if part) or "start another number of processes",
        )
        for message, names, own in faults
    ]


def is_possible(
    config: ParallelConfig, world_size: int, shape: ModelShape | None, *, ranks_per_node: int | None = None
) -> bool:
    """Whether `degree_problems` would find none."""
    return next(_faults(config, world_size, shape, ranks_per_node), None) is None


def nearest_possible(
    config: ParallelConfig, world_size: int, shape: ModelShape | None, *, ranks_per_node: int | None = None
) -> ParallelConfig | None:
    """The settings closest to these with which `world_size` processes can train a model of this shape."""
    best, best_cost = None, math.inf
    experts = shape.experts if shape is not None else config.expert_parallel_size
    for tp in divisors(world_size):
        for pp in divisors(world_size // tp):
            for cp in divisors(world_size // tp // pp):
                for ep in [e for e in divisors(max(1, experts)) if e <= world_size]:
                    sizes: dict[str, Any] = dict(zip(_SIZES, (tp, pp, cp, ep), strict=True))
                    cost = sum(_distance(getattr(config, name), size) for name, size in sizes.items())
                    for candidate, extra in _relaxed(replace(config, **sizes)):
                        if cost + extra >= best_cost:
                            break
                        if is_possible(candidate, world_size, shape, ranks_per_node=ranks_per_node):
                            best, best_cost = candidate, cost + extra
                            break
    return best


def _distance(asked: int, possible: int) -> float:
    """How far a size is from what was asked; any change at all counts too."""
    return abs(math.log2(possible / max(1, asked))) + (0.5 if asked != possible else 0)


def _relaxed(config: ParallelConfig) -> Iterator[tuple[ParallelConfig, float]]:
    """The settings, then with fewer of the finer ones, each with what that costs."""
    yield config, 0.0
    free = replace(config, pipeline_layers=[], dp_replicate_size=-1, dp_shard_size=-1, attention_impl="auto")
    schedule: dict[str, Any] = {"pipeline_schedule": "1f1b", "pipeline_stages_per_rank": None}
    shard: dict[str, Any] = {"fsdp": "fsdp2"} if config.fsdp == "none" else {}
    changes: list[dict[str, Any]] = [{}, shard, schedule, {**schedule, **shard}, {**schedule, "fsdp": "none"}]
    for number, change in enumerate(changes):
        yield replace(free, **change), 0.25 + 0.05 * number


def _flags(asked: ParallelConfig, possible: ParallelConfig) -> str:
    """How to ask for the possible settings."""
    words = [
        f"--{name} {getattr(possible, name)}"
        for name in _SIZES
        if getattr(possible, name) > 1 or getattr(possible, name) != getattr(asked, name)
    ]
    for name in ("fsdp", "attention_impl", "pipeline_schedule"):
        if getattr(asked, name) != getattr(possible, name):
            words.append(f"--{name} {getattr(possible, name)}")
    dropped = [
        name
        for name in ("pipeline_layers", "pipeline_stages_per_rank", "dp_replicate_size", "dp_shard_size")
        if getattr(asked, name) != getattr(possible, name)
    ]
    if dropped:
        words.append(f"{'and ' if words else ''}without {', '.join(dropped)}")
    return " ".join(words)


Fault = tuple[str, tuple[str, ...], str | None]  # what is wrong, the settings it comes from, a remedy of its own


def _faults(
    config: ParallelConfig, world_size: int, shape: ModelShape | None, ranks_per_node: int | None
) -> Iterator[Fault]:
    sizes = {name: getattr(config, name) for name in _SIZES}
    wrong = [name for name, size in sizes.items() if size < 1]
    for name in wrong:
        yield f"{name} must be at least 1, not {sizes[name]}", (name,), None
    if wrong:
        return
    product = math.prod(size for name, size in sizes.items() if name != "expert_parallel_size")
    if world_size % product:
        yield _not_shared_out(sizes, product, world_size)
    else:
        yield from _data_faults(config, world_size // product, ranks_per_node)
    if shape is not None:
        yield from _tensor_faults(config.tensor_parallel_size, shape)
        yield from _context_faults(config, shape)
        dp = world_size // product if world_size % product == 0 else None
        yield from _expert_faults(config, dp, shape, ranks_per_node)
    yield from _pipeline_faults(config, shape)


def _not_shared_out(sizes: dict[str, int], product: int, world_size: int) -> Fault:
    asked = {name: size for name, size in sizes.items() if size > 1 and name != "expert_parallel_size"}
    words = " x ".join(f"{_SIZES[name]} {size}" for name, size in asked.items())
    processes = "1 process" if world_size == 1 else f"{world_size} processes"
    if product > world_size:
        message = f"{words} needs {product} processes, and there {'is' if world_size == 1 else 'are'} {processes}"
        return message, tuple(asked), f"start {product} (--nproc_per_node, --nnodes),"
    return f"{processes} can't be shared out as {words}: {product} doesn't divide {world_size}", tuple(asked), None


def _data_faults(config: ParallelConfig, dp: int, ranks_per_node: int | None) -> Iterator[Fault]:
    replicate, shard = config.dp_replicate_size, config.dp_shard_size
    bad = [n for n in ("dp_replicate_size", "dp_shard_size") if getattr(config, n) != -1 and getattr(config, n) < 1]
    for name in bad:
        yield f"{name} must be at least 1, or -1, not {getattr(config, name)}", (name,), None
    if bad:
        return
    given = [n for n in ("dp_replicate_size", "dp_shard_size") if getattr(config, n) != -1]
    if replicate != -1 and shard != -1 and replicate * shard != dp:
        yield (
            f"dp_replicate {replicate} x dp_shard {shard} is {replicate * shard}, and {dp} rank(s) are left for data",
            tuple(given),
            None,
        )
    elif given and dp % getattr(config, given[0]):
        yield (
            f"{given[0]} {getattr(config, given[0])} doesn't divide the {dp} rank(s) left for data",
            tuple(given),
            None,
        )
    elif config.fsdp == "none" and shard > 1 and config.expert_parallel_size == 1:
        yield f"dp_shard_size {shard} shards nothing without fsdp", ("dp_shard_size",), "--fsdp fsdp2,"
    elif config.fsdp == "hsdp" and not given and dp > 1 and _data_parallel(config, dp, ranks_per_node)[1] == 1:
        yield (
            "hsdp shards within a node, and tensor, sequence and pipeline parallel leave one data-parallel rank there",
            ("fsdp",),
            "--fsdp fsdp2, or give --dp_shard_size,",
        )


def _tensor_faults(tp: int, shape: ModelShape) -> Iterator[Fault]:
    for number, words in (
        (shape.heads, "attention heads"),
        (shape.kv_heads, "key-value heads"),
        (shape.intermediate, "rows of the MLP"),
    ):
        if number % tp:
            yield f"{number} {words} can't be shared by {tp} ranks", ("tensor_parallel_size",), None
            return


def _context_faults(config: ParallelConfig, shape: ModelShape) -> Iterator[Fault]:
    if shape.heads % config.tensor_parallel_size or shape.kv_heads % config.tensor_parallel_size:
        return
    try:
        _context(config, shape)
    except UsageError as error:
        yield error.message, ("sequence_parallel_size", "attention_impl"), None


def _expert_faults(
    config: ParallelConfig, dp: int | None, shape: ModelShape, ranks_per_node: int | None
) -> Iterator[Fault]:
    ep = config.expert_parallel_size
    if ep == 1:
        return
    if not shape.experts:
        yield f"expert_parallel_size {ep}, and the model has no experts", ("expert_parallel_size",), None
        return
    if shape.experts % ep:
        yield f"{shape.experts} experts can't be shared by {ep} ranks", ("expert_parallel_size",), None
    if dp is not None:
        shard = _data_parallel(config, dp, ranks_per_node)[1] * config.sequence_parallel_size
        ranks = shard if config.fsdp != "none" else dp * config.sequence_parallel_size
        if shard % ep:
            yield (
                f"experts are shared by ranks that share a model or a sequence: {ep} doesn't divide their {ranks}",
                ("expert_parallel_size",),
                None,
            )


def _pipeline_faults(config: ParallelConfig, shape: ModelShape | None) -> Iterator[Fault]:
    pp, layers = config.pipeline_parallel_size, config.pipeline_layers
    pieces = stages_per_rank(config)
    schedule = config.pipeline_schedule
    if pieces < 1 or (schedule == "zbv" and pieces != 2) or (schedule == "interleaved" and pieces < 2):
        needed = {"zbv": "exactly 2", "interleaved": "2 or more"}.get(schedule, "1")
        yield (
            f"pipeline_schedule {schedule} has {needed} pieces of layers on each rank, not {pieces}",
            ("pipeline_stages_per_rank", "pipeline_schedule"),
            None,
        )
    elif schedule in ("gpipe", "1f1b") and pieces != 1:
        yield (
            f"pipeline_schedule {schedule} has one piece of layers on each rank, not {pieces}",
            ("pipeline_stages_per_rank", "pipeline_schedule"),
            "--pipeline_schedule interleaved,",
        )
    stages = pp * pieces if pp > 1 else 1
    if shape is not None and shape.layers < stages:
        pieces_words = f" x {pieces} pieces" if pieces > 1 else ""
        yield f"{shape.layers} layers can't fill {pp}{pieces_words} pipeline stages", ("pipeline_parallel_size",), None
    if not layers:
        return
    if len(layers) != stages:
        yield f"pipeline_layers gives {len(layers)} numbers for {stages} stage(s)", ("pipeline_layers",), None
    elif any(number < 1 for number in layers):
        yield "every stage of pipeline_layers needs at least one layer", ("pipeline_layers",), None
    elif shape is not None and sum(layers) != shape.layers:
        message = f"pipeline_layers adds up to {sum(layers)}, and the model has {shape.layers} layers"
        yield message, ("pipeline_layers",), None


def stages_per_rank(config: ParallelConfig) -> int:
    """Pieces of layers that a rank of the pipeline holds."""
    if config.pipeline_stages_per_rank is not None:
        return config.pipeline_stages_per_rank
    return 2 if config.pipeline_schedule in ("interleaved", "zbv") and config.pipeline_parallel_size > 1 else 1


def _context(config: ParallelConfig, shape: ModelShape) -> tuple[int, int]:
    """Sizes of ring and ulysses."""
    tp = config.tensor_parallel_size
    return resolve_context(
        config.attention_impl, config.sequence_parallel_size, shape.heads // tp, shape.kv_heads // tp
    )


def _data_parallel(config: ParallelConfig, dp: int, ranks_per_node: int | None) -> tuple[int, int]:
    """dp_replicate and dp_shard, out of `dp` ranks with different data."""
    if config.dp_shard_size != -1:
        return dp // config.dp_shard_size, config.dp_shard_size
    if config.dp_replicate_size != -1:
        return config.dp_replicate_size, dp // config.dp_replicate_size
    if config.fsdp == "fsdp2":
        return 1, dp
    if config.fsdp == "hsdp":
        inner = config.tensor_parallel_size * config.sequence_parallel_size
        per_node = ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or dp * inner
        shard = math.gcd(dp, max(1, per_node // inner))
        return dp // shard, shard
    ep = config.expert_parallel_size
    shard = ep // math.gcd(ep, config.sequence_parallel_size)
    return (dp // shard, shard) if dp % shard == 0 else (dp, 1)


def divisors(number: int) -> list[int]:
    """All divisors, smallest first."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
