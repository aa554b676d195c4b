"""Collectives with gradients, along one axis of the mesh.

Each comes in the pair that calculus asks for: where the forward pass adds up over ranks, the backward pass copies;
where the forward pass gathers, the backward pass scatters the sum, and so on. Which one is right depends on what the
ranks do with the result: "replicated" means that all of them go on to compute the same from it, "partial" that each
computes its own share. Along an axis of one rank all of them are the identity.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from swift.distributed.mesh import Axis
from swift.distributed.traffic import TRAFFIC


def all_reduce(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum over ranks, in place; counted; without a gradient."""
    if axis:
        sent = 2 * (axis.size - 1) / axis.size * tensor.numel() * tensor.element_size()
        TRAFFIC.count(axis.name, "all_reduce", sent)
        dist.all_reduce(tensor, group=axis.group)
    return tensor


def all_gather(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """All ranks' tensors end to end along `dim`; counted; without a gradient."""
    if not axis:
        return tensor
    tensor = tensor.contiguous()
    TRAFFIC.count(axis.name, "all_gather", (axis.size - 1) * tensor.numel() * tensor.element_size())
    parts = tensor.new_empty(axis.size, *tensor.shape)
    dist.all_gather_into_tensor(parts.flatten(0, 1) if tensor.ndim else parts, tensor, group=axis.group)
    return parts[:].movedim(0, dim).flatten(dim, dim + 1) if dim else parts.flatten(0, 1)


def reduce_scatter(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This rank's part, along `dim`, of the sum over ranks; counted; without a gradient."""
    if not axis:
        return tensor
    parts = torch.stack(tensor.chunk(axis.size, dim))
    TRAFFIC.count(axis.name, "reduce_scatter", (axis.size - 1) * parts[0].numel() * parts.element_size())
    result = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(result, parts.flatten(0, 1), group=axis.group)
    return result


def own_part(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This rank's part of a replicated tensor along `dim`, whose size the axis must divide."""
    return tensor.chunk(axis.size, dim)[axis.rank] if axis else tensor


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return all_reduce(grad.contiguous().clone(), ctx.axis), None


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
        return all_reduce(tensor.contiguous().clone(), axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: Axis, dim: int, partial: bool) -> torch.Tensor:
        ctx.settings = axis, dim, partial
        return all_gather(tensor, axis, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        axis, dim, partial = ctx.settings
        return (reduce_scatter if partial else own_part)(grad, axis, dim), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: Axis, dim: int, partial: bool) -> torch.Tensor:
        ctx.settings = axis, dim
        return reduce_scatter(tensor, axis, dim) if partial else own_part(tensor, axis, dim).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return all_gather(grad, *ctx.settings), None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: Axis, split_dim: int, join_dim: int) -> torch.Tensor:
        ctx.settings = axis, join_dim, split_dim
        return all_to_all(tensor, axis, split_dim, join_dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return all_to_all(grad, *ctx.settings), None, None, None


def all_to_all(tensor: torch.Tensor, axis: Axis, split_dim: int, join_dim: int) -> torch.Tensor:
    """Give each rank its part along `split_dim`, and join what comes along `join_dim`; counted; without a gradient."""
    if not axis:
        return tensor
    parts = torch.stack(tensor.chunk(axis.size, split_dim))
    sent = (axis.size - 1) / axis.size * parts.numel() * parts.element_size()
    TRAFFIC.count(axis.name, "all_to_all", sent)
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=axis.group)
    return torch.cat(received.unbind(0), join_dim)


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, axis: Axis, sent: list[int], received: list[int]) -> torch.Tensor:
        ctx.settings = axis, received, sent
        return all_to_all_rows(rows, axis, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return all_to_all_rows(grad, *ctx.settings), None, None, None


def all_to_all_rows(rows: torch.Tensor, axis: Axis, sent: list[int], received: list[int]) -> torch.Tensor:
    """Give rank r the next `sent[r]` rows, and join the `received[r]` rows that rank r gives; counted; without a
    gradient. No count need equal another; all may be 0."""
    if not axis:
        return rows
    result = rows.new_empty(sum(received), *rows.shape[1:])
    away = sum(sent) - sent[axis.rank]
    TRAFFIC.count(axis.name, "all_to_all", away * rows[:1].numel() * rows.element_size())
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=axis.group)
    return result


def sum_backward(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """A replicated tensor that each rank uses for its own share: gradients are added up. Entry of a parallel region."""
    return _SumBackward.apply(tensor, axis) if axis else tensor


def sum_forward(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Partial results added up to a replicated one. End of a parallel region."""
    return _SumForward.apply(tensor, axis) if axis else tensor


def gather(tensor: torch.Tensor, axis: Axis, dim: int, *, partial: bool) -> torch.Tensor:
    """Parts joined along `dim`.

    Args:
        partial: each rank goes on to compute its own share from the whole, so the gradients are added up; else all
            compute the same, and each takes its part of the gradient.
    """
    return _Gather.apply(tensor, axis, dim, partial) if axis else tensor


def scatter(tensor: torch.Tensor, axis: Axis, dim: int, *, partial: bool) -> torch.Tensor:
    """This rank's part along `dim`.

    Args:
        partial: of the sum over ranks; else of a tensor that is replicated.
    """
    return _Scatter.apply(tensor, axis, dim, partial) if axis else tensor


def exchange(tensor: torch.Tensor, axis: Axis, *, split_dim: int, join_dim: int) -> torch.Tensor:
    """All-to-all: from shares along `join_dim` to shares along `split_dim`; its gradient goes the other way."""
    return _Exchange.apply(tensor, axis, split_dim, join_dim) if axis else tensor


def exchange_rows(rows: torch.Tensor, axis: Axis, sent: list[int], received: list[int]) -> torch.Tensor:
    """All-to-all of rows in uneven parts: `sent[r]` of them, in order, to rank r, and `received[r]` from it; gradients
    go back the same ways."""
    return _ExchangeRows.apply(rows, axis, sent, received) if axis else rows
