"""Mistakes of users of `swift rlhf` end with a status and words that name the flag or the row, never a traceback."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from fixtures import build_tiny_model
from preference_rows import LOSSES, labelled_rows, pair_rows, rows_of
from runs import command, run_cli, start_cli, wait_for_step

from swift.cli.__main__ import main

FULL = {"tuner_type": "full"}
RM, KTO = {"rlhf_type": "rm"}, {"rlhf_type": "kto"}


def answered(text: str, **more: Any) -> dict[str, Any]:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]
    return {"messages": talk, **more}


def chats() -> list[dict[str, Any]]:
    return [{"messages": row["messages"]} for row in pair_rows(3)]


SAME = [*pair_rows(2), answered("b", rejected_response="b")]
MISMATCH = [
    *pair_rows(2),
    {"chosen": answered("b")["messages"], "rejected": [{"role": "user", "content": "y"}, answered("c")["messages"][1]]},
]
MARGIN = [{**row, "margin": "big"} if number == 1 else row for number, row in enumerate(pair_rows(3))]

# name -> rows, flags, exit status, words of the message
MISTAKES: dict[str, tuple[list[dict[str, Any]], dict[str, Any], int, tuple[str, ...]]] = {
    "kto, a step of one row": (
        labelled_rows(6),
        {**KTO, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1},
        2,
        ("--gradient_accumulation_steps", "a step has only one"),
    ),
    "kto, one row": (labelled_rows(1), KTO, 1, ("--dataset", "only one row")),
    "kto without labels": (chats(), KTO, 1, ("rows.jsonl:1", "label")),
    "rows of sft": (chats(), {}, 1, ("rows.jsonl:1", "rejected")),
    "identical": (SAME, {}, 1, ("rows.jsonl:3", "identical")),
    "prompts differ": (MISMATCH, {}, 1, ("rows.jsonl:3", "prompt_mismatch")),
    "empty rejected": ([answered("b", rejected_response="")], {}, 1, ("rows.jsonl:1", "empty")),
    "all too long": (pair_rows(3), {"max_length": 5}, 1, ("no row is left", "--max_length")),
    "short packed rows": (pair_rows(3), {"packing": True, "packing_length": 30}, 2, ("--packing_length",)),
    "margin": (MARGIN, RM, 1, ("rows.jsonl:2", "bad_margin")),
    "sharing with eager attention": (
        pair_rows(3),
        {"share_prompts": "true", "attn_impl": "eager"},
        2,
        ("--share_prompts true",),
    ),
    "sharing in padded rows": (pair_rows(3), {"share_prompts": "true", "padding_free": False}, 2, ("--share_prompts",)),
    "no such reference": (pair_rows(3), {**FULL, "ref_model": "./nowhere"}, 1, ("--ref_model", "nowhere")),
    "a reference of fewer tokens": (pair_rows(3), {**FULL, "ref_model": "SMALL"}, 1, ("--ref_model", "tokens")),
    "a reference of other tokens": (pair_rows(3), {**FULL, "ref_model": "OTHER"}, 1, ("--ref_model", "id 300")),
    "a reference for orpo": (pair_rows(3), {"rlhf_type": "orpo", "ref_model": "SMALL"}, 2, ("--ref_model",)),
    "adapter off, without one": (pair_rows(3), {**FULL, "reference": "adapter_off"}, 2, ("--reference",)),
    "asked beforehand, streamed": (pair_rows(3), {**FULL, "streaming": True}, 2, ("--streaming", "--reference copy")),
    "a copy of another model": (pair_rows(3), {"reference": "copy", "ref_model": "SMALL"}, 2, ("--ref_model",)),
    "numbers that explode": (
        pair_rows(6),
        {**FULL, "learning_rate": 1e30, "max_grad_norm": 0},
        1,
        ("not finite", "rows.jsonl:", "--learning_rate"),
    ),
}


@pytest.fixture(scope="module")
def others(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of references that don't go with the model."""
    root = tmp_path_factory.mktemp("others")
    small = build_tiny_model(root / "small", vocab_size=1000)
    other = Path(shutil.copytree(tiny_model_dir, root / "other"))
    tokens = json.loads((other / "tokenizer.json").read_text())
    numbers = tokens["model"]["vocab"]
    first, second = (next(word for word, number in numbers.items() if number == n) for n in (300, 301))
    numbers[first], numbers[second] = 301, 300
    (other / "tokenizer.json").write_text(json.dumps(tokens))
    return {"SMALL": str(small), "OTHER": str(other)}


