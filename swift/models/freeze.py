"""Which parameters full tuning trains: a bottom share, prefixes or a pattern are frozen, and others thawed again."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from swift.config.tuner import TunerConfig
from swift.core.errors import ModelError, did_you_mean


def trainable_summary(model: nn.Module) -> dict[str, float]:
    """Parameter counts: ``{"total": int, "trainable": int, "percent": float}``; shared parameters count once."""
    total = trainable = 0
    for parameter in model.parameters():
        total += parameter.numel()
        trainable += parameter.numel() if parameter.requires_grad else 0
    return {"total": total, "trainable": trainable, "percent": 100 * trainable / max(total, 1)}


def apply_freeze(model: nn.Module, config: TunerConfig) -> nn.Module:
    """Set `requires_grad` of every parameter by the freezing rules; everything is trained when there are none.

    In this order: `freeze_parameters_ratio` (from the bottom: parameters in the order of the model, while their running
    count stays within the ratio), `freeze_parameters` (name prefixes), `freeze_parameters_regex`, and then
    `trainable_parameters` and `trainable_parameters_regex`, which win.

    Raises:
        ModelError: a rule matches no parameter, or nothing is left to train; names the flag.
    """
    if not 0 <= config.freeze_parameters_ratio <= 1:
        raise ModelError(f"{config.freeze_parameters_ratio} is not between 0 and 1", where="--freeze_parameters_ratio")
    parameters = dict(model.named_parameters())
    names = list(parameters)
    frozen: set[str] = set()
    budget = config.freeze_parameters_ratio * sum(parameter.numel() for parameter in parameters.values())
    counted = 0
    for name, parameter in parameters.items():
        counted += parameter.numel()
        if counted > budget:
            break
        frozen.add(name)
    frozen |= _with_prefix(names, config.freeze_parameters, "--freeze_parameters")
    frozen |= _matching(names, config.freeze_parameters_regex, "--freeze_parameters_regex")
    frozen -= _with_prefix(names, config.trainable_parameters, "--trainable_parameters")
    frozen -= _matching(names, config.trainable_parameters_regex, "--trainable_parameters_regex")
    for name, parameter in parameters.items():
        parameter.requires_grad_(name not in frozen)
    require_trainable(model, _flags_in_use(config))
    return model


def require_trainable(model: nn.Module, flags: str) -> None:
    """Raise a `ModelError` that names `flags` if no parameter has a gradient."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError("nothing is left to train: every parameter is frozen", where=flags, fix="freeze less")


def _flags_in_use(config: TunerConfig) -> str:
    flags = ("freeze_parameters_ratio", "freeze_parameters", "freeze_parameters_regex")
    return (
        ", ".join(f"--{flag} {getattr(config, flag)}" for flag in flags if getattr(config, flag)) or "--tuner_type full"
    )


def _with_prefix(names: list[str], prefixes: Sequence[str], flag: str) -> set[str]:
    found: set[str] = set()
    for prefix in prefixes:
        hits = {name for name in names if name.startswith(prefix)}
        if not hits:
            raise ModelError(f"no parameter's name starts with {prefix!r}", where=flag, fix=_suggest(prefix, names))
        found |= hits
    return found


def _matching(names: list[str], pattern: str | None, flag: str) -> set[str]:
    if not pattern:
        return set()
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ModelError(f"{pattern!r} is not a regular expression: {error}", where=flag) from error
    hits = {name for name in names if compiled.search(name)}
    if not hits:
        raise ModelError(f"no parameter's name matches {pattern!r}", where=flag, fix=_suggest("", names))
    return hits


def _suggest(wanted: str, names: list[str]) -> str:
    """Prefixes that exist: `model.embed_tokens`, `model.layers.0`, …"""
    prefixes: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        for length in range(1, len(parts)):
            prefixes[".".join(parts[:length])] = None
    hint = did_you_mean(wanted, prefixes) if wanted else ""
    tops = [prefix for prefix in prefixes if prefix.count(".") <= 1]
    return f"{hint} prefixes of this model: {', '.join(tops[:8])}".strip()
