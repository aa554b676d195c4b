"""`swift infer` on models with a head: its lines, and that its numbers are those of the trainer's evaluation."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from methods.task_rows import TASKS, task_rows

from swift.commands.infer import infer, main
from swift.commands.merge_lora import merge_lora
from swift.commands.rlhf import rlhf
from swift.commands.sft import sft
from swift.config import InferConfig, build_config
from swift.core.errors import SwiftError
from swift.inference.loading import prepare
from swift.inference.score_talk import ScoreTalk
from swift.inference.terminal import Terminal

TRAINED = ("single", "several", "number", "mean", "spans", "words", "infonce", "rank_mean", "words_rank")


@pytest.fixture(scope="module")
def tuned(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`tuned(name)`: the adapter of a task, its evaluation rows, and what the trainer measured on them."""
    root = tmp_path_factory.mktemp("tuned")
    found: dict[str, tuple[Path, Path, dict[str, float]]] = {}

    def rows(name: str, part: str, count: int, seed: int) -> Path:
        path = root / f"{name}-{part}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in task_rows(name, count, seed)))
        return path

    def get(name: str) -> tuple[Path, Path, dict[str, float]]:
        if name not in found:
            train, val = rows(name, "train", 16, 0), rows(name, "val", 9, 1)
            result = sft(
                model=str(tiny_model_dir), dataset=[str(train)], val_dataset=[str(val)], **TASKS[name],
                output_dir=str(root / name), add_version=False, max_steps=6, learning_rate=3e-3, max_length=128,
                report_to=["none"], torch_dtype="float32", per_device_train_batch_size=4,
            )  # fmt: skip
            assert result.last_checkpoint is not None
            found[name] = result.last_checkpoint, val, result.metrics
        return found[name]

    return get


def answers(adapter: Path, rows: Path, path: Path, **flags: Any) -> tuple[list[dict[str, Any]], dict[str, float]]:
    lines = infer(adapters=[str(adapter)], val_dataset=[str(rows)], result_path=str(path), device="cpu", **flags)
    metrics = path.with_name(path.name + ".metrics.json")
    return lines, json.loads(metrics.read_text()) if metrics.is_file() else {}


@pytest.mark.parametrize("name", TRAINED)
def test_inference_measures_what_training_measured(name: str, tuned: Any, tmp_path: Path) -> None:
    adapter, val, metrics = tuned(name)
    lines, found = answers(adapter, val, tmp_path / "r.jsonl", max_batch_size=4)
    assert [line["status"] for line in lines] == ["ok"] * 9
    assert len(found) >= 2
    for measure, value in found.items():
        assert value == pytest.approx(metrics[f"eval_{measure}"], rel=2e-6, abs=1e-6), measure


def test_the_probabilities_give_the_loss_of_the_evaluation(tuned: Any, tmp_path: Path) -> None:
    adapter, val, metrics = tuned("single")
    lines, _ = answers(adapter, val, tmp_path / "r.jsonl")
    loss = np.mean([-math.log(line["probabilities"][line["expected"]]) for line in lines])
    assert loss == pytest.approx(metrics["eval_loss"], rel=1e-6)
    for line in lines:
        assert sum(line["probabilities"].values()) == pytest.approx(1)
        assert line["label"] == max(line["probabilities"], key=line["probabilities"].get)


def test_a_merged_classifier_answers_alike(tuned: Any, tmp_path: Path) -> None:
    adapter, val, _ = tuned("single")
    merge_lora(adapters=[str(adapter)], output_dir=str(tmp_path / "merged"))
    expected, _ = answers(adapter, val, tmp_path / "r.jsonl")
    lines = infer(model=str(tmp_path / "merged"), val_dataset=[str(val)], result_path=str(tmp_path / "m.jsonl"))
    for line, other in zip(lines, expected, strict=True):
        assert line["label"] == other["label"]
        assert line["probabilities"] == pytest.approx(other["probabilities"], abs=1e-5)


def test_rows_without_labels_and_bad_rows(tuned: Any, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "The fee is due"}\n{"nothing": 1}\n{"text": "It ends", "label": "payment"}\n')
    lines, found = answers(tuned("single")[0], rows, tmp_path / "r.jsonl")
    assert [line["status"] for line in lines] == ["ok", "error", "ok"]
    assert "expected" not in lines[0] and lines[2]["expected"] == "payment"
    assert found["accuracy"] in (0.0, 1.0)  # of the one labelled row
    again, _ = answers(tuned("single")[0], rows, tmp_path / "r.jsonl")  # finished: nothing is judged anew
    assert again == lines


