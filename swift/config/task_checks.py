"""What is wrong with the settings of a task (classes, vectors, scores), seen from the settings alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from swift.config.resolve import Problem
from swift.config.task import AnsweredTaskConfig, TaskConfig
from swift.core.errors import nearest

Fault = Callable[..., Problem]  # (names, message, fix) -> the problem with its place

_CLASSES = ("seq_cls", "token_cls")
_RERANKERS = ("reranker", "generative_reranker")
_VECTORS = ("embedding",)
# setting -> the tasks that read it
READ_BY: dict[str, tuple[str, ...]] = {
    "problem_type": ("seq_cls",),
    "num_labels": _CLASSES,
    "label_names": _CLASSES,
    "class_weights": _CLASSES,
    "pooling": ("seq_cls", "embedding", "reranker"),
    "positive_word": ("generative_reranker",),
    "negative_word": ("generative_reranker",),
    **dict.fromkeys((name for name in TaskConfig.__dataclass_fields__ if name.startswith("infonce_")), _VECTORS),
    "max_positive_samples": (*_VECTORS, *_RERANKERS),
    "max_negative_samples": (*_VECTORS, *_RERANKERS),
    "mrl_dims": _VECTORS,
    "mrl_dim": _VECTORS,
    "reranker_use_activation": _RERANKERS,
}
_LOSSES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("causal_lm", *_CLASSES), ("cross_entropy",)),
    "embedding": ("infonce", "cosine_similarity", "contrastive", "online_contrastive", "cosent"),
    **dict.fromkeys(_RERANKERS, ("pointwise", "listwise")),
}

_OF_CLASSES = ("f1_macro", "f1_micro", "f1_weighted", "precision_macro", "recall_macro", "f1/<class>")
_RANKS = ("mrr", "ndcg", *(f"{name}@{cut}" for name in ("ndcg", "recall") for cut in (1, 5, 10)))
# task -> what its evaluations measure
METRICS: dict[str, tuple[str, ...]] = {
    "seq_cls": (
        *("loss", "accuracy", *_OF_CLASSES, "auc"),
        *("absolute_error", "mse", "mae", "r2", "pearson", "spearman"),
    ),
    "token_cls": ("loss", "token_loss", "token_accuracy", "accuracy", *_OF_CLASSES),
    "embedding": ("loss", "accuracy", *_RANKS, "cosine_pearson", "cosine_spearman"),
    **dict.fromkeys(_RERANKERS, ("loss", "accuracy", *_RANKS, "auc")),
}
# setting -> (lowest, highest, whether the lowest itself is allowed, whether the highest is)
TASK_RANGES: dict[str, tuple[float, float | None, bool, bool]] = {
    "num_labels": (1, None, True, True),
    "infonce_temperature": (0, None, False, True),
    "infonce_hard_negatives": (1, None, True, True),
    "infonce_fake_neg_margin": (0, None, True, True),
    "max_positive_samples": (1, None, True, True),
    "max_negative_samples": (1, None, True, True),
    "mrl_dim": (1, None, True, True),
}


def task_faults(values: Mapping[str, Any], fault: Fault, *, plain_text: bool = False) -> Iterator[Problem]:
    """The rules of tasks.

    Args:
        values: every setting by name; those of a command without tasks bring none.
        fault: makes a problem of the settings' names, a message and a fix.
        plain_text: the command trains on plain text, which has no labels.
    """
    if "task_type" not in values:
        return
    if plain_text and values["task_type"] != "causal_lm":
        yield fault(
            "task_type",
            f"task_type {values['task_type']} needs rows of its own, and `swift pt` trains on plain text",
            "swift sft (from a checkpoint of pt, if you like)",
        )
        return
    yield from _unread(values, fault)
    if "num_labels" not in values:
        return
    yield from _losses(values, fault)
    yield from _classes(values, fault)
    yield from _vectors(values, fault)
    yield from _metrics(values, fault)
    task = values["task_type"]
    if task == "generative_reranker" and values["positive_word"] == values["negative_word"]:
        yield fault("positive_word negative_word", "positive_word and negative_word are the same")
    if task != "causal_lm":
        for name in ("enable_dft_loss", "label_smoothing_factor"):
            if values[name]:
                yield fault(f"{name} task_type", f"{name} does nothing with task_type {task}", "leave it out")


def _unread(values: Mapping[str, Any], fault: Fault) -> Iterator[Problem]:
    task = values["task_type"]
    defaults = {**vars(AnsweredTaskConfig()), **vars(TaskConfig())}
    for name, tasks in READ_BY.items():
        if name not in values or task in tasks or values[name] == defaults[name]:
            continue
        if name == "num_labels" and values[name] == 1 and task in _RERANKERS:  # a score is one number
            continue
        yield fault(
            f"{name} task_type", f"{name} does nothing with task_type {task}", f"leave it out; it is for {_or(tasks)}"
        )


def _losses(values: Mapping[str, Any], fault: Fault) -> Iterator[Problem]:
    task, loss = values["task_type"], values["loss_type"]
    known = _LOSSES[task]
    if loss is not None and loss not in known:
        yield fault(
            "loss_type task_type",
            f"{loss} is no loss_type of task_type {task}, whose are: {', '.join(known)}",
            f"--task_type {_or([name for name, losses in _LOSSES.items() if loss in losses])}",
        )
    if task != "embedding" or loss in (None, "infonce"):
        return
    defaults = TaskConfig()
    for name in READ_BY:
        if name.startswith("infonce_") and values[name] != getattr(defaults, name):
            yield fault(f"{name} loss_type", f"{name} does nothing with loss_type {loss}", "--loss_type infonce")


def _classes(values: Mapping[str, Any], fault: Fault) -> Iterator[Problem]:
    task, problem = values["task_type"], values["problem_type"]
    if task not in _CLASSES:
        return
    count, names, weights = values["num_labels"], values["label_names"], values["class_weights"]
    single = task == "token_cls" or problem == "single_label_classification"
    if single and count == 1:
        yield fault(
            "num_labels",
            "num_labels must be at least 2: a single class tells nothing",
            "--problem_type regression, if the labels are numbers" if task == "seq_cls" else None,
        )
    if len(set(names)) != len(names):
        yield fault("label_names", f"a class is named twice: {' '.join(names)}")
    if names and count is not None and len(names) != count:
        yield fault("label_names num_labels", f"label_names has {len(names)} name(s), and num_labels is {count}")
    classes = count if count is not None else len(names) or None
    if weights and classes is not None and len(weights) != classes:
        yield fault("class_weights num_labels", f"class_weights has {len(weights)} value(s) for {classes} classes")
    if any(not (math.isfinite(weight) and weight > 0) for weight in weights):
        yield fault("class_weights", "class_weights must be numbers above 0")
    if problem == "regression":
        for name in ("label_names", "class_weights"):
            if values[name]:
                yield fault(f"{name} problem_type", f"{name} is for classes, and problem_type is regression")


def _metrics(values: Mapping[str, Any], fault: Fault) -> Iterator[Problem]:
    task, metric = values["task_type"], values.get("metric_for_best_model", "loss").removeprefix("eval_")
    if task not in METRICS:
        return
    plain = metric.split("/")[0] if task == "embedding" else metric  # of vectors cut to a size
    if plain not in METRICS[task] and not (metric.startswith("f1/") and task in _CLASSES):
        close = nearest(metric, METRICS[task])
        yield fault(
            "metric_for_best_model task_type",
            f"metric_for_best_model {metric!r} is not measured with task_type {task}",
            (f"did you mean {close[0]}? " if close else "") + f"there are: {', '.join(METRICS[task])}",
        )


def _vectors(values: Mapping[str, Any], fault: Fault) -> Iterator[Problem]:
    dims = values["mrl_dims"]
    if any(size < 1 for size in dims) or len(set(dims)) != len(dims):
        yield fault(
            "mrl_dims", f"mrl_dims must be different numbers above 0: {' '.join(map(str, dims))}", "128 256 512"
        )
    if values["infonce_use_batch"] or values["task_type"] != "embedding":
        return
    for name in ("infonce_include_qq", "infonce_include_dd"):
        if values[name]:
            yield fault(
                f"{name} infonce_use_batch",
                f"{name} takes negatives from the other units of a step, which infonce_use_batch false leaves out",
                "leave one of them out",
            )


def _or(names: Any) -> str:
    return " or ".join(names)
