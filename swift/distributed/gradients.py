"""The size of a gradient that lies in pieces on many processes, and keeping it within a limit.

A parameter's placements tell along which axes it is cut; along all others every rank holds the same piece, and one of
them counts it. So nothing is counted twice, whatever the mesh. This file knows nothing of models or optimizers: it sees
named parameters after their gradients were added up (`finish_gradients`, `fully_shard`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from swift.distributed.mesh import EXPERT_AXES, VIEWS, Mesh
from swift.distributed.spread import Spread, local_tensor
from swift.distributed.traffic import TRAFFIC

_DENSE_AXES = ("dp_replicate", "dp_shard", "ring", "ulysses", "tp")
_ROW = 4096  # elements that a norm adds up in fp32


def cut_axes(tensor: torch.Tensor) -> set[str]:
    """Names of the mesh axes that a tensor is cut along, as its mesh names them (`fsdp`, `ep`, `tp`, ...).

    Raises:
        ValueError: its values are partial sums, which have no norm yet.
    """
    if not isinstance(tensor, DTensor):
        return set()
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"a tensor with placements {tensor.placements} was not added up")
    names = tensor.device_mesh.mesh_dim_names or ()
    # whatever neither copies nor adds up cuts (Shard, and the strided one that fully_shard uses beside another cut)
    return {name for name, place in zip(names, tensor.placements, strict=True) if not place.is_replicate()}


def counts_here(tensor: torch.Tensor, mesh: Mesh) -> bool:
    """Whether this process is the one, of all that hold the same piece of `tensor`, that counts it."""
    cut = cut_axes(tensor)
    axes: tuple[str, ...] = _DENSE_AXES
    if cut & {"efsdp", "ep"}:
        axes = tuple(axis for axis in EXPERT_AXES if axis != "pp")
    else:
        cut = {part for name in cut for part in VIEWS.get(name, (name,))}
    return all(mesh[axis].rank == 0 for axis in axes if axis not in cut)


@torch.no_grad()
def global_norm(named: Iterable[tuple[str, nn.Parameter]], spread: Spread) -> float:
    """2-norm of the gradient of the whole model, each element counted once; the same bits on every rank.

    One collective, of one number a rank; every rank of the world must call it. Parameters without a gradient count as
    zero. Stages of a pipeline add up; `spread.copies` are left out.

    Args:
        named: parameters under their names in the whole model.
    """
    mesh = spread.mesh
    grads = [
        local_tensor(parameter.grad)
        for name, parameter in named
        if parameter.grad is not None and name not in spread.copies and counts_here(parameter, mesh)
    ]
    return math.sqrt(_sum_over_world(sum(_squares(grads)), mesh))


def clip_gradients(named: Iterable[tuple[str, nn.Parameter]], spread: Spread, limit: float) -> float:
    """Scale all gradients by the same factor so that their global norm is at most `limit`; gives the norm before.

    Args:
        limit: 0 only measures. A norm that isn't finite changes nothing.
    """
    named = list(named)
    norm = global_norm(named, spread)
    if limit > 0 and math.isfinite(norm):
        scale_gradients(named, min(1.0, limit / (norm + 1e-6)))  # as torch.nn.utils.clip_grad_norm_
    return norm


@torch.no_grad()
def scale_gradients(named: Iterable[tuple[str, nn.Parameter]], factor: float) -> None:
    """Multiply all gradients of this process by `factor`, in place."""
    if factor == 1.0:
        return
    for grads in _by_kind(local_tensor(p.grad) for _, p in named if p.grad is not None):
        torch._foreach_mul_(grads, factor)


def _squares(grads: list[torch.Tensor]) -> list[float]:
    """Sums of squares that add up to that of all tensors, from norms of rows in fp32 or better.

    In rows, because torch's norm of a tensor on a CPU adds up in one fp32 number: 4 % short for 10^8 elements.
    """
    sums = []
    for kind in _by_kind(grads):
        dtype = torch.float64 if kind[0].dtype == torch.float64 else torch.float32
        flat = [grad.reshape(-1) for grad in kind]
        rests = [tensor[tensor.numel() // _ROW * _ROW :] for tensor in flat]
        norms = list(torch._foreach_norm(rests, 2, dtype=dtype))
        for tensor in flat:
            if tensor.numel() >= _ROW:
                rows = tensor[: tensor.numel() // _ROW * _ROW].view(-1, _ROW)
                norms.append(torch.linalg.vector_norm(rows, dim=1, dtype=dtype))
        sums.append(float(torch.cat([norm.reshape(-1) for norm in norms]).double().square().sum()))
    return sums


def _by_kind(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors that hold anything, grouped by type and device, in order."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(kinds.values())


def _sum_over_world(value: float, mesh: Mesh) -> float:
    """Added up in rank order by each rank itself, so that no algorithm of the library can make ranks differ."""
    if mesh.device_mesh is None:
        return value
    world = mesh.degrees.world_size
    values = torch.zeros(world, dtype=torch.float64, device=mesh.device_mesh.device_type)
    values[dist.get_rank()] = value
    TRAFFIC.count("world", "all_reduce", 2 * (world - 1) / world * values.numel() * values.element_size())
    dist.all_reduce(values)
    return sum(values.tolist())
