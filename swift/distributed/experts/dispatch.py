"""Bring each token to its experts and the results back, whatever ranks the experts are on.

Every rank routes its own tokens. A (token, expert) pair is a row; rows are sorted by expert, so that each rank's share
is one stretch, and sent by an all-to-all of uneven parts whose sizes were exchanged before. There is no capacity and
nothing is dropped. The rank that owns an expert computes its rows with the model's own code and knows nothing of
routing weights: these multiply the results on the rank the tokens came from, so a router's gradient never travels.

    counts   all-to-all of [ranks, own experts] integers, and one look at them by the host
    rows     all-to-all there and all-to-all back; each the other's gradient

This file knows nothing of how experts compute or where their weights are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.distributed as dist

from swift.distributed.collectives import exchange_rows
from swift.distributed.mesh import Axis
from swift.distributed.traffic import TRAFFIC

# What computes rows with local experts: (rows [n, hidden], expert ids [n, 1], weights [n, 1]) -> [n, hidden].
Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_UNIFORM: ContextVar[bool] = ContextVar("uniform_routing", default=False)


@contextmanager
def uniform_routing() -> Iterator[None]:
    """Within the context all experts are taken to be chosen equally often, on all ranks: for steps whose tensors have
    no numbers (`swift.distributed.trace`), where nobody can count."""
    token = _UNIFORM.set(True)
    try:
        yield
    finally:
        _UNIFORM.reset(token)


def through_experts(
    hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, axis: Axis, num_local: int, compute: Compute
) -> torch.Tensor:
    """The weighted sum of each token's experts.

    All ranks along `axis` call it together, in the forward and in the backward pass, however many tokens they have.

    Args:
        hidden: [tokens, hidden], this rank's own; may be empty.
        chosen: int64 [tokens, slots], numbers of experts among all; rank r holds `num_local` from r * num_local on.
        weights: [tokens, slots].

    Returns:
        [tokens, hidden], in the dtype of `hidden`.
    """
    slots = chosen.shape[1]
    experts = chosen.reshape(-1)
    order = torch.argsort(experts, stable=True)
    counts = _count(experts, axis.size * num_local).view(axis.size, num_local)
    arriving = _exchange_counts(counts, axis)
    if _UNIFORM.get():
        arriving = counts[axis.rank].expand_as(counts)
    sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
    rows = exchange_rows(hidden[order // slots], axis, sent, received)
    numbers = torch.arange(num_local, device=hidden.device).repeat(axis.size)
    numbers = numbers.repeat_interleave(arriving.reshape(-1), output_size=len(rows))
    results = _compute_some(rows, numbers, compute)
    results = exchange_rows(results, axis, received, sent)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    per_slot = results[place].view(*chosen.shape, hidden.shape[1])
    return (per_slot * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def _count(experts: torch.Tensor, total: int) -> torch.Tensor:
    """[total]: how many rows each expert gets."""
    if _UNIFORM.get():
        each, more = divmod(len(experts), total)
        return torch.tensor([each + (number < more) for number in range(total)], device=experts.device)
    return torch.bincount(experts, minlength=total)


def _compute_some(rows: torch.Tensor, numbers: torch.Tensor, compute: Compute) -> torch.Tensor:
    """`compute` with weights of one; without rows, a row of zeros that nobody gets.

    So every weight takes part in the backward pass of every rank, and has a gradient, if of zeros: whoever adds
    gradients up over ranks waits for all of them.
    """
    num_rows = len(rows)
    if not num_rows:
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        numbers = numbers.new_zeros(1)
    ones = torch.ones(len(rows), 1, dtype=rows.dtype, device=rows.device)
    return compute(rows, numbers[:, None], ones)[:num_rows]


def _exchange_counts(counts: torch.Tensor, axis: Axis) -> torch.Tensor:
    """[ranks, own experts]: how many rows each rank sends here for each expert."""
    arriving = torch.empty_like(counts)
    TRAFFIC.count(axis.name, "all_to_all", (axis.size - 1) * counts.shape[1] * counts.element_size())
    dist.all_to_all_single(arriving, counts, group=axis.group)
    return arriving
