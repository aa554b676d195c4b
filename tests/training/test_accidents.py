"""What happens to a run when something happens to it: signals, a full disk, numbers that aren't, a torn checkpoint."""

import json
import re
import shutil
import signal
import subprocess
import time

import pytest
import torch
from runs import BASE, assert_same_bits, command, environment, read_log, run_cli, start_cli, trained, wait_for_step

from swift import sft
from swift.checkpoint import find_checkpoint, list_checkpoints, verify
from swift.core.errors import CheckpointError, NumericsError, UsageError


@pytest.fixture
def flags(tiny_model_dir, chat_rows, write_rows, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", chat_rows(40))
    return {
        **BASE,
        "model": str(tiny_model_dir),
        "dataset": [str(data)],
        "output_dir": str(tmp_path / "run"),
        "max_steps": 5000,
        "save_steps": 100000,
    }


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_exits_0_and_the_run_goes_on_exactly(number, flags, tmp_path):
    flags |= {"max_steps": 150, "logging_steps": 1}
    process = start_cli(flags)
    wait_for_step(tmp_path / "run", 5, process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    saved = list_checkpoints(tmp_path / "run")
    assert saved[0].step < 150, "the run ended before the signal: nothing was tested"
    assert len(saved) == 1
    match = re.search(r"swift sft --resume_from_checkpoint (\S+)", output)
    assert match, output
    assert match[1] == str(saved[0].path)
    resumed = run_cli({"resume_from_checkpoint": match[1]})
    assert resumed.returncode == 0, resumed.stderr
    whole = run_cli({**flags, "output_dir": tmp_path / "whole"})
    assert whole.returncode == 0, whole.stderr
    assert read_log(tmp_path / "run") == read_log(tmp_path / "whole")
    assert_same_bits(trained(tmp_path / "run/checkpoint-150"), trained(tmp_path / "whole/checkpoint-150"))


@pytest.mark.slow
def test_a_signal_to_a_run_of_two_ranks(flags, tmp_path):
    process = start_cli({**flags, "nproc_per_node": 2})
    wait_for_step(tmp_path / "run", 5, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, output
    assert len(list_checkpoints(tmp_path / "run")) == 1


def test_a_second_ctrl_c_stops_at_once(flags, tmp_path):
    # steps of 20,000 examples: the first one doesn't end before the second signal
    process = start_cli({**flags, "dataset": [f"{flags['dataset'][0]}#20000"], "gradient_accumulation_steps": 10000})
    for line in process.stdout:
        if line.startswith("run "):
            break
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    for line in process.stdout:
        if "finishing this step" in line:
            break
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 130, output
    assert "stopped at once" in output
    assert list_checkpoints(tmp_path / "run") == []


def test_a_full_disk_is_named_and_earlier_checkpoints_stay(flags, tmp_path):
    """A file-size limit refuses the second save's larger files as a full disk would; the first one stays whole."""
    first = sft(**{**flags, "max_steps": 2, "save_steps": 2})
    flags |= {"max_steps": 4, "save_steps": 2, "resume_from_checkpoint": "latest"}
    script = f"ulimit -f 64; exec {' '.join(command(flags))}"
    result = subprocess.run(
        ["bash", "-c", script], env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert "could not write" in result.stderr
    assert str(tmp_path / "run/checkpoint-4") in result.stderr
    assert "intact: checkpoint-2" in result.stderr
    assert "needed" in result.stderr
    assert "Traceback" not in result.stderr
    verify(first.last_checkpoint)
    assert [c.step for c in list_checkpoints(tmp_path / "run")] == [2]
    assert not list((tmp_path / "run").glob(".checkpoint-*"))


def test_too_little_space_is_seen_before_writing(flags, monkeypatch):
    import swift.checkpoint.store as store

    real = shutil.disk_usage
    calls = []

    def shrinking(path):
        calls.append(path)
        return real(path)._replace(free=1000 if len(calls) > 1 else 1 << 30)

    monkeypatch.setattr(store.shutil, "disk_usage", shrinking)  # room at the start, none at the save
    with pytest.raises(CheckpointError, match="not enough free space"):
        sft(**{**flags, "max_steps": 2})
    assert len(calls) > 1


def test_no_room_for_a_checkpoint_is_seen_before_step_1(flags, tmp_path, monkeypatch):
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=1000))
    with pytest.raises(CheckpointError, match="no room for a checkpoint"):
        sft(**{**flags, "max_steps": 2})
    assert read_log(tmp_path / "run") == [] if (tmp_path / "run/logging.jsonl").exists() else True
    assert sft(**{**flags, "max_steps": 2, "save_strategy": "no", "overwrite_output_dir": True}).steps == 2


def test_a_reader_that_goes_away_does_not_end_the_run(flags, tmp_path):
    words = " ".join(command({**flags, "max_steps": 6}))
    script = f"{words} | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", script], env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "goes on" in done.stderr
    assert [c.step for c in list_checkpoints(tmp_path / "run")] == [6]
    assert len(read_log(tmp_path / "run")) == 6


def test_flash_attention_that_is_not_installed_is_said_so(flags):
    with pytest.raises(UsageError, match="flash-attn is not installed"):
        sft(**{**flags, "max_steps": 1}, attn_impl="flash_attention_2")


def test_a_kill_during_a_save_leaves_the_one_before(flags, tmp_path):
    flags |= {"save_steps": 2, "max_steps": 4}
    script = tmp_path / "die_in_save.py"
    script.write_text(
        "import os, sys\n"
        "import swift.checkpoint.store as store\n"
        "from swift.cli import main\n"
        "original = store.fsync_tree\n"
        "def die(path):\n"
        "    if path.name == '.checkpoint-4.writing':\n"
        "        os.kill(os.getpid(), 9)\n"
        "    original(path)\n"
        "store.fsync_tree = die\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    words = [command({})[0], str(script), *command(flags)[3:]]
    died = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert died.returncode == -signal.SIGKILL
    assert (tmp_path / "run/.checkpoint-4.writing").is_dir()
    assert find_checkpoint("latest", tmp_path / "run").step == 2
    resumed = sft(**flags, resume_from_checkpoint="latest")
    assert resumed.steps == 4
    assert not (tmp_path / "run/.checkpoint-4.writing").exists()
    whole = sft(**{**flags, "output_dir": str(tmp_path / "whole")})
    assert read_log(tmp_path / "run") == read_log(tmp_path / "whole")
    left, right = trained(resumed.last_checkpoint), trained(whole.last_checkpoint)
    assert all(torch.equal(left[name], right[name]) for name in left)


def poison(folder):
    """Make the model's embedding of one token infinite."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(str(path))
    tensors["model.embed_tokens.weight"][:] = float("nan")
    save_file(tensors, str(path), metadata={"format": "pt"})


def test_a_loss_that_is_not_finite_stops_with_its_rows(flags, tmp_path, monkeypatch):
    import swift.training.module as module

    original = module.TrainModule.forward
    calls = 0

    def forward(self, batch):
        nonlocal calls
        calls += 1
        terms = original(self, batch)
        if calls == 3:  # the first micro-batch of step 2
            terms.loss_sum = terms.loss_sum * float("nan")
        return terms

    monkeypatch.setattr(module.TrainModule, "forward", forward)
    with pytest.raises(NumericsError, match=r"loss of step 2 is not finite") as caught:
        sft(**{**flags, "max_steps": 4})
    folder = tmp_path / "run/nonfinite-step-2"
    described = json.loads((folder / "rank0.json").read_text())
    assert described[0]["loss"] == "nan"
    assert len(described[0]["rows"]) == 2
    assert all(row in caught.value.where for row in described[0]["rows"])
    assert not any(row in caught.value.where.split(";")[0].split(", ") for row in described[1]["rows"])
    batches = torch.load(folder / "rank0.pt", weights_only=True)
    assert batches[0]["input_ids"].numel() > 0

    calls = 0
    result = sft(**{**flags, "max_steps": 4, "on_nonfinite": "skip", "output_dir": str(tmp_path / "skip")})
    assert result.steps == 4
    state = json.loads((result.last_checkpoint / "trainer_state.json").read_text())
    assert state["skipped_steps"] == 1


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest"])
def test_a_damaged_checkpoint_is_found_and_latest_takes_the_one_before(damage, flags, tmp_path):
    sft(**{**flags, "max_steps": 4, "save_steps": 2})
    newest = tmp_path / "run/checkpoint-4"
    file = newest / "optimizer.pt"
    if damage == "flip":
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "remove":
        file.unlink()
    else:
        (newest / "complete.json").unlink()
    with pytest.raises(CheckpointError, match=r"damaged|incomplete"):
        find_checkpoint(str(newest), tmp_path)
    assert find_checkpoint("latest", tmp_path / "run").step == 2


def test_best_and_newest_are_kept(flags, tmp_path, monkeypatch):
    import swift.training.trainer as trainer

    scores = iter([3.0, 1.0, 2.0, 2.5, 2.2])
    monkeypatch.setattr(
        trainer, "evaluate", lambda *args, **kwargs: {"eval_loss": next(scores), "eval_token_accuracy": 0.0}
    )
    result = sft(
        **{**flags, "max_steps": 10, "save_steps": 2, "eval_steps": 2, "save_total_limit": 2},
        split_dataset_ratio=0.1,
        create_checkpoint_symlink=True,
    )
    assert [c.step for c in list_checkpoints(tmp_path / "run")] == [4, 10]
    assert result.best_checkpoint == tmp_path / "run/checkpoint-4"
    assert (tmp_path / "run/best").resolve() == tmp_path / "run/checkpoint-4"
    assert (tmp_path / "run/last").resolve() == tmp_path / "run/checkpoint-10"


def test_early_stop_and_best_weights_at_the_end(flags, tmp_path, monkeypatch):
    import swift.training.trainer as trainer

    scores = iter([2.0, 1.0, 3.0, 4.0])
    monkeypatch.setattr(
        trainer, "evaluate", lambda *args, **kwargs: {"eval_loss": next(scores), "eval_token_accuracy": 0.0}
    )
    loaded = []
    original = trainer.Trainer.fit

    def fit(self):
        result = original(self)
        named = self.parts.strategy.module.named_parameters()
        loaded.append({n: p.detach().clone() for n, p in named if p.requires_grad})
        return result

    monkeypatch.setattr(trainer.Trainer, "fit", fit)
    result = sft(
        **{**flags, "max_steps": 100, "save_steps": 2, "eval_steps": 2, "early_stop_interval": 2},
        split_dataset_ratio=0.1,
        load_best_model_at_end=True,
    )
    assert (result.status, result.steps) == ("early_stopped", 8)
    best = trained(tmp_path / "run/checkpoint-4")
    assert all(torch.equal(loaded[0][f"model.{name}"], tensor) for name, tensor in best.items())


def test_skipping_has_an_end(flags, monkeypatch):
    import swift.training.module as module

    original = module.TrainModule.forward

    def forward(self, batch):
        terms = original(self, batch)
        terms.loss_sum = terms.loss_sum * float("nan")
        return terms

    monkeypatch.setattr(module.TrainModule, "forward", forward)
    with pytest.raises(NumericsError, match="20th time in a row"):
        sft(**{**flags, "max_steps": 30, "on_nonfinite": "skip"})


def test_an_evaluation_that_is_not_a_number_is_never_the_best(flags, tmp_path, monkeypatch):
    import swift.training.trainer as trainer

    scores = iter([float("nan"), 2.0, 1.0, float("nan")])
    monkeypatch.setattr(
        trainer, "evaluate", lambda *args, **kwargs: {"eval_loss": next(scores), "eval_token_accuracy": 0.0}
    )
    result = sft(**{**flags, "max_steps": 8, "save_steps": 2, "eval_steps": 2}, split_dataset_ratio=0.1)
    assert result.best_checkpoint == tmp_path / "run/checkpoint-6"


def test_evaluation_rows_are_evaluated_at_the_end_even_if_nothing_is_saved(flags):
    result = sft(**{**flags, "max_steps": 3, "save_strategy": "no"}, split_dataset_ratio=0.1)
    assert result.metrics["eval_loss"] > 0


def test_an_interrupted_run_of_weights_only_can_go_on(flags, tmp_path):
    flags |= {"save_only_model": True, "max_steps": 200}
    process = start_cli(flags)
    wait_for_step(tmp_path / "run", 3, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    step = list_checkpoints(tmp_path / "run")[-1].step
    resumed = run_cli({"resume_from_checkpoint": tmp_path / f"run/checkpoint-{step}", "max_steps": step + 2})
    assert resumed.returncode == 0, resumed.stderr
    assert [line["step"] for line in read_log(tmp_path / "run")] == list(range(1, step + 3))


def test_overwriting_a_folder_takes_its_old_checkpoints_away(flags, tmp_path):
    flags |= {"save_total_limit": 1}
    sft(**{**flags, "max_steps": 12, "save_steps": 12})
    result = sft(**{**flags, "max_steps": 5, "save_steps": 5, "overwrite_output_dir": True})
    assert result.last_checkpoint == tmp_path / "run/checkpoint-5"
    assert [c.step for c in list_checkpoints(tmp_path / "run")] == [5]


def test_resuming_from_an_earlier_step_sets_later_checkpoints_aside(flags, tmp_path):
    flags |= {"save_steps": 2, "max_steps": 6, "save_total_limit": 2}
    sft(**{**flags, "save_total_limit": 9})
    sft(**flags, resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
    assert [c.step for c in list_checkpoints(tmp_path / "run")] == [4, 6]
    assert sorted(p.name for p in (tmp_path / "run/superseded").iterdir()) == ["checkpoint-4", "checkpoint-6"]


def test_two_runs_don_t_share_a_folder(flags, tmp_path):
    process = start_cli(flags)
    wait_for_step(tmp_path / "run", 2, process)
    with pytest.raises(CheckpointError, match=f"process {process.pid} on"):
        sft(**{**flags, "max_steps": 2, "overwrite_output_dir": True})
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert sft(**{**flags, "max_steps": 2, "overwrite_output_dir": True}).steps == 2


def test_the_sign_of_life_of_a_killed_run_is_gone_before_others_wait_for_a_new_one(flags, tmp_path, monkeypatch):
    """Ranks that come first would read it, find its process dead, and give up on a rank 0 that is on its way."""
    from swift.training import data

    pulse = tmp_path / "run/.preparing"
    pulse.parent.mkdir()
    pulse.write_text('{"pid": 4194299, "host": "", "beat": 3, "words": ""}')
    seen = []
    original = data.load_tokenizer
    monkeypatch.setattr(
        data, "load_tokenizer", lambda *given, **named: seen.append(pulse.exists()) or original(*given, **named)
    )
    sft(**{**flags, "max_steps": 1, "save_strategy": "no", "output_dir": str(tmp_path / "run")})
    assert seen == [False]
