"""The monitor as the trainer uses it: what is printed, recorded and left behind."""

import html
import json
import math
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from swift.config.training import MonitorConfig
from swift.core.errors import SwiftError
from swift.data.ledger import Ledger
from swift.data.rows import RowProblem, RowRef
from swift.monitor import EventWriter, build_monitor, read_history
from swift.monitor.console import Pace
from swift.monitor.plot import smooth
from swift.monitor.text import counted, duration, sparkline

PLAN = {
    "model": "tiny",
    "device": "cpu",
    "precision": "float32",
    "trainable": "LoRA: 1.2 k of 99.0 k parameters",
    "examples": 40,
    "tokens_per_epoch": 2048,
    "total_steps": 20,
    "steps_per_epoch": 10,
    "notes": ["gradient checkpointing off"],
}


def run_twenty_steps(folder: Path, config: MonitorConfig, *, every: int = 5, loss=lambda step: 2.0 / step) -> None:
    monitor = build_monitor(config, folder, rank=0)
    monitor.event("warning", "two rows were cut", rows=2)
    monitor.start({**PLAN, "run_dir": str(folder)})
    for step in range(1, 21):
        monitor.progress(step, {"loss": loss(step)})
        if step % every == 0:
            monitor.log(step, {"loss": loss(step), "learning_rate": 1e-4, "grad_norm": 0.5, "tokens_per_second": 150.0})
        if step % 10 == 0:
            monitor.log(step, {"eval_loss": loss(step)})
            monitor.event("checkpoint", f"checkpoint saved: {folder}/checkpoint-{step}")
    monitor.finish({"status": "finished", "steps": 20, "seconds": 75.0, "last_checkpoint": f"{folder}/checkpoint-20"})


def test_a_twenty_step_run_prints_at_most_thirty_lines(tmp_path: Path, capsys):
    run_twenty_steps(tmp_path, MonitorConfig(), every=1)
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line]
    assert sum(line.startswith("step ") and " loss " in line for line in lines) == 20
    assert len(lines) <= 36  # with a line for every step; the default is every fifth
    run_twenty_steps(tmp_path, MonitorConfig())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 30
    assert lines[0] == "warning: two rows were cut"
    assert any(
        line.startswith("step 20/20  loss 0.1000  lr 1.00e-04  grad_norm 0.5  150 tok/s  eta ") for line in lines
    )
    assert "20 steps in 1:15" in "\n".join(lines)


def test_plain_output_has_no_terminal_codes_and_needs_no_rich(tmp_path: Path):
    script = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path; from test_monitor import run_twenty_steps\n"
        "from swift.config.training import MonitorConfig\n"
        "run_twenty_steps(Path(sys.argv[1]), MonitorConfig())\n"
        "print('rich' in sys.modules, 'torch' in sys.modules)\n"
    )
    here = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path), here], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False False"
    assert "\x1b" not in done.stdout


