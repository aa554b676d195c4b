"""Ring attention over rows of segments: keys and values travel round the ranks, queries stay.

At each step a rank attends to the keys that are there while the next ones are on their way (Liu et al., arXiv
2310.01889), and merges the result by its log-sum-exp. In the backward pass keys and values go round again, and the
gradients that ranks have found for them follow one step behind, until they are home.

On the wire, per layer and rank, in a ring of P, with |KV| the bytes of a rank's keys and values and |dKV| those of
their gradients in the type of sums (fp32, or fp64): forward (P - 1) |KV|; backward (P - 1) (|KV| + |dKV|). A rank's
gradients of its own keys stay where they are until the others' arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from swift.distributed.context.kernels import Inputs, Running, Scores, attend, attend_backward, wide
from swift.distributed.context.tiles import Tile
from swift.distributed.mesh import Axis
from swift.distributed.traffic import TRAFFIC


@dataclass
class Travelling:
    """Tensors on their way to the next rank, while the same ones of the rank before arrive here."""

    sent: list[torch.Tensor]  # kept until they are gone
    arriving: list[torch.Tensor]
    requests: list[dist.Work]

    def arrived(self) -> list[torch.Tensor]:
        """Wait for them."""
        for request in self.requests:
            request.wait()
        return self.arriving


def pass_on(tensors: Sequence[torch.Tensor], axis: Axis) -> Travelling:
    """Send tensors to the next rank of the ring and begin to receive the previous one's, of the same shapes."""
    sent = [tensor.contiguous() for tensor in tensors]
    arriving = [torch.empty_like(tensor) for tensor in sent]
    TRAFFIC.count(axis.name, "send", sum(tensor.numel() * tensor.element_size() for tensor in sent))
    after, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    operations = []
    for mine, theirs in zip(sent, arriving, strict=True):
        operations.append(dist.P2POp(dist.isend, mine, group=axis.group, group_peer=after))
        operations.append(dist.P2POp(dist.irecv, theirs, group=axis.group, group_peer=before))
    return Travelling(sent, arriving, dist.batch_isend_irecv(operations))


class Ring(NamedTuple):
    """What a rank of the ring has to do: tiles for each step (`tiles.ring_tiles`), and how scores are made."""

    axis: Axis
    steps: list[list[Tile]]
    scores: Scores


def ring_attention(inputs: Inputs, sinks: torch.Tensor | None, ring: Ring) -> torch.Tensor:
    """This rank's queries against the keys of all ranks: [heads, tokens, value_dim].

    Args:
        inputs: of this rank's tokens.
        sinks: [heads], a score that each query gives to nothing (an attention sink), or None.
    """
    return _RingAttention.apply(*inputs, sinks, ring)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query, key, value, sinks, ring: Ring) -> torch.Tensor:
        running = Running(query, value.shape[2])
        here = [key, value]
        for step, tiles in enumerate(ring.steps):
            coming = pass_on(here, ring.axis) if step + 1 < ring.axis.size else None
            attend(tiles, Inputs(query, *here), ring.scores, running)
            if coming is not None:
                here = coming.arrived()
        total, logsumexp = running.finish(sinks)
        output = total.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, logsumexp, sinks)
        ctx.ring = ring
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        query, key, value, output, logsumexp, sinks = ctx.saved_tensors
        ring: Ring = ctx.ring
        merged = grad, output, logsumexp
        grad_query, *own = (torch.zeros_like(t, dtype=wide(t.dtype)) for t in (query, key, value))
        here = [key, value]
        going_home: Travelling | None = None
        for step, tiles in enumerate(ring.steps):
            coming = pass_on(here, ring.axis) if step + 1 < ring.axis.size else None
            found = own if step == 0 else [torch.zeros_like(tensor) for tensor in own]
            attend_backward(tiles, Inputs(query, *here), ring.scores, merged, (grad_query, found[0], found[1]))
            if step:
                if going_home is not None:
                    _add(found, going_home.arrived())
                going_home = pass_on(found, ring.axis)
            if coming is not None:
                here = coming.arrived()
        if going_home is not None:
            _add(own, going_home.arrived())
        grad_sinks = None if sinks is None else sink_gradient(sinks, merged)
        grads = (t.to(query.dtype) for t in (grad_query, *own))
        return (*grads, grad_sinks, None)


def _add(sums: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    for total, other in zip(sums, others, strict=True):
        total += other


def sink_gradient(sinks: torch.Tensor, merged: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Of each head's sink, from this rank's queries: its value is 0, so only the softmax's correction is left."""
    grad, output, logsumexp = merged
    weight = (sinks.to(logsumexp.dtype)[:, None] - logsumexp).exp_()
    correction = (grad.to(logsumexp.dtype) * output).sum(2)
    return -(weight * correction).sum(1).to(sinks.dtype)
