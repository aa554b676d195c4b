"""Attention through tables of blocks, for any Hugging Face model that goes through the attention interface.

`paged` is an attention implementation: it puts the keys and values of a step's rows into the cache and lets each row
see all tokens of its request up to itself. What rows belong to whom is in the running `Step`; no model code changes.

Two implementations of one function: compiled loops on a CPU, for fp32 and bfloat16, where a row's result depends, bit
for bit, on nothing that is computed beside it; and plain torch for everything else. This file knows nothing of models
beyond the interface's arguments; `fit.prove_paged` checks a model before it is trusted.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from swift.core.errors import ModelError
from swift.inference.paged.cache import array_of
from swift.inference.paged.linear import has_products
from swift.inference.paged.step import Step, current_step
from swift.inference.paged.threads import pool

PAGED = "paged"

# multiplications of a layer below which a second thread costs more than it saves
_WORTH_A_THREAD = 2_000_000


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention-interface function: [1, heads, rows, head_dim] in, [1, rows, heads, value_dim] out.

    Args:
        sliding_window: tokens a position looks back at, itself included.
        softcap: cap * tanh(scores / cap) before the softmax.
        s_aux: [heads] attention sinks.
    """
    step = current_step()
    if step is None:
        raise ModelError("paged attention runs inside of an engine's step only", fix="set another attn_implementation")
    layer = step.cache.place[module.layer_idx]
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    options = (scale, sliding_window or 0, softcap or 0.0)
    if step.cache.arrays and query.dtype in (torch.float32, torch.bfloat16) and _compiled():
        output = _with_kernels(query, key, value, step, layer, (*options, s_aux))
    else:
        _write(key, value, step, layer)
        output = _with_torch(query, step, layer, (*options, s_aux))
    return output[None], None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The tables are the mask."""


AttentionInterface.register(PAGED, paged_attention)
AttentionMaskInterface.register(PAGED, _no_mask)


@cache
def _compiled() -> bool:
    return has_products()


def _with_kernels(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: Step,
    layer: int,
    options: tuple[float, int, float, torch.Tensor | None],
) -> torch.Tensor:
    """[rows, heads, value_dim], computed by `kernels`."""
    from swift.inference.paged import kernels

    scale, window, softcap, sinks = options
    cache = step.cache.arrays[layer]
    rows, heads, kv_heads = query.shape[2], query.shape[1], key.shape[1]
    output = torch.zeros(rows, heads, value.shape[3])
    arguments = (
        _packed(query, torch.float32),
        cache,
        (step.spans, step.tables),
        _numbers(scale, window, softcap),
        _no_sinks(heads) if sinks is None else sinks.detach().float().contiguous().numpy(),
        output.numpy(),
    )
    written = (_packed(key, step.cache.dtype), _packed(value, step.cache.dtype), step.slots)
    threads = torch.get_num_threads()
    parts = [(0, rows * kv_heads)] if threads == 1 else _shares(step.spans, (kv_heads, window), query, threads)
    if len(parts) == 1:
        kernels.write_and_attend(*written, *arguments, parts[0])
        return output.to(query.dtype)
    kernels.write(*cache, *written)
    others = [pool(len(parts) - 1).submit(kernels.attend, *arguments, part) for part in parts[1:]]
    kernels.attend(*arguments, parts[0])
    for other in others:
        other.result()
    return output.to(query.dtype)


@cache
def _numbers(scale: float, window: int, softcap: float) -> np.ndarray:
    return np.array([scale, window, softcap], dtype=np.float32)


@cache
def _no_sinks(heads: int) -> np.ndarray:
    return np.full(heads, -np.inf, dtype=np.float32)


def _packed(tensor: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    """[1, heads, rows, dim] -> [rows, heads, dim] of `dtype`."""
    return array_of(tensor.transpose(1, 2)[0].to(dtype).contiguous())


def _shares(spans: np.ndarray, layer: tuple[int, int], query: torch.Tensor, threads: int) -> list[tuple[int, int]]:
    """What each thread computes, as `kernels.attend` counts it, so that all have about as many keys to look at.

    Args:
        layer: key heads, and the window or 0.
        query: [1, heads, rows, key_dim].
    """
    kv_heads, window = layer
    rows = query.shape[2]
    seen = np.zeros(rows, dtype=np.int64)
    for first, count, position in spans.tolist():
        seen[first : first + count] = np.arange(position + 1, position + count + 1)
    if window:
        seen = np.minimum(seen, window)
    total = np.repeat(seen, kv_heads).cumsum()
    work = 2 * int(seen.sum()) * query.shape[1] * query.shape[3]
    threads = max(1, min(threads, work // _WORTH_A_THREAD))
    borders = np.searchsorted(total, total[-1] * np.arange(1, threads) / threads).tolist()
    return [pair for pair in pairwise([0, *borders, rows * kv_heads]) if pair[0] < pair[1]]


def _write(key: torch.Tensor, value: torch.Tensor, step: Step, layer: int) -> None:
    """Put rows into the cache."""
    size = step.cache.block_size
    slots = torch.from_numpy(step.slots).to(key.device)
    block, place = slots // size, slots % size
    keys, values = step.cache.keys[layer], step.cache.values[layer]
    keys.permute(0, 3, 1, 2)[block, place] = key[0].transpose(0, 1).to(keys.dtype)
    values.permute(0, 2, 1, 3)[block, place] = value[0].transpose(0, 1).to(values.dtype)


def _with_torch(
    query: torch.Tensor, step: Step, layer: int, options: tuple[float, int, float, torch.Tensor | None]
) -> torch.Tensor:
    """[rows, heads, value_dim]: all spans together, padded to the longest."""
    keys, values = step.cache.keys[layer], step.cache.values[layer]
    heads, rows, device = query.shape[1], query.shape[2], query.device
    output = query.new_zeros(rows, heads, values.shape[3])
    if not len(step.spans):
        return output
    first, count, position = (torch.from_numpy(column).to(device).long() for column in step.spans.T)
    longest = int(step.spans[:, 1].max())
    width = -(-int((step.spans[:, 1] + step.spans[:, 2]).max()) // step.cache.block_size)
    tables = torch.from_numpy(step.tables[:, :width]).to(device).long()  # [spans, width]
    steps = torch.arange(longest, device=device)
    there = steps < count[:, None]  # [spans, longest]
    places = torch.where(there, first[:, None] + steps, 0)
    asked = query[0].transpose(0, 1)[places].transpose(1, 2)  # [spans, heads, longest, key_dim]
    kept_keys = keys[tables].permute(0, 2, 3, 1, 4).flatten(3)  # [spans, kv_heads, key_dim, tokens]
    kept_values = values[tables].permute(0, 2, 1, 3, 4).flatten(2, 3)  # [spans, kv_heads, tokens, value_dim]
    seen = torch.arange(kept_keys.shape[3], device=device)
    own = (position[:, None] + steps)[:, :, None]  # [spans, longest, 1]
    visible = seen <= own
    if options[1]:
        visible &= seen > own - options[1]
    # blocks may hold anything beyond a request's own tokens, NaN included
    used = (seen < (position + count)[:, None])[:, None, :, None]
    kept_values = torch.where(used, kept_values, 0).to(query.dtype)
    kept_keys = torch.where(used.transpose(2, 3), kept_keys, 0).to(query.dtype)
    weights = _weights(asked, kept_keys, visible[:, None], options)
    grouped = weights.view(*weights.shape[:1], kept_values.shape[1], -1, kept_values.shape[2])
    found = (grouped @ kept_values).view(*weights.shape[:3], -1).transpose(1, 2)  # [spans, longest, heads, value_dim]
    output[places[there]] = found[there]
    return output


def _weights(
    query: torch.Tensor,
    keys: torch.Tensor,
    visible: torch.Tensor,
    options: tuple[float, int, float, torch.Tensor | None],
) -> torch.Tensor:
    """Attention weights [spans, heads, longest, tokens]; query heads that share a key head are taken together."""
    scale, _, softcap, sinks = options
    spans, heads, longest, dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.reshape(spans, kv_heads, -1, dim)  # [spans, kv_heads, shared * longest, key_dim]
    scores = (grouped @ keys).view(spans, heads, longest, -1).float() * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, torch.finfo(torch.float32).min)
    if sinks is not None:
        sink = sinks.float().view(1, heads, 1, 1).expand(spans, heads, longest, 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1].to(query.dtype)
    return scores.softmax(-1).to(query.dtype)
