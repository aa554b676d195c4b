"""DeepSpeed's own configuration: presets, files and JSON, and how it goes together with the settings here.

What a file says about batches, precision, clipping, the optimizer and its rate are settings here as well. A number in
the file is taken as if it had been given as the setting; a setting that says otherwise is a contradiction and refused;
`"auto"` is filled with the setting. No torch and no DeepSpeed: a wrong file is found at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift.config.resolve import Problem, Resolved
from swift.core.errors import UsageError, nearest

AUTO = "auto"

_ZERO: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero2_offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "zero3_offload": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}
PRESETS: dict[str, dict[str, Any]] = {
    name: {
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_clipping": AUTO,
        "bf16": {"enabled": AUTO},
        "fp16": {"enabled": AUTO},
        "zero_optimization": {**zero, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": AUTO},
    }
    for name, zero in _ZERO.items()
}

# parts of a DeepSpeed configuration that this program's own engine would have to do, or that contradict its loop
_NOT_HERE = {
    "scheduler": "the schedule is --lr_scheduler_type's",
    "curriculum_learning": "see --curriculum",
    "data_efficiency": "see --curriculum",
    "pipeline": "pipelines are --pipeline_parallel_size's, without --deepspeed",
    "tensor_parallel": "see --tensor_parallel_size, without --deepspeed",
    "sequence_parallel_size": "see --sequence_parallel_size, without --deepspeed",
    "compression_training": "leave it out",
    "hybrid_engine": "leave it out",
    "elasticity": "leave it out",
    "autotuning": "leave it out",
    "amp": "write bf16 or fp16 instead",
    "torch_autocast": "write bf16 or fp16 instead",
}
# tuners whose forward reads another module's weights, which stage 3 has then put away
_STAGE_3_TUNERS = ("full", "lora")
_OPTIMIZERS = {"adamw": "adamw_torch", "adam": "adamw_torch", "sgd": "sgd"}


@dataclass(frozen=True)
class Shared:
    """A place in the file that is also a setting here: its path, the setting's name, and the place's value as ours."""

    path: str
    setting: str
    value: Any


def read_deepspeed(text: str) -> dict[str, Any]:
    """The configuration that `--deepspeed` means: a preset's name, JSON, or a file with JSON.

    Raises:
        UsageError: no such preset or file, or not a JSON object.
    """
    name = text.strip()
    if name in PRESETS:
        return json.loads(json.dumps(PRESETS[name]))
    where = "--deepspeed"
    if not name.startswith("{"):
        path = Path(name).expanduser()
        if not path.is_file():
            close = nearest(name, list(PRESETS))
            hint = f"did you mean {close[0]}? " if close else ""
            raise UsageError(
                f"{name!r} is neither a preset nor a file",
                where=where,
                fix=f"{hint}presets: {', '.join(PRESETS)}; or a path, or JSON",
            )
        where, name = str(path), path.read_text(encoding="utf-8")
    try:
        value = json.loads(name)
    except json.JSONDecodeError as error:
        raise UsageError(f"not JSON: {error.msg} in line {error.lineno}, column {error.colno}", where=where) from error
    if not isinstance(value, dict):
        raise UsageError("a DeepSpeed configuration is a JSON object", where=where, fix='{"zero_optimization": ...}')
    return value


def shared_settings(values: dict[str, Any]) -> Iterator[Shared]:
    """What the file fixes of our settings; `auto` and what is left out fix nothing."""
    simple = {
        "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "gradient_clipping": "max_grad_norm",
    }
    for path, setting in simple.items():
        if values.get(path, AUTO) != AUTO:
            yield Shared(path, setting, type_of(setting)(values[path]))
    for part, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if values.get(part, {}).get("enabled") is True:
            yield Shared(f"{part}.enabled", "torch_dtype", dtype)
    optimizer = values.get("optimizer") or {}
    kind = str(optimizer.get("type", "")).lower()
    if kind in _OPTIMIZERS:
        yield Shared("optimizer.type", "optim", _OPTIMIZERS[kind])
    for place, setting in (("lr", "learning_rate"), ("weight_decay", "weight_decay"), ("eps", "adam_epsilon")):
        value = optimizer.get("params", {}).get(place, AUTO)
        if value != AUTO:
            yield Shared(f"optimizer.params.{place}", setting, float(value))
    betas = optimizer.get("params", {}).get("betas", AUTO)
    if betas != AUTO:
        for number, beta in enumerate(betas, 1):
            yield Shared(f"optimizer.params.betas[{number - 1}]", f"adam_beta{number}", float(beta))


def type_of(setting: str) -> type:
    """The type that a shared number has here."""
    return float if setting == "max_grad_norm" else int


def fill_from_deepspeed(resolved: Resolved) -> None:
    """Take what the DeepSpeed file fixes for settings nobody gave; a setting that disagrees is a fault."""
    text = resolved.values.get("deepspeed")
    if not text:
        return
    try:
        values = read_deepspeed(text)
    except UsageError as error:
        resolved.problems.append(Problem(error.message, error.where, error.fix))
        return
    shown = text if text in PRESETS or not text.strip().startswith("{") else "--deepspeed"
    for shared in shared_settings(values):
        origin = resolved.origins.get(shared.setting)
        if origin in (None, "checkpoint"):
            resolved.values[shared.setting] = shared.value
            resolved.origins[shared.setting] = shown
            resolved.places[shared.setting] = f"{shown}: {shared.path}"
            continue
        ours = resolved.values.get(shared.setting)
        same = ours == shared.value or (shared.setting == "optim" and str(ours).startswith(str(shared.value)))
        if not same:
            resolved.problems.append(
                Problem(
                    f"{shared.setting} is {ours}, and {shared.path} of the DeepSpeed configuration {shared.value}",
                    f"{resolved.places.get(shared.setting, shared.setting)} and {shown}",
                    f'leave one of them out, or write "auto" for {shared.path}',
                )
            )


def deepspeed_faults(values: Mapping[str, Any], fault: Callable[..., Problem]) -> Iterator[Problem]:
    """What is wrong with `--deepspeed` and with the settings beside it.

    Args:
        values: every setting by name.
        fault: makes a problem of the settings' names, a message and a fix.
    """
    if not values["deepspeed"]:
        return
    wrong = list(deepspeed_problems(values["deepspeed"]))
    yield from wrong
    if wrong:
        return
    stage = zero_stage(read_deepspeed(values["deepspeed"]))
    tuner = values["tuner_type"]
    if tuner == "adalora":
        yield fault(
            "tuner_type deepspeed", "adalora looks at gradients, and DeepSpeed has them in parts", "--tuner_type lora"
        )
    reads_others = tuner not in _STAGE_3_TUNERS or values["use_dora"] or values["target_parameters"]
    if stage == 3 and reads_others and tuner != "adalora":
        name = next((name for name in ("use_dora", "target_parameters") if values[name]), "tuner_type")
        yield fault(
            f"{name} deepspeed",
            f"{name} {values[name]} reads weights that ZeRO stage 3 has put away",
            "--deepspeed zero2, or plain LoRA",
        )
    if values["optim"] not in _OPTIMIZERS.values() and not values["optim"].startswith("adamw"):
        yield fault(
            "optim deepspeed",
            f"DeepSpeed steps over flat pieces of memory, and {values['optim']} needs whole matrices",
            "--optim adamw or sgd",
        )
    if values["torch_compile"]:
        yield fault("torch_compile deepspeed", "torch_compile has not been tried under DeepSpeed", "leave one out")


def deepspeed_problems(text: str) -> Iterator[Problem]:
    """What a DeepSpeed configuration asks for that can't be done here, or that DeepSpeed itself would trip over."""
    try:
        values = read_deepspeed(text)
    except UsageError as error:
        yield Problem(error.message, error.where, error.fix)
        return
    for name, instead in _NOT_HERE.items():
        if values.get(name):
            yield Problem(f"{name} of a DeepSpeed configuration is not used here", "--deepspeed", instead)
    if values.get("bf16", {}).get("enabled") is True and values.get("fp16", {}).get("enabled") is True:
        yield Problem("the DeepSpeed configuration enables bf16 and fp16", "--deepspeed", "enable one of them")
    kind = str((values.get("optimizer") or {}).get("type", "adamw")).lower()
    if kind not in _OPTIMIZERS:
        yield Problem(
            f"the optimizer {values['optimizer']['type']!r} of the DeepSpeed configuration is not known here",
            "--deepspeed",
            f"one of {', '.join(sorted(_OPTIMIZERS))}, or leave it out and use --optim",
        )
    batch = values.get("train_batch_size", AUTO)
    micro, steps = values.get("train_micro_batch_size_per_gpu", AUTO), values.get("gradient_accumulation_steps", AUTO)
    if batch != AUTO and (micro == AUTO or steps == AUTO):
        yield Problem(
            "train_batch_size depends on the number of processes",
            "--deepspeed",
            'write "auto" for it, and give --per_device_train_batch_size and --gradient_accumulation_steps',
        )
    zero = values.get("zero_optimization") or {}
    stage = zero.get("stage", 0)
    if stage == 0:
        yield Problem(
            "ZeRO stage 0 shards nothing: it is what runs without --deepspeed",
            "--deepspeed",
            "leave --deepspeed out, or use zero1, zero2 or zero3",
        )
    elif stage not in (1, 2, 3):
        yield Problem(f"there is no ZeRO stage {stage!r}", "--deepspeed", "1, 2 or 3")
    for part in ("offload_optimizer", "offload_param"):
        device = (zero.get(part) or {}).get("device", "none")
        if device not in ("none", "cpu"):
            yield Problem(
                f"{part} to {device} of a DeepSpeed configuration is not supported here",
                "--deepspeed",
                '{"device": "cpu"}',
            )
    if values.get("bf16", {}).get("check_grad_overflow") is False:
        yield Problem(
            "check_grad_overflow false would train on gradients that aren't finite", "--deepspeed", "leave it out"
        )


