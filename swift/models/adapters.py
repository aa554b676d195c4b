"""Adapters on any `torch.nn.Module`: prepare, load, switch, merge, save. Built on peft, in peft's format on disk.

>>> from swift import LoRAConfig, Swift
>>> model = Swift.prepare_model(model, LoRAConfig(r=8, lora_alpha=16))
>>> ...                                     # any training loop; only the adapter has gradients
>>> Swift.save(model, "my-adapter")
>>> model = Swift.from_pretrained(fresh_model, "my-adapter")

Knows nothing about training, configuration files or checkpoints; `tuners.py` maps the command line to what is here.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import peft
import torch
from peft import PeftModel
from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
from peft.utils import load_peft_weights
from torch import nn

from swift.core.errors import ModelError, did_you_mean
from swift.core.files import disk_errors
from swift.models.hub import check_weight_file
from swift.models.quiet import quiet_transformers
from swift.models.split_init import (
    SPLIT_FILE,
    Split,
    changes_base,
    exchange_start,
    has_split,
    initial_factors,
    joined_config,
    joined_state,
    remember_split,
    separated,
    split_of,
    split_settings,
    subtract_start,
)

AdapterConfig: TypeAlias = peft.PeftConfig
"""Any adapter configuration: those below, or one of peft's own."""

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_ALL_LINEAR = "all-linear"


# peft's configurations under the names that users of `swift` know, with every linear layer as the default target
@dataclass
class LoRAConfig(peft.LoraConfig):
    """LoRA (https://arxiv.org/abs/2106.09685): W + alpha/r · B A. Also DoRA, rsLoRA, PiSSA, OLoRA by their flags."""

    target_modules: Any = field(default=_ALL_LINEAR)


@dataclass
class AdaLoRAConfig(peft.AdaLoraConfig):
    """AdaLoRA (https://arxiv.org/abs/2303.10512): the rank is shared out among layers while training."""

    target_modules: Any = field(default=_ALL_LINEAR)


@dataclass
class IA3Config(peft.IA3Config):
    """IA3 (https://arxiv.org/abs/2205.05638): learned scales of activations."""

    target_modules: Any = field(default=_ALL_LINEAR)
    feedforward_modules: Any = field(default_factory=list)


@dataclass
class VeRAConfig(peft.VeraConfig):
    """VeRA (https://arxiv.org/abs/2310.11454): shared frozen random matrices, trained scaling vectors."""

    target_modules: Any = field(default=_ALL_LINEAR)


@dataclass
class BOFTConfig(peft.BOFTConfig):
    """BOFT (https://arxiv.org/abs/2311.06243): orthogonal updates as products of butterfly factors."""

    target_modules: Any = field(default=_ALL_LINEAR)


@dataclass
class OFTConfig(peft.OFTConfig):
    """OFT (https://arxiv.org/abs/2306.07280): block-diagonal orthogonal updates."""

    target_modules: Any = field(default=_ALL_LINEAR)


@dataclass
class FourierFTConfig(peft.FourierFTConfig):
    """FourierFT (https://arxiv.org/abs/2405.03003): a few trained frequencies of the weight's spectrum.

    They start at zero here (peft: at random), so that training starts from the base model.
    """

    target_modules: Any = field(default=_ALL_LINEAR)
    init_weights: bool = field(default=True)


@dataclass
class LoHaConfig(peft.LoHaConfig):
    """LoHa (https://arxiv.org/abs/2108.06098): Hadamard product of two low-rank matrices."""

    target_modules: Any = field(default=_ALL_LINEAR)


@dataclass
class LoKrConfig(peft.LoKrConfig):
    """LoKr (https://arxiv.org/abs/2309.14859): Kronecker product with a low-rank factor."""

    target_modules: Any = field(default=_ALL_LINEAR)


@dataclass
class HRAConfig(peft.HRAConfig):
    """HRA (https://arxiv.org/abs/2405.17484): a chain of Householder reflections."""

    target_modules: Any = field(default=_ALL_LINEAR)


