"""`swift rlhf --streaming true`: pairs and labelled answers that are read while training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from preference_rows import rows_of
from runs import assert_same_bits, run_cli, trained

from swift.checkpoint import list_checkpoints
from swift.commands.rlhf import rlhf
from swift.core.errors import DataError, UsageError
from swift.data.columns import MOST_SEQUENCES
from swift.training.trainer import Trainer

slow = pytest.mark.slow
BASE: dict[str, Any] = {
    "streaming": True,
    "shuffle_buffer_size": 8,
    "max_steps": 4,
    "save_steps": 2,
    "save_total_limit": 9,
    "logging_steps": 1,
    "max_length": 128,
    "learning_rate": 1e-3,
    "adam_epsilon": 1e-4,
    "torch_dtype": "float32",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "add_version": False,
    "report_to": ["none"],
}
VARIANTS: dict[str, Any] = {
    "dpo-packed": {"packing": True},
    "kto": {"rlhf_type": "kto"},
    "kto-packed": {"rlhf_type": "kto", "packing": True},
    "dpo": {},
    "dpo-padded": {"padding_free": False},
    "bco": {"loss_type": ["bco_pair"]},
    "rm": {"rlhf_type": "rm", "tuner_type": "full"},
}
QUICK = ("dpo-packed", "kto")
Settings = Callable[..., dict[str, Any]]


@pytest.fixture
def settings(tiny_model_dir: Path, write_rows: Callable[..., Path], tmp_path: Path) -> Settings:
    def make(name: str, **flags: Any) -> dict[str, Any]:
        data = write_rows(tmp_path / "rows.jsonl", rows_of(flags, 19))
        return {
            **BASE,
            "model": str(tiny_model_dir),
            "dataset": [str(data)],
            "output_dir": str(tmp_path / name),
            **flags,
        }

    return make


def logged(folder: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (Path(folder) / "logging.jsonl").read_text().splitlines())
    names = ("step", "loss", "grad_norm", "kto_z0", "rewards/chosen")
    return [{name: line.get(name) for name in names} for line in lines if "grad_norm" in line]


@pytest.mark.parametrize("variant", [pytest.param(v, marks=() if v in QUICK else slow) for v in VARIANTS])
def test_a_resumed_stream_equals_an_uninterrupted_one(variant: str, settings: Settings, tmp_path: Path) -> None:
    whole = settings("whole", **VARIANTS[variant])
    rlhf(**whole)
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "whole", other)
    for checkpoint in list_checkpoints(other):
        if checkpoint.step > 2:
            shutil.rmtree(checkpoint.path)
    rlhf(**{**whole, "output_dir": str(other)}, resume_from_checkpoint="latest")
    assert logged(str(other)) == logged(whole["output_dir"])
    assert len({line["loss"] for line in logged(str(other))}) == 4
    assert_same_bits(trained(other / "checkpoint-4"), trained(tmp_path / "whole" / "checkpoint-4"))


@slow
@pytest.mark.parametrize("variant", ["dpo-packed", "kto", "kto-packed"])
def test_two_processes_give_the_same(variant: str, settings: Settings) -> None:
    one = settings("one", **VARIANTS[variant])
    two = settings("two", **VARIANTS[variant], nproc_per_node=2, gradient_accumulation_steps=1)
    rlhf(**one)
    ran = run_cli(two, name="rlhf")
    assert ran.returncode == 0, ran.stderr
    for ours, theirs in zip(logged(two["output_dir"]), logged(one["output_dir"]), strict=True):
        for name in (name for name, value in theirs.items() if value is not None):
            assert ours[name] == pytest.approx(theirs[name], rel=2e-5, abs=1e-7), name


def test_rows_of_pairs_hold_two_sequences_of_full_length(
    settings: Settings, write_rows: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows beforehand how long the longest pair is: rows have room for two answers of max_length."""
    assert MOST_SEQUENCES["pairs"] == 2
    flags = settings("run", packing=True, max_steps=2, save_strategy="no", max_length=64)
    rows = rows_of(flags, 8)
    for row in rows:
        row["messages"][-1]["content"] = "rain " * 70
        row["rejected_response"] = "stone " * 70
    flags["dataset"] = [str(write_rows(tmp_path / "long.jsonl", rows))]
    tokens = []
    original = Trainer.train_step

    def spy(self: Trainer, batches: list[Any]) -> None:
        tokens.extend(batch.num_tokens for batch in batches)
        original(self, batches)

    monkeypatch.setattr(Trainer, "train_step", spy)
    rlhf(**flags, truncation_strategy="right", share_prompts="false")
    assert max(tokens) == 2 * 2 * 64  # two packed rows in a micro-batch, each of a pair that was cut
    with pytest.raises(UsageError, match="up to 128"):
        rlhf(**{**flags, "output_dir": str(tmp_path / "small")}, truncation_strategy="right", packing_length=127)


def test_an_example_that_no_packed_row_holds_names_its_row(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other layouts nobody knows how many sequences an example has."""
    monkeypatch.setitem(MOST_SEQUENCES, "pairs", 0)
    with pytest.raises(DataError, match="in all, and packed rows have 40") as caught:
        rlhf(**settings("run", packing=True, max_length=40, truncation_strategy="right"))
    assert "rows.jsonl:" in (caught.value.where or "") and "--packing_length" in (caught.value.fix or "")


def test_a_reference_that_is_asked_beforehand_cant_stream(settings: Settings) -> None:
    with pytest.raises(UsageError, match="before rows are read"):
        rlhf(**settings("run", tuner_type="full"))
