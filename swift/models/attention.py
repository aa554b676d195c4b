"""Attention over concatenated examples: every segment attends to itself alone.

A padding-free micro-batch is one long row of examples laid end to end. `varlen` is an attention implementation for any
Hugging Face model that goes through the attention interface; it reads the segment borders from `cu_seq_lens_q` (int32
[segments + 1]), the name the library's own flash-attention path uses, so no model code changes.

On a CPU each segment runs by itself: no block mask is built and no work is done across segments (12 % faster than a
block mask at four examples a row). The whole loop is one custom operator, so a compiled layer sees
one opaque call whose shapes don't depend on the borders. On CUDA, `torch.nn.attention.varlen` does the same in one
kernel (not yet run on a GPU).

This file knows nothing of models beyond the interface's arguments; `prove_varlen` checks a model before it is trusted.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from swift.core.errors import ModelError
from swift.models.attention_blocks import blocked_backward, blocked_forward, suits_blocks

VARLEN = "varlen"

# Largest relative difference of hidden states between concatenated and separate forwards that counts as equal.
_PROOF_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}


def _segments(cu_seqlens: torch.Tensor) -> list[tuple[int, int]]:
    borders = cu_seqlens.tolist()
    return list(pairwise(borders))


def _expand_heads(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    repeats = num_heads // tensor.shape[1]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=1)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention within each segment of one row: batched products or PyTorch's flash kernel, by length.

    Args:
        query: [1, heads, tokens, head_dim]; key, value: [1, kv_heads, tokens, head_dim].
        cu_seqlens: int32 [segments + 1], borders from 0 to tokens.
        scale: factor on the scores.

    Returns:
        output, shaped as `query` and laid out as [1, tokens, heads, head_dim]; log-sum-exp of the scores, fp32.
    """
    batch, heads, tokens, _ = query.shape
    output = query.new_empty(batch, tokens, heads, value.shape[3]).transpose(1, 2)
    logsumexp = query.new_empty(batch, heads, tokens, dtype=_lse_dtype(query.dtype))
    for start, end in _segments(cu_seqlens):
        q, k, v = (t[:, :, start:end] for t in (query, key, value))
        if suits_blocks(end - start, query.dtype, backward=False):
            part, part_lse = blocked_forward(q[0], k[0], v[0], scale)
        else:
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, _expand_heads(k, heads), _expand_heads(v, heads), 0.0, True, scale=scale
            )
        output[:, :, start:end] = part
        logsumexp[:, :, start:end] = part_lse
    return output, logsumexp


segment_attention = torch.library.custom_op("swift::segment_attention", _attend, mutates_args=())


def _lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@segment_attention.register_fake
def _(query, key, value, cu_seqlens, scale):
    batch, heads, tokens, _ = query.shape
    output = query.new_empty(batch, tokens, heads, value.shape[3]).transpose(1, 2)
    return output, query.new_empty(batch, heads, tokens, dtype=_lse_dtype(query.dtype))


