"""Gradients of causal attention over one example of middling length, as batched products; for CPUs.

PyTorch's flash kernel reaches 38 GFLOP/s in the backward pass where products reach 100. Here the queries go in blocks:
all scores of a block are computed again from the log-sum-exp of the forward pass, and five batched products (Dao et
al., arXiv 2205.14135, algorithm 4, without its blocks of keys) give the gradients. Query heads that share a key head
are rows of one product, so their sum over the group needs no step of its own. A third faster at 512 tokens; no faster
for very short examples, whose products are small, nor for very long ones, whose blocks leave the cache.
"""

from __future__ import annotations

import torch

BLOCK = 32
SHORTEST, LONGEST = 160, 2048


def suits_blocks(tokens: int, dtype: torch.dtype) -> bool:
    """Whether an example of so many tokens is better off here than with the flash kernel."""
    return dtype in (torch.float32, torch.float64) and SHORTEST <= tokens <= LONGEST


def blocked_backward(
    grad: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value.

    Args:
        grad, output: [heads, tokens, head_dim], of the attention's output.
        inputs: query [heads, tokens, head_dim]; key, value [kv_heads, tokens, head_dim].
        logsumexp: [heads, tokens], of the scaled scores.
    """
    query, key, value = inputs
    heads, tokens, head_dim = query.shape
    kv_heads = key.shape[0]
    group = heads // kv_heads
    key, value = key.contiguous(), value.contiguous()
    grad_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
    delta = (grad * output).sum(2)  # [heads, tokens]: what the softmax takes off
    future = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=query.device).triu(1)

    for start in range(0, tokens, BLOCK):
        end = min(start + BLOCK, tokens)
        size = end - start

        def fold(tensor: torch.Tensor, start: int = start, end: int = end) -> torch.Tensor:
            """A block's rows of [heads, tokens, n] as [kv_heads, group * size, n]."""
            return tensor[:, start:end].reshape(kv_heads, group * (end - start), -1)

        queries, grads = fold(query), fold(grad)
        keys, values = key[:, :end], value[:, :end]
        weights = torch.baddbmm(fold(logsumexp[..., None]), queries, keys.mT, beta=-1, alpha=scale).exp_()
        weights.view(kv_heads, group, size, end)[..., start:].masked_fill_(future[:size, :size], 0.0)
        grad_value[:, :end].baddbmm_(weights.mT, grads)
        grad_scores = torch.baddbmm(fold(delta[..., None]), grads, values.mT, beta=-1).mul_(weights)
        grad_query[:, start:end] = torch.bmm(grad_scores, keys).mul_(scale).view(heads, size, head_dim)
        grad_key[:, :end].baddbmm_(grad_scores.mT, queries, alpha=scale)
    return grad_query, grad_key, grad_value
