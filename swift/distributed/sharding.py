"""Shard weights, gradients and optimizer state over ranks with `fully_shard` (FSDP2), along the axis `fsdp`.

Each decoder layer is gathered as one; embedding, last norm and head belong to the root, since the objective uses the
head's matrix outside of its own forward. What each `zero_stage` keeps of P parameters on N ranks, with AdamW in fp32:

    stage   weights                     gradients                        optimizer state   gathered per step
    3       4 P / N, and one layer      4 P / N, and one layer           8 P / N           2 x per micro-batch
    2       whole during a step         4 P / N, and one layer           8 P / N           1 x
    1       whole during a step         whole during a step              8 P / N           1 x

Stage 1 adds its gradients up over ranks once a step, the others with every micro-batch; with replicas (a 2-D mesh),
over a replica's ranks with every micro-batch and over replicas once a step. Between steps every stage holds 4 P / N of
weights. Gradients are sums over ranks, never means: the loss was divided by the weight of the whole step before. Where
replicas exchange gradients in a way of our own, `fully_shard` knows of one replica only.

This file knows nothing of losses, optimizers or how the tensors get their values: it works on meta modules too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel

from swift.config.parallel import ParallelConfig
from swift.core.errors import ModelError, UsageError
from swift.distributed.compression import ReplicaExchange, build_replica_exchange
from swift.distributed.gradients import cut_axes
from swift.distributed.spread import Spread
from swift.distributed.tensor import fsdp_placement
from swift.distributed.traffic import TRAFFIC
from swift.models.head import find_decoder
from swift.models.prepare import decoder_layers


def apply_fsdp(
    module: nn.Module, causal_lm: PreTrainedModel, spread: Spread, config: ParallelConfig, *, compute: torch.dtype
) -> None:
    """Shard a model in place: experts, decoder layers, and the rest as the root. Nothing happens on one rank.

    Afterwards every parameter is a DTensor, but for scalars, which stay whole and are marked in `spread` as to be added
    up. Call it last, after adapters, cuts along other axes, recompute and compilation; on real or meta tensors.

    Args:
        module: what runs forward (`TrainModule`): the root. Its parameters are those of the model under `model.`.
        causal_lm: the Hugging Face model inside.
        spread: its mesh says where to. Parameters cut along `tp` or `ep` are DTensors already.
        compute: type of matrix products. Below fp32, stages 2 and 3 gather weights in it; stage 1, which holds whole
            weights anyway, keeps them as they are and leaves casting to autocast.

    Raises:
        UsageError: settings that exclude each other.
        ModelError: the model's parameters can't be sharded layer by layer.
    """
    _prepare_replicas(spread, config)
    if not spread.mesh["fsdp"]:
        return
    if config.zero_stage not in (1, 2, 3):
        raise UsageError(
            f"there is no ZeRO stage {config.zero_stage}", where="--zero_stage", fix="1, 2 or 3; --fsdp none for 0"
        )
    if config.zero_stage == 1 and config.reduce_dtype == "bfloat16":
        raise UsageError(
            "stage 1 adds micro-batches up before ranks, so it would add them up in bfloat16 too",
            where="--reduce_dtype",
            fix="--zero_stage 2, or leave --reduce_dtype out",
        )
    decoder = find_decoder(causal_lm)
    # a pipeline leaves layers without parameters in the places of other ranks' layers
    layers = [layer for layer in dict.fromkeys(decoder_layers(decoder)) if next(layer.parameters(), None) is not None]
    _refuse_shared_weights(decoder, layers)
    scalars = _keep_scalars(module, spread)
    shard = partial(
        fully_shard,
        mp_policy=_precision(config, compute),
        offload_policy=_offload(config, spread),
        ignored_params=scalars,
        shard_placement_fn=partial(_placement, ranks=spread.mesh["fsdp"].size),
    )
    spread_out = config.zero_stage == 3
    for experts in _expert_modules(module):
        shard(experts, mesh=_sharding_mesh(spread, "efsdp"), reshard_after_forward=spread_out)
    mesh = _sharding_mesh(spread, "fsdp")
    for layer in layers:
        shard(layer, mesh=mesh, reshard_after_forward=spread_out)
    shard(module, mesh=mesh, reshard_after_forward=False)  # backward begins with the head
    for part in sharded_modules(module):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo can't multiply while it adds
        part.set_reduce_scatter_unused_params(True, recurse=False)  # a rank may lack gradients that others have
    _count_traffic(module, spread)
    if spread.replicas is not None:
        spread.replicas.register(module)


def _prepare_replicas(spread: Spread, config: ParallelConfig) -> None:
    """Take over from `fully_shard` how replicas add gradients up, where settings say how."""
    replicas = spread.mesh["dp_replicate"]
    if not config.grad_compression or not replicas:
        return
    if not spread.mesh["fsdp"]:
        raise UsageError(
            f"each of the {replicas.size} replicas is one process, so nothing is sharded",
            where="--fsdp with --grad_compression",
            fix="--fsdp none, which exchanges gradients of whole models, or a --dp_shard_size above 1",
        )
    if spread.mesh["pp"]:
        raise UsageError(
            "grad_compression is not for pipelines", where="--grad_compression", fix="leave grad_compression out"
        )
    spread.replicas = build_replica_exchange(config.grad_compression, replicas)


def _sharding_mesh(spread: Spread, axis: str) -> DeviceMesh | None:
    """What weights are sharded over: along `fsdp`, or `efsdp` for experts; with replicas where the library adds up."""
    mesh = spread.mesh.fsdp_mesh() if axis == "fsdp" else spread.mesh.expert_fsdp_mesh()
    return mesh[axis] if mesh is not None and spread.replicas is not None else mesh


def _count_traffic(module: nn.Module, spread: Spread) -> None:
    replicas = spread.mesh["dp_replicate"].size

    def count_all_reduce(reduced: torch.Tensor) -> None:
        num_bytes = 2 * (replicas - 1) / replicas * reduced.numel() * reduced.element_size()
        TRAFFIC.count("dp_replicate", "all_reduce", num_bytes)

    for unit in sharded_modules(module):
        experts = any("ep" in cut_axes(parameter) for parameter in unit.parameters(recurse=False))
        axis = "efsdp" if experts else "fsdp"
        unit.set_custom_all_gather(_CountedAllGather(axis))
        unit.set_custom_reduce_scatter(_CountedReduceScatter(axis))
        if replicas > 1 and spread.replicas is None:
            unit.set_all_reduce_hook(count_all_reduce)


@dataclass(frozen=True)
class _CountedAllGather:
    """The library's all-gather, counted."""

    axis: str

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        num_bytes = (group.size() - 1) * input_tensor.numel() * input_tensor.element_size()
        TRAFFIC.count(self.axis, "all_gather", num_bytes)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