@dataclass
class MiSSConfig(peft.MissConfig):
    """MiSS (https://arxiv.org/abs/2409.15371): shards of the weight share one update; earlier called Bone."""

    target_modules: Any = field(default=_ALL_LINEAR)


BoneConfig = MiSSConfig


class Swift:
    """Adapters on any module. All methods are static; the model carries the state."""

    @staticmethod
    def prepare_model(
        model: nn.Module, config: AdapterConfig | Mapping[str, AdapterConfig], adapter_name: str = "default"
    ) -> PeftModel:
        """Wrap `model` with one adapter, or with several named ones of one kind.

        The base parameters are frozen, in place; the adapter's are trainable. The result is an `nn.Module` with the
        forward signature of `model`.

        Args:
            model: any module with layers that the adapter kind supports. A model that is wrapped already gets more
                adapters.
            config: a configuration, or a mapping from names to configurations; the first one is made active.
            adapter_name: name of a single configuration.

        Raises:
            ModelError: no layer matches the targets, the name is taken, or the kinds can't be combined.
        """
        configs = dict(config) if isinstance(config, Mapping) else {adapter_name: config}
        if not configs:
            raise ModelError("no adapter configuration given", fix='for example {"default": LoRAConfig()}')
        for name, entry in configs.items():
            if not isinstance(entry, peft.PeftConfig):
                raise ModelError(
                    f"the adapter {name!r} is configured by {entry!r}", fix="pass a LoRAConfig or the like"
                )
            model = _add_adapter(model, name, copy.deepcopy(entry))
        assert isinstance(model, PeftModel)
        Swift.set_adapter(model, next(iter(configs)))
        return model

    @staticmethod
    def from_pretrained(
        model: nn.Module,
        path: str | os.PathLike | Mapping[str, str | os.PathLike],
        *,
        adapter_name: str = "default",
        is_trainable: bool = False,
    ) -> PeftModel:
        """Load one saved adapter onto `model`, or several by name; the first is made active.

        Adapters saved by peft load here, and those saved by `Swift.save` load with plain peft.

        Raises:
            ModelError: files are missing or damaged, or the adapter doesn't fit the model.
        """
        paths = dict(path) if isinstance(path, Mapping) else {adapter_name: path}
        for name, folder in paths.items():
            model = _load_adapter(model, name, Path(folder), is_trainable)
        assert isinstance(model, PeftModel)
        Swift.set_adapter(model, next(iter(paths)), trainable=is_trainable)
        return model

    @staticmethod
    def save(model: nn.Module, path: str | os.PathLike, *, adapter_name: str | None = None) -> Path:
        """Write an adapter in peft's format; with several, each in a sub-folder of its name ("default" at the top).

        Raises:
            SwiftError: the folder can't be written.
        """
        wrapped = _peft_model(model)
        names = [adapter_name] if adapter_name else list(wrapped.peft_config)
        for name in names:
            _require_adapter(wrapped, name)
            folder = Path(path) if name == "default" or len(names) == 1 else Path(path) / name
            save_adapter(wrapped, folder, name)
        return Path(path)

    @staticmethod
    def set_adapter(model: nn.Module, names: str | Sequence[str], *, trainable: bool = True) -> None:
        """Make these adapters the active ones: their updates add up, the others rest."""
        wrapped = _peft_model(model)
        wanted = [names] if isinstance(names, str) else list(names)
        for name in wanted:
            _require_adapter(wrapped, name)
        wrapped.base_model.set_adapter(wanted, inference_mode=not trainable)  # type: ignore[operator]
        if len(wanted) == 1:
            wrapped.active_adapter = wanted[0]

    @staticmethod
    def activate(model: nn.Module) -> None:
        """Let the active adapters take part again after `deactivate`."""
        _peft_model(model).base_model.enable_adapter_layers()  # type: ignore[operator]

    @staticmethod
    def deactivate(model: nn.Module) -> None:
        """Make the model compute as if it had no adapter.

        Raises:
            ModelError: the adapter is a PiSSA or OLoRA one: without it, the base is not the original base.
        """
        if has_split(_peft_model(model)):
            raise ModelError(
                "a model tuned with PiSSA or OLoRA can't switch its adapter off: a part of the base is in it"
            )
        _peft_model(model).base_model.disable_adapter_layers()  # type: ignore[operator]

    @staticmethod
    def merge(model: nn.Module, adapter_names: Sequence[str] | None = None) -> nn.Module:
        """Fold the active (or the named) adapters into the base weights, in place; `unmerge` takes them out again.

        Out again up to rounding: W + D - D differs from W in the last bits.
        """
        with _model_errors("merge"):
            _peft_model(model).merge_adapter(list(adapter_names) if adapter_names else None, safe_merge=True)
        return model

    @staticmethod
    def unmerge(model: nn.Module) -> nn.Module:
        """Take merged adapters out of the base weights."""
        _peft_model(model).unmerge_adapter()
        return model

    @staticmethod
    def merge_and_unload(model: nn.Module) -> nn.Module:
        """The base model with the active adapters folded in, and without any adapter layer."""
        with _model_errors("merge"):
            return _peft_model(model).merge_and_unload(safe_merge=True)

    @staticmethod
    def adapters(model: nn.Module) -> dict[str, peft.PeftConfig]:
        """Name to configuration of every adapter on `model`; empty if there is none."""
        inner = getattr(model, "_orig_mod", model)
        return dict(inner.peft_config) if isinstance(inner, PeftModel) else {}


