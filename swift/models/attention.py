"""Attention over concatenated examples: every segment attends to itself alone.

A padding-free micro-batch is one long row of examples laid end to end. `varlen` is an attention implementation for any
Hugging Face model that goes through the attention interface; it reads the segment borders from `cu_seq_lens_q` (int32
[segments + 1]), the name the library's own flash-attention path uses, so no model code changes.

Segments may share a prefix (`prefix_attention`): a prompt that is there once, and completions that go on from it.

On a CPU each segment runs by itself: no block mask is built and no work is done across segments (12 % faster than a
block mask at four examples a row). The whole loop is one custom operator, so a compiled layer sees
one opaque call whose shapes don't depend on the borders. On CUDA, `torch.nn.attention.varlen` does the same in one
kernel (not yet run on a GPU).

This file knows nothing of models beyond the interface's arguments; `prove_varlen` checks a model before it is trusted.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from swift.core.errors import ModelError
from swift.models.attention_segment import (
    expand_heads,
    lse_dtype,
    masked_attention,
    segment_backward,
    segment_forward,
    visible_keys,
)
from swift.models.prefix_attention import (
    PrefixAttentionFunction,
    check_prefixes,
    key_rows,
    prefix_attention,
    seen_rows,
    sequences,
)

VARLEN = "varlen"

# Largest relative difference of hidden states between concatenated and separate forwards that counts as equal.
_PROOF_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}


def _segments(cu_seqlens: torch.Tensor) -> list[tuple[int, int]]:
    borders = cu_seqlens.tolist()
    return list(pairwise(borders))


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
    logsumexp = query.new_empty(batch, heads, tokens, dtype=lse_dtype(query.dtype))
    for start, end in _segments(cu_seqlens):
        q, k, v = (t[:, :, start:end] for t in (query, key, value))
        output[:, :, start:end], logsumexp[:, :, start:end] = segment_forward(q, k, v, scale)
    return output, logsumexp


segment_attention = torch.library.custom_op("swift::segment_attention", _attend, mutates_args=())


@segment_attention.register_fake
def _(query, key, value, cu_seqlens, scale):
    batch, heads, tokens, _ = query.shape
    output = query.new_empty(batch, tokens, heads, value.shape[3]).transpose(1, 2)
    return output, query.new_empty(batch, heads, tokens, dtype=lse_dtype(query.dtype))


def _attend_backward(
    grad: torch.Tensor, inputs: list[torch.Tensor], output: torch.Tensor, logsumexp: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `_attend` (of one row); `inputs` is [query, key, value, cu_seqlens]."""
    query, key, value, cu_seqlens = inputs
    grad_query, grad_key, grad_value = (
        torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (query, key, value)
    )
    for start, end in _segments(cu_seqlens):
        q, k, v, out, out_grad = (t[:, :, start:end] for t in (query, key, value, output, grad))
        parts = segment_backward(out_grad, (q, k, v), out, logsumexp[:, :, start:end], scale)
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
    max_length_k: int | None = None,
    prefix_spans: torch.Tensor | None = None,
    prefix_keys: tuple[torch.Tensor, torch.Tensor] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention-interface function: [batch, heads, tokens, head_dim] in, [batch, tokens, heads, head_dim] out.

    Without `cu_seq_lens_q` every row is one segment, so a plain forward of the same model gives the plain result.

    Args:
        sliding_window: tokens a position looks back at, itself included.
        softcap: cap * tanh(scores / cap) before the softmax.
        s_aux: [heads] attention sinks.
        max_length_q: longest segment; max_length_k: the same with its prefix. They tell without a look at the borders
            whether a window matters.
        prefix_spans: int32 [segments, 2], the rows (start, end) that a segment sees before its own; equal for none.
        prefix_keys: of the keys of all sequences laid end to end, the rows and the borders; only CUDA needs them.
    """
    if torch.is_autocast_enabled(query.device.type):  # as scaled_dot_product_attention does: rotary leaves fp32 behind
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    batch, heads, tokens, head_dim = query.shape
    scale = head_dim**-0.5 if scaling is None else scaling
    if cu_seq_lens_q is None:
        cu_seq_lens_q = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=query.device)
        max_length_q = max_length_k = tokens
    longest = max_length_q if prefix_spans is None else max_length_k
    if batch > 1:  # rows end to end: [1, heads, batch * tokens, head_dim]
        query, key, value = (t.transpose(0, 1).reshape(1, t.shape[1], -1, t.shape[3]) for t in (query, key, value))
    window_matters = sliding_window is not None and (longest is None or longest > sliding_window)
    plain = not dropout and softcap is None and s_aux is None and not window_matters
    plain &= value.shape[3] == head_dim  # the flash kernels want one head size; latent attention (MLA) has two
    if plain and query.device.type == "cpu" and prefix_spans is not None:
        attend_all = prefix_attention if torch.compiler.is_compiling() else PrefixAttentionFunction.apply
        output, _ = attend_all(query, key, value, cu_seq_lens_q, prefix_spans, scale)
    elif plain and query.device.type == "cpu":
        attend = segment_attention if torch.compiler.is_compiling() else SegmentAttentionFunction.apply
        output, _ = attend(query, key, value, cu_seq_lens_q, scale)
    elif plain and query.device.type == "cuda" and query.dtype in (torch.bfloat16, torch.float16):
        lengths = (max_length_q, longest)
        output = _cuda_varlen(query, key, value, (cu_seq_lens_q, prefix_keys), scale, lengths)
    else:
        window = sliding_window if window_matters else None
        options = (dropout, window, softcap, s_aux)
        output = _general_segments(query, key, value, (cu_seq_lens_q, prefix_spans), scale, options)
    output = output.transpose(1, 2)
    return output.reshape(batch, tokens, heads, -1), None


def _cuda_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None],
    scale: float,
    lengths: tuple[int | None, int | None],
) -> torch.Tensor:
    """Segments are borders and `prefix_keys`; lengths are the longest of queries and of keys.

    Where a sequence has more keys than queries, the kernel's causal mask is aligned to its end (FlashAttention since
    2.1); the documentation of `varlen_attn` is silent about it, so the proof of prefixes has to pass.
    """
    from torch.nn.attention.varlen import varlen_attn

    cu_seqlens, prefix_keys = segments
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))  # [tokens, heads, head_dim]
    cu_keys = cu_seqlens
    if prefix_keys is not None:
        rows, cu_keys = prefix_keys
        k, v = k[rows], v[rows]  # their gradients are added up where a row is there more than once
    # waits for the device: callers give lengths where they can
    longest_q, longest_k = (
        int((borders[1:] - borders[:-1]).max()) if longest is None else longest
        for borders, longest in zip((cu_seqlens, cu_keys), lengths, strict=True)
    )
    output = varlen_attn(
        q, k, v, cu_seqlens, cu_keys, longest_q, longest_k, scale=scale, window_size=(-1, 0), enable_gqa=True
    )
    assert isinstance(output, torch.Tensor)  # a pair only where the log-sum-exp is asked for
    return output.transpose(0, 1)[None]


@torch.compiler.disable
def _general_segments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: tuple[torch.Tensor, torch.Tensor | None],
    scale: float,
    options: tuple,
) -> torch.Tensor:
    """Segment by segment, for what the flash kernels don't know: windows, soft caps, sinks, dropout, two head sizes.

    Segments are borders and the spans of prefixes. A window counts tokens of the sequence, its prefix included.
    """
    dropout, window, softcap, sinks = options
    heads = query.shape[1]
    key, value = expand_heads(key, heads), expand_heads(value, heads)
    parts = []
    for before, own in sequences(*segments):
        q, k, v = query[:, :, own], seen_rows(key, before, own), seen_rows(value, before, own)
        visible = visible_keys(q.shape[2], k.shape[2], window, q.device)
        parts.append(masked_attention(q, k, v, visible, scale, (dropout, softcap, sinks)))
    return torch.cat(parts, dim=2)


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
LARGEST_WINDOW_TRIED = 64


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
    if window and window <= LARGEST_WINDOW_TRIED and max(lengths) <= window:
        lengths = (*lengths, window + 3)
    generator = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    pieces = [torch.randint(0, config.vocab_size, (1, n), generator=generator).to(device) for n in lengths]

    def together() -> torch.Tensor:
        return base(
            input_ids=torch.cat(pieces, 1),
            position_ids=torch.cat([torch.arange(n, device=device) for n in lengths])[None],
            use_cache=False,
            **segment_arguments([0, *accumulate(lengths)], device),
        ).last_hidden_state

    def alone() -> torch.Tensor:
        return torch.cat([base(input_ids=p, use_cache=False).last_hidden_state for p in pieces], 1)

    prove_equal(model, together, alone, what="concatenated examples", autocast=autocast)


@torch.no_grad()
def prove_equal(
    model: PreTrainedModel,
    together: Callable[[], torch.Tensor],
    alone: Callable[[], torch.Tensor],
    *,
    what: str,
    autocast: Callable[[], AbstractContextManager],
) -> None:
    """Check that hidden states with `varlen` attention are those with the model's own.

    Args:
        together: runs the model's decoder with `varlen`; alone: with its own attention, to the same rows.
        what: what `together` is given, for the message.

    Raises:
        ModelError: when they differ by more than rounding, or the model can't be run that way at all.
    """
    was_training = model.training
    model.eval()
    try:
        with autocast():
            ours = together()
            model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
            reference = alone()
    except (RuntimeError, TypeError) as error:  # kernels and signatures refuse in their own ways
        text = " ".join(str(error).split())[:300]
        raise _unproven(model, f"the model can't take {what} ({text})") from error
    finally:
        model.set_attn_implementation(VARLEN)
        model.train(was_training)
    difference = ((ours - reference).float().norm() / reference.float().norm()).item()
    tolerances = (_PROOF_TOLERANCE[dtype] for dtype in (reference.dtype, _compute_dtype(reference, autocast)))
    if not difference <= max(tolerances):
        raise _unproven(
            model, f"{what} give other hidden states than separate ones (relative difference {difference:.1e})"
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


def segment_arguments(
    borders: list[int],
    device: torch.device,
    *,
    lengths: bool = True,
    prefixes: list[tuple[int, int]] | None = None,
) -> dict[str, Any]:
    """The keyword arguments that tell a model's attention where segments begin and end.

    `lengths=False` leaves out the longest length, a Python number that would make compiled layers compile again
    whenever it changes; only windows, CUDA and the flash-attention package need it.

    Args:
        prefixes: for each segment the rows [start, end) of an earlier one that it sees before its own; equal for none.

    Raises:
        ValueError: prefixes that don't come before their segments.
    """
    cu_seqlens = torch.tensor(borders, dtype=torch.int32, device=device)
    arguments: dict[str, Any] = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
    sizes = key_sizes = [end - start for start, end in pairwise(borders)]
    if prefixes is not None:
        check_prefixes(borders, prefixes)
        arguments["prefix_spans"] = torch.tensor(prefixes, dtype=torch.int32, device=device)
        key_sizes = [size + last - first for size, (first, last) in zip(sizes, prefixes, strict=True)]
        if device.type != "cpu":
            rows = torch.tensor(key_rows(borders, prefixes), device=device)
            arguments["prefix_keys"] = rows, torch.tensor([0, *accumulate(key_sizes)], dtype=torch.int32, device=device)
    if lengths:
        arguments |= {"max_length_q": max(sizes), "max_length_k": max(key_sizes)}
    return arguments
