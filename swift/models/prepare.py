"""Make a loaded model ready for the training loop: attention path, recompute, compilation."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from transformers import PreTrainedModel

from swift.core.errors import ModelError, UsageError
from swift.models.attention import VARLEN, prove_varlen, varlen_unsupported_reason
from swift.models.head import find_decoder
from swift.models.kinds import task_of


def choose_attention(
    model: PreTrainedModel,
    wanted: str,
    *,
    padding_free: bool | None,
    packing: bool,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
) -> tuple[bool, list[str]]:
    """Set the model's attention implementation; say whether examples can be laid end to end.

    Args:
        wanted: `--attn_impl`; `auto` takes `varlen` where examples are concatenated, else sdpa.
        padding_free: the user's choice, or None for "wherever the model allows".
        autocast: makes the context that forward passes run in; the proof runs in it too.

    Returns:
        whether micro-batches are padding-free, and notes for the user.

    Raises:
        UsageError: packing or padding-free batches were asked for and can't be had with this model or attention.
        ModelError: the model failed the proof that concatenated examples are separate ones.
    """
    reason = varlen_unsupported_reason(model)
    if wanted not in ("auto", VARLEN, "flash_attention_2"):
        reason = f"--attn_impl {wanted} attends across examples"
    asked = "--packing" if packing else "--padding_free" if padding_free else None
    if reason and asked:
        raise UsageError(
            f"{asked} true is not possible with {type(model).__name__}: {reason}",
            where=asked,
            fix=f"leave {asked} out: batches of like length are padded instead",
        )
    if wanted == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        raise UsageError(
            "the package flash-attn is not installed",
            where="--attn_impl flash_attention_2",
            fix="pip install flash-attn (needs CUDA), or leave --attn_impl out",
        )
    concatenate = (packing or padding_free is not False) and reason is None
    if not concatenate:
        model.set_attn_implementation(wanted if wanted not in ("auto", VARLEN) else _own(model))
        return False, [f"batches are padded: {reason}"] if reason else []
    model.set_attn_implementation(wanted if wanted == "flash_attention_2" else VARLEN)
    if wanted == "flash_attention_2":
        return True, []
    try:
        prove_varlen(model, find_decoder(model), autocast=autocast)
    except ModelError as error:
        if asked:
            raise
        model.set_attn_implementation(_own(model))
        return False, [f"batches are padded: {error.message}"]
    return True, []


def _own(model: PreTrainedModel) -> str:
    return "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


def decoder_layers(decoder: nn.Module) -> nn.ModuleList:
    """The list of a decoder's layers: its largest `ModuleList` that isn't inside another.

    An encoder may have it one level deeper (`bert.encoder.layer`).
    """
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList)]
    if not lists:
        lists = [part for child in decoder.children() for part in child.children() if isinstance(part, nn.ModuleList)]
    if not lists:
        raise ModelError(f"{type(decoder).__name__} has no list of layers", fix="leave --torch_compile out")
    return max(lists, key=len)


def first_position(decoder: nn.Module) -> int:
    """The number of a text's first position as the model counts: 0, but in RoBERTa's kin after that of padding."""
    table = getattr(getattr(decoder, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    return 0 if padding is None else int(padding) + 1


def compile_layers(decoder: nn.Module) -> None:
    """Compile each layer for any number of tokens: one graph serves all layers and all batch shapes."""
    for layer in decoder_layers(decoder):
        layer.compile(dynamic=True)


def enable_checkpointing(model: PreTrainedModel) -> None:
    """Recompute activations in the backward pass."""
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"{type(model).__name__} can't recompute activations", fix="use --gradient_checkpointing false"
        )
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5.24
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def fix_ends(model: PreTrainedModel, stop_token_ids: list[int]) -> None:
    """Let generation stop at the ends the template trains: a base model tuned on chats would else never stop.

    Nothing happens to a model that doesn't generate.
    """
    if task_of(model).kind != "causal_lm":
        return
    known = model.generation_config.eos_token_id
    known = [] if known is None else [known] if isinstance(known, int) else list(known)
    ends = list(dict.fromkeys([*stop_token_ids, *known]))
    if ends:
        model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    if model.generation_config.pad_token_id is None and ends:
        model.generation_config.pad_token_id = ends[0]


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    import random

    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def without_dropout(module: torch.nn.Module) -> None:
    """Switch all dropout off for good, that of attention too."""
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        for name, value in list(vars(part).items()):
            if "dropout" in name and isinstance(value, float):  # attention_dropout, residual_dropout, attn_dropout_p
                setattr(part, name, 0.0)
