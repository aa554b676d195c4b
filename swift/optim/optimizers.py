"""Optimizers and the parameter groups they get."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from swift.config.training import OptimizerConfig
from swift.core.errors import UsageError
from swift.core.registry import Registry
from swift.optim.local import LocalParameters, check_elementwise

Group = dict
Builder = Callable[[OptimizerConfig, list[Group]], torch.optim.Optimizer]
OPTIMIZERS: Registry[Builder] = Registry("optimizer")

# Learning rates when the user names none (ms-swift's, so scripts move over unchanged).
DEFAULT_RATE_FULL = 1e-5
DEFAULT_RATE_ADAPTER = 1e-4


def default_learning_rate(config: OptimizerConfig, tuner_type: str) -> float:
    """The peak rate: the user's, else the usual one for full or adapter tuning."""
    if config.learning_rate is not None:
        return config.learning_rate
    return DEFAULT_RATE_FULL if tuner_type == "full" else DEFAULT_RATE_ADAPTER


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], *, learning_rate: float, weight_decay: float, lora_b_ratio: float | None
) -> list[Group]:
    """Trainable parameters in up to four groups: decayed or not, and LoRA B matrices apart for LoRA+.

    Vectors and scalars (biases, norms) get no weight decay. With `lora_b_ratio` the B matrices learn that many times
    faster (LoRA+, arXiv 2402.12354).
    """
    groups: dict[tuple[bool, bool], Group] = {}
    found_b = False
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        decayed = parameter.ndim >= 2
        fast = lora_b_ratio is not None and ("lora_B" in name or "lora_embedding_B" in name)
        found_b |= fast
        key = (decayed, fast)
        if key not in groups:
            rate = learning_rate * (lora_b_ratio if fast and lora_b_ratio else 1.0)
            groups[key] = {
                "params": [],
                "names": [],
                "lr": rate,
                "peak_lr": rate,
                "weight_decay": weight_decay if decayed else 0.0,
            }
        groups[key]["params"].append(parameter)
        groups[key]["names"].append(name)
    if lora_b_ratio is not None and not found_b:
        raise UsageError(
            "LoRA+ sets the learning rate of LoRA's B matrices, and this model has none",
            where="--lorap_lr_ratio",
            fix="use --tuner_type lora, or leave --lorap_lr_ratio out",
        )
    return [groups[key] for key in sorted(groups)]


@OPTIMIZERS.register("adamw")
@OPTIMIZERS.register("adamw_torch_fused")
def _fused_adamw(config: OptimizerConfig, groups: list[Group]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_epsilon, fused=True)


@OPTIMIZERS.register("adamw_torch")
def _adamw(config: OptimizerConfig, groups: list[Group]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_epsilon)


@OPTIMIZERS.register("sgd")
def _sgd(config: OptimizerConfig, groups: list[Group]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups)


@OPTIMIZERS.register("adafactor")
def _adafactor(config: OptimizerConfig, groups: list[Group]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(groups)


def build_optimizer(
    model: nn.Module | LocalParameters,
    config: OptimizerConfig,
    *,
    tuner_type: str,
    lorap_lr_ratio: float | None = None,
) -> torch.optim.Optimizer:
    """The optimizer over the model's trainable parameters. Each group keeps its peak rate under `peak_lr`.

    Args:
        model: or this process's parts of its parameters, where they are spread over processes.

    Raises:
        UsageError: the optimizer needs whole matrices, and they are cut.
    """
    if isinstance(model, LocalParameters):
        check_elementwise(config.optim, cut=model.cut)
    groups = parameter_groups(
        model.named() if isinstance(model, LocalParameters) else model.named_parameters(),
        learning_rate=default_learning_rate(config, tuner_type),
        weight_decay=config.weight_decay,
        lora_b_ratio=lorap_lr_ratio,
    )
    return OPTIMIZERS[config.optim](config, groups)


def set_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set every group's learning rate to `factor` times its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
