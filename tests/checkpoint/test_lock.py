"""One run folder, one writer."""

import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import swift.checkpoint.lock as lock_module
from swift.checkpoint import RunLock, find_checkpoint, save_checkpoint
from swift.core.errors import CheckpointError, SwiftError

HOLDER = """
import os, sys, time
from pathlib import Path
from swift.checkpoint import RunLock
lock = RunLock(Path(sys.argv[1]))
if sys.argv[2] == "fork" and not os.fork():
    os.write(1, f"child {os.getpid()}\\n".encode())
    time.sleep(60)
    os._exit(0)
if sys.argv[2] != "fork":
    print("locked", flush=True)
time.sleep(60)
"""


def start_holder(run_dir, how="alone"):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run_dir), how], stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    return process, process.stdout.readline().split()


def test_the_second_process_is_refused_and_told_of_the_first(tmp_path):
    run_dir = tmp_path / "run"
    holder, _ = start_holder(run_dir)
    try:
        with pytest.raises(CheckpointError, match=f"process {holder.pid} on {socket.gethostname()}") as caught:
            RunLock(run_dir)
        assert caught.value.where == str(run_dir)
        assert "--output_dir" in caught.value.fix
    finally:
        holder.kill()
        holder.wait()
    with RunLock(run_dir):  # a killed process leaves no lock
        assert (run_dir / ".lock").read_text() == f"{os.getpid()} {socket.gethostname()}\n"
        with pytest.raises(CheckpointError, match=f"process {os.getpid()} "):
            RunLock(run_dir)
    RunLock(run_dir).close()


def test_a_worker_that_outlives_a_killed_run_holds_nothing(tmp_path):
    holder, (_, child) = start_holder(tmp_path, "fork")
    try:
        with pytest.raises(CheckpointError):
            RunLock(tmp_path)
        holder.kill()
        holder.wait()
        os.kill(int(child), 0)  # still there
        RunLock(tmp_path).close()
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_without_locks_there_is_a_warning(tmp_path, monkeypatch):
    def unsupported(descriptor, how):
        raise OSError(errno.ENOLCK, "No locks available")

    said = []
    monkeypatch.setattr(lock_module.fcntl, "flock", unsupported)
    monkeypatch.setattr(lock_module.get_logger(), "warning", lambda words, *values: said.append(words % values))
    with RunLock(tmp_path), RunLock(tmp_path):
        pass
    assert len(said) == 2
    assert "No locks available" in said[0] and str(tmp_path) in said[0]
    monkeypatch.setattr(lock_module, "fcntl", None)
    RunLock(tmp_path).close()
    assert "no flock" in said[2]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_a_refused_lock_leaves_no_open_file(tmp_path):
    with RunLock(tmp_path):
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(3):
            with pytest.raises(CheckpointError):
                RunLock(tmp_path)
        assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    def refuse(path, *rest):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(lock_module.os, "open", refuse)
    with pytest.raises(SwiftError, match=r"could not write .*\.lock"):
        RunLock(tmp_path)


def test_looking_for_a_checkpoint_leaves_a_live_save_of_another_process_alone(tmp_path):
    run_dir = tmp_path / "run"
    save_checkpoint(run_dir, 4, [lambda folder: (folder / "file").write_text("x")])
    aside = (run_dir / "checkpoint-4").rename(run_dir / ".checkpoint-4.writing")
    holder, _ = start_holder(run_dir)
    try:
        with pytest.raises(CheckpointError, match="no complete checkpoint"):
            find_checkpoint("latest", tmp_path)
        assert aside.is_dir()
    finally:
        holder.kill()
        holder.wait()
    assert find_checkpoint("latest", tmp_path).path == run_dir / "checkpoint-4"
    (run_dir / "checkpoint-4").rename(aside)
    with RunLock(run_dir):  # one's own lock is no obstacle
        assert find_checkpoint("latest", tmp_path).path == run_dir / "checkpoint-4"
