"""Preference runs by other engines: DeepSpeed, local updates, compressed gradients, shares by speed. Two gloo ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from distributed.pool import on_ranks
from preference_rows import rows_of

from swift.commands.rlhf import rlhf
from swift.training import balance

slow = pytest.mark.slow
BASE: dict[str, Any] = {
    "max_steps": 3,
    "save_strategy": "no",
    "logging_steps": 1,
    "max_length": 128,
    "learning_rate": 1e-3,
    "adam_epsilon": 1e-4,
    "max_grad_norm": 0.5,
    "torch_dtype": "float32",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "add_version": False,
    "report_to": ["none"],
}
Lines = list[dict[str, float]]
Run = Callable[..., Lines]


def _run(flags: dict[str, Any], shares: list[int] | None = None) -> Lines:
    if shares:
        balance.MEASURED_STEPS, kept = 1, (balance.MEASURED_STEPS, balance.rebalance)
        balance.rebalance = lambda *_: shares
    try:
        folder = rlhf(**flags).run_dir
        lines = map(json.loads, (folder / "logging.jsonl").read_text().splitlines())
        return [line for line in lines if "grad_norm" in line]
    finally:
        if shares:
            balance.MEASURED_STEPS, balance.rebalance = kept
        if not dist.is_initialized():  # the pool leaves it at the end
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.fixture
def run(tiny_model_dir: Path, write_rows: Callable[..., Path], tmp_path: Path) -> Run:
    def go(name: str, *, shares: list[int] | None = None, **flags: Any) -> Lines:
        data = write_rows(tmp_path / "rows.jsonl", rows_of(flags, 23))
        places = {"model": str(tiny_model_dir), "dataset": [str(data)], "output_dir": str(tmp_path / name)}
        return on_ranks(2, _run, {**BASE, **places, **flags}, shares)[0]

    return go


def assert_equal(ours: Lines, theirs: Lines, *, norms: bool = True) -> None:
    assert len(ours) == len(theirs) == 3
    for a, b in zip(ours, theirs, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-6)
        assert not norms or a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        for name in ("rewards/chosen", "rewards/rejected", "kto_z0"):
            assert (name in a) == (name in b)
            assert a.get(name, 0.0) == pytest.approx(b.get(name, 0.0), rel=1e-3, abs=2e-5)


@pytest.mark.parametrize(
    ("preset", "flags"),
    [
        ("zero3", {"tuner_type": "lora"}),
        pytest.param("zero2", {"tuner_type": "lora"}, marks=slow),
        pytest.param("zero1", {"tuner_type": "full"}, marks=slow),
        pytest.param("zero3", {"tuner_type": "full"}, marks=slow),
        pytest.param("zero2", {"tuner_type": "full", "reference": "copy"}, marks=slow),
        pytest.param("zero2", {"tuner_type": "full", "sync_ref_model": True, "ref_model_sync_steps": 1}, marks=slow),
        pytest.param("zero3", {"rlhf_type": "kto", "tuner_type": "lora"}, marks=slow),
        pytest.param("zero3", {"rlhf_type": "rm", "tuner_type": "lora"}, marks=slow),
    ],
    ids=str,
)
def test_a_run_by_deepspeed_equals_a_native_one(preset: str, flags: dict[str, Any], run: Run) -> None:
    pytest.importorskip("deepspeed", reason="the extra `deepspeed` is not installed")
    if flags.get("sync_ref_model"):
        flags = {**flags, "reference": "copy"}
    assert_equal(run("deepspeed", **flags, deepspeed=preset), run("native", **flags))


@slow
@pytest.mark.parametrize("flags", [{"reference": "adapter_off"}, {"tuner_type": "full", "reference": "copy"}], ids=str)
def test_bf16_by_deepspeed_begins_at_its_reference(flags: dict[str, Any], run: Run) -> None:
    pytest.importorskip("deepspeed", reason="the extra `deepspeed` is not installed")
    lines = run("deepspeed", **flags, deepspeed="zero2", torch_dtype="bfloat16")
    assert lines[0]["loss"] == pytest.approx(math.log(2), rel=1e-8)


@slow
@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_local_steps_that_are_brought_together_at_once_are_usual_ones(method: str, run: Run) -> None:
    """Plain SGD: the mean over ranks of what each moved is the step of all."""
    flags = {"rlhf_type": method, "optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0}
    local = run("local", **flags, local_updates='{"method": "local_sgd", "every": 1}')
    assert_equal(local, run("usual", **flags), norms=False)
    assert len({line["loss"] for line in local}) == 3


@slow
@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_shares_by_speed_change_nothing(method: str, run: Run) -> None:
    flags = {"rlhf_type": method, "gradient_accumulation_steps": 4}
    uneven = run("uneven", **flags, balance_micro_batches=True, shares=[6, 2])
    assert_equal(uneven, run("even", **flags))


@slow
@pytest.mark.parametrize("how", ["bf16", "powersgd"])
def test_gradients_are_compressed_as_elsewhere(how: str, run: Run) -> None:
    lines, whole = run("less", tuner_type="full", grad_compression=how), run("whole", tuner_type="full")
    assert lines[0]["loss"] == whole[0]["loss"]
    for ours, theirs in zip(lines, whole, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.02)
