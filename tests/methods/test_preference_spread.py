"""Preference runs over several processes: losses, what is logged beside them and the weights are those of one process.

Runs are real ones (`swift.commands.rlhf`), several in each group of ranks. Their last step is a short one, so that some
micro-batches are empty.
"""

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
from preference_rows import LOSSES, rows_of
from runs import trained
from safetensors.torch import load_file

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
OBJECTIVES: dict[str, dict[str, Any]] = {
    name: LOSSES[name] for name in ("sigmoid", "rpo_ld", "aot", "bco_pair", "kto", "orpo", "simpo_nll", "rm")
}
OBJECTIVES["gkd"] = {"rlhf_type": "gkd", "lmbda": 0.5, "max_completion_length": 5}
TUNERS: dict[str, dict[str, Any]] = {"lora": {"tuner_type": "lora"}, "full": {"tuner_type": "full"}}
FSDP = {"fsdp": "fsdp2"}
# ranks in all, those with data of their own, flags
SPREADS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "ddp": (2, 2, {}),
    "tp": (2, 1, {"tensor_parallel_size": 2}),
    "ring": (2, 1, {"sequence_parallel_size": 2, "attention_impl": "ring"}),
    "ulysses": (2, 1, {"sequence_parallel_size": 2, "attention_impl": "ulysses"}),
    "pp": (2, 1, {"pipeline_parallel_size": 2}),
    "zbv": (2, 1, {"pipeline_parallel_size": 2, "pipeline_schedule": "zbv"}),
    "zero 2": (2, 2, {**FSDP, "zero_stage": 2}),
    "zero 3": (2, 2, FSDP),
    "tp x fsdp": (4, 2, {"tensor_parallel_size": 2, **FSDP}),
    "pp x cp": (4, 1, {"pipeline_parallel_size": 2, "sequence_parallel_size": 2, "attention_impl": "ring"}),
}
# (loss, tuner) of each spread that `make test` runs
QUICK: dict[str, list[tuple[str, str]]] = {
    "ddp": [("aot", "full")],
    "tp": [("rm", "lora"), ("gkd", "lora")],
    "ring": [("rpo_ld", "lora"), ("kto", "full")],
    "pp": [("kto", "lora"), ("rm", "full")],
    "zero 3": [("bco_pair", "lora"), ("sigmoid", "full")],
}
MIXES = [(loss, tuner) for loss in OBJECTIVES for tuner in TUNERS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers, and rows."""
    root = tmp_path_factory.mktemp("spread")
    build_tiny_model(root / "model", num_hidden_layers=4)
    build_tiny_model(root / "teacher", num_hidden_layers=2, initializer_range=0.1)
    for name, flags in OBJECTIVES.items():
        write_jsonl(root / f"{name}.jsonl", rows_of(flags, COUNT))
    return root


def settings(root: Path, loss: str, tuner: str, **more: Any) -> dict[str, Any]:
    given = {"model": str(root / "model"), "dataset": [str(root / f"{loss}.jsonl")]}
    given |= {"teacher_model": str(root / "teacher")} if loss == "gkd" else {}
    return {**BASE, **OBJECTIVES[loss], **TUNERS[tuner], **given, **more}


def runs(given: list[dict[str, Any]]) -> None:
    """Each run on this rank."""
    from swift.commands.rlhf import rlhf

    for flags in given:
        rlhf(**flags)
    if not dist.is_initialized():  # a run ends its group, and the pool will want to end one
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def final(run: Path) -> dict[str, torch.Tensor]:
    """The trained tensors that a run ends with."""
    adapter = run / f"checkpoint-{STEPS}" / "adapter_model.safetensors"
    return load_file(adapter) if adapter.is_file() else trained(adapter.parent)


def logged(run: Path) -> list[dict[str, float]]:
    return [line for line in map(json.loads, (run / "logging.jsonl").read_text().splitlines()) if "grad_norm" in line]


def difference(ours: Path, theirs: Path) -> str:
    """What differs between two runs; nothing if they are the same."""
    lines, others = logged(ours), logged(theirs)
    if len(lines) != STEPS or len(others) != STEPS:
        return f"{len(lines)} and {len(others)} steps"
    wrong = []
    named = {name for line in others for name in line}
    names = {"loss", "grad_norm"} | {n for n in named if n.startswith(("rewards/", "logps/")) or n in ("nll", "kl")}
    for a, b in zip(lines, others, strict=True):
        first = {"rewards/accuracies"} if b["step"] == 1 else set()  # the model is the reference but for rounding
        for name in sorted((names - first) & b.keys()):
            if name not in a or abs(a[name] - b[name]) > 2e-5 + 2e-5 * abs(b[name]):
                wrong.append(f"step {b['step']} {name}: {a.get(name)} instead of {b[name]}")
    left, right = (final(run) for run in (ours, theirs))
    if left.keys() != right.keys():
        return f"weights {sorted(left.keys() ^ right.keys())[:4]}"
    off = math.sqrt(sum(float((left[n] - right[n]).double().square().sum()) for n in left))
    moved = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in right.values()))
    if not off <= 2e-6 * moved:
        wrong.append(f"weights off by {off / moved:.2g}")
    return "; ".join(wrong[:6])


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    """What one process gets, run once for each mix that is asked for."""
    from swift.commands.rlhf import rlhf

    def get(loss: str, tuner: str) -> Path:
        run = folder / f"one-{loss}-{tuner}"
        if not run.exists():
            rlhf(**settings(folder, loss, tuner, output_dir=str(run)))
        return run

    return get


def compare(name: str, mixes: list[tuple[str, str]], folder: Path, alone: Any) -> None:
    world, data_ranks, flags = SPREADS[name]
    given, cut = [], {"gradient_accumulation_steps": 4 // data_ranks}
    for loss, tuner in mixes:
        run = str(folder / f"{name.replace(' ', '')}-{loss}-{tuner}")
        given.append(settings(folder, loss, tuner, output_dir=run, **flags, **cut))
    torch.set_num_threads(1)
    on_ranks(world, runs, given, timeout_s=600.0)
    wrong = {
        mix: words
        for mix, one in zip(mixes, given, strict=True)
        if (words := difference(Path(one["output_dir"]), alone(*mix)))
    }
    assert not wrong, "\n".join(f"{'-'.join(mix)}: {words}" for mix, words in wrong.items())


@pytest.mark.parametrize("name", QUICK)
def test_spread_is_one_process(name: str, folder: Path, alone: Any) -> None:
    compare(name, QUICK[name], folder, alone)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SPREADS)
def test_every_loss_in_every_spread(name: str, folder: Path, alone: Any) -> None:
    compare(name, [mix for mix in MIXES if mix not in QUICK.get(name, [])], folder, alone)
