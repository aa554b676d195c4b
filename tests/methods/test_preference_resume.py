"""A preference run that stops and is resumed is the uninterrupted one, bit for bit, whatever it has to remember."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from preference_rows import LOSSES, rows_of
from runs import assert_same_bits, trained

from swift.checkpoint import list_checkpoints
from swift.commands.rlhf import rlhf

COUNT, STEPS, STOP = 14, 6, 3
BASE: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": STEPS,
    "logging_steps": 1,
    "save_steps": STOP,
    "learning_rate": 1e-3,
    "max_length": 128,
    "torch_dtype": "float32",
    "add_version": False,
    "report_to": ["none"],
}
FULL = {"tuner_type": "full"}
VARIANTS: dict[str, dict[str, Any]] = {
    "dpo lora": LOSSES["sigmoid"],
    "dpo full, precomputed": {**LOSSES["rpo_alpha"], **FULL},
    "a copy that follows": {**LOSSES["tr_dpo"], **FULL, "ref_model_sync_steps": 2},
    "bco": LOSSES["bco_pair"],
    "aot full": {**LOSSES["aot"], **FULL},
    "kto": LOSSES["kto"],
    "kto, full": {**LOSSES["kto"], **FULL},
    "rm with dropout": {**LOSSES["rm"], "disable_dropout": False, "lora_dropout": 0.2},
    "orpo, odd logging": {**LOSSES["orpo"], "logging_steps": 4},
    "streamed": {**LOSSES["sigmoid"], "streaming": True},
    "kto, streamed": {**LOSSES["kto"], "streaming": True},
    "kto, mixed": {**LOSSES["kto"], "parts": 2, "interleave_prob": [0.7, 0.3]},
    "dpo mixed, precomputed": {**LOSSES["sigmoid"], **FULL, "parts": 2, "interleave_prob": [0.7, 0.3]},
}

QUICK = ("a copy that follows", "bco", "kto, streamed", "kto, mixed")


@pytest.fixture
def flags(tiny_model_dir: Path, write_rows: Any, tmp_path: Path) -> Any:
    def make(variant: str) -> dict[str, Any]:
        own = dict(VARIANTS[variant])
        rows, parts = rows_of(own, COUNT), own.pop("parts", 1)
        data = [str(write_rows(tmp_path / f"rows-{part}.jsonl", rows[part::parts])) for part in range(parts)]
        return {**BASE, **own, "model": str(tiny_model_dir), "dataset": data}

    return make


def logged(run: Path) -> list[dict[str, float]]:
    """Everything of the training lines that isn't a time, a size of memory or a speed."""
    lines = [json.loads(line) for line in (run / "logging.jsonl").read_text().splitlines()]
    left_out = ("seconds", "memory", "tokens_per", "time", "sent_", "stream", "data_")
    return [{k: v for k, v in line.items() if not k.startswith(left_out)} for line in lines if "grad_norm" in line]


def stopped(whole: Path, into: Path) -> Path:
    """The run as it was after step STOP."""
    shutil.copytree(whole, into)
    for checkpoint in list_checkpoints(into):
        if checkpoint.step > STOP:
            shutil.rmtree(checkpoint.path)
    return into


@pytest.mark.parametrize("variant", [v if v in QUICK else pytest.param(v, marks=pytest.mark.slow) for v in VARIANTS])
def test_resumed_equals_uninterrupted(variant: str, flags: Any, tmp_path: Path) -> None:
    given = flags(variant)
    whole = rlhf(**given, output_dir=str(tmp_path / "whole"))
    other = stopped(whole.run_dir, tmp_path / "other")
    resumed = rlhf(**given, output_dir=str(other), resume_from_checkpoint="latest")
    assert resumed.run_dir == other and resumed.steps == STEPS
    assert logged(other) == logged(whole.run_dir)
    assert len({line["loss"] for line in logged(other)}) > 1
    assert resumed.last_checkpoint and whole.last_checkpoint
    assert_same_bits(trained(resumed.last_checkpoint), trained(whole.last_checkpoint))


@pytest.mark.parametrize("left", [pytest.param("nothing", marks=pytest.mark.slow), "half of it"])
def test_a_lost_reference_is_asked_again(left: str, flags: Any, tmp_path: Path) -> None:
    """Of the model before training, not of the weights that the run goes on with."""
    given = flags("dpo full, precomputed")
    whole = rlhf(**given, output_dir=str(tmp_path / "whole"))
    other = stopped(whole.run_dir, tmp_path / "other")
    if left == "nothing":
        shutil.rmtree(other / "reference")
    else:  # as a process leaves it that was killed while it asked
        (other / "reference" / "identity.json").unlink()
        values = np.memmap(other / "reference" / "train" / "own.values", np.float32, "r+")
        values[:] = 0.0
        values.flush()
    resumed = rlhf(**given, output_dir=str(other), resume_from_checkpoint="latest")
    assert logged(other) == logged(whole.run_dir)
    assert resumed.last_checkpoint and whole.last_checkpoint
    assert_same_bits(trained(resumed.last_checkpoint), trained(whole.last_checkpoint))


def test_a_reference_that_is_there_is_not_asked_again(flags: Any, tmp_path: Path) -> None:
    given = flags("dpo full, precomputed")
    whole = rlhf(**given, output_dir=str(tmp_path / "whole"))
    other = stopped(whole.run_dir, tmp_path / "other")
    values = np.memmap(other / "reference" / "train" / "own.values", np.float32, "r+")
    values[:] -= 1.0
    values.flush()
    rlhf(**given, output_dir=str(other), resume_from_checkpoint="latest")
    assert logged(other)[:STOP] == logged(whole.run_dir)[:STOP]
    assert logged(other)[STOP:] != logged(whole.run_dir)[STOP:]


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["bco", "kto", "a copy that follows", "dpo full, precomputed"])
def test_another_micro_batch_changes_nothing(variant: str, flags: Any, tmp_path: Path) -> None:
    given = flags(variant)
    whole = rlhf(**given, output_dir=str(tmp_path / "whole"))
    other = stopped(whole.run_dir, tmp_path / "other")
    given |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    rlhf(**given, output_dir=str(other), resume_from_checkpoint="latest")
    for ours, theirs in zip(logged(other), logged(whole.run_dir), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-4)
