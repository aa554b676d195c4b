"""Causal attention over one example of middling length, or after keys that all see, as batched products; for CPUs.

PyTorch's flash kernel reaches 40 GFLOP/s where products reach 100. Here the queries go in blocks: all scores of a block
are taken at once, and in the backward pass again, from the log-sum-exp of the forward pass (Dao et al., arXiv
2205.14135, algorithms 1 and 4, without their blocks of keys). Query heads that share a key head are rows of one
product, so their sum over the group needs no step of its own. About a third faster at 512 tokens; no faster for very
short examples, whose products are small, nor for very long ones, whose blocks leave the cache.
"""

from __future__ import annotations

import torch

BLOCK = 32
SHORTEST, LONGEST = 160, 2048
# Forward, the flash kernel is the faster one earlier.
LONGEST_FORWARD = 1024


def suits_blocks(tokens: int, dtype: torch.dtype, *, backward: bool) -> bool:
    """Whether an example of so many tokens is better off here than with the flash kernel."""
    longest = LONGEST if backward else LONGEST_FORWARD
    return dtype in (torch.float32, torch.float64) and SHORTEST <= tokens <= longest


def blocked_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention's output [heads, tokens, head_dim] and the log-sum-exp of the scaled scores [heads, tokens].

    Args:
        query: [heads, tokens, head_dim], of the last tokens of the example.
        key, value: [kv_heads, shared + tokens, head_dim]; all queries see the first `shared`.
    """
    heads, tokens, head_dim = query.shape
    kv_heads, shared = key.shape[0], key.shape[1] - tokens
    group = heads // kv_heads
    key, value = key.contiguous(), value.contiguous()
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    logsumexp = query.new_empty(heads, tokens)
    future = _future(query.device)
    for start in range(0, tokens, BLOCK):
        end = min(start + BLOCK, tokens)
        size, seen = end - start, shared + end
        weights = torch.bmm(_fold(query, kv_heads, start, end) * scale, key[:, :seen].mT)
        own = weights.view(kv_heads, group, size, seen)[..., shared + start :]
        own.masked_fill_(future[:size, :size], float("-inf"))
        peak = weights.amax(2)
        torch.softmax(weights, 2, out=weights)
        # the largest weight is exp(peak - log-sum-exp), and never a small number
        logsumexp[:, start:end] = (peak - weights.amax(2).log()).view(heads, size)
        output[:, start:end] = torch.bmm(weights, value[:, :seen]).view(heads, size, head_dim)
    return output, logsumexp


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
        inputs: query [heads, tokens, head_dim]; key, value [kv_heads, shared + tokens, head_dim].
        logsumexp: [heads, tokens], of the scaled scores.
    """
    query, key, value = inputs
    heads, tokens, head_dim = query.shape
    kv_heads, shared = key.shape[0], key.shape[1] - tokens
    group = heads // kv_heads
    key, value = key.contiguous(), value.contiguous()
    grad_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
    delta = (grad * output).sum(2)  # [heads, tokens]: what the softmax takes off
    future = _future(query.device)
    for start in range(0, tokens, BLOCK):
        end = min(start + BLOCK, tokens)
        size, seen = end - start, shared + end
        queries, grads = (_fold(t, kv_heads, start, end) for t in (query, grad))
        lse, correction = (_fold(t[..., None], kv_heads, start, end) for t in (logsumexp, delta))
        keys, values = key[:, :seen], value[:, :seen]
        weights = torch.baddbmm(lse, queries, keys.mT, beta=-1, alpha=scale).exp_()
        own = weights.view(kv_heads, group, size, seen)[..., shared + start :]
        own.masked_fill_(future[:size, :size], 0.0)
        grad_value[:, :seen].baddbmm_(weights.mT, grads)
        grad_scores = torch.baddbmm(correction, grads, values.mT, beta=-1).mul_(weights)
        grad_query[:, start:end] = torch.bmm(grad_scores, keys).mul_(scale).view(heads, size, head_dim)
        grad_key[:, :seen].baddbmm_(grad_scores.mT, queries, alpha=scale)
    return grad_query, grad_key, grad_value


def _fold(tensor: torch.Tensor, kv_heads: int, start: int, end: int) -> torch.Tensor:
    """Rows of [heads, tokens, n] as [kv_heads, group * rows, n]."""
    return tensor[:, start:end].reshape(kv_heads, -1, tensor.shape[2])


def _future(device: torch.device) -> torch.Tensor:
    """What a block's queries may not see of its own keys."""
    return torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=device).triu(1)
