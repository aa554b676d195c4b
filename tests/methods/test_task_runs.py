"""`swift sft --task_type` from the user's level: however a step is cut, the same numbers; what it measures; what it
refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import assert_same_bits, trained
from safetensors.torch import load_file
from task_rows import TASKS, task_rows

from swift.commands.sft import sft
from swift.core.errors import SwiftError
from swift.models.kinds import read_task

BASE: dict[str, Any] = {
    "max_steps": 3,
    "logging_steps": 1,
    "max_length": 128,
    "learning_rate": 2e-4,
    "adam_epsilon": 1e-4,  # where gradients are rounding alone, Adam would make steps of them
    "tuner_type": "full",
    "torch_dtype": "float32",
    "add_version": False,
    "report_to": ["none"],
}
COUNT = 11  # the third step of four is a short one
LOSS_RTOL, NORM_RTOL, WEIGHTS_RTOL = 3e-6, 3e-5, 2e-6


def cut(size: int, accumulation: int) -> dict[str, Any]:
    return {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}


WHOLE = cut(4, 1)
VARIANTS: dict[str, dict[str, Any]] = {
    "1x4, padded": {**cut(1, 4), "padding_free": False, "group_by_length": False},
    "2x2": cut(2, 2),
    "1x4": cut(1, 4),
}
VARIANT = {name: list(VARIANTS)[number % len(VARIANTS)] for number, name in enumerate(TASKS)}
QUICK = ("weighted", "several", "mean", "spans", "infonce", "infonce_mean", "cosent", "rank_mean", "words_list")

Train = Callable[..., Path]


@pytest.fixture
def train(tiny_model_dir: Path, write_rows: Any, tmp_path: Path) -> Train:
    """Runs a task with these settings; gives the run's folder."""

    def run(folder: str, name: str, **more: Any) -> Path:
        everything = {**BASE, "model": str(tiny_model_dir), **TASKS[name], **more}
        if "dataset" not in everything:
            everything["dataset"] = [str(write_rows(tmp_path / f"{name}.jsonl", task_rows(name, COUNT)))]
        sft(**everything, output_dir=str(tmp_path / folder))
        return tmp_path / folder

    return run


def logged(folder: Path, key: str = "grad_norm") -> list[dict[str, float]]:
    lines = map(json.loads, (folder / "logging.jsonl").read_text().splitlines())
    return [line for line in lines if key in line]


def final(folder: Path) -> dict[str, torch.Tensor]:
    (checkpoint,) = folder.glob("checkpoint-*")
    return trained(checkpoint)


def assert_equal_runs(ours: Path, theirs: Path) -> None:
    """Losses, what is logged beside them, gradient norms, and the weights in the end."""
    lines, others = logged(ours), logged(theirs)
    assert len(lines) == len(others) > 0
    for a, b in zip(lines, others, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=LOSS_RTOL, abs=1e-9)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=NORM_RTOL)
        for name in {"accuracy", "token_accuracy", "absolute_error"} & b.keys():
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=2e-5), name
    left, right = final(ours), final(theirs)
    assert left.keys() == right.keys()
    difference = math.sqrt(sum(float((left[n] - right[n]).double().square().sum()) for n in left))
    norm = math.sqrt(sum(float(right[n].double().square().sum()) for n in right))
    assert difference / norm <= WEIGHTS_RTOL


