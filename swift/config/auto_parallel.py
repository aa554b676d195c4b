"""`--parallel auto`: sizes of the axes by rules, from the model's shape, the devices and their memory. No torch.

The rules, in order: what fits on one device with its optimizer is copied to all (and sharded as far as it must be);
more is sharded over all data-parallel ranks, within nodes first; a very large layer or a very long sequence is shared
within a node (tensor, sequence parallel); experts are shared; and stages across nodes are the last resort, where the
shards of all devices together don't suffice. What the user gave explicitly is kept.

The memory model is a formula, and errs on the side of too much: bytes for each weight (its gradient, its optimizer
state), some 34 bytes for each token, layer and hidden unit (2 with recomputed activations), and the logits of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any

from swift.config.degrees import Degrees, ModelShape, degree_problems, divisors, is_possible, resolve_degrees
from swift.config.parallel import ParallelConfig
from swift.config.parallel_checks import spread_faults
from swift.config.resolve import Problem, raise_problems
from swift.config.schema import values_of

GIB = 1 << 30
USABLE = 0.85  # of a device's memory: the rest is the allocator's, the kernels' and the communication's
COMFORTABLE = 0.6  # with less left than this, plain copies would leave no room for longer rows
LAYER_PARAMETERS_FOR_TP = 1_000_000_000  # from here on, one layer gathered whole is a burden by itself
LONG_TOKENS = 32_768  # a device's share of a sequence should not be more
MIDDLING_TOKENS = 16_384  # nor than this, where activations would take half of the memory
MOST_SHARDS = 128  # ranks in one all-gather; beyond, replicate


@dataclass(frozen=True)
class Footprint:
    """Bytes on one device.

    Attributes:
        weights: with master copies; gradients; optimizer; activations: of one micro-batch.
        gathered: weights of one layer, whole, where they are sharded.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.gathered

    def words(self) -> str:
        """Such as `weights 28 GiB + gradients 28 GiB + optimizer 56 GiB + activations 3 GiB`."""
        names = ("weights", "gradients", "optimizer", "activations")
        return " + ".join(f"{name} {_gib(getattr(self, name))}" for name in names)