def save_adapter(
    model: PeftModel, folder: Path, adapter_name: str = "default", *, tensors: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write one adapter into `folder`: adapter_config.json and adapter_model.safetensors, nothing else.

    An adapter that changed the base weights when it was made (PiSSA, OLoRA) is written as the equivalent LoRA of twice
    the rank on the *original* base, so that it can be used anywhere; loading it for training splits it again.

    Args:
        tensors: the model's tensors by name, where it doesn't hold them itself.
    """
    from safetensors.torch import save_file

    config = copy.deepcopy(model.peft_config[adapter_name])
    state = adapter_state_dict(model, adapter_name, tensors)
    split = split_of(model, adapter_name)
    if split is not None:
        state, config = joined_state(state, split), joined_config(config)
    if config.peft_type == peft.PeftType.ADALORA:
        config.rank_pattern = None  # type: ignore[attr-defined] # all ranks are written; pruned ones hold zeros
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(model.get_base_model(), "name_or_path", None) or None
    written = {key: value.detach().cpu().contiguous().clone() for key, value in state.items()}
    needed = sum(tensor.numel() * tensor.element_size() for tensor in written.values())
    with disk_errors(folder, needed):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(written, str(folder / WEIGHTS_FILE), metadata={"format": "pt"})
        (folder / WEIGHTS_FILE).chmod(folder.stat().st_mode & 0o666)
        config.save_pretrained(str(folder))
        if split is not None:
            (folder / SPLIT_FILE).write_text(json.dumps(split.record(), indent=1))


def adapter_state_dict(
    model: PeftModel, adapter_name: str = "default", tensors: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """The adapter's tensors under the names that peft uses on disk.

    Args:
        tensors: the model's tensors by name, where it doesn't hold them itself.
    """
    config = model.peft_config[adapter_name]
    pattern = getattr(config, "rank_pattern", None) if config.peft_type == peft.PeftType.ADALORA else None
    if pattern is not None:
        config.rank_pattern = None  # type: ignore[attr-defined] # else peft would cut the pruned ranks off
    try:
        return peft.get_peft_model_state_dict(
            model, state_dict=tensors, adapter_name=adapter_name, save_embedding_layers=False
        )
    finally:
        if pattern is not None:
            config.rank_pattern = pattern  # type: ignore[attr-defined]


def load_adapter_weights(model: nn.Module, folder: Path, adapter_name: str = "default") -> None:
    """Overwrite the weights of an adapter that `model` carries with those saved in `folder`. Nothing else changes.

    Raises:
        ModelError: files are missing or damaged, or of an adapter with other settings.
    """
    wrapped = _peft_model(model)
    _require_adapter(wrapped, adapter_name)
    config, state, split = _read_adapter(
        folder, is_trainable=split_of(wrapped, adapter_name) is not None, model=wrapped
    )
    if config.peft_type != wrapped.peft_config[adapter_name].peft_type:
        raise ModelError(f"{folder} is a {config.peft_type} adapter, the model has another kind", where="--adapters")
    if split is not None:
        exchange_start(wrapped, adapter_name, split)
    _fill_adapter(wrapped, adapter_name, state, folder)


def read_adapter_config(folder: Path) -> peft.PeftConfig:
    """The configuration in an adapter folder, after a check that its files are there and whole.

    Raises:
        ModelError: a file is missing, damaged, or of a kind that this peft doesn't know.
    """
    if not folder.is_dir():
        siblings = [entry.name for entry in folder.parent.iterdir()] if folder.parent.is_dir() else []
        hint = did_you_mean(folder.name, siblings)
        raise ModelError(f"there is no adapter folder {folder}", where="--adapters", fix=hint or None)
    missing = [name for name in (CONFIG_FILE,) if not (folder / name).is_file()]
    if not any((folder / name).is_file() for name in (WEIGHTS_FILE, "adapter_model.bin")):
        missing.append(WEIGHTS_FILE)
    if missing:
        runs = sorted(path.parent for path in folder.glob(f"**/{CONFIG_FILE}"))
        fix = f"did you mean {runs[-1]}?" if runs else "point at the folder that holds both"
        if (folder / "config.json").is_file():
            fix = f"this is a whole model: --model {folder}"
        raise ModelError(
            f"{folder} is not an adapter folder; missing: {', '.join(missing)}", where="--adapters", fix=fix
        )
    if (folder / WEIGHTS_FILE).is_file():
        check_weight_file(folder / WEIGHTS_FILE)
    try:
        return peft.PeftConfig.from_pretrained(str(folder))
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ModelError(f"{folder / CONFIG_FILE} can't be used: {error}", where="--adapters") from error


class _model_errors:
    """Turns peft's complaints about a model or configuration into a `ModelError`."""

    def __init__(self, doing: str) -> None:
        self.doing = doing

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, (ValueError, TypeError, KeyError, NotImplementedError, AttributeError, RuntimeError)):
            text = " ".join(str(error).split())
            raise ModelError(f"peft can't {self.doing} this adapter: {text[:500]}") from error