def _attend_backward(
    grad: torch.Tensor, inputs: list[torch.Tensor], output: torch.Tensor, logsumexp: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `_attend` (of one row); `inputs` is [query, key, value, cu_seqlens]."""
    query, key, value, cu_seqlens = inputs
    heads, kv_heads = query.shape[1], key.shape[1]
    grad_query, grad_key, grad_value = (
        torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (query, key, value)
    )
    for start, end in _segments(cu_seqlens):
        q, k, v, out, out_grad = (t[:, :, start:end] for t in (query, key, value, output, grad))
        lse = logsumexp[:, :, start:end]
        parts: Any
        if suits_blocks(end - start, query.dtype, backward=True):
            parts = blocked_backward(out_grad[0], (q[0], k[0], v[0]), out[0], lse[0], scale)
        else:
            k, v = _expand_heads(k, heads), _expand_heads(v, heads)
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                out_grad, q, k, v, out, lse, 0.0, True, scale=scale
            )
            if kv_heads != heads:
                parts = parts[0], *(t.unflatten(1, (kv_heads, -1)).sum(2) for t in parts[1:])
        grad_query[:, :, start:end], grad_key[:, :, start:end], grad_value[:, :, start:end] = parts
    return grad_query, grad_key, grad_value


segment_attention_backward = torch.library.custom_op(
    "swift::segment_attention_backward", _attend_backward, mutates_args=()
)


@segment_attention_backward.register_fake
def _(grad, inputs, output, logsumexp, scale):
    query, key, value, _ = inputs
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple) -> None:
    query, key, value, cu_seqlens, scale = inputs
    ctx.save_for_backward(query, key, value, cu_seqlens, *output)
    ctx.scale = scale


def _backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple:
    *inputs, output, logsumexp = ctx.saved_tensors
    return (*segment_attention_backward(grad, inputs, output, logsumexp, ctx.scale), None, None)


segment_attention.register_autograd(_backward, setup_context=_save_for_backward)


class SegmentAttentionFunction(torch.autograd.Function):
    """`segment_attention` without an operator's cost for each call, for code that isn't compiled."""

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
        return (*_attend_backward(gradients[0], inputs, output, logsumexp, ctx.scale), None, None)


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention-interface function: [batch, heads, tokens, head_dim] in, [batch, tokens, heads, head_dim] out.

    Without `cu_seq_lens_q` every row is one segment, so a plain forward of the same model gives the plain result.

    Args:
        sliding_window: tokens a position looks back at, itself included.
        softcap: cap * tanh(scores / cap) before the softmax.
        s_aux: [heads] attention sinks.
        max_length_q: longest segment, to know without a look at the borders whether a window matters.
    """
    if torch.is_autocast_enabled(query.device.type):  # as scaled_dot_product_attention does: rotary leaves fp32 behind
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    batch, heads, tokens, head_dim = query.shape
    scale = head_dim**-0.5 if scaling is None else scaling
    if cu_seq_lens_q is None:
        cu_seq_lens_q = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=query.device)
        max_length_q = tokens
    if batch > 1:  # rows end to end: [1, heads, batch * tokens, head_dim]
        query, key, value = (t.transpose(0, 1).reshape(1, t.shape[1], -1, t.shape[3]) for t in (query, key, value))
    window_matters = sliding_window is not None and (max_length_q is None or max_length_q > sliding_window)
    plain = not dropout and softcap is None and s_aux is None and not window_matters
    plain &= value.shape[3] == head_dim  # the flash kernels want one head size; latent attention (MLA) has two
    if plain and query.device.type == "cpu":
        attend = segment_attention if torch.compiler.is_compiling() else SegmentAttentionFunction.apply
        output, _ = attend(query, key, value, cu_seq_lens_q, scale)
    elif plain and query.device.type == "cuda" and query.dtype in (torch.bfloat16, torch.float16):
        output = _cuda_varlen(query, key, value, cu_seq_lens_q, scale, max_length_q)
    else:
        window = sliding_window if window_matters else None
        output = _general_segments(query, key, value, cu_seq_lens_q, scale, (dropout, window, softcap, s_aux))
    output = output.transpose(1, 2)
    return output.reshape(batch, tokens, heads, -1), None


def _cuda_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    longest: int | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))  # [tokens, heads, head_dim]
    if longest is None:
        longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())  # waits for the device: callers give it where they can
    output = varlen_attn(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest, scale=scale, window_size=(-1, 0), enable_gqa=True
    )
    assert isinstance(output, torch.Tensor)  # a pair only where the log-sum-exp is asked for
    return output.transpose(0, 1)[None]