def flags_of(model: Path, data: Path, folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    batch = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": 3, "logging_steps": 1}
    kept = {"torch_dtype": "float32", "add_version": False, "report_to": ["none"]}
    return {"model": str(model), "dataset": [str(data)], "output_dir": str(folder), **batch, **kept, **given}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, tiny_model_dir: Path, others: Any, write_rows: Any, tmp_path: Path, capfd: Any) -> None:
    rows, given, status, words = MISTAKES[name]
    given = {key: others.get(value, value) if isinstance(value, str) else value for key, value in given.items()}
    data = write_rows(tmp_path / "rows.jsonl", rows)
    line = command(flags_of(tiny_model_dir, data, tmp_path / "run", given), name="rlhf")
    assert main(line[line.index("rlhf") :]) == status
    said = capfd.readouterr().err
    assert "Traceback" not in said and said.count("error:") == 1
    assert all(word in said for word in words), said


@pytest.mark.parametrize("name", ["bco_pair", *(pytest.param(n, marks=pytest.mark.slow) for n in ("aot", "kto", "rm"))])
def test_steps_that_explode_can_be_left_out(
    name: str, tiny_model_dir: Path, write_rows: Any, tmp_path: Path, capfd: Any
) -> None:
    """What looks ahead at a step that is left out remembers nothing of it."""
    data = write_rows(tmp_path / "rows.jsonl", rows_of(LOSSES[name], 8))
    given = {**FULL, **LOSSES[name], "learning_rate": 1e30, "max_grad_norm": 0, "on_nonfinite": "skip"}
    line = command(flags_of(tiny_model_dir, data, tmp_path / "run", given), name="rlhf")
    assert main(line[line.index("rlhf") :]) == 0
    assert "step left out" in capfd.readouterr().out
    state = json.loads((tmp_path / "run" / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["skipped_steps"] >= 1


@pytest.mark.slow
def test_killed_while_the_reference_is_asked(tiny_model_dir: Path, write_rows: Any, tmp_path: Path) -> None:
    """It can be started again in the same folder, and Ctrl-C ends it at once."""
    rows = [
        {**row, "rejected_response": f"{k} {row['rejected_response']}"} for k in range(300) for row in pair_rows(10)
    ]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    flags = flags_of(tiny_model_dir, data, tmp_path / "run", {**FULL, "max_steps": 4, "save_steps": 2})
    for number, status in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        process = start_cli(flags, name="rlhf")
        assert process.stdout is not None
        assert any("asking the reference" in line for line in process.stdout)
        time.sleep(0.5)
        os.killpg(process.pid, number)
        rest = process.stdout.read()
        assert process.wait() == status and "Traceback" not in rest
        assert not (tmp_path / "run" / "reference" / "identity.json").exists()
    result = run_cli(flags, name="rlhf")
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_interrupted_while_training(tiny_model_dir: Path, write_rows: Any, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", labelled_rows(40))
    flags = flags_of(tiny_model_dir, data, tmp_path / "run", {**KTO, "max_steps": 500})
    process = start_cli(flags, name="rlhf")
    wait_for_step(tmp_path / "run", 3, process)
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout is not None
    said = process.stdout.read()
    assert process.wait() == 0 and "Traceback" not in said
    assert "swift rlhf --resume_from_checkpoint" in said
