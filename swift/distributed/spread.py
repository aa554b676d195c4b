"""What is known of a model whose parameters are spread over processes.

Parameters that are cut along a tensor- or expert-parallel axis are DTensors, so that sharding over data-parallel ranks,
checkpoints and gathering know their whole shape. Computing is done with the local tensors: `expose_local` puts them in
the parameters' place for as long as a module's forward runs, so that any code works on them, ours and other people's,
without a DTensor rule for each operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from swift.distributed.collectives import all_reduce
from swift.distributed.compression import ReplicaExchange
from swift.distributed.mesh import Axis, Mesh


@dataclass
class Spread:
    """How one model lies on a mesh.

    Attributes:
        mesh: the grid of the run.
        partial: parameter name -> axes along which its gradient is a partial sum after the backward pass, because each
            rank used a replicated parameter for its own share (a norm over a share of the tokens, LoRA's A in front of
            a share of B's rows). `finish_gradients` adds them up.
        copies: names of parameters of this process that another process counts: a tied embedding's second copy.
        replicas: how replicas of a sharded model add gradients up, if not by the library's all-reduce.
    """

    mesh: Mesh
    partial: dict[str, set[str]] = field(default_factory=dict)
    copies: set[str] = field(default_factory=set)
    replicas: ReplicaExchange | None = None

    def mark_partial(self, name: str, axis: str) -> None:
        """The gradient of parameter `name` (of the whole model) is to be added up along `axis`."""
        self.partial.setdefault(name, set()).add(axis)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor; differentiable: the gradient arrives at the DTensor with its placements."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def expose_local(module: nn.Module) -> None:
    """Whenever `module` runs, its DTensor parameters, and those of all modules in it, are seen as local tensors.

    Whatever reads `some_module.weight` meanwhile gets the local tensor: an instance's own attribute goes before a
    registered parameter. The parameters stay registered, so names, optimizers and `fully_shard` don't notice. A module
    inside may be exposed as well; each puts back only what it has shown.
    """
    if getattr(module, "_exposes_local", False):
        return
    module._exposes_local = True  # type: ignore[assignment]
    module.register_forward_pre_hook(_show_local, prepend=True)
    module.register_forward_hook(_hide_local, always_call=True)


def view_local(module: nn.Module, name: str, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Have `expose_local` show `view(local tensor)` for the parameter `name` of `module`: a part of it, or nothing of
    it on this rank. It must be differentiable."""
    module.__dict__.setdefault("_local_views", {})[name] = view


def _show_local(module: nn.Module, _: Any) -> None:
    shown: list[tuple[nn.Module, str]] = []
    for part in module.modules():
        views = part.__dict__.get("_local_views", {})
        for name, parameter in part._parameters.items():
            if name in part.__dict__ or not (isinstance(parameter, DTensor) or name in views):
                continue
            assert parameter is not None
            local = local_tensor(parameter)
            part.__dict__[name] = views[name](local) if name in views else local
            shown.append((part, name))
    module.__dict__.setdefault("_shown_local", []).append(shown)


def _hide_local(module: nn.Module, *_: Any) -> None:
    if not module.__dict__.get("_shown_local"):  # it failed before anything was shown
        return
    for part, name in module._shown_local.pop():  # type: ignore[operator, union-attr]
        del part.__dict__[name]


def finish_gradients(named: Iterable[tuple[str, nn.Parameter]], spread: Spread) -> None:
    """Add partial gradients up, all of one kind in one collective. Call it after the last backward of a step."""
    kinds: dict[tuple[tuple[str, ...], torch.dtype, torch.device], list[torch.Tensor]] = {}
    for name, parameter in named:
        axes = tuple(sorted(axis for axis in spread.partial.get(name, ()) if spread.mesh[axis]))
        if not axes or not parameter.requires_grad:
            continue
        if parameter.grad is None:  # this rank had nothing to add, others may have
            parameter.grad = torch.zeros_like(parameter)
        grad = local_tensor(parameter.grad.detach())
        kinds.setdefault((axes, grad.dtype, grad.device), []).append(grad)
    for (axes, _, _), grads in kinds.items():
        add_up(grads, [spread.mesh[axis] for axis in axes])


def add_up(tensors: list[torch.Tensor], axes: list[Axis]) -> None:
    """Sum tensors over the ranks of all `axes`, in place, as one flat tensor each time."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    for axis in axes:
        all_reduce(flat, axis)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
