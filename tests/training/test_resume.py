"""Resumed = uninterrupted, bit for bit: every later loss, gradient norm, learning rate, and the final weights."""

import os
import shutil
import signal

import pytest
from runs import BASE, assert_same_bits, read_log, run_cli, start_cli, trained, wait_for_step

from swift import sft
from swift.checkpoint import list_checkpoints
from swift.core.errors import CheckpointError

VARIANTS = {
    "plain": {},
    "packing": {"packing": True, "packing_length": 256},
    "padded": {"padding_free": False},
    "full": {"tuner_type": "full", "learning_rate": 1e-4, "freeze_parameters_ratio": 0.3},
    "bf16": {"torch_dtype": "bfloat16"},
    "full-bf16": {"tuner_type": "full", "torch_dtype": "bfloat16"},
    "neftune-accumulation": {"neftune_noise_alpha": 5.0, "gradient_accumulation_steps": 3},
    "odd-logging": {"logging_steps": 4},
    "adalora": {"tuner_type": "adalora", "adalora_init_r": 6, "adalora_target_r": 2},
    "pissa": {"init_weights": "pissa", "lora_dropout": 0.0},
    "lora-plus-dora": {"lorap_lr_ratio": 4.0, "use_dora": True},
    "adafactor-recompute": {"optim": "adafactor", "gradient_checkpointing": True},
    "with-evaluation": {"split_dataset_ratio": 0.2, "eval_steps": 2},
}


