"""Runs of tasks over several processes: losses and weights are those of one process."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import build_tiny_model, write_jsonl
from pool import on_ranks
from runs import trained
from safetensors.torch import load_file
from task_rows import TASKS, task_rows

STEPS, COUNT = 3, 11
BASE: dict[str, Any] = {
    "max_steps": STEPS,
    "logging_steps": 1,
    "max_length": 128,
    "learning_rate": 2e-4,
    "adam_epsilon": 1e-4,
    "torch_dtype": "float32",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "add_version": False,
    "report_to": ["none"],
}
TUNERS: dict[str, dict[str, Any]] = {
    "lora": {"tuner_type": "lora", "lora_dropout": 0.0},
    "full": {"tuner_type": "full"},
}
# ranks in all, those with data of their own, flags
SPREADS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "ddp": (2, 2, {}),
    "tp": (2, 1, {"tensor_parallel_size": 2}),
    "ring": (2, 1, {"sequence_parallel_size": 2, "attention_impl": "ring"}),
    "pp": (2, 1, {"pipeline_parallel_size": 2}),
    "zero 3": (2, 2, {"fsdp": "fsdp2"}),
}
# (task, tuner) of each spread that `make test` runs
QUICK: dict[str, list[tuple[str, str]]] = {
    "ddp": [("infonce", "lora"), ("spans", "full"), ("words", "lora")],
    "tp": [("words_rank", "full"), ("mean", "lora")],
    "ring": [("mean", "full"), ("infonce_mean", "full"), ("spans", "lora"), ("rank_mean", "lora")],
    "pp": [("weighted", "lora"), ("cosent", "full"), ("words_list", "lora")],
    "zero 3": [("infonce", "full"), ("listwise", "lora"), ("several", "full")],
}
MIXES = [(task, tuner) for task in TASKS for tuner in TUNERS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers, and rows."""
    root = tmp_path_factory.mktemp("task-spread")
    build_tiny_model(root / "model", num_hidden_layers=4)
    for name in TASKS:
        write_jsonl(root / f"{name}.jsonl", task_rows(name, COUNT))
    return root


def settings(root: Path, task: str, tuner: str, **more: Any) -> dict[str, Any]:
    data = [str(root / f"{task}.jsonl")]
    given = {"model": str(root / "model"), "dataset": data, "val_dataset": data}
    return {**BASE, **TASKS[task], **TUNERS[tuner], **given, **more}


def runs(given: list[dict[str, Any]]) -> None:
    """Each run on this rank."""
    from swift.commands.sft import sft

    for flags in given:
        sft(**flags)
    if not dist.is_initialized():  # a run ends its group, and the pool will want to end one
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def final(run: Path) -> dict[str, torch.Tensor]:
    adapter = run / f"checkpoint-{STEPS}" / "adapter_model.safetensors"
    return load_file(adapter) if adapter.is_file() else trained(adapter.parent)


def lines(run: Path, key: str) -> list[dict[str, float]]:
    return [line for line in map(json.loads, (run / "logging.jsonl").read_text().splitlines()) if key in line]


def difference(ours: Path, theirs: Path) -> str:
    """What differs between two runs; nothing if they are the same."""
    wrong = []
    for key in ("grad_norm", "eval_loss"):
        mine, others = lines(ours, key), lines(theirs, key)
        if len(mine) != len(others) or not others:
            return f"{len(mine)} and {len(others)} lines with {key}"
        for a, b in zip(mine, others, strict=True):
            names = {"loss", "grad_norm", "accuracy", "token_accuracy", *(n for n in b if n.startswith("eval_"))}
            for name in sorted(names & b.keys()):
                if name not in a or abs(a[name] - b[name]) > 2e-5 + 2e-5 * abs(b[name]):
                    wrong.append(f"step {b['step']} {name}: {a.get(name)} instead of {b[name]}")
    left, right = (final(run) for run in (ours, theirs))
    if left.keys() != right.keys():
        return f"weights {sorted(left.keys() ^ right.keys())[:4]}"
    off = math.sqrt(sum(float((left[n] - right[n]).double().square().sum()) for n in left))
    moved = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in right.values()))
    if not off <= 3e-6 * moved:
        wrong.append(f"weights off by {off / moved:.2g}")
    return "; ".join(wrong[:6])


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    """What one process gets, run once for each mix that is asked for."""
    from swift.commands.sft import sft

    def get(task: str, tuner: str) -> Path:
        run = folder / f"one-{task}-{tuner}"
        if not run.exists():
            sft(**settings(folder, task, tuner, output_dir=str(run)))
        return run

    return get


def compare(name: str, mixes: list[tuple[str, str]], folder: Path, alone: Any) -> None:
    world, data_ranks, flags = SPREADS[name]
    given, cut = [], {"gradient_accumulation_steps": 4 // data_ranks}
    for task, tuner in mixes:
        run = str(folder / f"{name.replace(' ', '')}-{task}-{tuner}")
        given.append(settings(folder, task, tuner, output_dir=run, **flags, **cut))
    torch.set_num_threads(1)
    on_ranks(world, runs, given, timeout_s=600.0)
    wrong = {
        mix: words
        for mix, one in zip(mixes, given, strict=True)
        if (words := difference(Path(one["output_dir"]), alone(*mix)))
    }
    assert not wrong, "\n".join(f"{'-'.join(mix)}: {words}" for mix, words in wrong.items())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", QUICK)
def test_a_spread_task_is_one_process(name: str, folder: Path, alone: Any) -> None:
    compare(name, QUICK[name], folder, alone)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SPREADS)
def test_every_task_in_every_spread(name: str, folder: Path, alone: Any) -> None:
    compare(name, [mix for mix in MIXES if mix not in QUICK[name]], folder, alone)
