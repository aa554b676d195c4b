"""A run over two "machines": network namespaces of this one, joined by a virtual cable, with host names of their own.

It needs the right to make namespaces (root in most containers).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import BASE, command, environment, read_log, run_cli

ADDRESSES = ("198.51.100.1", "198.51.100.2")
# the names resolve nowhere, as on many clusters' nodes
NAMED = "import os, socket, sys; socket.sethostname(sys.argv[1]); os.execvp(sys.argv[2], sys.argv[2:])"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def spaces():
    """The two namespaces' names."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("there are no `ip` and `unshare`")
    names = [f"swift{os.getpid()}{letter}" for letter in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces can't be made here: {error.stderr.strip()}")
    cables = [f"v{os.getpid() % 100000}{letter}" for letter in "ab"]
    try:
        ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for name, cable, address in zip(names, cables, ADDRESSES, strict=True):
            ip("link", "set", cable, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


@pytest.fixture
def flags(tiny_model_dir, chat_rows, write_rows, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", chat_rows(12))
    base = {**BASE, "model": str(tiny_model_dir), "dataset": [str(data)], "max_steps": 2, "save_steps": 2}
    return {**base, "gradient_accumulation_steps": 1, "output_dir": str(tmp_path / "out")}


@pytest.fixture
def on_machine(spaces):
    """`on_machine(number, words, **environment)`: start a command on one of the machines."""
    started: list[subprocess.Popen] = []

    def start(number: int, words: list[str], **variables: str) -> subprocess.Popen:
        inside = ["ip", "netns", "exec", spaces[number], "unshare", "--uts", sys.executable, "-c", NAMED]
        process = subprocess.Popen(
            [*inside, f"machine-{'ab'[number]}", *words],
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def place(number: int, **more: object) -> dict[str, object]:
    return {"nnodes": 2, "node_rank": number, "master_addr": ADDRESSES[0], "master_port": 29611, **more}


def ended(process: subprocess.Popen, timeout: float = 150) -> tuple[int, str]:
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


def test_a_machine_that_comes_late_and_two_are_like_one(on_machine, flags, tmp_path):
    """Two processes on two machines train what two processes on one do; the second machine starts seconds later."""
    first = on_machine(0, command({**flags, **place(0)}))
    time.sleep(3)
    second = on_machine(1, command({**flags, **place(1)}))
    for process in (first, second):
        code, output = ended(process)
        assert code == 0, output
    alone = run_cli({**flags, "nproc_per_node": 2, "output_dir": str(tmp_path / "one")})
    assert alone.returncode == 0, alone.stderr
    log = read_log(tmp_path / "out")
    assert len(log) == 2 and log == read_log(tmp_path / "one")


@pytest.mark.slow
def test_a_rank_with_another_setting_is_named_on_both(on_machine, flags):
    first = on_machine(0, command({**flags, **place(0)}))
    second = on_machine(1, command({**flags, **place(1), "learning_rate": 5e-4}))
    for process in (first, second):
        code, output = ended(process)
        assert code == 1
        assert "(machine-b) has other settings: learning_rate is 0.0005 there and 0.001 on rank 0" in output


@pytest.mark.slow
def test_the_loopback_interface_is_refused_on_both(on_machine, flags):
    first = on_machine(0, command({**flags, **place(0)}))
    second = on_machine(1, command({**flags, **place(1)}), GLOO_SOCKET_IFNAME="lo")
    for process in (first, second):
        code, output = ended(process)
        assert code == 1 and "rank 1 (machine-b) would be reached at 127.0.0.1" in output


def test_an_interface_that_is_not_there(on_machine, flags):
    """The machine itself says so at once; the other one tells which machine didn't come."""
    first = on_machine(0, command({**flags, **place(0, join_timeout_s=6)}))
    second = on_machine(1, command({**flags, **place(1, join_timeout_s=6)}), GLOO_SOCKET_IFNAME="eth77")
    code, output = ended(second)
    assert code == 1 and "machine-b has no such network interface" in output and ADDRESSES[1] in output
    code, output = ended(first)
    assert code == 1 and "machine 1 of 2 didn't come within 6 s" in output


def test_a_master_that_can_not_be_reached(on_machine, flags):
    began = time.monotonic()
    absent = on_machine(1, command({**flags, **place(1, master_addr="198.51.100.99", join_timeout_s=4)}))
    nowhere = on_machine(1, command({**flags, **place(1, master_addr="192.0.2.7", join_timeout_s=4)}))
    code, output = ended(absent)
    assert code == 1 and "machine 0 can't be reached at 198.51.100.99:29611 after 4 s" in output
    code, output = ended(nowhere)
    assert code == 1 and "there is no way to it" in output and ADDRESSES[1] in output
    assert time.monotonic() - began < 60


def test_a_rank_that_dies_ends_the_other_machine(on_machine, flags):
    """With a message that names it."""
    first = on_machine(0, command({**flags, **place(0), "max_steps": 100000, "save_steps": 100000}))
    second = on_machine(1, command({**flags, **place(1), "max_steps": 100000, "save_steps": 100000}))
    log = Path(str(flags["output_dir"])) / "logging.jsonl"
    deadline = time.monotonic() + 100
    while not (log.is_file() and '"step"' in log.read_text()):
        assert time.monotonic() < deadline and first.poll() is None, first.stdout.read() if first.stdout else ""
        time.sleep(0.1)
    children = subprocess.run(["pgrep", "-P", str(second.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(children[0]), 9)
    code, output = ended(first, 60)
    assert code == 1 and "rank 1 on machine-b was ended by SIGKILL" in output


@pytest.mark.slow
def test_torchrun_and_slurm_start_the_same_run(on_machine, flags, tmp_path):
    """Plain torchrun; one task a machine under srun; one task a device under srun (their variables, without Slurm)."""
    logs = []
    for way in ("torchrun", "node", "device"):
        words = {**flags, "output_dir": str(tmp_path / way)}
        processes = []
        for number in (0, 1):
            slurm = {
                "SLURM_STEP_NODELIST": "machine-[a-b]", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_PROCID": str(number), "SLURM_NODEID": str(number), "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7",
                "MASTER_ADDR": ADDRESSES[0],
            }  # fmt: skip
            run = command(words)
            if way == "torchrun":
                options = ["--nnodes=2", f"--node_rank={number}", "--nproc_per_node=1", "--master_port=29612"]
                head = [run[0], "-m", "torch.distributed.run", *options, f"--master_addr={ADDRESSES[0]}"]
                processes.append(on_machine(number, [*head, *run[1:]]))
            elif way == "node":
                processes.append(on_machine(number, run, **slurm))
            else:
                slurm |= {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
                slurm |= {"SLURM_LOCALID": str(number), "MASTER_PORT": "29613"}
                processes.append(on_machine(0, run, **slurm))
        for process in processes:
            code, output = ended(process)
            assert code == 0, output
        logs.append(read_log(tmp_path / way))
    assert len(logs[0]) == 2 and logs[0] == logs[1] == logs[2]
