"""However a step's examples are spread over micro-batches and ranks: same loss, gradients and weights after 5 steps."""

import json
import subprocess

import pytest
import torch
from runs import BASE, command, environment, read_log, run_cli, trained

from swift import sft

RTOL = 1e-6

SPREADS = {
    "8x1": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
    "1x8": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    "4x2": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
}
MODES = {
    "lora": {},
    "full": {"tuner_type": "full"},
    "padded": {"padding_free": False},
    "packing": {"packing": True, "packing_length": 128, "packed": True},
    "sgd": {"optim": "sgd", "learning_rate": 0.1},
    "smoothing-dft": {"label_smoothing_factor": 0.1, "enable_dft_loss": True},
}


@pytest.fixture
def flags(tiny_model_dir, chat_rows, write_rows, tmp_path):
    # 21 rows: the last step of the epoch is a partial one
    data = write_rows(tmp_path / "rows.jsonl", chat_rows(21))
    return {
        **BASE,
        "model": str(tiny_model_dir),
        "dataset": [str(data)],
        "max_steps": 5,
        "lora_dropout": 0.0,
        "learning_rate": 1e-4,
    }


def assert_close(first, second):
    for a, b in zip(read_log(first), read_log(second), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=RTOL)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=10 * RTOL)
    left, right = trained(first / "checkpoint-5"), trained(second / "checkpoint-5")
    assert left.keys() == right.keys()
    difference = torch.sqrt(sum((left[n] - right[n]).double().square().sum() for n in left))
    norm = torch.sqrt(sum(right[n].double().square().sum() for n in right))
    assert difference / norm <= RTOL


@pytest.mark.parametrize("mode", MODES)
def test_accumulation_and_micro_batch_change_nothing(mode, flags, tmp_path):
    flags |= MODES[mode]
    spreads = SPREADS
    if flags.pop("packed", False):  # units are packed rows: fewer of them
        spreads = {
            "4x1": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1},
            "1x4": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        }
    for name, spread in spreads.items():
        sft(**{**flags, **spread, "output_dir": str(tmp_path / name)})
    first, *others = spreads
    for other in others:
        assert_close(tmp_path / first, tmp_path / other)


def test_another_batch_would_be_seen(flags, tmp_path):
    """The check itself: one example more per step must show."""
    sft(**{**flags, **SPREADS["8x1"], "output_dir": str(tmp_path / "8")})
    sft(**{**flags, **SPREADS["8x1"], "per_device_train_batch_size": 9, "output_dir": str(tmp_path / "9")})
    with pytest.raises(AssertionError):
        assert_close(tmp_path / "8", tmp_path / "9")


@pytest.mark.parametrize("mode", ["lora", pytest.param("full", marks=pytest.mark.slow), "packing"])
def test_two_ranks_equal_one_process(mode, flags, tmp_path):
    flags |= MODES[mode]
    packed = flags.pop("packed", False)
    size = 2 if packed else 4
    flags |= {"split_dataset_ratio": 0.2, "eval_steps": 5, "save_steps": 5}
    one = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 2, "output_dir": str(tmp_path / "one")}
    two = {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": 1,
        "output_dir": str(tmp_path / "two"),
        "nproc_per_node": 2,
    }
    single = sft(**{**flags, **one})
    result = run_cli({**flags, **two})
    assert result.returncode == 0, result.stdout + result.stderr
    assert_close(tmp_path / "one", tmp_path / "two")
    evaluations = [
        line
        for line in map(json.loads, (tmp_path / "two/logging.jsonl").read_text().splitlines())
        if "eval_loss" in line
    ]
    assert evaluations[-1]["eval_loss"] == pytest.approx(single.metrics["eval_loss"], rel=RTOL)


@pytest.mark.slow
def test_plain_torchrun_equals_our_own_launcher(flags, tmp_path):
    flags |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    ours = run_cli({**flags, "nproc_per_node": 2, "output_dir": tmp_path / "ours"})
    assert ours.returncode == 0, ours.stderr
    python, *words = command({**flags, "output_dir": tmp_path / "theirs"})
    torchrun = [python, "-m", "torch.distributed.run", "--nproc-per-node", "2", *words]
    theirs = subprocess.run(torchrun, env=environment(), capture_output=True, text=True, timeout=240, check=False)
    assert theirs.returncode == 0, theirs.stderr
    assert_close(tmp_path / "ours", tmp_path / "theirs")
