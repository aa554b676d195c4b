"""Adapters that start as a part of the base weight (PiSSA, OLoRA), kept usable on the original base.

Such an adapter splits W into a residual and a low-rank start: W = R + s·B0·A0, trains A and B from A0 and B0, and
computes R + s·B·A. R lives only in memory. On disk the same function is a plain LoRA of twice the rank on W itself,

    W + s·(B·A - B0·A0) = W + s·[B, -B0]·[A; A0],

which anyone can load. Nothing is lost: A, B, A0 and B0 are all in that file, so training can split it again, bit for
bit.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from swift.core.errors import ModelError

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

SPLIT_FILE = "split_init.json"  # beside adapter_config.json: how to take the doubled rank apart again
_ATTRIBUTE = "_swift_split_init"
_KINDS = ("pissa", "olora")
_STEM_A, _STEM_B = ".lora_A.weight", ".lora_B.weight"


@dataclass
class Split:
    """The start of one adapter.

    Attributes:
        settings: the configuration's own `r`, `lora_alpha` and patterns, and its `init_lora_weights`.
        initial: A0 [r, in] and B0 [out, r] under their names on disk.
    """

    settings: dict[str, Any]
    initial: dict[str, torch.Tensor] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """What is written to `SPLIT_FILE`."""
        return {"format": 1, **self.settings}


def changes_base(config: PeftConfig) -> bool:
    """Whether making this adapter takes a part out of the base weights."""
    return str(getattr(config, "init_lora_weights", "")).lower().startswith(_KINDS)


def split_of(model: nn.Module, adapter_name: str) -> Split | None:
    """The start of an adapter of `model`, if it changed the base weights."""
    return getattr(model, _ATTRIBUTE, {}).get(adapter_name)


def has_split(model: nn.Module) -> bool:
    """Whether any adapter of `model` changed the base weights."""
    return bool(getattr(model, _ATTRIBUTE, {}))


def remember_split(model: PeftModel, adapter_name: str, split: Split) -> None:
    """Keep the start of an adapter with the model; not in its state dict, since the saved adapter holds it too."""
    kept = dict(getattr(model, _ATTRIBUTE, {}))
    kept[adapter_name] = split
    setattr(model, _ATTRIBUTE, kept)


def split_settings(config: Any) -> dict[str, Any]:
    """The settings that `joined_config` changes."""
    return {
        "init_lora_weights": config.init_lora_weights,
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "rank_pattern": dict(config.rank_pattern or {}),
        "alpha_pattern": dict(config.alpha_pattern or {}),
    }


def initial_factors(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of the A and B in an adapter's state dict."""
    return {key: value.detach().clone() for key, value in state.items() if key.endswith((_STEM_A, _STEM_B))}


def joined_state(state: dict[str, torch.Tensor], split: Split) -> dict[str, torch.Tensor]:
    """The adapter as a plain LoRA of twice the rank on the original base."""
    joined = dict(state)
    for key, start in split.initial.items():
        if key.endswith(_STEM_A):
            joined[key] = torch.cat([state[key], start.to(state[key])], dim=0)
        else:
            joined[key] = torch.cat([state[key], -start.to(state[key])], dim=1)
    return joined


def joined_config(config: Any) -> Any:
    """The configuration that goes with `joined_state`: the rank doubles and the scale stays."""
    joined = copy.deepcopy(config)
    joined.init_lora_weights = True
    factor = 2**0.5 if config.use_rslora else 2  # the scale is alpha / sqrt(r), or alpha / r
    joined.r = 2 * config.r
    joined.lora_alpha = config.lora_alpha * factor
    joined.rank_pattern = {key: 2 * value for key, value in (config.rank_pattern or {}).items()}
    joined.alpha_pattern = {key: factor * value for key, value in (config.alpha_pattern or {}).items()}
    return joined


def separated(
    config: Any, state: dict[str, torch.Tensor], record: dict[str, Any]
) -> tuple[Any, dict[str, torch.Tensor], Split]:
    """Undo `joined_config` and `joined_state`: the configuration and state to go on training with, and the start."""
    config = copy.deepcopy(config)
    settings = {key: record[key] for key in ("init_lora_weights", "r", "lora_alpha", "rank_pattern", "alpha_pattern")}
    for key, value in settings.items():
        setattr(config, key, value)
    config.init_lora_weights = True  # the values come from the file; the base must not be split a second time
    single: dict[str, torch.Tensor] = {}
    start: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if key.endswith(_STEM_A):
            single[key], start[key] = (part.contiguous() for part in value.chunk(2, dim=0))
        elif key.endswith(_STEM_B):
            single[key], negative = (part.contiguous() for part in value.chunk(2, dim=1))
            start[key] = -negative
        else:
            single[key] = value
    return config, single, Split(settings, start)


def subtract_start(model: PeftModel, adapter_name: str, split: Split) -> None:
    """Turn the base weights W of a freshly loaded model into R = W - s·B0·A0, exactly as the initialisation did.

    Same operations in the same order as peft's own, so that a resumed run has the same R to the last bit.
    """
    layers = dict(model.named_modules())
    for key, start_a in split.initial.items():
        if not key.endswith(_STEM_A):
            continue
        name = key.removesuffix(_STEM_A)
        layer: Any = layers.get(name)
        if layer is None:
            raise ModelError(f"the adapter has a start for {name}, which the model lacks", where="--adapters")
        weight = layer.get_base_layer().weight
        start_b = split.initial[name + _STEM_B].to(weight.device)
        whole = weight.data.to(torch.float32)
        rest = whole - layer.scaling[adapter_name] * start_b @ start_a.to(weight.device)
        layer.get_base_layer().weight.data = rest.to(weight.dtype)


def exchange_start(model: PeftModel, adapter_name: str, split: Split) -> None:
    """Let an adapter that has a start already go on from another one of the same model: R + s·B0·A0 stays the same."""
    present = split_of(model, adapter_name)
    if present is None or present.initial.keys() != split.initial.keys():
        raise ModelError("the adapter's start doesn't belong to this model", where="--adapters")
    layers = dict(model.named_modules())
    for key, start_a in present.initial.items():
        if key.endswith(_STEM_A) and not _same_start(present, split, key):
            name = key.removesuffix(_STEM_A)
            layer: Any = layers[name]
            weight = layer.get_base_layer().weight
            start_b = present.initial[name + _STEM_B]
            part = layer.scaling[adapter_name] * start_b @ start_a
            weight.data = (weight.data.to(torch.float32) + part.to(weight.device)).to(weight.dtype)
    changed = {
        key: value
        for key, value in split.initial.items()
        if not _same_start(present, split, key.replace(_STEM_B, _STEM_A))
    }
    subtract_start(model, adapter_name, Split(split.settings, changed))
    remember_split(model, adapter_name, split)


def _same_start(left: Split, right: Split, key_a: str) -> bool:
    key_b = key_a.removesuffix(_STEM_A) + _STEM_B
    return all(torch.equal(left.initial[key], right.initial[key]) for key in (key_a, key_b))
