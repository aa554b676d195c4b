"""From a grouped file to what comes after the run: its settings are shown, it goes on, answers, and is merged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from preference_rows import pair_rows
from runs import assert_same_bits, trained

import swift
from swift.cli import main


@pytest.mark.slow
def test_a_grouped_file_and_what_comes_after(
    tiny_model_dir: Path, write_rows: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    settings: dict[str, Any] = {
        "model": {"model": str(tiny_model_dir)},
        "data": {"dataset": [str(write_rows(tmp_path / "pairs.jsonl", pair_rows(9)))]},
        "template": {"max_length": 128},
        "preference": {"rlhf_type": "dpo", "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
        "optimizer": {"learning_rate": 1e-2},
        "training": {"max_steps": 4},
        "checkpoint": {"output_dir": str(run), "add_version": False, "save_steps": 2, "save_total_limit": 9},
        "monitor": {"report_to": ["none"], "logging_steps": 1},
    }
    file = tmp_path / "dpo.yaml"
    file.write_text(yaml.safe_dump(settings))
    assert main(["config", "show", str(file), "--command", "rlhf"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["preference"]["loss_weights"] == [1.0, 0.5] and shown["template"]["loss_scale"] == "last_round"
    assert main(["rlhf", str(file)]) == 0
    whole, log = trained(run / "checkpoint-4"), (run / "logging.jsonl").read_text()

    resumed = swift.rlhf(resume_from_checkpoint=str(run / "checkpoint-2"))
    assert resumed.steps == 4 and resumed.run_dir == run
    assert_same_bits(trained(run / "checkpoint-4"), whole)
    losses = [
        [json.loads(line).get("loss") for line in text.splitlines()]
        for text in (log, (run / "logging.jsonl").read_text())
    ]
    assert losses[0][:4] == losses[1][:4]

    asked = write_rows(tmp_path / "asked.jsonl", [{"messages": [{"role": "user", "content": "Where to?"}]}])
    words = ["--val_dataset", str(asked), "--max_new_tokens", "4"]
    assert main(["merge-lora", "--adapters", str(run / "checkpoint-4"), "--output_dir", str(tmp_path / "merged")]) == 0
    answers = []
    for number, model in enumerate((["--adapters", str(run / "checkpoint-4")], ["--model", str(tmp_path / "merged")])):
        results = tmp_path / f"results-{number}.jsonl"
        assert main(["infer", *model, *words, "--temperature", "0", "--result_path", str(results)]) == 0
        answers.append(json.loads(results.read_text().splitlines()[0])["response"])
    assert answers[0] == answers[1]
