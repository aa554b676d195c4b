"""Which classes a run has: those of the checkpoint that it starts from, of the settings, or of its rows.

Labels are read before anything is encoded, since the size of the head and the numbers of names depend on all rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swift.config.commands import TrainConfig
from swift.config.task import TaskConfig
from swift.core.errors import DataError
from swift.data.labels import LabelCounts, collect_labels
from swift.models.kinds import ModelKind, read_task, stored_kind
from swift.models.loading import load_configuration, resolve_model

_SHOWN = 8
_RARE = 10.0  # how many times more rows the largest class has than the smallest before it is said


def read_labels(config: TrainConfig, settings: TaskConfig) -> LabelCounts:
    """The classes of a run, and how often each occurs.

    Raises:
        DataError: no row has a label, one has a label that is none of the classes, or all rows have the same one.
    """
    kind: ModelKind = "seq_cls" if settings.task_type == "seq_cls" else "token_cls"
    datasets = [*config.data.dataset, *config.data.val_dataset]
    names = tuple(settings.label_names) or stored_names(config, kind)
    problem = settings.problem_type if kind == "seq_cls" else "single_label_classification"
    found = collect_labels(
        datasets,
        config.data,
        layout="labelled" if kind == "seq_cls" else "tokens",
        label_names=() if problem == "regression" else names,
        num_labels=settings.num_labels,
        problem=problem,
    )
    for label, place in found.out_of_range.items():
        space = found.space
        known = ", ".join(space.names[:12]) or f"whole numbers from 0 to {space.num_labels - 1}"
        raise DataError(
            f"label {label!r} is none of the {space.num_labels} classes: {known}",
            where=place,
            fix="correct the row, or give all classes with --num_labels or --label_names; a model that has classes "
            "already keeps them",
        )
    if found.all_same:
        (label,) = found.counts
        raise DataError(
            f"all {found.rows} rows have the label {label!r}: there is nothing to learn",
            where=", ".join(datasets),
            fix="add rows of other classes" if isinstance(label, int | str) else "add rows with other values",
        )
    return found


def stored_names(config: TrainConfig, kind: ModelKind) -> tuple[str, ...]:
    """The names of the classes of the adapter or model that training starts from, if it has a head of this kind."""
    for adapter in config.model.adapters:
        task = read_task(Path(adapter).expanduser())
        if task is not None and task.kind == kind and task.labels:
            return task.labels
    folder = resolve_model(config.model)
    task = read_task(folder)
    if task is not None:
        return task.labels if task.kind == kind else ()
    described: Any = load_configuration(folder, config.model)
    if stored_kind(described) != kind:
        return ()
    names = tuple(str(described.id2label[number]) for number in sorted(described.id2label))
    return () if all(name == f"LABEL_{number}" for number, name in enumerate(names)) else names


def label_notes(found: LabelCounts) -> list[str]:
    """What the user should know of the classes."""
    space = found.space
    if space.problem == "regression":
        numbers = "a number" if space.num_labels == 1 else f"{space.num_labels} numbers"
        return [f"regression: {numbers} for each of {found.rows} rows"]
    ordered = found.counts.most_common()
    shown = ", ".join(f"{label} {count}" for label, count in ordered[:_SHOWN]) + (
        ", …" if len(ordered) > _SHOWN else ""
    )
    several = " (a text can have several)" if space.problem == "multi_label_classification" else ""
    notes = [f"{space.num_labels} classes{several}, found in {found.rows} rows: {shown}"]
    never = [name for number, name in enumerate(space.names) if name not in found.counts and number not in found.counts]
    if never:
        notes.append(f"no row has the label {', '.join(never[:_SHOWN])}{', …' if len(never) > _SHOWN else ''}")
    (first, most), (last, least) = ordered[0], ordered[-1]
    if most > _RARE * least and not any(str(label).startswith(("B-", "I-")) for label in found.counts):
        notes.append(
            f"{first} has {most / least:.0f} times as many as {last}: look at f1_macro, and at --class_weights"
        )
    if found.bad:
        notes.append(f"{found.bad} rows have no label that can be read")
    return notes
