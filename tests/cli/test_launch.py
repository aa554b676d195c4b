"""Several processes on one node: what they see, how they end, and that none is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swift.cli import launch
from swift.config import SftConfig

LAUNCHER = (
    "import sys\n"
    "from swift.cli import launch\n"
    "sys.exit(launch.run(sys.argv[3:], int(sys.argv[2]), program=[sys.executable, sys.argv[1]]))\n"
)


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "child.py"
    path.write_text("import os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + text)
    return str(path)


def start(tmp_path: Path, text: str, processes: int = 2, *words: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MASTER_PORT", "RANK")}
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, script(tmp_path, text), str(processes), *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def wait_for(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]


REPORT = """
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"]
import json, pathlib
seen = {n: os.environ.get(n) for n in names} | {"pid": os.getpid()}
pathlib.Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(seen))
"""


def reports(folder: Path, count: int) -> list[dict]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


def test_what_each_process_sees(tmp_path):
    process = start(tmp_path, REPORT, 3, str(tmp_path))
    assert process.wait(30) == 0
    seen = reports(tmp_path, 3)
    assert [r["RANK"] for r in seen] == [r["LOCAL_RANK"] for r in seen] == ["0", "1", "2"]
    assert {r["WORLD_SIZE"] for r in seen} == {r["LOCAL_WORLD_SIZE"] for r in seen} == {"3"}
    assert {r["MASTER_ADDR"] for r in seen} == {"127.0.0.1"} and len({r["MASTER_PORT"] for r in seen}) == 1
    assert {r["OMP_NUM_THREADS"] for r in seen} == {str(max(1, (os.cpu_count() or 1) // 3))}


@pytest.mark.parametrize(("codes", "expected"), [((0, 0), 0), ((0, 1), 1), ((2, 1), 2)])
def test_exit_code_is_the_worst(tmp_path, codes, expected):
    assert start(tmp_path, f"sys.exit({codes}[rank])").wait(30) == expected


def test_a_killed_process_is_reported(tmp_path):
    process = start(tmp_path, "os.kill(os.getpid(), signal.SIGKILL) if rank else None")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1 and "rank 1 was ended by SIGKILL" in errors
    assert "--resume_from_checkpoint latest" in errors


def test_a_failure_ends_the_others(tmp_path):
    """Rank 0 waits for ever, as in a collective whose partner has gone."""
    process = start(tmp_path, REPORT + "sys.exit(1) if rank else time.sleep(600)", 2, str(tmp_path))
    assert process.wait(40) == 1
    assert not any(alive(report["pid"]) for report in reports(tmp_path, 2))


GRACEFUL = (
    REPORT
    + """
asked = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda n, f: asked.append(n))
pathlib.Path(sys.argv[1], f"ready{rank}").touch()
while not asked:
    time.sleep(0.01)
time.sleep(0.3)  # a second delivery of the same Ctrl-C would arrive now
pathlib.Path(sys.argv[1], f"asked{rank}").write_text(str(len(asked)))
"""
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_stop_reaches_each_process_once(tmp_path, number):
    process = start(tmp_path, GRACEFUL, 2, str(tmp_path))
    wait_for(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)))
    process.send_signal(number)
    assert process.wait(30) == 0
    assert [(tmp_path / f"asked{rank}").read_text() for rank in range(2)] == ["1", "1"]


def test_ctrl_c_in_a_terminal_is_not_delivered_twice(tmp_path):
    """A terminal sends SIGINT to the whole foreground process group: the children aren't in it."""
    process = start(tmp_path, REPORT + "time.sleep(1)", 2, str(tmp_path))
    wait_for(lambda: all((tmp_path / f"{rank}.json").exists() for rank in range(2)))
    wait_for(lambda: all((tmp_path / f"{rank}.json").stat().st_size for rank in range(2)))
    groups = {os.getpgid(report["pid"]) for report in reports(tmp_path, 2)}
    assert os.getpgid(process.pid) not in groups
    assert process.wait(30) == 0


STUBBORN = (
    REPORT
    + """
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
pathlib.Path(sys.argv[1], f"ready{rank}").touch()
time.sleep(600)
"""
)


def test_the_second_request_kills(tmp_path):
    process = start(tmp_path, STUBBORN, 2, str(tmp_path))
    wait_for(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)))
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert not any(alive(report["pid"]) for report in reports(tmp_path, 2))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's help is Linux only")
def test_no_process_survives_the_launcher(tmp_path):
    process = start(
        tmp_path,
        REPORT + f"pathlib.Path({str(tmp_path)!r}, f'ready{{rank}}').touch(); time.sleep(600)",
        2,
        str(tmp_path),
    )
    wait_for(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)))
    process.kill()
    process.wait()
    wait_for(lambda: not any(alive(report["pid"]) for report in reports(tmp_path, 2)))


def test_how_many(monkeypatch):
    for name in ("NPROC_PER_NODE", "NNODES", "RANK"):
        monkeypatch.delenv(name, raising=False)
    assert not launch.inside() and launch.launch(["sft"], SftConfig()) is None  # one process is this one
    monkeypatch.setenv("RANK", "0")
    assert launch.inside()
