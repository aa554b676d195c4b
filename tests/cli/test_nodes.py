"""Launchers of several machines, all on this one: how they meet, what each process sees, and how a failure ends all."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAUNCHER = """
import sys
from swift.cli import launch
from swift.cli.nodes import join
from swift.config.nodes import Nodes
from swift.core.errors import SwiftError
count, rank, processes, port, timeout = map(int, sys.argv[2:7])
try:
    link = join(Nodes(count, rank, processes, "127.0.0.1", port, timeout))
    sys.exit(launch.run(sys.argv[7:], processes, link=link, program=[sys.executable, sys.argv[1]]))
except SwiftError as error:
    print(error, file=sys.stderr)
    sys.exit(3)
"""
REPORT = """
import json, os, pathlib, signal, sys, time
rank = int(os.environ["RANK"])
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"]
pathlib.Path(sys.argv[1], f"{rank}.json").write_text(json.dumps([os.environ[n] for n in names] + [os.getpid()]))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


@pytest.fixture
def start(tmp_path):
    """`start(rank, text)`: a launcher for one of two machines whose processes run `text`."""
    port = free_port()
    started = []

    def launcher(rank: int, text: str = "", *, count: int = 2, processes: int = 1, timeout: int = 30):
        program = tmp_path / f"child{len(started)}.py"
        program.write_text(REPORT + text)
        words = [str(program), *map(str, (count, rank, processes, port, timeout)), str(tmp_path)]
        environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "MASTER_PORT")}
        started.append(
            subprocess.Popen([sys.executable, "-c", LAUNCHER, *words], stderr=subprocess.PIPE, text=True, env=environ)
        )
        return started[-1]

    yield launcher
    for process in started:
        process.kill()
        process.wait()


def ended(process: subprocess.Popen, timeout: float = 40) -> tuple[int, str]:
    _, errors = process.communicate(timeout=timeout)
    return process.returncode, errors


def seen(folder: Path) -> dict[int, list]:
    return {int(file.stem): json.loads(file.read_text()) for file in folder.glob("*.json")}


def wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_ranks_go_through_the_machines_in_order(tmp_path, start):
    """Also with another number of processes on each."""
    second, first = start(1, processes=2), start(0, processes=1)
    assert ended(first)[0] == ended(second)[0] == 0
    found = seen(tmp_path)
    assert {rank: values[:6] for rank, values in found.items()} == {
        0: ["0", "0", "3", "1", "0", "127.0.0.1"],
        1: ["1", "0", "3", "2", "1", "127.0.0.1"],
        2: ["2", "1", "3", "2", "1", "127.0.0.1"],
    }
    assert len({values[6] for values in found.values()}) == 1


def test_a_machine_that_never_comes_is_named_to_those_that_did(start):
    first, second = start(0, count=3, timeout=2), start(1, count=3, timeout=20)
    began = time.monotonic()
    for process in (first, second):
        code, errors = ended(process)
        assert code == 3 and "machine 2 of 3 didn't come within 2 s" in errors
    assert time.monotonic() - began < 15


def test_a_machine_without_the_first(start):
    code, errors = ended(start(1, timeout=1))
    assert code == 3 and "machine 0 can't be reached at 127.0.0.1" in errors and "nothing listens" in errors


@pytest.mark.parametrize(
    ("second", "words"),
    [({"rank": 1, "count": 3}, "was started for 3 machines, machine 0 for 2"), ({"rank": 0}, "can't be opened")],
)
def test_contradictions(start, second, words):
    first = start(0)
    if second["rank"] == 0:
        time.sleep(1.5)  # the port is the first one's
    other = start(**second)
    code, errors = ended(other)
    assert code == 3 and words in errors
    if second["rank"]:
        assert words in ended(first)[1]


def test_two_machines_of_one_number(start):
    first = start(0, count=3)
    for _ in range(2):
        start(1, count=3)
    code, errors = ended(first)
    assert code == 3 and "two machines call themselves number 1" in errors


def test_a_failure_ends_the_processes_of_all_machines(tmp_path, start):
    """And every launcher names the rank that failed."""
    first = start(0, "time.sleep(600)", processes=2)
    second = start(1, "time.sleep(0.5); sys.exit(5)")
    code, errors = ended(first)
    assert code == 1 and "rank 2 on" in errors and "failed (exit code 5)" in errors
    assert ended(second)[0] == 5
    for values in seen(tmp_path).values():
        with pytest.raises(ProcessLookupError):
            os.kill(values[-1], 0)


def test_a_failure_on_the_first_machine_reaches_the_third(start):
    others = [start(rank, "time.sleep(600)", count=3) for rank in (1, 2)]
    first = start(0, "time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)", count=3)
    for process in others:
        code, errors = ended(process)
        assert code == 1 and "rank 0 on" in errors and "SIGKILL" in errors
    assert ended(first)[0] == 1


@pytest.mark.parametrize("lost", [0, 1])
def test_a_launcher_that_dies_is_missed(tmp_path, start, lost):
    processes = [start(rank, "time.sleep(600)") for rank in (0, 1)]
    wait_for(lambda: len(seen(tmp_path)) == 2)
    processes[lost].send_signal(signal.SIGKILL)
    code, errors = ended(processes[1 - lost])
    assert code == 1 and f"machine {lost}" in errors and "has gone" in errors


def test_the_first_machine_waits_for_the_others_to_end(start):
    first, second = start(0), start(1, "time.sleep(2); sys.exit(4)")
    assert ended(first)[0] == 1 and ended(second)[0] == 4