def _add_adapter(model: nn.Module, name: str, config: peft.PeftConfig) -> PeftModel:
    """Wrap `model`, or add to it if it is wrapped; the base model is changed in place."""
    _check_name(name, config)
    splits = changes_base(config)
    settings = split_settings(config) if splits else {}
    if isinstance(model, PeftModel):
        _check_addition(model, name, config, splits)
    with quiet_transformers(), _model_errors("add"):
        if isinstance(model, PeftModel):
            wrapped = model
            wrapped.add_adapter(name, config)
        else:
            added = peft.get_peft_model(model, config, adapter_name=name)
            assert isinstance(added, PeftModel)  # peft.PeftMixedModel only comes when asked for
            wrapped = added
    if getattr(config, "modules_to_save", None):  # peft adds the usual names of heads, each time it sees the settings
        config.modules_to_save = list(dict.fromkeys(config.modules_to_save))  # type: ignore[attr-defined]
    if splits:
        remember_split(wrapped, name, Split(settings, initial_factors(adapter_state_dict(wrapped, name))))
    return wrapped


def _check_name(name: str, config: peft.PeftConfig) -> None:
    kind: Any = config.peft_type
    prefix = PEFT_TYPE_TO_PREFIX_MAPPING.get(kind, "")  # of parameter names: peft tells them apart by it
    if not re.fullmatch(r"[A-Za-z0-9][\w-]*", name) or name in prefix:
        raise ModelError(f"{name!r} can't name an adapter", fix="letters, digits, - and _, such as `style-a`")


