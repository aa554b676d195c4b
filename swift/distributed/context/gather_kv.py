"""Attention to gathered keys and values: every rank gets those of the whole row at once.

Simpler than a ring and, on few ranks, as fast: one all-gather forward, one reduce-scatter of gradients backward. Its
memory is a whole row's keys and values on every rank, for each layer whose activations are kept; queries, outputs and
all else are shared. On the wire, per layer and rank, with |KV| the bytes of a rank's keys and values, P - 1 times |KV|
either way (Llama 3, arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from swift.distributed.collectives import gather
from swift.distributed.context.kernels import Inputs, Running, Scores, attend, attend_backward, wide
from swift.distributed.context.ring import sink_gradient
from swift.distributed.context.tiles import Tile
from swift.distributed.mesh import Axis
from swift.models.attention_segment import masked_attention


def gather_row(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """[heads, tokens, n] of the places of a ring -> those of the whole row, in its order; gradients are added up."""
    joined = gather(tensor, axis, 1, partial=True).unflatten(1, (axis.size, 2, -1))
    return torch.cat([joined[:, :, 0].flatten(1, 2), joined[:, :, 1].flip(1).flatten(1, 2)], 1)


def tiled_attention(inputs: Inputs, sinks: torch.Tensor | None, tiles: list[Tile], scores: Scores) -> torch.Tensor:
    """Queries against keys, tile by tile: [heads, queries, value_dim].

    Args:
        tiles: they must give every query a key; see `tiles.gathered_tiles`.
        sinks: [heads], a score that each query gives to nothing, or None.
    """
    return _TiledAttention.apply(*inputs, sinks, tiles, scores)


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query, key, value, sinks, tiles: list[Tile], scores: Scores) -> torch.Tensor:
        running = Running(query, value.shape[2])
        attend(tiles, Inputs(query, key, value), scores, running)
        total, logsumexp = running.finish(sinks)
        output = total.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, logsumexp, sinks)
        ctx.plan = tiles, scores
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        query, key, value, output, logsumexp, sinks = ctx.saved_tensors
        merged = grad, output, logsumexp
        grad_query, grad_key, grad_value = (torch.zeros_like(t, dtype=wide(t.dtype)) for t in (query, key, value))
        tiles, scores = ctx.plan
        attend_backward(tiles, Inputs(query, key, value), scores, merged, (grad_query, grad_key, grad_value))
        grad_sinks = None if sinks is None else sink_gradient(sinks, merged)
        return (*(t.to(query.dtype) for t in (grad_query, grad_key, grad_value)), grad_sinks, None, None)


def dropout_attention(
    inputs: Inputs, sinks: torch.Tensor | None, tiles: list[Tile], scores: Scores, dropout: float
) -> torch.Tensor:
    """The same with weights dropped at random, which tiles that are merged can't do: all keys of a query at once.

    Args:
        tiles: each query in one of them, in order; see `tiles.whole_tiles`.
    """
    heads, device = inputs.query.shape[0], inputs.query.device
    parts = []
    for tile in tiles:
        query, key, value = (t[None] for t in inputs.of(tile))
        key, value = (t.repeat_interleave(heads // t.shape[1], 1) for t in (key, value))
        distance = torch.arange(tile.ahead, tile.ahead + tile.num_queries, device=device)[:, None]
        distance = distance - torch.arange(tile.num_keys, device=device)
        visible = distance >= 0 if scores.window is None else (distance >= 0) & (distance < scores.window)
        options = (dropout, scores.softcap, sinks)
        parts.append(masked_attention(query, key, value, visible, scores.scale, options)[0])
    return torch.cat(parts, 1)