@dataclass(frozen=True)
class Workload:
    """What has to be trained.

    Attributes:
        tokens: of one micro-batch on one data-parallel rank.
        weight_bytes: of one frozen weight; trained ones are kept in fp32.
        trained: how many weights are trained; all: whether these are all.
        state_bytes: of the optimizer, for each trained weight.
        recompute: whether activations are recomputed.
    """

    shape: ModelShape
    tokens: int
    weight_bytes: int
    trained: int
    all: bool
    state_bytes: int
    recompute: bool

    def footprint(self, parallel: ParallelConfig, world: int, per_node: int) -> Footprint:
        """Bytes on one device with these sizes, which must be possible."""
        degrees = resolve_degrees(parallel, world, self.shape, ranks_per_node=per_node)
        sharded, stage = parallel.fsdp != "none", parallel.zero_stage
        experts = self.shape.expert_parameters / (degrees.pp * degrees.tp * degrees.ep)
        dense = (self.shape.parameters - self.shape.expert_parameters) / (degrees.pp * degrees.tp)
        whole = dense + experts
        shard = dense / degrees.fsdp + experts / degrees.efsdp if sharded else whole
        trained = self.trained / self.shape.parameters
        layers = max(1, self.shape.layers // degrees.pp)
        return Footprint(
            weights=(4 if self.all else self.weight_bytes) * (shard if stage == 3 else whole),
            gradients=4 * trained * (shard if stage >= 2 else whole),
            optimizer=self.state_bytes * trained * shard,
            activations=self._activations(degrees, parallel.sequence_parallel),
            gathered=2 * 2 * whole / layers if sharded else 0.0,  # this layer and the next, in 16 bits
        )

    def _activations(self, degrees: Degrees, sequence_parallel: bool) -> float:
        """Of the micro-batches that are on their way at once."""
        shape, tokens = self.shape, self.tokens / degrees.cp
        layers = max(1, shape.layers // degrees.pp)
        wide = shape.hidden * (1 + shape.experts_per_token / 8 if shape.experts else 1)
        inside = 34 * tokens * wide / degrees.tp  # one layer's own
        between = (
            2 * tokens * shape.hidden / (degrees.tp if sequence_parallel else 1)
        )  # what a layer is recomputed from
        kept = layers * between + inside if self.recompute else layers * inside
        logits = 6 * min(tokens, 4096) * shape.vocab / degrees.tp  # the loss works in chunks
        return kept * min(degrees.pp, 4) + logits


def choose(
    config: Any,
    shape: ModelShape,
    world: int,
    per_node: int,
    memory_bytes: float,
    tokens: int,
    *,
    given: Collection[str] = (),
) -> tuple[ParallelConfig, list[str]]:
    """Sizes for a run, and why.

    Args:
        config: an `SftConfig`; its tuner, optimizer and precision decide how much is kept for each weight.
        world, per_node: processes in all and on one machine.
        memory_bytes: of one device.
        tokens: of one micro-batch on one data-parallel rank (batch size x length).
        given: settings that the user gave, even where they are the defaults; others that differ from their defaults
            count as given too. None of them is changed.

    Raises:
        UsageError: what was given is impossible.
    """
    return _Planner(config, shape, world, per_node, memory_bytes, tokens, given).plan()


class _Planner:
    """One decision after the other; each leaves a reason."""

    def __init__(
        self, config: Any, shape: ModelShape, world: int, per_node: int, memory: float, tokens: int, given: Any
    ) -> None:
        self.shape, self.world, self.per_node = shape, world, min(per_node, world)
        self.room = USABLE * memory
        self.load = workload(config, shape, tokens)
        self.config = config
        self.sizes: ParallelConfig = replace(config.parallelism, parallel="manual")
        defaults = ParallelConfig()
        self.given = set(given) | {
            f.name for f in fields(ParallelConfig) if getattr(self.sizes, f.name) != getattr(defaults, f.name)
        }
        self.reasons: list[str] = []

    def plan(self) -> tuple[ParallelConfig, list[str]]:
        kept = sorted(self.given & {f.name for f in fields(ParallelConfig)} - {"parallel"})
        if kept:
            self.reasons.append(f"as given: {', '.join(f'{name} {getattr(self.sizes, name)}' for name in kept)}")
        if self.world == 1:
            self.reasons.append(f"one process: nothing to share; it needs about {_gib(self._need())}")
        elif self.sizes.deepspeed:
            self.reasons.append("DeepSpeed shards by itself")
        else:
            self._describe()
            self._experts()
            self._long_sequences()
            self._shard()
            self._large_layers()
            self._stages()
        problems: list[Problem] = degree_problems(self.sizes, self.world, self.shape, ranks_per_node=self.per_node)
        raise_problems(problems, subject="the parallelism")
        if self.world > 1:
            need = self._need()
            verdict = "" if need <= self.room else ": more than there is; --fsdp_cpu_offload true, or shorter rows"
            words = resolve_degrees(self.sizes, self.world, self.shape, ranks_per_node=self.per_node).words()
            self.reasons.append(f"{words}: about {_gib(need)} of {_gib(self.room)} on each device{verdict}")
        return self.sizes, self.reasons

    def _describe(self) -> None:
        weights = self.shape.parameters
        count = f"{weights / 1e9:.3g} B" if weights >= 1e8 else f"{weights / 1e6:.3g} M"
        alone = self.load.footprint(ParallelConfig(), 1, 1)
        trained = "all trained" if self.load.all else f"{self.load.trained / 1e6:.3g} M trained"
        self.reasons.append(f"{count} weights, {trained}: {alone.words()} on one device")

    def _experts(self) -> None:
        if not self.shape.experts or not self._free("expert_parallel_size"):
            return
        bytes_each = 16 if self.load.all else self.load.weight_bytes
        expert_bytes = self.shape.expert_parameters * bytes_each
        if expert_bytes < 0.2 * self.room:
            return
        limit = self.world // (self.sizes.tensor_parallel_size * self.sizes.pipeline_parallel_size)
        wanted = min(limit, self.per_node)
        layer_bytes = 2 * self.shape.expert_parameters / self.shape.layers
        while wanted < limit and layer_bytes / wanted > 0.1 * self.room:
            wanted *= 2
        for ep in reversed(divisors(self.shape.experts)):
            if 1 < ep <= wanted and self._try(expert_parallel_size=ep, **self._sharding_for_experts()):
                self.reasons.append(
                    f"expert_parallel_size {ep}: {self.shape.experts} experts hold {_gib(expert_bytes)}, and no device "
                    f"should gather a layer's, {_gib(layer_bytes)} in 16 bits"
                )
                return

    def _sharding_for_experts(self) -> dict[str, Any]:
        """Experts are shared among ranks that share the model."""
        return {"fsdp": "fsdp2"} if self._free("fsdp") else {}

    def _long_sequences(self) -> None:
        if not self._free("sequence_parallel_size"):
            return
        cp = 1
        for size in divisors(self.per_node):
            if self._try(sequence_parallel_size=size):
                cp = size
            share = self.load.tokens / cp
            if share <= MIDDLING_TOKENS or (share <= LONG_TOKENS and self._activations() <= 0.5 * self.room):
                break
        if cp > 1:
            self.reasons.append(
                f"sequence_parallel_size {cp}: of {self.load.tokens} tokens each device holds {self.load.tokens // cp}"
            )

    def _shard(self) -> None:
        if not self._free("fsdp") or self.sizes.fsdp != "none":
            return
        need = self._need()
        if need <= COMFORTABLE / USABLE * self.room:
            self.reasons.append(f"fsdp none: a copy of all takes {_gib(need)}, which fits on every device")
            return
        if need <= self.room and self._try(fsdp="fsdp2", zero_stage=2):
            self.reasons.append(f"fsdp2, zero_stage 2: a copy of all would just fit ({_gib(need)})")
            return
        nodes = self.world // self.per_node
        if nodes > 1 and self._try(fsdp="hsdp") and self._need() <= COMFORTABLE / USABLE * self.room:
            self.reasons.append(
                f"hsdp: {_gib(need)} don't fit on a device, but shared by a machine's {self.per_node} they do"
            )
        elif self._try(fsdp="fsdp2"):
            self.reasons.append(f"fsdp2: {_gib(need)} don't fit on one device of {_gib(self.room)}")

    def _large_layers(self) -> None:
        """Tensor parallel inside a node: for layers that are a burden when gathered, and for too many shards."""
        if not self._free("tensor_parallel_size") or (self.sizes.fsdp == "none" and self._need() <= self.room):
            return
        experts = self.shape.expert_parameters / max(1, self.shape.layers)
        layer = (self.shape.parameters - self.shape.vocab * self.shape.hidden * 2) / self.shape.layers - experts
        why = ""
        if self._need() > self.room:
            why = f"without it, {_gib(self._need())} are left for each device"
        elif layer >= LAYER_PARAMETERS_FOR_TP:
            why = f"a layer of {layer / 1e9:.2g} B weights is gathered each time"
        elif self.world > MOST_SHARDS:
            why = f"{self.world} ranks would take part in every gathering"
        if not why:
            return
        best = 1
        for tp in divisors(self.per_node // self.sizes.sequence_parallel_size):
            norms = {"sequence_parallel": tp > 1} if self._free("sequence_parallel") else {}
            if tp > 8 or not self._try(tensor_parallel_size=tp, **norms):
                continue
            best = tp
            if tp > 1 and self._need() <= self.room and (layer / tp < LAYER_PARAMETERS_FOR_TP / 2):
                break
        if best > 1:
            self.reasons.append(f"tensor_parallel_size {best}, inside a machine: {why}")

    def _stages(self) -> None:
        if not self._free("pipeline_parallel_size") or self._need() <= self.room:
            return
        nodes, before = self.world // self.per_node, self._need()
        for pp in divisors(nodes)[1:]:
            if self._try(pipeline_parallel_size=pp) and self._need() <= self.room:
                self.reasons.append(f"pipeline_parallel_size {pp}, across machines: {_gib(before)} didn't fit")
                return
            self._try(pipeline_parallel_size=1)

    def _free(self, name: str) -> bool:
        return name not in self.given

    def _try(self, **changes: Any) -> bool:
        """Take these sizes if they are possible, with this model and with what else is asked for."""
        candidate = replace(self.sizes, **changes)
        values = values_of(replace(self.config, parallelism=candidate))
        if any(spread_faults(values, _problem)) or not is_possible(
            candidate, self.world, self.shape, ranks_per_node=self.per_node
        ):
            return False
        self.sizes = candidate
        return True

    def _need(self) -> float:
        if not is_possible(self.sizes, self.world, self.shape, ranks_per_node=self.per_node):
            return math.inf
        return self.load.footprint(self.sizes, self.world, self.per_node).total

    def _activations(self) -> float:
        return self.load.footprint(self.sizes, self.world, self.per_node).activations


def _problem(names: str, message: str, fix: str | None = None) -> Problem:
    return Problem(message, f"--{names.split()[0]}", fix)


def _gib(number: float) -> str:
    gib = number / GIB
    if gib < 0.1:
        return f"{number / 2**20:.3g} MiB"
    return f"{gib:,.0f} GiB" if gib >= 100 else f"{gib:.3g} GiB"


def workload(config: Any, shape: ModelShape, tokens: int) -> Workload:
    """What a configuration keeps for each weight."""
    full = config.tuner.tuner_type == "full"
    per_layer = 7 if not shape.experts else 4
    trained = shape.parameters if full else shape.layers * per_layer * 2 * shape.hidden * config.tuner.lora_rank
    states = {"sgd": 4, "adafactor": 4}.get(config.optimizer.optim, 8)
    return Workload(
        shape=shape,
        tokens=tokens,
        weight_bytes=4 if config.model.torch_dtype == "float32" else 2,
        trained=trained,
        all=full,
        state_bytes=states,
        recompute=config.training.gradient_checkpointing is not False,
    )