@pytest.mark.parametrize("name", QUICK)
def test_how_a_step_of_a_task_is_cut_changes_nothing(name: str, train: Train) -> None:
    whole = train("whole", name, **WHOLE)
    assert_equal_runs(train("other", name, **VARIANTS[VARIANT[name]]), whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_no_way_of_cutting_a_step_of_a_task_changes_anything(name: str, train: Train) -> None:
    whole = train("whole", name, **WHOLE)
    for number, flags in enumerate(VARIANTS.values()):
        assert_equal_runs(train(f"other{number}", name, **flags), whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single", "spans", "infonce_alone", "listwise", "words_rank"])
def test_packed_rows_train_the_same_units(name: str, train: Train) -> None:
    """One row holds all units, so that a step has the same ones."""
    packed = {"packing": True, "packing_length": 4096, "max_steps": 1, **cut(1, 1)}
    assert_equal_runs(train("packed", name, **packed), train("loose", name, max_steps=1, **cut(COUNT, 1)))


@pytest.mark.parametrize("name", ["infonce", "spans"])
def test_a_resumed_task_goes_on_bit_for_bit(name: str, train: Train) -> None:
    flags: dict[str, Any] = {"tuner_type": "lora", "save_steps": 2, "lora_dropout": 0.1, "max_steps": 4, **cut(2, 2)}
    whole = train("whole", name, **flags)
    stopped = train("stopped", name, **flags)
    expected = trained(stopped / "checkpoint-4")
    for file in (stopped / "checkpoint-4").iterdir():
        file.unlink()
    (stopped / "checkpoint-4").rmdir()
    resumed = train("stopped", name, **flags, resume_from_checkpoint=str(stopped / "checkpoint-2"))
    assert_same_bits(trained(resumed / "checkpoint-4"), expected)
    assert [line["loss"] for line in logged(resumed)][-2:] == [line["loss"] for line in logged(whole)][-2:]


# --- what the checkpoint says and the evaluation measures ---


def test_a_classifier_keeps_its_labels_and_can_be_loaded_by_transformers(train: Train) -> None:
    from transformers import AutoModelForSequenceClassification

    (checkpoint,) = train("run", "single", **WHOLE).glob("checkpoint-*")
    task = read_task(checkpoint)
    assert task is not None and task.labels == ("liability", "payment", "termination")
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint)
    assert model.config.id2label == dict(enumerate(task.labels))
    assert torch.equal(model.score.weight, load_file(checkpoint / "model.safetensors")["score.weight"])


def test_the_best_checkpoint_by_macro_f1(train: Train, write_rows: Any, tmp_path: Path) -> None:
    val = write_rows(tmp_path / "val.jsonl", task_rows("single", 12, seed=1))
    flags = {"val_dataset": [str(val)], "metric_for_best_model": "f1_macro", "eval_steps": 2, "save_steps": 2}
    folder = train("run", "single", **flags, max_steps=8, learning_rate=3e-3, **WHOLE)
    found = list(logged(folder, "eval_f1_macro"))
    assert len(found) == 4
    state = json.loads((folder / "checkpoint-8/trainer_state.json").read_text())
    assert state["best_metric"] == max(line["eval_f1_macro"] for line in found)
    for line in found:
        classes = [line[f"eval_f1/{name}"] for name in ("liability", "payment", "termination")]
        assert line["eval_f1_macro"] == pytest.approx(np.mean(classes))
    table = [e for e in map(json.loads, (folder / "logging.jsonl").read_text().splitlines()) if "evaluation" in str(e)]
    assert any("termination" in json.dumps(entry) for entry in table)


# --- refusals ---


@pytest.mark.parametrize(
    ("name", "rows", "flags", "words"),
    [
        ("single", [{"text": "a b", "label": "x"}, {"text": "c d", "label": "x"}], {}, "nothing to learn"),
        (
            "single",
            [{"text": "a b", "label": 0}, {"text": "c", "label": 5}],
            {"num_labels": 3},
            "none of the 3 classes",
        ),
        (
            "single",
            [{"text": "a", "label": "x"}, {"text": "c", "label": "y"}],
            {"label_names": ["x", "z"]},
            "'y' is none",
        ),
        (
            "single",
            [{"text": "a", "label": "x"}, {"text": "c", "label": "y"}],
            {"class_weights": [1, 2, 3]},
            "3 class w",
        ),
        ("single", [{"text": "a"}, {"text": "c"}], {}, "no row has a label"),
        ("infonce", [{"sentence1": "a", "sentence2": "b", "score": 0.0}], {}, "takes the second text of every pair"),
        ("single", None, {"metric_for_best_model": "f1_makro", "split_dataset_ratio": 0.2}, "is not measured"),
        ("single", None, {"pooling": "cls"}, "sees none of the others"),
        ("infonce_alone", [{"anchor": "a", "positive": "b"}], {}, "no negative"),
    ],
)
def test_refused_tasks(
    name: str, rows: Any, flags: dict[str, Any], words: str, train: Train, write_rows: Any, tmp_path: Path
) -> None:
    if rows is not None:
        flags = {**flags, "dataset": [str(write_rows(tmp_path / "given.jsonl", rows))]}
    with pytest.raises(SwiftError) as caught:
        train("run", name, **flags, **WHOLE)
    assert words in f"{caught.value.message} {caught.value}"


def test_a_classifier_that_is_trained_on_keeps_its_numbers_of_labels(
    train: Train, write_rows: Any, tmp_path: Path
) -> None:
    (first,) = train("first", "single", **WHOLE).glob("checkpoint-*")
    two = [{"text": "x", "label": "termination"}, {"text": "y", "label": "payment"}]  # sorted, payment would be 0
    data = [str(write_rows(tmp_path / "two.jsonl", two))]
    (second,) = train("second", "single", model=str(first), dataset=data, max_steps=1, **cut(2, 1)).glob("checkpoint-*")
    task = read_task(second)
    assert task is not None and task.labels == ("liability", "payment", "termination")