def zero_stage(values: dict[str, Any]) -> int:
    """The ZeRO stage of a configuration."""
    return int((values.get("zero_optimization") or {}).get("stage", 0))


@dataclass(frozen=True)
class Filling:
    """The numbers that `auto` stands for.

    Attributes:
        world_size: data-parallel processes; hidden: the model's hidden size, which bucket sizes follow.
    """

    micro_batch: int
    world_size: int
    clipping: float
    dtype: str
    hidden: int


def filled(values: dict[str, Any], filling: Filling) -> dict[str, Any]:
    """The configuration as DeepSpeed takes it: every `auto` filled, and the loop's own parts taken out.

    Gradient accumulation is the loop's: a step may have fewer micro-batches at the end of an epoch, so DeepSpeed is
    told which micro-batch is the last one.
    """
    result = json.loads(json.dumps(values))
    result["train_micro_batch_size_per_gpu"] = filling.micro_batch
    result["gradient_accumulation_steps"] = 1
    result["train_batch_size"] = filling.micro_batch * filling.world_size
    result["gradient_clipping"] = filling.clipping
    for part, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if part in result or filling.dtype == dtype:
            result.setdefault(part, {})["enabled"] = filling.dtype == dtype
    zero = result.setdefault("zero_optimization", {"stage": 0})
    square = filling.hidden * filling.hidden
    buckets = {
        "reduce_bucket_size": square,
        "allgather_bucket_size": square,
        "stage3_prefetch_bucket_size": int(0.9 * square),
        "stage3_param_persistence_threshold": 10 * filling.hidden,
    }
    for name, size in buckets.items():
        if zero.get(name) == AUTO:
            zero[name] = size
    result.pop("optimizer", None)  # the optimizer is built here, with the groups that the rates hang on
    result.setdefault("zero_allow_untested_optimizer", True)
    result.setdefault("zero_force_ds_cpu_optimizer", False)
    result.setdefault("wall_clock_breakdown", False)
    return _without_auto(result, "")


def _without_auto(value: Any, path: str) -> Any:
    if value == AUTO:
        raise UsageError(f'{path} of the DeepSpeed configuration can\'t be "auto"', where="--deepspeed", fix="give it")
    if isinstance(value, dict):
        return {key: _without_auto(item, f"{path}.{key}".lstrip(".")) for key, item in value.items()}
    return value
