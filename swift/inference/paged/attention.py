"""Attention through tables of blocks, for any Hugging Face model that goes through the attention interface.

`paged` is an attention implementation: it puts the keys and values of a step's rows into the cache and lets each row
see all tokens of its request up to itself. What rows belong to whom is in the running `Step`; no model code changes.

Two implementations of one function: compiled loops for fp32 on a CPU, where a row's result doesn't depend, bit for bit,
on what is computed beside it; and plain torch for everything else. This file knows nothing of models beyond the
interface's arguments; `fit.prove_paged` checks a model before it is trusted.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from swift.core.errors import ModelError
from swift.data.compiled import has_numba
from swift.inference.paged.step import Step, current_step

PAGED = "paged"

# multiplications of a layer below which a second thread costs more than it saves
_WORTH_A_THREAD = 4_000_000


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
    if query.device.type == "cpu" and query.dtype == step.cache.dtype == torch.float32 and _compiled():
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
    return has_numba()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="attention")


def _forget_threads() -> None:
    """A forked child has none of its parent's threads."""
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


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

    *numbers, sinks = options
    keys, values = step.cache.arrays[layer]
    kernels.write(keys, values, _array(key), _array(value), step.slots)
    rows, heads = query.shape[2], query.shape[1]
    output = torch.zeros(rows, heads, values.shape[3])
    arguments = (
        _array(query),
        keys,
        values,
        step.spans,
        step.tables,
        np.array(numbers, dtype=np.float32),
        np.empty(0, dtype=np.float32) if sinks is None else sinks.detach().float().contiguous().numpy(),
        output.numpy(),
    )
    parts = _shares(step.spans, rows, heads * query.shape[3], torch.get_num_threads())
    if len(parts) == 1:
        kernels.attend(*arguments, parts[0])
        return output
    others = [_pool(len(parts) - 1).submit(kernels.attend, *arguments, part) for part in parts[1:]]
    kernels.attend(*arguments, parts[0])
    for other in others:
        other.result()
    return output


def _array(tensor: torch.Tensor) -> np.ndarray:
    """[1, heads, rows, dim] -> [heads, rows, dim]."""
    return tensor[0].contiguous().numpy()


def _shares(spans: np.ndarray, rows: int, width: int, threads: int) -> list[np.ndarray]:
    """Rows for each thread, int64 [2], so that all have about as many keys to look at."""
    if threads == 1 or not len(spans):
        return [np.array([0, rows], dtype=np.int64)]
    seen = np.zeros(rows, dtype=np.int64)
    for first, count, position in spans:
        seen[first : first + count] = np.arange(position + 1, position + count + 1)
    total = seen.cumsum()
    threads = int(min(threads, max(1, 2 * total[-1] * width // _WORTH_A_THREAD)))
    borders = np.searchsorted(total, total[-1] * np.arange(1, threads) / threads).tolist()
    edges = [0, *borders, rows]
    return [np.array(pair, dtype=np.int64) for pair in pairwise(edges) if pair[0] < pair[1]]


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
