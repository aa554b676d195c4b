"""Runs from the command line whose processes share a model: what they log and write is what one process does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from runs import BASE, run_cli, trained
from safetensors.torch import load_file

from swift import sft

# way -> its flags, and how many ranks have data of their own
WAYS = {
    "one": ({}, 1),
    "fsdp": ({"fsdp": "fsdp2"}, 2),
    "tp": ({"tensor_parallel_size": 2, "sequence_parallel": True}, 1),
    "pp": ({"pipeline_parallel_size": 2}, 1),
    "cp": ({"sequence_parallel_size": 2, "attention_impl": "ring"}, 1),
}
ONE = {
    "fsdp": "none",
    "tensor_parallel_size": 1,
    "sequence_parallel": False,
    "pipeline_parallel_size": 1,
    "sequence_parallel_size": 1,
    "attention_impl": "auto",
}


def logged(run_dir: Path) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (run_dir / "logging.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "grad_norm" in line]


def assert_same_run(ours: Path, theirs: Path) -> None:
    for (step, *values), (expected_step, *expected) in zip(logged(ours), logged(theirs), strict=True):
        assert step == expected_step
        assert values == pytest.approx(expected, rel=2e-5)


@pytest.fixture(scope="module")
def flags(tiny_model_dir, tmp_path_factory):
    from fixtures import write_jsonl

    questions = [f"What comes after {number}?" for number in range(32)]
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": f"{n + 1} " * (1 + n % 5)}]}
        for n, text in enumerate(questions)
    ]
    data = write_jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", rows)
    own = {"model": str(tiny_model_dir), "dataset": [str(data)], "max_steps": 4, "save_steps": 2, "lora_dropout": 0.0}
    return {**BASE, **own}


@pytest.fixture(scope="module")
def references(flags, tmp_path_factory):
    """The run of one process, for each way of tuning, made once."""
    made: dict[str, Path] = {}

    def get(tuner: str) -> Path:
        if tuner not in made:
            made[tuner] = tmp_path_factory.mktemp("one") / tuner
            sft(**{**flags, "tuner_type": tuner, "gradient_accumulation_steps": 4, "output_dir": str(made[tuner])})
        return made[tuner]

    return get


def run_way(flags: dict, way: str, **more) -> None:
    own, data_ranks = WAYS[way]
    processes = {"nproc_per_node": 1 if way == "one" else 2, "gradient_accumulation_steps": 4 // data_ranks}
    result = run_cli({**flags, **ONE, **own, **processes, **more})
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("way", "next_way", "tuner"),
    [
        ("pp", "fsdp", "lora"),
        pytest.param("fsdp", "tp", "full", marks=pytest.mark.slow),
        pytest.param("tp", "cp", "lora", marks=pytest.mark.slow),
        pytest.param("cp", "one", "full", marks=pytest.mark.slow),
        pytest.param("one", "pp", "full", marks=pytest.mark.slow),
    ],
)
def test_a_shared_model_trains_like_one_process_and_goes_on_in_another_way(
    way, next_way, tuner, flags, references, tmp_path
):
    expected, run_dir = references(tuner), tmp_path / "run"
    run_way(flags, way, tuner_type=tuner, output_dir=str(run_dir))
    assert_same_run(run_dir, expected)
    name = "model.safetensors" if tuner == "full" else "adapter_model.safetensors"
    whole = {folder: load_file(folder / "checkpoint-4" / name) for folder in (run_dir, expected)}
    assert whole[run_dir].keys() == whole[expected].keys()
    for key, tensor in whole[expected].items():
        assert torch.allclose(whole[run_dir][key], tensor, rtol=1e-4, atol=1e-5), key
    shutil.rmtree(run_dir / "checkpoint-4")
    run_way(flags, next_way, tuner_type=tuner, resume_from_checkpoint=str(run_dir / "checkpoint-2"))
    assert_same_run(run_dir, expected)
    if next_way == "one":
        for key, tensor in trained(expected / "checkpoint-4").items():
            assert torch.allclose(trained(run_dir / "checkpoint-4")[key], tensor, rtol=1e-4, atol=1e-5), key


def test_what_cannot_be_shared_is_said_before_processes_start(flags, tmp_path):
    """All faults at once, with the exit code of wrong usage, and without a word from the processes."""
    more = {"nproc_per_node": 2, "tensor_parallel_size": 2, "neftune_noise_alpha": 5, "use_dora": True}
    result = run_cli({**flags, **more, "output_dir": str(tmp_path / "run")}, timeout=60)
    assert result.returncode == 2
    assert "neftune_noise_alpha draws noise" in result.stderr and "DoRA needs" in result.stderr
    assert "[rank" not in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_model_without_heads_has_no_plan_for_tensor_parallelism(flags, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(flags["model"], folder)
    config = json.loads((folder / "config.json").read_text())
    del config["num_attention_heads"]
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    result = run_cli({**flags, "model": str(folder), "nproc_per_node": 2, "tensor_parallel_size": 2}, timeout=60)
    assert result.returncode == 2
    assert "no plan" in result.stderr and "--fsdp fsdp2" in result.stderr and "[rank" not in result.stderr
