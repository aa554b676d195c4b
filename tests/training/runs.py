"""Helpers for tests that run real trainings on the tiny model."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

BASE = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 9,
    "logging_steps": 1,
    "save_steps": 3,
    "learning_rate": 1e-3,
    "lora_dropout": 0.1,
    "max_length": 128,
    "add_version": False,
    "report_to": ["none"],
}


def read_log(run_dir: Path) -> list[dict]:
    """The training lines of logging.jsonl: step, loss and gradient norm, bit for bit as logged."""
    lines = [json.loads(line) for line in (run_dir / "logging.jsonl").read_text().splitlines()]
    return [
        {key: line[key] for key in ("step", "loss", "grad_norm", "learning_rate", "token_accuracy")}
        for line in lines
        if "grad_norm" in line
    ]


def trained(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The trained tensors of a checkpoint."""
    private = checkpoint / "trained_state.safetensors"
    return load_file(str(private if private.is_file() else checkpoint / "model.safetensors"))


def assert_same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different


def command(flags: dict, *, name: str = "sft") -> list[str]:
    """The command line for a run."""
    words = [sys.executable, "-m", "swift.cli", name]
    for key, value in flags.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{key}", *(str(v).lower() if isinstance(v, bool) else str(v) for v in values)]
    return words


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **extra}


def run_cli(flags: dict, *, name: str = "sft", timeout: float = 240, **extra: str) -> subprocess.CompletedProcess:
    """Run the real command line and give its output."""
    return subprocess.run(
        command(flags, name=name),
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def start_cli(flags: dict, *, name: str = "sft") -> subprocess.Popen:
    """Start the real command line in a process group of its own."""
    return subprocess.Popen(
        command(flags, name=name),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen, timeout_s: float = 120) -> None:
    """Wait until the run has logged `step`."""
    deadline = time.monotonic() + timeout_s
    log = run_dir / "logging.jsonl"
    while time.monotonic() < deadline:
        if log.exists() and any(f'"step":{step},' in line.replace(" ", "") for line in log.read_text().splitlines()):
            return
        if process.poll() is not None:
            raise AssertionError(f"the run ended early:\n{process.stdout.read() if process.stdout else ''}")
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    raise AssertionError(f"step {step} was not reached in {timeout_s} s")