def test_entities_are_where_the_text_has_them(tuned: Any, tmp_path: Path) -> None:
    adapter, val, _ = tuned("spans")
    lines, _ = answers(adapter, val, tmp_path / "r.jsonl")
    seen = 0
    for line, row in zip(lines, map(json.loads, val.read_text().splitlines()), strict=True):
        for entity in line["entities"]:
            assert row["text"][entity["start"] : entity["end"]] == entity["text"]
            assert entity["text"] == entity["text"].lstrip() and entity["label"] in ("PARTY", "AMOUNT")
            seen += 1
    assert seen
    plain = tmp_path / "plain.jsonl"
    plain.write_text("".join(json.dumps({"text": json.loads(r)["text"]}) + "\n" for r in val.read_text().splitlines()))
    unlabelled, found = answers(adapter, plain, tmp_path / "p.jsonl")
    assert not found and [line["entities"] for line in unlabelled] == [line["entities"] for line in lines]


def test_vectors_have_length_one_and_can_be_cut(tuned: Any, tmp_path: Path) -> None:
    adapter, val, _ = tuned("infonce")
    whole, _ = answers(adapter, val, tmp_path / "w.jsonl")
    short, _ = answers(adapter, val, tmp_path / "s.jsonl", mrl_dim=16)
    for line, other in zip(whole, short, strict=True):
        vector, head = np.array(line["embedding"]), np.array(other["embedding"])
        assert len(vector) == 64 and np.linalg.norm(vector) == pytest.approx(1)
        assert head == pytest.approx(vector[:16] / np.linalg.norm(vector[:16]), abs=1e-6)
    with pytest.raises(SwiftError, match="have 64 numbers"):
        answers(adapter, val, tmp_path / "t.jsonl", mrl_dim=65)


def test_documents_are_ranked(tuned: Any, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        json.dumps({"query": "When does it end?", "documents": ["It ends soon", "Pay now", "x y z"]}) + "\n"
    )
    (line,), _ = answers(tuned("words_rank")[0], rows, tmp_path / "r.jsonl")
    (raw,), _ = answers(tuned("words_rank")[0], rows, tmp_path / "a.jsonl", reranker_use_activation=False)
    scores = [entry["score"] for entry in line["scores"]]
    assert sorted(scores, reverse=True) == scores and sorted(e["index"] for e in line["scores"]) == [0, 1, 2]
    assert scores == pytest.approx([1 / (1 + math.exp(-entry["score"])) for entry in raw["scores"]])


def test_rewards(tiny_model_dir: Path, tmp_path: Path) -> None:
    pairs = [{"query": f"q {n}?", "response": "good " * (n + 1), "rejected_response": "bad"} for n in range(4)]
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in pairs))
    result = rlhf(
        rlhf_type="rm", model=str(tiny_model_dir), dataset=[str(data)], val_dataset=[str(data)], max_steps=3,
        output_dir=str(tmp_path / "rm"), add_version=False, report_to=["none"], torch_dtype="float32",
    )  # fmt: skip
    lines, found = answers(result.last_checkpoint, data, tmp_path / "r.jsonl")
    assert found["margin"] == pytest.approx(result.metrics["eval_rewards/margins"], rel=1e-5, abs=1e-6)
    assert found["accuracy"] == result.metrics["eval_rewards/accuracies"]
    alone = tmp_path / "alone.jsonl"
    alone.write_text("".join(json.dumps({"query": r["query"], "response": r["response"]}) + "\n" for r in pairs))
    single, _ = answers(result.last_checkpoint, alone, tmp_path / "a.jsonl")
    assert [line["reward"] for line in single] == pytest.approx([line["reward"] for line in lines], abs=1e-6)


def talk(adapter: Path, text: str) -> str:
    config = build_config(InferConfig, {"adapters": [str(adapter)], "device": "cpu"})
    prepared, out = prepare(config), io.StringIO()
    assert prepared.judge is not None
    terminal = Terminal(io.StringIO(text), out, io.StringIO())
    assert ScoreTalk(prepared.judge.name, prepared.load_scorer, terminal).run() == 0
    return out.getvalue()


def test_a_label_for_each_line(tuned: Any) -> None:
    said = talk(tuned("single")[0], "The fee is due\nIt ends\n/exit\nnot read\n").splitlines()
    assert len(said) == 2 and all(line.split()[0] in ("payment", "liability", "termination") for line in said)


def test_scores_of_documents_line_by_line(tuned: Any) -> None:
    said = talk(tuned("rank_mean")[0], "When does it end?\nIt ends soon\nPay now\n\nq\nd\n").split()
    assert len(said) == 3 and all(0 < float(score) < 1 for score in said)


def test_vectors_are_not_for_the_terminal(tuned: Any) -> None:
    with pytest.raises(SwiftError, match="nothing to read") as caught:
        main(build_config(InferConfig, {"adapters": [str(tuned("infonce")[0])]}))
    assert "--val_dataset" in str(caught.value.fix)


def test_another_task_is_refused(tuned: Any, tiny_model_dir: Path) -> None:
    with pytest.raises(SwiftError, match="trained for seq_cls"):
        prepare(build_config(InferConfig, {"adapters": [str(tuned("single")[0])], "task_type": "embedding"}))
    with pytest.raises(SwiftError, match="no head for seq_cls"):
        prepare(build_config(InferConfig, {"model": str(tiny_model_dir), "task_type": "seq_cls"}))
