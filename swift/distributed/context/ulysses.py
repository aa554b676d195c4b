"""Ulysses: ranks that share a sequence exchange heads for tokens, attend to whole sequences, and exchange back.

Jacobs et al., arXiv 2309.14509. Each rank then has 1 / U of the heads and all tokens (of its place in the ring, if
there is one), so any attention works that works on one process. On the wire, per layer and rank, forward and again
backward: (U - 1) / U of the bytes of its queries, keys, values and outputs.
"""

from __future__ import annotations

import math

import torch

from swift.distributed.collectives import exchange
from swift.distributed.mesh import Axis


def to_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, axis: Axis
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[1, heads, tokens / U, n] -> [1, heads / U, tokens, n].

    Key-value heads that don't divide among the ranks are repeated as often as needed, so that each rank has those that
    its query heads look at; their gradients add up.
    """
    kv_heads = key.shape[1]
    repeats = axis.size // math.gcd(axis.size, kv_heads)
    if repeats > 1:  # divides the size of a group, since the axis divides the query heads
        key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
    q, k, v = (exchange(tensor, axis, split_dim=1, join_dim=2) for tensor in (query, key, value))
    return q, k, v


def to_tokens(output: torch.Tensor, axis: Axis) -> torch.Tensor:
    """[1, tokens, heads / U, n] -> [1, tokens / U, heads, n]."""
    return exchange(output, axis, split_dim=1, join_dim=2)
