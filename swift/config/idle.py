"""Settings that somebody gave and that have no effect beside the others: said, so that nobody waits for one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from swift.config.checks import has_evaluation_rows
from swift.config.files import COMMAND_LINE
from swift.config.preference_checks import READ_BY as READ_BY_METHODS
from swift.config.task_checks import READ_BY as READ_BY_TASKS

_LOW_RANK = ("lora", "adalora", "loha", "lokr")
_ADAPTERS = (*_LOW_RANK, "ia3", "vera", "boft", "oft", "fourierft", "miss", "bone", "hra")
_ADAM = ("adamw", "adamw_torch", "adamw_torch_fused")
_FALLING = ("cosine", "linear", "wsd", "cosine_with_min_lr", "inverse_sqrt", "polynomial")

_SAMPLING = ("max_completion_length", "temperature", "top_p", "top_k")
_STREAMED = ("shuffle_buffer_size", "on_bad_shard")

# the setting that decides -> setting -> the values of the first with which the second works
_WORKS_WITH: dict[str, dict[str, Collection[str]]] = {
    "optim": {"adam_beta1": _ADAM, "adam_beta2": _ADAM, "adam_epsilon": _ADAM},
    "lr_scheduler_type": {"min_lr_ratio": _FALLING, "decay_ratio": ("wsd",)},
    "rlhf_type": dict(READ_BY_METHODS),
    "task_type": dict(READ_BY_TASKS),
    "tuner_type": {
        "target_modules": _ADAPTERS,
        "target_regex": _ADAPTERS,
        "target_parameters": _ADAPTERS,
        "modules_to_save": _ADAPTERS,
        "init_weights": _ADAPTERS,
        "lora_rank": ("lora", "loha", "lokr", "miss", "bone", "hra"),
        "lora_alpha": _LOW_RANK,
        "lora_dropout": (*_LOW_RANK, "vera", "boft", "oft", "miss", "bone"),
        "lora_bias": ("lora", "adalora", "ia3", "vera", "boft", "oft", "fourierft", "miss", "bone", "hra"),
        "adalora_target_r": ("adalora",),
        "adalora_init_r": ("adalora",),
        "adalora_orth_reg_weight": ("adalora",),
        "vera_rank": ("vera",),
        "vera_d_initial": ("vera",),
        "boft_block_size": ("boft",),
        "boft_n_butterfly_factor": ("boft",),
        "oft_block_size": ("oft",),
        "fourier_n_frequency": ("fourierft",),
        "fourier_scaling": ("fourierft",),
    },
}


def idle_notes(values: Mapping[str, Any], origins: Mapping[str, str]) -> list[str]:
    """One line for each deciding setting, about the settings that do nothing beside it.

    Args:
        values: every setting by name.
        origins: where the given ones came from; those taken from a checkpoint were not asked for now.
    """
    given = [name for name, origin in origins.items() if origin != "checkpoint"]
    notes = []
    for decider, settings in _WORKS_WITH.items():
        choice = values.get(decider)
        idle = [name for name in given if name in settings and name in values and choice not in settings[name]]
        if choice is not None and idle:
            notes.append(f"note: {_listed(idle)} nothing with {decider} {choice}")
    if not values.get("streaming"):
        idle = [name for name in given if name in _STREAMED]
        notes += [f"note: {_listed(idle)} nothing without streaming true"] if idle else []
    if "dataloader_prefetch_factor" in given and not values.get("dataloader_num_workers"):
        notes.append("note: dataloader_prefetch_factor does nothing without dataloader_num_workers")
    mixed = any(values.get(name) for name in ("interleave_prob", "mix_temperature", "mix_epochs", "curriculum"))
    if mixed and values.get("dataloader_num_workers") and not values.get("streaming"):
        idle = [name for name in given if name in ("dataloader_num_workers", "dataloader_prefetch_factor")]
        notes += [f"note: {_listed(idle)} nothing for prepared rows that are mixed"] if idle else []
    if "augment" in given and values.get("augment") and values.get("cached_dataset") and not values.get("dataset"):
        notes.append("note: augment does nothing: cached_dataset holds rows as they were when it was made")
    if "dataset_num_proc" in given and values.get("streaming") and not values.get("val_dataset"):
        notes.append("note: dataset_num_proc does nothing with streaming: see dataloader_num_workers")
    if "warmup_ratio" in given and values.get("warmup_ratio") and values.get("warmup_steps"):
        notes.append("note: warmup_ratio does nothing: warmup_steps overrides it")
    # a flag that shortens the run of a file is meant to; a flag that a file overrides is not
    shortened = origins.get("max_steps") == COMMAND_LINE != origins.get("num_train_epochs")
    if "num_train_epochs" in given and values.get("max_steps", -1) > 0 and not shortened:
        notes.append("note: num_train_epochs does nothing: max_steps overrides it")
    return (
        notes + _of_preference(values, given) + _of_parallelism(values, given) + _without_evaluation_rows(values, given)
    )


def _of_preference(values: Mapping[str, Any], given: Collection[str]) -> list[str]:
    notes: list[str] = []
    if values.get("disable_dropout") and "lora_dropout" in given and values["lora_dropout"]:
        notes.append("note: lora_dropout does nothing: disable_dropout true switches it off")
    if values.get("rlhf_type") == "gkd" and not values["lmbda"] and not values["seq_kd"]:
        idle = [name for name in given if name in _SAMPLING]
        notes += [f"note: {_listed(idle)} nothing with lmbda 0 and seq_kd false"] if idle else []
    return notes


def _of_parallelism(values: Mapping[str, Any], given: Collection[str]) -> list[str]:
    """Settings of an axis that has no length."""
    notes: list[str] = []
    if values.get("parallel", "auto") == "auto":
        return notes
    if values["fsdp"] == "none" and not values["deepspeed"]:
        idle = [name for name in given if name in ("zero_stage", "reduce_dtype")]
        notes += [f"note: {_listed(idle)} nothing without fsdp"] if idle else []
    if values["pipeline_parallel_size"] == 1:
        idle = [name for name in given if name in ("pipeline_schedule", "pipeline_stages_per_rank")]
        notes += [f"note: {_listed(idle)} nothing with pipeline_parallel_size 1"] if idle else []
    if "attention_impl" in given and values["sequence_parallel_size"] == 1:
        notes.append("note: attention_impl does nothing with sequence_parallel_size 1")
    if values["nnodes"] == 1:
        idle = [name for name in given if name in ("node_rank", "master_addr", "master_port")]
        notes += [f"note: {_listed(idle)} nothing with nnodes 1"] if idle else []
    return notes


def _without_evaluation_rows(values: Mapping[str, Any], given: Collection[str]) -> list[str]:
    """The settings of an evaluation that has no rows: scripts carry them whether or not there are any."""
    if "eval_strategy" not in values or has_evaluation_rows(values):
        return []
    idle = [name for name in given if name in ("eval_steps", "per_device_eval_batch_size")]
    if "eval_strategy" in given and values["eval_strategy"] in ("steps", "epoch"):
        idle.append("eval_strategy")
    return [f"note: {_listed(idle)} nothing without evaluation rows (val_dataset, split_dataset_ratio)"] if idle else []


def _listed(names: list[str]) -> str:
    return f"{', '.join(names)} {'does' if len(names) == 1 else 'do'}"