def run_in_terminal(script: str, *arguments: str) -> str:
    """Output of a Python script whose stdout is a real pseudo-terminal."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdout=follower,
        stderr=follower,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "160"},
    )
    os.close(follower)
    output = bytearray()
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # the other side is closed
            break
        if not chunk:
            break
        output += chunk
    os.close(leader)
    process.wait()
    return output.decode()


def test_a_terminal_gets_a_live_line_and_the_lines_above_it(tmp_path: Path):
    script = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path; from test_monitor import run_twenty_steps\n"
        "from swift.config.training import MonitorConfig\n"
        "run_twenty_steps(Path(sys.argv[1]), MonitorConfig(disable_tqdm=sys.argv[3] == 'plain'))\n"
    )
    here = str(Path(__file__).parent)
    live = run_in_terminal(script, str(tmp_path), here, "live")
    assert "\x1b[?25l" in live and "\x1b[?25h" in live  # cursor hidden, and given back
    assert "step 20/20  loss 0.1000" in live
    assert "\x1b" not in run_in_terminal(script, str(tmp_path), here, "plain")


def test_everything_is_recorded_and_the_report_is_whole(tmp_path: Path, capsys):
    ledger = Ledger(tmp_path / "ledger.jsonl", strict=False, max_bad_rows=5)
    tally = ledger.begin("train", "a.jsonl")
    ledger.keep(tally, RowRef("a.jsonl", 1), examples=1, tokens_cut=0)
    ledger.drop(tally, RowRef("a.jsonl", 2), RowProblem("not_json", "found <img src=x>"))
    ledger.close()
    (tmp_path / "swift_config.yaml").write_text("model:\n  model: '<script>alert(1)</script>'\n")
    run_twenty_steps(tmp_path, MonitorConfig(), loss=lambda step: math.nan if step == 15 else 2.0 / step)
    records = read_history(tmp_path)
    assert [record["event"] for record in records if "event" in record] == [
        "start",
        "warning",
        "checkpoint",
        "checkpoint",
        "finish",
    ]
    assert records[1]["rows"] == 2
    at_15 = next(record for record in records if record["step"] == 15)
    assert at_15["loss"] is None and at_15["nonfinite"] == {"loss": "nan"}
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "runs").glob("events.out.tfevents.*"))

    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page and "<img src=x>" not in page
    assert html.escape("'<script>alert(1)</script>'") in page
    assert "data:image/png;base64," in page
    assert "http://" not in page and "https://" not in page  # self-contained
    assert "dropped 1 not_json: first a.jsonl:2: found &lt;img src=x&gt;" in page
    for words in ("LoRA: 1.2 k of 99.0 k parameters", "<th>kept</th>", "two rows were cut", "python"):
        assert words in page


def test_resume_continues_history_and_counts_from_there(tmp_path: Path, capsys):
    run_twenty_steps(tmp_path, MonitorConfig())
    monitor = build_monitor(MonitorConfig(), tmp_path, rank=0)
    monitor.resume_at(10)
    monitor.start(PLAN)
    monitor.log(15, {"loss": 0.5})
    monitor.finish({"steps": 20})
    steps = [record["step"] for record in read_history(tmp_path) if "loss" in record]
    assert steps == [5, 10, 15]
    kinds = [record["event"] for record in read_history(tmp_path) if "event" in record]
    assert kinds == ["start", "warning", "checkpoint", "resume", "finish"]
    assert "goes on after step 10" in capsys.readouterr().out


def test_a_resume_that_is_refused_before_it_starts_cuts_nothing(tmp_path: Path, capsys):
    run_twenty_steps(tmp_path, MonitorConfig())
    before = (tmp_path / "logging.jsonl").read_bytes()
    monitor = build_monitor(MonitorConfig(), tmp_path, rank=0)
    monitor.resume_at(10)
    monitor.event("data", "40 examples")
    monitor.close()
    assert (tmp_path / "logging.jsonl").read_bytes() == before


def test_a_resume_in_another_folder_carries_the_history_over(tmp_path: Path, capsys):
    run_twenty_steps(tmp_path / "old", MonitorConfig())
    monitor = build_monitor(MonitorConfig(), tmp_path / "new", rank=0)
    monitor.resume_at(10, tmp_path / "old")
    monitor.start(PLAN)
    monitor.close()
    assert [record["step"] for record in read_history(tmp_path / "new") if "loss" in record] == [5, 10]


def test_other_ranks_are_silent(tmp_path: Path, capsys):
    monitor = build_monitor(MonitorConfig(), tmp_path / "run", rank=1)
    monitor.resume_at(3)
    monitor.start(PLAN)
    monitor.log(5, {"loss": 1.0})
    monitor.progress(5, {})
    monitor.event("warning", "x")
    monitor.finish({})
    monitor.close()
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("level", "shown"), [("info", True), ("warning", False)])
def test_log_level_hides_lines_but_records_them(tmp_path: Path, capsys, level, shown):
    run_twenty_steps(tmp_path, MonitorConfig(log_level=level))
    out = capsys.readouterr().out
    assert ("step 5/20" in out) is shown
    assert "warning: two rows were cut" in out
    assert len(read_history(tmp_path)) == 11


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_once_and_closing_adds_nothing(tmp_path: Path, capsys):
    (tmp_path / "logging.jsonl").symlink_to("/dev/full")
    monitor = build_monitor(MonitorConfig(), tmp_path, rank=0)
    with pytest.raises(SwiftError, match=r"could not write .*logging\.jsonl"):
        monitor.start(PLAN)
    monitor.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_at_the_event_file_is_told_once(tmp_path: Path, monkeypatch):
    writer = EventWriter(tmp_path)
    os.dup2(os.open("/dev/full", os.O_WRONLY), writer._file.fileno())
    with pytest.raises(SwiftError, match="could not write"):
        writer.add(1, {"train/loss": 1.0})
    writer.close()


def test_report_to_none_writes_no_event_file(tmp_path: Path, capsys):
    run_twenty_steps(tmp_path, MonitorConfig(report_to=["none"]))
    assert not (tmp_path / "runs").exists()
    assert (tmp_path / "logging.jsonl").exists()


def test_logging_dir_moves_the_event_file(tmp_path: Path, capsys):
    run_twenty_steps(tmp_path, MonitorConfig(logging_dir=str(tmp_path / "elsewhere")))
    assert list((tmp_path / "elsewhere").glob("events.out.tfevents.*"))


def test_a_run_without_any_loss_still_gets_a_report(tmp_path: Path, capsys):
    monitor = build_monitor(MonitorConfig(), tmp_path, rank=0)
    monitor.start(PLAN)
    monitor.finish({"status": "interrupted", "steps": 0})
    assert not (tmp_path / "loss.png").exists()
    assert "interrupted" in (tmp_path / "report.html").read_text()
    json.loads((tmp_path / "logging.jsonl").read_text().splitlines()[-1])


def test_the_eta_follows_the_pace(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("swift.monitor.console.time.monotonic", lambda: now[0])
    pace = Pace(total_steps=100, step=10)
    assert math.isnan(pace.eta_s())
    for step in range(11, 21):
        now[0] += 2.0
        pace.mark(step)
    assert pace.eta_s() == pytest.approx(160.0)


def test_words():
    assert [duration(s) for s in (5, 75, 3675, math.nan)] == ["0:05", "1:15", "1:01:15", "-:--"]
    assert sparkline([4.0, 3.0, 2.0, 1.0]) == "█▆▃▁"
    assert sparkline([math.nan]) == ""
    assert len(sparkline([float(i) for i in range(500)], width=40)) == 40


def test_smoothing_neither_lags_on_short_curves_nor_leaves_long_ones_rough():
    assert smooth([3.0, 2.0, 1.0]) == [3.0, 2.0, 1.0]
    assert smooth([3.0] * 100) == pytest.approx([3.0] * 100)  # no bias at the start
    rough = [1.0 + (-1) ** i for i in range(400)]
    assert max(smooth(rough)[100:]) < 1.1


@pytest.mark.parametrize(("count", "words"), [(1, "1 step"), ("1", "1 step"), (0, "0 steps"), ("0.5", "0.5 steps")])
def test_counts_have_their_plural(count, words):
    assert counted(count, "step") == words