@dataclass(frozen=True)
class _CountedReduceScatter:
    """The library's reduce-scatter, counted."""

    axis: str

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        num_bytes = (group.size() - 1) * output_tensor.numel() * output_tensor.element_size()
        TRAFFIC.count(self.axis, "reduce_scatter", num_bytes)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def sharded_modules(module: nn.Module) -> list[Any]:
    """All parts of `module` that `apply_fsdp` made units of sharding, as `FSDPModule`s."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


class GradientSync:
    """When a sharded module gathers weights and adds gradients up, over the micro-batches of a step.

    Args:
        module: the root that `apply_fsdp` made; where it did nothing, this does nothing.
        zero_stage: as given to `apply_fsdp`.
        replicas: how replicas add gradients up, if not by the library's all-reduce.

    Attributes:
        units: what is gathered as one.
    """

    def __init__(self, module: nn.Module, zero_stage: int, replicas: ReplicaExchange | None = None) -> None:
        self.units = sharded_modules(module)
        self._stage = zero_stage
        self._replicas = replicas

    def before_backward(self, last: bool) -> None:
        """Call it before the backward pass of each micro-batch.

        Args:
            last: whether it is the step's last; after it every rank has its share of the sums.
        """
        if self._replicas is not None:
            self._replicas.last = last
        for part in self.units:
            part.set_is_last_backward(last)
            part.set_requires_gradient_sync(self._stage > 1 or last, recurse=False)
            part.set_requires_all_reduce(last, recurse=False)
            part.set_reshard_after_backward(self._stage == 3 or last, recurse=False)

    def free(self) -> None:
        """Drop gathered weights that no backward pass will drop: after an evaluation."""
        for part in self.units:
            part.reshard()


class UsedParameters:
    """Tells which parameters no rank has a gradient for, so that the optimizer leaves them alone.

    Where ranks add up, no gradient and a gradient of zero look the same, but with the latter AdamW decays weights: the
    vision tower of a model that is trained on text would shrink.

    Args:
        module: what runs forward, sharded or not.
        named: its trained parameters; the same names in the same order on every rank of the world.
    """

    def __init__(self, module: nn.Module, named: list[tuple[str, nn.Parameter]]) -> None:
        self._names = {parameter: name for name, parameter in named}
        self._used: set[str] = set()
        self._watched: set[nn.Parameter] = set()
        watched: set[nn.Module] = set()
        for unit in reversed(sharded_modules(module)):  # inner ones first
            parts = [part for part in unit.modules() if part not in watched]
            watched.update(parts)
            self._watch_unit(unit, parts)
        for parameter, name in self._names.items() if not watched else ():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._note, name))

    def _watch_unit(self, unit: nn.Module, parts: list[nn.Module]) -> None:
        """Gradients arrive at the gathered parameters, which exist from the unit's first forward pass on."""
        places = [
            (part, own, self._names[parameter])
            for part in parts
            for own, parameter in part.named_parameters(recurse=False)
            if parameter in self._names
        ]

        def watch(*_: Any) -> None:
            for part, own, name in places:
                parameter = part._parameters[own]
                if parameter is None or not parameter.requires_grad:  # of a model that is only asked
                    continue
                if parameter not in self._watched:
                    self._watched.add(parameter)
                    parameter.register_post_accumulate_grad_hook(partial(self._note, name))

        unit.register_forward_pre_hook(watch)

    def _note(self, name: str, _: torch.Tensor) -> None:
        self._used.add(name)

    def unused(self) -> set[str]:
        """Names of parameters that had no gradient on any rank of the world since the last call; forgets the rest.

        One collective of a byte for each parameter.
        """
        names = list(self._names.values())
        flags = torch.tensor([name in self._used for name in names], dtype=torch.uint8)
        self._used.clear()
        if dist.is_initialized():
            flags = flags.to("cuda" if dist.get_backend() == "nccl" else "cpu")
            world = dist.get_world_size()
            TRAFFIC.count("world", "all_reduce", 2 * (world - 1) / world * flags.numel())
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return {name for name, used in zip(names, flags.tolist(), strict=True) if not used}


