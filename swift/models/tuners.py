"""From `TunerConfig` to a model with something to train: full tuning with freezing, or any adapter kind of peft's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn

from swift.config.tuner import TunerConfig
from swift.core.errors import UsageError
from swift.core.logging import get_logger
from swift.models.adapters import Swift, read_adapter_config
from swift.models.freeze import apply_freeze, require_trainable, trainable_summary
from swift.models.lora_kernel import enable_fast_lora
from swift.models.tuner_configs import TUNERS, adapter_config

__all__ = [
    "adapter_config",
    "adapter_regularizer",
    "adapter_state",
    "adapter_step_callback",
    "apply_tuner",
    "load_adapter_state",
    "set_total_steps",
    "trainable_summary",
]

log = get_logger("models")

_FREEZE_FLAGS = (
    "freeze_parameters",
    "freeze_parameters_regex",
    "freeze_parameters_ratio",
    "trainable_parameters",
    "trainable_parameters_regex",
)


def apply_tuner(
    model: nn.Module,
    config: TunerConfig,
    *,
    adapters: Sequence[str] = (),
    total_steps: int | None = None,
    fast_lora: bool = True,
) -> nn.Module:
    """Make `model` trainable as `config` says: itself (full) or wrapped with an adapter.

    Args:
        model: the loaded base model; changed in place.
        config: the tuner's settings.
        adapters: folder of an adapter to go on training. It keeps its own settings (rank, targets, …).
        total_steps: optimizer steps of the run. AdaLoRA plans its ranks with it; `set_total_steps` can give it later.
        fast_lora: use the memory-saving LoRA forward where it applies; same results as peft's.

    Returns:
        The model itself, or a `peft.PeftModel` around it. In training mode.

    Raises:
        ModelError: targets match nothing, nothing is trainable, or the adapter doesn't fit.
        UsageError: settings that exclude each other.
    """
    if config.tuner_type == "full":
        if adapters:
            raise UsageError(
                "an adapter can't be trained on in full tuning",
                where="--adapters",
                fix=f"merge it first: swift merge-lora --adapters {adapters[0]}",
            )
        return apply_freeze(model, config).train()
    for flag in _FREEZE_FLAGS:
        if getattr(config, flag):
            raise UsageError(
                f"--{flag} is for full tuning only", where=f"--{flag}", fix="--tuner_type full, or leave it out"
            )
    if adapters:
        tuned = _continue_adapter(model, config, adapters)
    else:
        tuned = Swift.prepare_model(model, adapter_config(model, config, total_steps=total_steps))
    if total_steps is not None:
        set_total_steps(tuned, total_steps)
    require_trainable(tuned, f"--tuner_type {config.tuner_type}")
    if fast_lora:
        enable_fast_lora(tuned)
    return tuned.train()


def _continue_adapter(model: nn.Module, config: TunerConfig, adapters: Sequence[str]) -> peft.PeftModel:
    if len(adapters) > 1:
        raise UsageError(
            f"one adapter can be trained on, and {len(adapters)} are given",
            where="--adapters",
            fix="merge the others first",
        )
    folder = Path(adapters[0]).expanduser()
    saved = read_adapter_config(folder)
    if saved.peft_type != TUNERS[config.tuner_type].peft_type:
        kind = next((name for name, tuner in TUNERS.items() if tuner.peft_type == saved.peft_type), saved.peft_type)
        raise UsageError(
            f"{folder} is a {kind} adapter, and the run is asked to tune {config.tuner_type}",
            where="--tuner_type",
            fix=f"--tuner_type {kind}",
        )
    log.info("going on with the adapter %s, with its own settings", folder)
    return Swift.from_pretrained(model, folder, is_trainable=True)


def set_total_steps(model: nn.Module, total_steps: int) -> None:
    """Tell an adapter that plans ahead (AdaLoRA) how many optimizer steps the run has. No effect on other models.

    The first tenth of the steps keeps all ranks, the last fifth keeps the ranks that were chosen.

    Raises:
        UsageError: too few steps to choose ranks in.
    """
    tuner = _adalora_model(model)
    if tuner is None:
        return
    settings = tuner.peft_config[tuner.trainable_adapter_name]
    first, last = total_steps // 10, total_steps // 5
    if total_steps - last - first < 2:
        raise UsageError(
            f"AdaLoRA can't choose ranks in {total_steps} steps",
            where="--tuner_type adalora",
            fix="at least 2 steps, or lora",
        )
    settings.total_step, settings.tinit, settings.tfinal = total_steps, first, last
    tuner.rankallocator.set_total_step(total_steps)


def adapter_step_callback(model: nn.Module) -> Callable[[int], None] | None:
    """What the trainer calls with the step's number (from 1) after `optimizer.step()`, while gradients are still there.

    None for adapters that need no such call. AdaLoRA updates its importance scores and prunes ranks in it.
    """
    tuner = _adalora_model(model)
    return None if tuner is None else tuner.update_and_allocate


def adapter_regularizer(model: nn.Module) -> Callable[[], torch.Tensor] | None:
    """A term to add to the loss of each step, or None. For AdaLoRA: the distance of P and Q from orthogonality.

    weight · mean over matrices of ||P Pᵀ - I||, ||Qᵀ Q - I|| (Frobenius), eq. 4 of https://arxiv.org/abs/2303.10512
    in the form that peft uses.
    """
    tuner = _adalora_model(model)
    if tuner is None:
        return None
    adapter = tuner.trainable_adapter_name
    weight = tuner.peft_config[adapter].orth_reg_weight
    if not weight:
        return None
    left = [layer.lora_B[adapter] for layer in _adapter_layers(model, "lora_E") if adapter in layer.lora_B]
    right = [layer.lora_A[adapter] for layer in _adapter_layers(model, "lora_E") if adapter in layer.lora_A]

    def penalty() -> torch.Tensor:
        grams = [matrix.T @ matrix for matrix in left] + [matrix @ matrix.T for matrix in right]
        norms = [torch.linalg.norm(gram - torch.eye(gram.shape[0], device=gram.device)) for gram in grams]
        return weight * torch.stack(norms).mean()

    return penalty


def adapter_state(model: nn.Module) -> dict[str, Any] | None:
    """What an adapter knows beside its weights and must know again for an exact resume; None for most kinds."""
    tuner = _adalora_model(model)
    if tuner is None:
        return None
    scores = tuner.rankallocator
    kept = {name: dict(getattr(scores, name)) for name in ("ipt", "exp_avg_ipt", "exp_avg_unc")}
    return {**kept, "rank_pattern": tuner.peft_config[tuner.trainable_adapter_name].rank_pattern}


def load_adapter_state(model: nn.Module, state: dict[str, Any] | None) -> None:
    """Give back what `adapter_state` returned."""
    tuner = _adalora_model(model)
    if tuner is None or state is None:
        return
    for name in ("ipt", "exp_avg_ipt", "exp_avg_unc"):
        setattr(tuner.rankallocator, name, {key: value.clone() for key, value in state[name].items()})
    tuner.peft_config[tuner.trainable_adapter_name].rank_pattern = state["rank_pattern"]


def _adalora_model(model: nn.Module) -> Any:
    """The AdaLoRA tuner inside `model`, if its adapter is trained; else None."""
    inner: Any = getattr(model, "_orig_mod", model)
    inner = inner.module if isinstance(inner, nn.parallel.DistributedDataParallel) else inner
    tuner = getattr(inner, "base_model", None)
    return tuner if isinstance(tuner, peft.AdaLoraModel) and hasattr(tuner, "rankallocator") else None


def _adapter_layers(model: nn.Module, attribute: str) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, attribute)]
