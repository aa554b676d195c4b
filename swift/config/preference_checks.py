"""What is wrong with the settings of preference tuning and distillation, seen from the settings alone.

Which method reads which setting is said here once: a value that its method never reads is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from swift.config.deepspeed import read_deepspeed, zero_stage
from swift.config.preference import (
    LOSSES,
    OF_DIFFERENCE,
    SMOOTHED,
    SORTED,
    WITH_REFERENCE,
    DistillConfig,
    PreferenceConfig,
    reference_way,
    why_not_adapter_off,
)
from swift.config.resolve import Problem
from swift.config.tuner import TunerConfig
from swift.core.errors import UsageError, nearest

Fault = Callable[..., Problem]  # (names, message, fix) -> the problem with its place

_SIMPO = ("simpo",)
_GKD = ("gkd",)
# setting -> the methods that read it
READ_BY: dict[str, tuple[str, ...]] = {
    "loss_type": ("dpo", "cpo", "simpo", "kto"),
    "loss_weights": ("dpo", "cpo", "simpo", "kto"),
    "beta": ("dpo", "orpo", "simpo", "kto", "cpo", "gkd"),
    "label_smoothing": ("dpo", "cpo", "simpo"),
    **dict.fromkeys(
        (
            *("reference", "precompute_ref_log_probs", "ref_model", "ref_adapters", "reference_free"),
            *("sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha"),
        ),
        WITH_REFERENCE,
    ),
    **dict.fromkeys(
        ("rpo_alpha", "ld_alpha", "discopop_tau", "f_divergence_type", "f_alpha_divergence_coef", "use_weighting"),
        ("dpo",),
    ),
    "simpo_gamma": _SIMPO,
    "alphapo_alpha": _SIMPO,
    "cpo_alpha": ("cpo", "simpo"),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "center_rewards_coefficient": ("rm",),
    **dict.fromkeys(DistillConfig.__dataclass_fields__, _GKD),
}

_PAIR_METRICS = (
    "loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen",
    "logps/rejected", "nll",
)  # fmt: skip
_REFERENCE_METRICS = ("logps/ref_chosen", "logps/ref_rejected", "kl")
# what an evaluation measures
METRICS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("orpo", "cpo", "simpo"), _PAIR_METRICS),
    "dpo": (*_PAIR_METRICS, *_REFERENCE_METRICS),
    "kto": (
        *("loss", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "kto_z0"),
        *_REFERENCE_METRICS,
    ),
    "rm": ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "rewards/mean"),
    "gkd": ("loss", "divergence", "nll", "teacher_nll", "student_entropy", "token_accuracy", "agreement"),
}

# setting -> (lowest, highest, whether the lowest itself is allowed, whether the highest is)
PREFERENCE_RANGES: dict[str, tuple[float, float | None, bool, bool]] = {
    "label_smoothing": (0, 0.5, True, False),
    "ref_model_sync_steps": (1, None, True, True),
    "ref_model_mixup_alpha": (0, 1, False, True),
    "rpo_alpha": (0, None, True, True),
    "ld_alpha": (0, 1, True, True),
    "discopop_tau": (0, None, False, True),
    "simpo_gamma": (0, None, True, True),
    "cpo_alpha": (0, None, True, True),
    "desirable_weight": (0, None, False, True),
    "undesirable_weight": (0, None, False, True),
    "center_rewards_coefficient": (0, None, True, True),
    "lmbda": (0, 1, True, True),
    "max_completion_length": (1, None, True, True),
    "distill_temperature": (0, None, False, True),
    "gkd_logits_topk": (1, None, True, True),
    "sft_alpha": (0, None, True, True),
}


def preference_faults(values: Mapping[str, Any], fault: Fault) -> Iterator[Problem]:
    """The rules of preference tuning.

    Args:
        values: every setting by name; those of a command without it bring none.
        fault: makes a problem of the settings' names, a message and a fix.
    """
    if "rlhf_type" not in values:
        return
    method = values["rlhf_type"]
    yield from _unread(values, fault)
    if values["use_chat_template"] is False and values["truncation_strategy"] == "split":
        yield fault("truncation_strategy", "an answer that is preferred, or not, can't be cut into rows")
    yield from _metric(values, fault)
    if method in LOSSES:
        yield from _losses(values, fault)
    yield from _beta(values, fault)
    if method == "dpo":
        yield from _variants(values, fault)
    if method in WITH_REFERENCE:
        yield from _reference(values, fault)
    if method == "kto":
        yield from _kto(values, fault)
    if method == "gkd":
        yield from _teacher(values, fault)
        yield from _distillation(values, fault)


def _unread(values: Mapping[str, Any], fault: Fault) -> Iterator[Problem]:
    method = values["rlhf_type"]
    defaults = {**vars(PreferenceConfig()), **vars(DistillConfig())}
    for name, methods in READ_BY.items():
        if method not in methods and values[name] != defaults[name]:
            yield fault(
                f"{name} rlhf_type",
                f"{name} does nothing with rlhf_type {method}",
                f"leave it out; it is for {' and '.join(methods)}",
            )


def _metric(values: Mapping[str, Any], fault: Fault) -> Iterator[Problem]:
    method, metric = values["rlhf_type"], values.get("metric_for_best_model", "loss").removeprefix("eval_")
    if metric not in METRICS[method]:
        close = nearest(metric, METRICS[method])
        yield fault(
            "metric_for_best_model rlhf_type",
            f"metric_for_best_model {metric!r} is not measured with rlhf_type {method}",
            (f"did you mean {close[0]}? " if close else "") + f"there are: {', '.join(METRICS[method])}",
        )


def _losses(values: Mapping[str, Any], fault: Fault) -> Iterator[Problem]:
    method, names, weights = values["rlhf_type"], values["loss_type"], values["loss_weights"]
    known = LOSSES[method]
    for name in names:
        if name not in known:
            other = next(m for m, losses in LOSSES.items() if name in losses)
            yield fault(
                "loss_type rlhf_type",
                f"{name} is no loss_type of rlhf_type {method}, whose are: {', '.join(known)}",
                f"--rlhf_type {other}",
            )
    if len(set(names)) != len(names):
        yield fault("loss_type", f"a loss_type is named twice: {' '.join(names)}", "add up their loss_weights")
    if weights and len(weights) != max(1, len(names)):
        yield fault(
            "loss_weights loss_type",
            f"loss_weights has {len(weights)} value(s) for {max(1, len(names))} loss_type(s)",
            "give one for each, in their order",
        )
    if any(not 0 <= weight < float("inf") for weight in weights) or (weights and not any(weights)):
        yield fault("loss_weights", f"loss_weights must be numbers from 0 on, one above it: {_words(weights)}")
    used = names or ["sigmoid" if method in ("dpo", "cpo") else method]
    if "exo_pair" in used and not values["label_smoothing"]:
        yield fault(
            "label_smoothing loss_type",
            "exo_pair compares with how sure the labels are, and label_smoothing 0 says that they are certain",
            "--label_smoothing 0.001",
        )
    if values["label_smoothing"] and method in READ_BY["label_smoothing"] and not set(used) & set(SMOOTHED):
        yield fault(
            "label_smoothing loss_type",
            f"label_smoothing does nothing with loss_type {' '.join(used)}",
            f"leave it out; it is for {', '.join(SMOOTHED)}",
        )
    if values["discopop_tau"] != PreferenceConfig.discopop_tau and method == "dpo" and "discopop" not in used:
        yield fault("discopop_tau loss_type", "discopop_tau is for loss_type discopop", "--loss_type discopop")


def _beta(values: Mapping[str, Any], fault: Fault) -> Iterator[Problem]:
    beta = values["beta"]
    if beta is None or values["rlhf_type"] not in READ_BY["beta"]:
        return
    if values["rlhf_type"] == "gkd":
        if not 0 <= beta <= 1:
            yield fault(
                "beta", f"beta must be at least 0 (forward KL) and at most 1 (reverse KL) with gkd, not {beta:g}"
            )
    elif not 0 < beta < float("inf"):
        yield fault("beta", f"beta must be a finite number above 0, not {beta:g}", "0.1 is usual")


def _variants(values: Mapping[str, Any], fault: Fault) -> Iterator[Problem]:
    """What can be put on top of DPO, and with which losses."""
    used = values["loss_type"] or ["sigmoid"]
    if values["use_weighting"] and (found := [name for name in used if name in SORTED]):
        yield fault(
            "use_weighting loss_type",
            f"use_weighting weighs single pairs, and {found[0]} compares sorted ones, which belong to none",
            "leave one of them out",
        )
    if values["rpo_alpha"] and "sft" in used:
        yield fault(
            "rpo_alpha loss_type",
            f"rpo_alpha {values['rpo_alpha']:g} adds the loss sft, and loss_type names it as well",
            "--rpo_alpha 0, and its weight in loss_weights",
        )
    divergence = values["f_divergence_type"]
    if divergence != "reverse_kl" and (found := [name for name in used if name not in OF_DIFFERENCE]):
        yield fault(
            "f_divergence_type loss_type",
            f"f_divergence_type {divergence} changes the difference of two rewards, and {found[0]} isn't made of one",
            f"leave it out; it goes with {', '.join(OF_DIFFERENCE[:-1])}",
        )
    if divergence != "reverse_kl" and values["reference_free"]:
        yield fault(
            "f_divergence_type reference_free",
            "reference_free leaves no reference to be held near to",
            "leave one of them out",
        )
    if values["f_alpha_divergence_coef"] != 1.0 and divergence != "alpha_divergence":
        yield fault(
            "f_alpha_divergence_coef f_divergence_type",
            f"f_alpha_divergence_coef does nothing with f_divergence_type {divergence}",
            "--f_divergence_type alpha_divergence",
        )


def _reference(values: Mapping[str, Any], fault: Fault) -> Iterator[Problem]:
    asked = values["reference"]
    named = [name for name in ("ref_model", "ref_adapters") if values[name]]
    if values["precompute_ref_log_probs"] and asked not in ("auto", "precompute"):
        yield fault(
            "precompute_ref_log_probs reference",
            f"precompute_ref_log_probs true and reference {asked} exclude each other",
            "leave one of them out",
        )
        return
    if values["reference_free"]:
        idle = [*named, *(name for name in ("sync_ref_model", "precompute_ref_log_probs") if values[name])]
        idle += ["reference"] if asked != "auto" else []
        for name in idle:
            yield fault(
                f"{name} reference_free", f"{name} does nothing: reference_free true takes none", "leave one out"
            )
        return
    preference = PreferenceConfig(**{name: values[name] for name in PreferenceConfig.__dataclass_fields__})
    tuner = TunerConfig(**{name: values[name] for name in TunerConfig.__dataclass_fields__})
    way = reference_way(preference, tuner, values["adapters"])
    if way == "adapter_off" and named:
        yield fault(
            f"{named[0]} reference",
            f"reference adapter_off is the model itself, and {named[0]} names another one",
            "--reference precompute",
        )
    elif way == "copy" and named:
        yield fault(
            f"{named[0]} reference",
            f"reference copy is a copy of the model that is trained, and {named[0]} names another one",
            "--reference precompute",
        )
    elif way == "adapter_off" and (reason := why_not_adapter_off(tuner, values["adapters"])):
        yield fault("reference", f"reference adapter_off isn't the model before training: {reason}", "leave it out")
    if way == "precompute" and values["streaming"]:
        yield fault(
            "reference streaming" if asked != "auto" else "streaming reference",
            "the reference's log-probabilities can't be worked out before rows are read",
            "--reference copy holds a second model; or leave streaming out",
        )
    if way == "copy" and values["deepspeed"] and _puts_weights_away(values["deepspeed"]):
        yield fault(
            "reference deepspeed",
            "a copy is exchanged with the model's weights, and ZeRO stage 3 has put those away",
            "--deepspeed zero2; or --reference precompute",
        )
    yield from _sync(values, fault, way)


def _puts_weights_away(deepspeed: str) -> bool:
    """Whether the configuration's ZeRO stage shards weights; one that can't be read is told by its own check."""
    try:
        return zero_stage(read_deepspeed(deepspeed)) == 3
    except UsageError:
        return False


def _sync(values: Mapping[str, Any], fault: Fault, way: str) -> Iterator[Problem]:
    if values["sync_ref_model"] and way != "copy":
        yield fault(
            "sync_ref_model reference",
            f"sync_ref_model moves a reference model, and with reference {way} there is none to move",
            "--reference copy holds a second model",
        )
    for name in ("ref_model_sync_steps", "ref_model_mixup_alpha"):
        if values[name] != getattr(PreferenceConfig, name) and not values["sync_ref_model"]:
            yield fault(
                f"{name} sync_ref_model", f"{name} does nothing without sync_ref_model", "--sync_ref_model true"
            )


def _kto(values: Mapping[str, Any], fault: Fault) -> Iterator[Problem]:
    """KTO measures how far the model has moved on answers to other rows, as a mean over a step: one row tells little,
    and has no other one beside it in a stream."""
    if "kto" in (values["loss_type"] or ["kto"]) and _rows_of_a_step(values) == 1:
        yield fault(
            "per_device_train_batch_size gradient_accumulation_steps global_batch_size",
            "kto's reference point is a mean over the rows of a step, and a step has only one",
            "--gradient_accumulation_steps 16; or --loss_type apo_zero_unpaired, which needs no other rows",
        )


def _rows_of_a_step(values: Mapping[str, Any]) -> int | None:
    """As far as it is known here; None if the program chooses."""
    if values["global_batch_size"] is not None:
        return values["global_batch_size"]
    if values["gradient_accumulation_steps"] is None:
        return None
    environ = os.environ
    given = environ.get("WORLD_SIZE") or values["nproc_per_node"] or environ.get("NPROC_PER_NODE") or 1
    machines = 1 if "WORLD_SIZE" in environ else values["nnodes"] or environ.get("NNODES") or 1
    sharing = 1
    for axis in ("tensor", "pipeline", "sequence"):
        sharing *= max(1, values[f"{axis}_parallel_size"])
    try:
        ranks = max(1, int(given) * int(machines) // sharing)
    except ValueError:  # said by the check of the environment
        return None
    return values["per_device_train_batch_size"] * values["gradient_accumulation_steps"] * ranks


_TEACHERS = ("teacher_model", "teacher_model_server", "teacher_logits", "teacher_self")


def _teacher(values: Mapping[str, Any], fault: Fault) -> Iterator[Problem]:
    given = [name for name in _TEACHERS if values[name]]
    keeps = given == ["teacher_model", "teacher_logits"] or given == ["teacher_logits", "teacher_model"]
    if keeps:  # asked once about all rows; what it says is kept in the folder
        given = ["teacher_model"]
        if values["gkd_logits_topk"] is None:
            yield fault(
                "teacher_logits gkd_logits_topk",
                "teacher_logits keep a teacher's likeliest tokens, and gkd_logits_topk doesn't say how many",
                "--gkd_logits_topk 64",
            )
    if not given:
        yield fault(
            "teacher_model",
            "gkd needs a teacher, and none is given",
            "--teacher_model FOLDER, --teacher_model_server URL, --teacher_logits FOLDER or --teacher_self true",
        )
        return
    if len(given) > 1:
        yield fault(" ".join(given), f"there are several teachers: {', '.join(given)}", "keep one of them")
        return
    for name in ("teacher_adapters", "offload_teacher_model"):
        if values[name] and given != ["teacher_model"]:
            yield fault(f"{name} {given[0]}", f"{name} is for a teacher_model, not for {given[0]}", "leave it out")
    prompt = values["teacher_prompt"]
    if prompt and given != ["teacher_self"]:
        yield fault("teacher_prompt", "teacher_prompt is for teacher_self", "--teacher_self true")
    elif prompt and prompt.endswith(".txt") and "\n" not in prompt and not Path(prompt).expanduser().is_file():
        yield fault("teacher_prompt", f"there is no file {prompt} with the teacher's system prompt")
    server = values["teacher_model_server"]
    if server and not server.startswith(("http://", "https://")):
        yield fault(
            "teacher_model_server", f"teacher_model_server {server!r} is no address", "such as http://localhost:8000/v1"
        )
    if server and values["gkd_logits_topk"] is None:
        yield fault(
            "teacher_model_server gkd_logits_topk",
            "a server gives the likeliest tokens only, and gkd_logits_topk doesn't say how many",
            "--gkd_logits_topk 20",
        )
    folder = values["teacher_logits"]
    if folder and not keeps and not Path(folder).expanduser().is_dir():
        yield fault("teacher_logits", f"there is no folder {folder} of a teacher's logits")
    if values["topk_tail"] is not None and values["gkd_logits_topk"] is None and not folder:
        yield fault(
            "topk_tail gkd_logits_topk",
            "topk_tail does nothing while the whole vocabulary is compared",
            "--gkd_logits_topk 64",
        )


def _distillation(values: Mapping[str, Any], fault: Fault) -> Iterator[Problem]:
    generated = values["lmbda"] > 0
    if generated and values["teacher_logits"]:
        yield fault(
            "lmbda teacher_logits",
            f"teacher_logits hold no logits of answers that are yet to be generated, which lmbda {values['lmbda']:g} "
            "asks for",
            "--lmbda 0",
        )
    if values["seq_kd"] and values["teacher_logits"]:
        yield fault(
            "seq_kd teacher_logits", "teacher_logits are of the rows' own answers, and seq_kd has others written"
        )
    tuner = TunerConfig(**{name: values[name] for name in TunerConfig.__dataclass_fields__})
    why = why_not_adapter_off(tuner, values["adapters"])
    if values["teacher_self"] and tuner.tuner_type != "full" and why:
        yield fault(
            "teacher_self", f"teacher_self switches the adapter off, and that isn't the model before training: {why}"
        )
    if values["seq_kd"] and not (values["teacher_model"] or values["teacher_self"]):
        yield fault(
            "seq_kd",
            "seq_kd lets the teacher generate answers, which needs one that runs here",
            "--teacher_model FOLDER",
        )
    if values["on_policy_objective"] == "policy_gradient" and not generated:
        yield fault(
            "on_policy_objective lmbda",
            "on_policy_objective is for the model's own answers, and with lmbda 0 there are none",
            "--lmbda 1",
        )
    if values["on_policy_objective"] == "policy_gradient" and not (values["teacher_model"] or values["teacher_self"]):
        yield fault(
            "on_policy_objective",
            "the policy gradient needs a teacher that runs here",
            "--teacher_model FOLDER, or --on_policy_objective jsd",
        )
    if (generated or values["seq_kd"]) and values["temperature"] == 0:
        yield fault("temperature", "temperature must be above 0: answers are sampled", "0.9 is the default")


def _words(values: Collection[float]) -> str:
    return " ".join(f"{value:g}" for value in values)