def _placement(parameter: nn.Parameter, ranks: int) -> Shard | None:
    """Rows, but for a packed matrix whose parts tensor parallelism has cut: its columns."""
    placement = fsdp_placement(parameter)
    if placement is not None and parameter.shape[placement.dim] % ranks:
        raise ModelError(
            f"a packed matrix of {list(parameter.shape)} can't be sharded over {ranks} ranks: {ranks} doesn't divide "
            f"{parameter.shape[placement.dim]}",
            where="--fsdp with --tensor_parallel_size",
            fix="--dp_shard_size with a number that divides it, or leave one of the two out",
        )
    return placement


def _precision(config: ParallelConfig, compute: torch.dtype) -> MixedPrecisionPolicy:
    """Inputs aren't cast: a batch holds loss weights in fp32, and autocast sees to matrix products."""
    low = compute != torch.float32 and config.zero_stage > 1
    reduce = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.reduce_dtype]
    return MixedPrecisionPolicy(
        param_dtype=compute if low else None,
        reduce_dtype=reduce if low or reduce != torch.float32 else None,
        cast_forward_inputs=False,
    )


def _offload(config: ParallelConfig, spread: Spread) -> OffloadPolicy:
    if not config.fsdp_cpu_offload:
        return OffloadPolicy()
    assert spread.mesh.device_mesh is not None
    return CPUOffloadPolicy(pin_memory=spread.mesh.device_mesh.device_type == "cuda")


def _keep_scalars(module: nn.Module, spread: Spread) -> set[nn.Parameter]:
    """Parameters without a dimension to cut stay whole on every rank."""
    scalars = {parameter: name for name, parameter in module.named_parameters() if parameter.ndim == 0}
    for name in scalars.values():
        spread.mark_partial(name.removeprefix("model."), "loss")
    return set(scalars)


def _expert_modules(module: nn.Module) -> list[nn.Module]:
    """Modules whose own parameters are cut along `ep`."""
    found = []
    for name, part in module.named_modules():
        cut = ["ep" in cut_axes(parameter) for parameter in part.parameters(recurse=False)]
        if any(cut):
            if not all("ep" in cut_axes(parameter) for parameter in part.parameters()):
                raise ModelError(
                    "a part of these experts isn't spread over ranks, and can't be sharded together with the rest",
                    where=name,
                    fix="leave --expert_parallel_size out",
                )
            found.append(part)
    return found


def _refuse_shared_weights(decoder: nn.Module, layers: list[nn.Module]) -> None:
    """A weight belongs to one unit of sharding, which is gathered while that unit runs (Zamba's layers share some).

    Raises:
        ModelError: a layer has a weight that another layer has too, or that is used outside of the layers.
    """
    holders = Counter(parameter for layer in layers for parameter in set(layer.parameters()))
    inside = {part for layer in layers for part in layer.modules()}
    outside = {p for part in decoder.modules() if part not in inside for p in part.parameters(recurse=False)}
    if any(count > 1 or parameter in outside for parameter, count in holders.items()):
        raise ModelError(
            f"{type(decoder).__name__} has weights in more than one layer: they can't be sharded layer by layer",
            where="--fsdp",
            fix="--fsdp none: every process holds the whole model",
        )
