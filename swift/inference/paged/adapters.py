"""LoRA adapters of an engine: several at once, each for the rows of the requests that name it.

An adapter is read from the folder that training wrote, one pair of matrices for each layer, and handed to the layers
(`linear.ServedLinear`). It can come and go between any two steps. What can't be added row by row is refused by name;
such an adapter is merged into its model instead.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig
from peft.utils import load_peft_weights
from peft.utils.other import get_pattern_key
from torch import nn

from swift.core.errors import ModelError, UsageError, did_you_mean
from swift.inference.paged.linear import LowRank, ServedLinear
from swift.models.adapters import read_adapter_config
from swift.models.quiet import quiet_transformers

_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


class AdapterSlots:
    """The adapters of one model.

    Args:
        model: its linear layers are served ones.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = {name: part for name, part in model.named_modules() if isinstance(part, ServedLinear)}
        self._base = getattr(model, "name_or_path", "") or type(model).__name__
        self._slots: dict[str, int] = {}
        self._made = 0

    @property
    def names(self) -> list[str]:
        """Of the adapters that are there."""
        return list(self._slots)

    def slot(self, name: str) -> int:
        """The number of an adapter, 1 or above; never used again after it is gone.

        Raises:
            UsageError: there is none of that name.
        """
        if name not in self._slots:
            hint = did_you_mean(name, self._slots)
            known = f"known: {', '.join(self._slots)}" if self._slots else "none is loaded"
            raise UsageError(f"there is no adapter called {name!r}", fix=f"{hint} {known}".strip())
        return self._slots[name]

    def load(self, name: str, folder: Path) -> int:
        """Read an adapter; it can be used from the next step on.

        Raises:
            UsageError: the name is taken, or the model carries an adapter that requests don't choose.
            ModelError: the folder holds none that fits this model, or one that can't be added row by row.
        """
        if name in self._slots:
            raise UsageError(
                f"there is an adapter called {name!r} already", fix="unload it first, or take another name"
            )
        if any(layer.endswith(".base_layer") for layer in self._layers):
            raise UsageError(
                "the model carries an adapter of its own, and others can't be chosen beside it",
                where=f"--adapters {name}=…",
                fix="give that one a name too (--adapters NAME=FOLDER), or --merge_lora true",
            )
        config = _checked(read_adapter_config(folder), folder)
        with quiet_transformers():
            state = load_peft_weights(str(folder), device="cpu")
        pairs = self._pairs(state, folder)
        slot = self._made + 1
        for layer, (down, up) in pairs.items():
            like = self._layers[layer]
            where = like.weight.device if like.weight.device.type != "meta" else torch.device("cpu")
            scale = _scale(config, layer, down.shape[0])
            like.deltas[slot] = LowRank(down.to(where, like.weight.dtype), up.to(where, like.weight.dtype), scale)
        self._made = slot
        self._slots[name] = slot
        return slot

    def unload(self, name: str) -> None:
        """Forget an adapter.

        Raises:
            UsageError: there is none of that name.
        """
        slot = self.slot(name)
        del self._slots[name]
        for layer in self._layers.values():
            layer.deltas.pop(slot, None)

    def _pairs(self, state: dict[str, torch.Tensor], folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """A and B of each layer, checked against the layers."""
        pairs = {}
        strange = sorted(key for key in state if not key.endswith((_DOWN, _UP)))
        if strange:
            raise _needs_merging(folder, f"it holds more than pairs of matrices: {', '.join(strange[:3])}")
        for key, down in state.items():
            if not key.endswith(_DOWN):
                continue
            layer = key.removesuffix(_DOWN).removeprefix(_PREFIX)
            up = state.get(key.removesuffix(_DOWN) + _UP)
            served = self._layers.get(layer)
            if served is None or up is None or not _fits(served, down, up):
                raise ModelError(
                    f"the adapter {folder} doesn't fit {self._base}: {layer}",
                    where="--adapters",
                    fix="use the base model that it was trained on (see base_model_name_or_path in its configuration)",
                )
            pairs[layer] = down, up
        if not pairs:
            raise ModelError(f"the adapter {folder} holds no matrices", where="--adapters")
        return pairs


def _checked(config: PeftConfig, folder: Path) -> LoraConfig:
    """Refuse what can't be added to single rows."""
    if not isinstance(config, LoraConfig):
        raise _needs_merging(folder, f"it is of the kind {config.peft_type}")
    wrong = {
        "DoRA": config.use_dora,
        "modules trained as a whole (modules_to_save)": config.modules_to_save,
        "trained bias": config.bias != "none",
        "LoRA on parameters": getattr(config, "target_parameters", None),
        "trained tokens": getattr(config, "trainable_token_indices", None),
        "a bias in B": config.lora_bias,
        "aLoRA": getattr(config, "alora_invocation_tokens", None),
    }
    for what, given in wrong.items():
        if given:
            raise _needs_merging(folder, f"it has {what}")
    return config


def _fits(layer: ServedLinear, down: torch.Tensor, up: torch.Tensor) -> bool:
    return down.shape[1] == layer.in_features and tuple(up.shape) == (layer.out_features, down.shape[0])


def _scale(config: LoraConfig, layer: str, rank: int) -> float:
    """The factor of a layer's pair."""
    patterns = config.alpha_pattern or {}
    alpha = patterns.get(get_pattern_key(list(patterns), layer), config.lora_alpha)
    return alpha / math.sqrt(rank) if config.use_rslora else alpha / rank


def _needs_merging(folder: Path, why: str) -> ModelError:
    return ModelError(
        f"the adapter {folder} can't be served beside others: {why}",
        where="--adapters",
        fix=f"swift merge-lora --adapters {folder}, and serve the result",
    )