@pytest.fixture
def flags(tiny_model_dir, chat_rows, write_rows, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", chat_rows(26))
    return {**BASE, "model": str(tiny_model_dir), "dataset": [str(data)]}


@pytest.mark.parametrize("variant", VARIANTS)
def test_resumed_equals_uninterrupted(variant, flags, tmp_path):
    flags |= VARIANTS[variant]
    whole = sft(**flags, output_dir=str(tmp_path / "whole"))
    assert whole.steps == 9
    for step in (3, 6):
        other = tmp_path / f"from-{step}"
        shutil.copytree(tmp_path / "whole", other)
        for checkpoint in list_checkpoints(other):
            if checkpoint.step > step:
                shutil.rmtree(checkpoint.path)
        resumed = sft(**flags, output_dir=str(other), resume_from_checkpoint="latest")
        assert resumed.run_dir == other
        assert read_log(other) == read_log(whole.run_dir)
        assert_same_bits(trained(resumed.last_checkpoint), trained(whole.last_checkpoint))
    losses = [line["loss"] for line in read_log(whole.run_dir)]
    assert len(set(losses)) > len(losses) // 2, "the losses don't move: nothing was tested"


def test_state_that_is_left_out_would_be_seen(flags, tmp_path):
    """The test itself: without the saved random state a resumed run with dropout must differ."""
    import torch

    whole = sft(**flags, output_dir=str(tmp_path / "whole"))
    shutil.rmtree(tmp_path / "whole/checkpoint-9")
    shutil.rmtree(tmp_path / "whole/checkpoint-6")
    states = torch.load(tmp_path / "whole/checkpoint-3/random_state.pt", weights_only=True)
    states[0]["torch"] = torch.Generator().manual_seed(99).get_state()
    torch.save(states, tmp_path / "whole/checkpoint-3/random_state.pt")
    before = read_log(whole.run_dir)
    manifest = tmp_path / "whole/checkpoint-3/complete.json"
    from swift.checkpoint.store import describe_files

    manifest.write_text('{"files": %s}' % str(describe_files(manifest.parent)).replace("'", '"'))  # noqa: UP031
    sft(**flags, output_dir=str(tmp_path / "whole"), resume_from_checkpoint="latest")
    after = read_log(whole.run_dir)
    assert after[:3] == before[:3]
    assert after[3:] != before[3:]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_kill_9_and_resume_latest(processes, flags, tmp_path):
    flags |= {"max_steps": 14, "nproc_per_node": processes}
    whole = run_cli({**flags, "output_dir": tmp_path / "whole"})
    assert whole.returncode == 0, whole.stderr
    run_dir = tmp_path / "killed"
    process = start_cli({**flags, "output_dir": run_dir})
    wait_for_step(run_dir, 8, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    resumed = run_cli({**flags, "output_dir": run_dir, "resume_from_checkpoint": "latest"})
    assert resumed.returncode == 0, resumed.stderr
    assert read_log(run_dir) == read_log(tmp_path / "whole")
    assert_same_bits(trained(run_dir / "checkpoint-14"), trained(tmp_path / "whole/checkpoint-14"))


def test_other_data_is_refused(flags, chat_rows, write_rows, tmp_path):
    sft(**{**flags, "max_steps": 3}, output_dir=str(tmp_path / "run"))
    other = write_rows(tmp_path / "other.jsonl", chat_rows(30))
    with pytest.raises(CheckpointError, match="rows differ"):
        sft(
            **{**flags, "dataset": [str(other)], "max_steps": 6},
            output_dir=str(tmp_path / "run"),
            resume_from_checkpoint="latest",
        )
    with pytest.raises(CheckpointError, match="order differs"):
        sft(**{**flags, "seed": 7, "max_steps": 6}, output_dir=str(tmp_path / "run"), resume_from_checkpoint="latest")


def test_weights_only_starts_afresh(flags, write_rows, chat_rows, tmp_path):
    first = sft(**{**flags, "max_steps": 3}, output_dir=str(tmp_path / "one"))
    other = write_rows(tmp_path / "other.jsonl", chat_rows(30))
    second = sft(
        **{**flags, "dataset": [str(other)], "max_steps": 3, "learning_rate": 1e-30, "weight_decay": 0.0},
        output_dir=str(tmp_path / "two"),
        resume_from_checkpoint=str(first.last_checkpoint),
        resume_only_model=True,
    )
    assert second.run_dir == tmp_path / "two"
    assert [line["step"] for line in read_log(second.run_dir)] == [1, 2, 3]
    assert_same_bits(trained(first.last_checkpoint), trained(second.last_checkpoint))


@pytest.mark.parametrize(("first", "then"), [(1, 2), (4, 1), (2, 3)])
def test_another_batch_size_still_sees_every_row_once_an_epoch(first, then, flags, tmp_path, monkeypatch):
    from swift.training.trainer import Trainer

    seen = []
    original = Trainer.train_step

    def spy(self, batches):
        seen.extend((self.state.epoch, ref.line) for batch in batches for ref in batch.refs)
        original(self, batches)

    monkeypatch.setattr(Trainer, "train_step", spy)
    flags |= {"num_train_epochs": 2.0, "per_device_train_batch_size": 1, "output_dir": str(tmp_path / "run")}
    flags |= {"max_steps": -1, "save_steps": 4}
    sft(**{**flags, "gradient_accumulation_steps": first})
    steps_first = len(seen)
    assert sorted(seen) == [(epoch, line) for epoch in (0, 1) for line in range(1, 27)]
    for checkpoint in list_checkpoints(tmp_path / "run"):
        if checkpoint.step > 4:
            shutil.rmtree(checkpoint.path)
    seen[:] = seen[: 4 * first]
    assert steps_first == 52
    sft(**{**flags, "gradient_accumulation_steps": then}, resume_from_checkpoint="latest")
    assert sorted(seen) == [(epoch, line) for epoch in (0, 1) for line in range(1, 27)]


def test_another_optimizer_is_refused_and_todays_betas_hold(flags, tmp_path, monkeypatch):
    from swift.training.trainer import Trainer

    flags |= {"output_dir": str(tmp_path / "run")}
    sft(**{**flags, "max_steps": 3})
    with pytest.raises(CheckpointError, match="AdamW, not of SGD"):
        sft(**{**flags, "optim": "sgd"}, resume_from_checkpoint="latest")
    found = []
    original = Trainer.fit

    def fit(self):
        found.append([(g["betas"], g["lr"], g["fused"]) for g in self.parts.optimizer.param_groups])
        return original(self)

    monkeypatch.setattr(Trainer, "fit", fit)
    sft(
        **{**flags, "max_steps": 5, "adam_beta2": 0.5, "optim": "adamw_torch", "learning_rate": 1e-5},
        resume_from_checkpoint="latest",
    )
    assert all(betas == (0.9, 0.5) and rate <= 1e-5 and not fused for betas, rate, fused in found[0])


def test_resuming_a_finished_run_changes_nothing(flags, tmp_path, capfd):
    flags |= {"output_dir": str(tmp_path / "run")}
    first = sft(**flags)
    before = (first.last_checkpoint / "complete.json").stat().st_ino
    again = sft(**flags, resume_from_checkpoint="latest")
    assert again.last_checkpoint == first.last_checkpoint
    assert "nothing left to do: all 9 steps are done" in capfd.readouterr().out
    assert (again.last_checkpoint / "complete.json").stat().st_ino == before
    sft(**{**flags, "max_steps": 11}, resume_from_checkpoint="latest")
    assert "finished: 2 more steps, 11 in all" in capfd.readouterr().out
