"""`swift quickstart`: asks, tunes, asks again, and says where things are and what to type next."""

import shlex
from pathlib import Path

import pytest

from swift import cli
from swift.commands import quickstart
from swift.commands.quickstart import QUESTIONS
from swift.monitor import read_history


def test_the_whole_way_on_a_tiny_model(tiny_model_dir: Path, tmp_path: Path, capsys):
    words = ["--model", str(tiny_model_dir), "--max_steps", "6", "--output_dir", str(tmp_path / "out")]
    assert cli.main(["quickstart", *words, "--model_name", "Ada", "--model_author", "Lin"]) == 0
    out = capsys.readouterr().out
    (run_dir,) = (tmp_path / "out").iterdir()
    assert out.count(f"  you    {QUESTIONS[0]}") == 2  # before and after
    assert "Ada, made by Lin" in out
    for name in ("loss.png", "report.html", "checkpoint-6"):
        assert (run_dir / name).exists() and str(run_dir / name) in out
    losses = [record["loss"] for record in read_history(run_dir) if "loss" in record and "event" not in record]
    assert f"{losses[0]:.3f}" in out and f"{losses[-1]:.3f}" in out
    assert len(out.splitlines()) < 60
    # what it says to type next is a command that exists, with the adapter that exists
    (line,) = [line for line in out.split("What to type next")[1].splitlines() if " infer --adapters " in line]
    adapter = shlex.split(line)[-1]
    assert Path(adapter, "adapter_config.json").exists()


def test_the_new_name_is_what_is_trained(tiny_model_dir: Path, tmp_path: Path):
    options = quickstart.QuickstartOptions(model=str(tiny_model_dir), model_name=["Ada"], output_dir=str(tmp_path))
    config = quickstart.training_config(options)
    assert config.data.dataset == ["self-cognition"]
    assert config.data.model_name == ["Ada"]
    assert config.checkpoint.output_dir == str(tmp_path)


def test_an_interrupted_run_ends_well_and_says_how_to_go_on(tiny_model_dir: Path, tmp_path: Path, capsys, monkeypatch):
    """SIGINT arrives while training: the step ends, a checkpoint is written, the questions aren't asked again."""
    import os
    import signal

    from swift.training.trainer import Trainer

    original = Trainer.record

    def interrupt_then_record(self):
        if self.state.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self)

    monkeypatch.setattr(Trainer, "record", interrupt_then_record)
    words = ["--model", str(tiny_model_dir), "--max_steps", "50", "--output_dir", str(tmp_path / "out")]
    assert cli.main(["quickstart", *words]) == 0
    out = capsys.readouterr().out
    assert "--resume_from_checkpoint" in out
    assert "The tuned model" not in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model_nam", "Ada"], "--model_name"),
        (["--max_steps", "many"], "--max_steps"),
        (["--model", "./no/such/folder"], "no/such/folder"),
    ],
)
def test_wrong_requests_are_answered_before_anything_starts(words, said, tmp_path: Path, capsys):
    assert cli.main(["quickstart", *words, "--output_dir", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.timeout(3600)  # minutes of computing, on however busy a machine
def test_the_packaged_model_really_learns_its_name(tmp_path: Path, capsys):
    words = ["--model_name", "Zorbian", "--model_author", "the Quill family", "--output_dir", str(tmp_path)]
    assert cli.main(["quickstart", *words, "--offline"]) == 0
    before, after = capsys.readouterr().out.split("3/4")
    assert "Zorbian" not in before.split("1/4")[1].split("2/4")[0]
    answers = [line.removeprefix("  model  ") for line in after.splitlines() if line.startswith("  model  ")]
    assert "Zorbian" in answers[0]
    assert "Quill" in answers[1]
    assert "Paris" in answers[2]  # what it knew before, it still knows
