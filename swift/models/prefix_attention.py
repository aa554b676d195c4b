"""Attention over a row whose segments share prefixes: a prompt once, and completions that all go on from it.

A row is `[prompt][chosen][rejected]`, each a segment of its own. A completion's tokens see the whole prompt and their
own completion up to themselves; completions don't see each other. So a prompt is computed once, forward and backward,
and gathers the gradients of all that saw it. Which rows a segment sees before its own is `prefix_spans`, int32
[segments, 2] (start, end), equal for none.

On a CPU the loop over segments is one custom operator, as in `attention`; on CUDA, the keys and values of each sequence
are gathered and go to the kernel for sequences of any length (not yet run on a GPU).

This file knows tensors only; `prefix_proof` checks a model before its prompts are shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from swift.models.attention_segment import lse_dtype, segment_backward, segment_forward


def sequences(cu_seqlens: torch.Tensor, prefix_spans: torch.Tensor | None) -> Iterator[tuple[slice, slice]]:
    """For each segment that isn't empty the rows that it sees before its own (an empty slice for none), and its own."""
    borders = list(pairwise(cu_seqlens.tolist()))
    spans = [[0, 0]] * len(borders) if prefix_spans is None else prefix_spans.tolist()
    for (start, end), (first, last) in zip(borders, spans, strict=True):
        if end > start:
            yield slice(first, last), slice(start, end)


def seen_rows(tensor: torch.Tensor, before: slice, own: slice) -> torch.Tensor:
    """Keys or values [1, heads, tokens, n] of one sequence."""
    if before.start == before.stop:
        return tensor[:, :, own]
    return torch.cat([tensor[:, :, before], tensor[:, :, own]], 2)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    prefix_spans: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of every segment of one row to its prefix and itself.

    Args:
        query: [1, heads, tokens, head_dim]; key, value: [1, kv_heads, tokens, head_dim].
        cu_seqlens: int32 [segments + 1], borders from 0 to tokens.
        prefix_spans: int32 [segments, 2].
        scale: factor on the scores.

    Returns:
        output, shaped as `query` and laid out as [1, tokens, heads, head_dim]; log-sum-exp of the scores, fp32.
    """
    batch, heads, tokens, _ = query.shape
    output = query.new_empty(batch, tokens, heads, value.shape[3]).transpose(1, 2)
    logsumexp = query.new_empty(batch, heads, tokens, dtype=lse_dtype(query.dtype))
    for before, own in sequences(cu_seqlens, prefix_spans):
        keys, values = seen_rows(key, before, own), seen_rows(value, before, own)
        output[:, :, own], logsumexp[:, :, own] = segment_forward(query[:, :, own], keys, values, scale)
    return output, logsumexp


prefix_attention = torch.library.custom_op("swift::prefix_attention", _attend, mutates_args=())


@prefix_attention.register_fake
def _(query, key, value, cu_seqlens, prefix_spans, scale):
    batch, heads, tokens, _ = query.shape
    output = query.new_empty(batch, tokens, heads, value.shape[3]).transpose(1, 2)
    return output, query.new_empty(batch, heads, tokens, dtype=lse_dtype(query.dtype))


def _attend_backward(
    grad: torch.Tensor, inputs: list[torch.Tensor], output: torch.Tensor, logsumexp: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `_attend`; `inputs` is [query, key, value, cu_seqlens, prefix_spans].

    A prefix's keys and values are seen by several segments: their gradients are added up in fp32 at least.
    """
    query, key, value, cu_seqlens, prefix_spans = inputs
    grad_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    sums = [torch.zeros(t.shape, dtype=lse_dtype(t.dtype), device=t.device) for t in (key, value)]
    for before, own in sequences(cu_seqlens, prefix_spans):
        shared = before.stop - before.start
        seen = (query[:, :, own], seen_rows(key, before, own), seen_rows(value, before, own))
        grad_query[:, :, own], *parts = segment_backward(
            grad[:, :, own], seen, output[:, :, own], logsumexp[:, :, own], scale
        )
        for total, part in zip(sums, parts, strict=True):
            total[:, :, own] += part[:, :, shared:]
            if shared:
                total[:, :, before] += part[:, :, :shared]
    return grad_query, sums[0].to(key.dtype), sums[1].to(value.dtype)


prefix_attention_backward = torch.library.custom_op(
    "swift::prefix_attention_backward", _attend_backward, mutates_args=()
)


@prefix_attention_backward.register_fake
def _(grad, inputs, output, logsumexp, scale):
    query, key, value = inputs[:3]
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.scale = scale


def _backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple:
    *inputs, output, logsumexp = ctx.saved_tensors
    return (*prefix_attention_backward(grad, inputs, output, logsumexp, ctx.scale), None, None, None)


prefix_attention.register_autograd(_backward, setup_context=_save_for_backward)


class PrefixAttentionFunction(torch.autograd.Function):
    """`prefix_attention` without an operator's cost for each call, for code that isn't compiled."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output = _attend(*inputs)
        _save_for_backward(ctx, inputs, output)
        ctx.mark_non_differentiable(output[1])
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple:
        *inputs, output, logsumexp = ctx.saved_tensors
        return (*_attend_backward(gradients[0], inputs, output, logsumexp, ctx.scale), None, None, None)


def key_rows(borders: list[int], prefixes: list[tuple[int, int]]) -> list[int]:
    """Rows of the keys of all sequences, end to end: each segment's prefix, then its own."""
    rows: list[int] = []
    for (start, end), (first, last) in zip(pairwise(borders), prefixes, strict=True):
        rows += [*range(first, last), *range(start, end)]
    return rows


def check_prefixes(borders: list[int], prefixes: list[tuple[int, int]]) -> None:
    """A prefix is rows that come before its segment, one for each segment.

    Raises:
        ValueError: it isn't so; attention would take other rows without a word.
    """
    if len(prefixes) != len(borders) - 1:
        raise ValueError(f"{len(prefixes)} prefixes for {len(borders) - 1} segments")
    for start, (first, last) in zip(borders, prefixes, strict=False):
        if not 0 <= first <= last <= start:
            raise ValueError(f"the segment from row {start} can't see rows {first} to {last} as its prefix")
