"""Attention within one segment of a row: by PyTorch's flash kernel, by batched products, or under an explicit mask.

Keys may begin before the queries: with more keys than queries, the queries are the last tokens of the sequence and see
all that comes before them. Segments, rows and models are unknown here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from swift.models.attention_blocks import blocked_backward, blocked_forward, suits_blocks

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def expand_heads(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[1, kv_heads, ...] -> [1, num_heads, ...]: a key head for each query head."""
    repeats = num_heads // tensor.shape[1]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=1)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over scores are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def segment_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention on a CPU.

    Args:
        query: [1, heads, tokens, head_dim]; key, value: [1, kv_heads, shared + tokens, head_dim].
        scale: factor on the scores.

    Returns:
        output, shaped as `query`; log-sum-exp of the scores [1, heads, tokens].
    """
    heads, tokens = query.shape[1:3]
    shared = key.shape[2] - tokens
    if _in_blocks(query, shared, backward=False):
        output, logsumexp = blocked_forward(query[0], key[0], value[0], scale)
        return output[None], logsumexp[None]
    key, value = expand_heads(key, heads), expand_heads(value, heads)
    if not shared:
        return _flash(query, key, value, scale, causal=True)
    before, before_lse = _flash(query, key[:, :, :shared], value[:, :, :shared], scale, causal=False)
    own, own_lse = _flash(query, key[:, :, shared:], value[:, :, shared:], scale, causal=True)
    logsumexp = torch.logaddexp(before_lse, own_lse)
    shares = ((lse - logsumexp).exp().unsqueeze(3) for lse in (before_lse, own_lse))
    return (before * next(shares) + own * next(shares)).to(query.dtype), logsumexp


def segment_backward(
    grad: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    scale: float,
) -> Gradients:
    """Gradients of `segment_forward`'s query, key and value.

    The flash kernel's backward pass works weights out again from the log-sum-exp, and what the softmax takes off from
    the output. Given those over all keys, its gradients for some of the keys are exact (arXiv 2205.14135, algorithm 4).
    """
    query, key, value = inputs
    heads, kv_heads = query.shape[1], key.shape[1]
    shared = key.shape[2] - query.shape[2]
    if _in_blocks(query, shared, backward=True):
        folded = blocked_backward(grad[0], (query[0], key[0], value[0]), output[0], logsumexp[0], scale)
        return folded[0][None], folded[1][None], folded[2][None]
    key, value = expand_heads(key, heads), expand_heads(value, heads)

    def gradients(keys: slice, causal: bool) -> Gradients:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key[:, :, keys], value[:, :, keys], output, logsumexp, 0.0, causal, scale=scale
        )

    parts: Any = gradients(slice(shared, None), True)
    if shared:
        before = gradients(slice(0, shared), False)
        parts = parts[0] + before[0], *(torch.cat(pair, 2) for pair in zip(before[1:], parts[1:], strict=True))
    if kv_heads != heads:
        parts = parts[0], *(t.unflatten(1, (kv_heads, -1)).sum(2) for t in parts[1:])
    return parts


def _in_blocks(query: torch.Tensor, shared: int, *, backward: bool) -> bool:
    """After keys that all see, products are never slower than two calls of the kernel, but they know no half types."""
    if shared:
        return query.dtype in (torch.float32, torch.float64)
    return suits_blocks(query.shape[2], query.dtype, backward=backward)


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)


def visible_keys(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Bool [queries, keys]: what each of the last `queries` tokens of a sequence of `keys` sees, itself included.

    Args:
        window: how many tokens of the sequence that is at most.
    """
    position = torch.arange(keys, device=device)
    back = position[keys - queries :, None] - position[None, :]
    visible = back >= 0
    return visible if window is None else visible & (back < window)


def masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, scale: float, options: tuple
) -> torch.Tensor:
    """Attention of queries to the keys that they see, all scores at once.

    Args:
        query: [1, heads, queries, head_dim]; key, value: [1, heads, keys, ...].
        visible: bool [queries, keys].
        options: probability of dropout, soft cap or None, sinks [heads] or None.
    """
    dropout, softcap, sinks = options
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, dropout_p=dropout, scale=scale)
    wide = lse_dtype(query.dtype)
    scores = (query @ key.transpose(2, 3)).to(wide) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.to(wide).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=3)
    weights = scores.softmax(3)[..., : key.shape[2]].to(value.dtype)
    return F.dropout(weights, dropout) @ value