def _check_addition(model: PeftModel, name: str, config: peft.PeftConfig, splits: bool) -> None:
    """Refuse what one model can't carry at once."""
    if name in model.peft_config:
        raise ModelError(f"the model has an adapter called {name!r} already", fix="choose another name")
    kinds = {entry.peft_type for entry in model.peft_config.values()}
    if config.peft_type not in kinds:
        have = ", ".join(sorted(str(getattr(kind, "value", kind)) for kind in kinds))
        raise ModelError(f"adapters of different kinds can't share a model: {config.peft_type} and {have}")
    if splits or has_split(model):
        raise ModelError("PiSSA and OLoRA change the base weights, so such an adapter must be the only one on a model")


def _load_adapter(model: nn.Module, name: str, folder: Path, is_trainable: bool) -> PeftModel:
    config, state, split = _read_adapter(folder, is_trainable=is_trainable, model=model)
    config.inference_mode = not is_trainable
    wrapped = _add_adapter(model, name, config)
    _fill_adapter(wrapped, name, state, folder)
    if split is not None:
        subtract_start(wrapped, name, split)
        remember_split(wrapped, name, split)
    if not is_trainable:
        wrapped.eval()
    return wrapped


def _read_adapter(
    folder: Path, *, is_trainable: bool, model: nn.Module
) -> tuple[peft.PeftConfig, dict[str, torch.Tensor], Split | None]:
    """Settings and tensors of an adapter folder; to train on, a joined PiSSA or OLoRA adapter is taken apart again."""
    config = read_adapter_config(folder)
    mapping = getattr(model, "_checkpoint_conversion_mapping", None)
    with quiet_transformers(), _model_errors("load"):
        state = load_peft_weights(str(folder), device="cpu", key_mapping=mapping)
    if is_trainable and (folder / SPLIT_FILE).is_file():
        return separated(config, state, json.loads((folder / SPLIT_FILE).read_text()))
    return config, state, None


def _fill_adapter(model: PeftModel, name: str, state: dict[str, torch.Tensor], folder: Path) -> None:
    with quiet_transformers(), _model_errors("load"):
        result = peft.set_peft_model_state_dict(model, state, adapter_name=name)
        model.base_model._cast_adapter_dtype(adapter_name=name, autocast_adapter_dtype=True)  # type: ignore[operator]
    _check_adapter_fits(folder, model, name, result)


def _check_adapter_fits(folder: Path, model: PeftModel, name: str, result: Any) -> None:
    """Every tensor of the file must have found its place, and every tensor of the adapter its value."""
    # AdaLoRA's ranknum is a constant that peft doesn't save
    own = {key for key, _ in model.named_parameters() if f".{name}." in f"{key}." and ".ranknum." not in key}
    missing = sorted(own & set(result.missing_keys))
    unexpected = sorted(result.unexpected_keys)
    if missing or unexpected:
        bad, what = (unexpected, "has tensors without a place in") if unexpected else (missing, "lacks tensors for")
        shown = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
        base = getattr(model.get_base_model(), "name_or_path", "") or "this model"
        raise ModelError(
            f"the adapter {folder} {what} {base}: {shown}",
            where="--adapters",
            fix="use the base model that it was trained on (base_model_name_or_path in its adapter_config.json)",
        )


def _peft_model(model: nn.Module) -> PeftModel:
    """The wrapped model itself, out of torch.compile's or DDP's wrapper."""
    inner = getattr(model, "_orig_mod", model)
    if isinstance(inner, nn.parallel.DistributedDataParallel):
        inner = inner.module
    if not isinstance(inner, PeftModel):
        raise ModelError("this model has no adapter", fix="Swift.prepare_model(model, config) adds one")
    return inner


def _require_adapter(model: PeftModel, name: str) -> None:
    if name not in model.peft_config:
        hint = did_you_mean(name, model.peft_config)
        known = "known: " + ", ".join(model.peft_config)
        raise ModelError(f"the model has no adapter called {name!r}", fix=f"{hint} {known}".strip())
