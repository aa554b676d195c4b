"""The sizes of a run's axes, worked out from the settings, the number of processes and the model's shape. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from swift.config.parallel import ParallelConfig

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


@dataclass(frozen=True)
class ModelShape:
    """What decides which sizes are possible, read from a model's config.json.

    Attributes:
        kv_heads: key-value heads; experts: 0 for a dense model.
        vocab, hidden, intermediate: sizes of matrices; tied: one matrix is embedding and head.
    """

    layers: int
    heads: int
    kv_heads: int
    hidden: int
    intermediate: int
    vocab: int
    experts: int = 0
    tied: bool = False


def resolve_degrees(config: ParallelConfig, world_size: int, shape: ModelShape) -> Degrees:
    """The sizes of all axes.

    Without fsdp every data-parallel rank is a replica; with fsdp2 all of them share one; hsdp replicates across nodes.

    Raises:
        UsageError: what is asked for is impossible; it names the nearest possible sizes.
    """
    tp, pp, cp = config.tensor_parallel_size, config.pipeline_parallel_size, config.sequence_parallel_size
    ulysses = math.gcd(cp, shape.kv_heads // tp) if config.attention_impl in ("auto", "ulysses") else 1
    dp = world_size // (tp * pp * cp)
    shard = 1 if config.fsdp == "none" else dp if config.dp_shard_size == -1 else config.dp_shard_size
    return Degrees(pp, dp // shard, shard, cp // ulysses, ulysses, tp, config.expert_parallel_size)