@torch.compiler.disable
def _general_segments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, scale: float, options: tuple
) -> torch.Tensor:
    """Segment by segment, for what the flash kernels don't know: windows, soft caps, sinks, dropout, two head sizes."""
    dropout, window, softcap, sinks = options
    heads = query.shape[1]
    key, value = _expand_heads(key, heads), _expand_heads(value, heads)
    parts = []
    for start, end in _segments(cu_seqlens):
        q, k, v = (t[:, :, start:end] for t in (query, key, value))
        position = torch.arange(end - start, device=q.device)
        visible = position[:, None] >= position[None, :]
        if window is not None:
            visible &= position[:, None] - position[None, :] < window
        parts.append(masked_attention(q, k, v, visible, scale, (dropout, softcap, sinks)))
    return torch.cat(parts, dim=2)


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
    wide = _lse_dtype(query.dtype)
    scores = (query @ key.transpose(2, 3)).to(wide) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.to(wide).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=3)
    weights = scores.softmax(3)[..., : key.shape[2]].to(value.dtype)
    return F.dropout(weights, dropout) @ value


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The segments are the mask."""


AttentionInterface.register(VARLEN, varlen_attention)
AttentionMaskInterface.register(VARLEN, _no_mask)


def varlen_unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why this model can't take concatenated examples, or None when its configuration allows it."""
    config = model.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or [])
    other = layer_types - {"full_attention", "sliding_attention"}
    if other:
        return f"it has layers of type {', '.join(sorted(other))}"
    if getattr(model, "_is_stateful", False):
        return "it carries a recurrent state across tokens"
    if getattr(config, "attention_chunk_size", None):
        return "it attends in fixed chunks"
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "is_causal", True) is False:
        return "it is not a causal decoder"
    if not getattr(model, "_supports_attention_backend", True):
        return "it doesn't use the attention interface"
    return None


# A sliding window up to this size (tokens) is tried with a segment that is longer than it.
_LARGEST_WINDOW_TRIED = 64


@torch.no_grad()
def prove_varlen(
    model: PreTrainedModel,
    base: torch.nn.Module,
    *,
    lengths: tuple[int, ...] = (5, 9, 3),
    autocast: Callable[[], AbstractContextManager] = nullcontext,
) -> None:
    """Check that concatenated examples give the hidden states of separate ones, on random tokens.

    Args:
        model: the model, with `varlen` as its attention implementation; `base` is its decoder.
        lengths: segment lengths to try. A segment longer than the model's sliding window is added when the window is
            small; a larger one is proven inside the window only.
        autocast: makes the context that forward passes run in when training.

    Raises:
        ModelError: when they differ by more than rounding, or the model can't be run that way at all.
    """
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if window and window <= _LARGEST_WINDOW_TRIED and max(lengths) <= window:
        lengths = (*lengths, window + 3)
    was_training = model.training
    model.eval()
    generator = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    pieces = [torch.randint(0, config.vocab_size, (1, n), generator=generator).to(device) for n in lengths]
    try:
        with autocast():
            together = base(
                input_ids=torch.cat(pieces, 1),
                position_ids=torch.cat([torch.arange(n, device=device) for n in lengths])[None],
                use_cache=False,
                **segment_arguments([0, *torch.tensor(lengths).cumsum(0).tolist()], device),
            ).last_hidden_state
            model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
            alone = torch.cat([base(input_ids=p, use_cache=False).last_hidden_state for p in pieces], 1)
    except (RuntimeError, TypeError) as error:  # kernels and signatures refuse in their own ways
        text = " ".join(str(error).split())[:300]
        raise _unproven(model, f"the model can't take concatenated examples ({text})") from error
    finally:
        model.set_attn_implementation(VARLEN)
        model.train(was_training)
    difference = ((together - alone).float().norm() / alone.float().norm()).item()
    if not difference <= max(_PROOF_TOLERANCE[alone.dtype], _PROOF_TOLERANCE[_compute_dtype(alone, autocast)]):
        raise _unproven(
            model,
            f"concatenated examples give other hidden states than separate ones (relative difference {difference:.1e})",
        )


def _compute_dtype(states: torch.Tensor, autocast: Callable[[], AbstractContextManager]) -> torch.dtype:
    """The least precise type of the matrix products that made `states`."""
    with autocast():
        device = states.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype


def _unproven(model: PreTrainedModel, message: str) -> ModelError:
    return ModelError(
        message, where=f"model class {type(model).__name__}", fix="use --padding_free false --packing false"
    )


def segment_arguments(borders: list[int], device: torch.device, *, lengths: bool = True) -> dict[str, Any]:
    """The keyword arguments that tell a model's attention where segments begin and end.

    `lengths=False` leaves out the longest length, a Python number that would make compiled layers compile again
    whenever it changes; only windows and the flash-attention package need it.
    """
    cu_seqlens = torch.tensor(borders, dtype=torch.int32, device=device)
    arguments: dict[str, Any] = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
    if lengths:
        longest = max(end - start for start, end in pairwise(borders))
        arguments |= {"max_length_q": longest, "max_length_k": longest}
    return arguments
