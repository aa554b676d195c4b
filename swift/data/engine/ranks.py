"""Several processes, started apart from each other, that share the tasks of a run through its work folder.

Each takes every n-th task and waits for the others at the end of a stage. A heartbeat file tells that a rank lives; one
whose heartbeat stops is named instead of being waited for without end. Ages are compared with a file of our own on the
same file system, so clocks that differ between machines don't matter.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from swift.core.errors import SwiftError, UsageError
from swift.core.files import disk_errors, write_atomic
from swift.core.logging import get_logger

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

BEAT_S = 5.0
_POLL_S = 0.2
_TELL_S = 60.0
_VARIABLES = (("SLURM_PROCID", "SLURM_NTASKS"), ("RANK", "WORLD_SIZE"))


def rank_and_size(rank: int | None, world_size: str | None, environment: Mapping[str, str]) -> tuple[int, int]:
    """Which of how many this process is.

    Args:
        rank: as given, from 0.
        world_size: a number; `auto` takes both from SLURM_PROCID and SLURM_NTASKS, or RANK and WORLD_SIZE.
        environment: the variables.

    Raises:
        UsageError: they contradict each other, or aren't there.
    """
    if world_size is None:
        if rank is not None:
            raise UsageError("--rank needs to know of how many", where="--rank", fix="--world_size 8")
        return 0, 1
    if world_size == "auto":
        for own, total in _VARIABLES:
            if own in environment and total in environment:
                return _checked(int(environment[own]) if rank is None else rank, int(environment[total]))
        raise UsageError(
            "--world_size auto finds no rank in the environment",
            where="--world_size auto",
            fix="start it with srun or torchrun, or give --rank and --world_size",
        )
    if not world_size.isdigit() or int(world_size) < 1:
        raise UsageError(f"{world_size!r} is not a number of processes", where="--world_size", fix="--world_size 8")
    if rank is None:
        raise UsageError("--world_size needs to know which one this is", where="--world_size", fix="--rank 0")
    return _checked(rank, int(world_size))


def _checked(rank: int, size: int) -> tuple[int, int]:
    if not 0 <= rank < size:
        raise UsageError(f"there is no rank {rank} of {size}", where="--rank", fix=f"ranks go from 0 to {size - 1}")
    return rank, size


class Ranks:
    """This process among those of the run; a context manager that beats while it is open.

    Args:
        work: the shared work folder. rank, size: which of how many.
        timeout_s: after how long without a sign of life a rank counts as gone.

    Raises (on entering):
        SwiftError: another process has this rank of this run.
    """

    def __init__(self, work: Path, rank: int, size: int, timeout_s: float) -> None:
        self.folder = work / "ranks"
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock: int | None = None
        self._began = self._joined = 0.0

    def __enter__(self) -> Ranks:
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._take()
        self._joined = time.monotonic()
        self._beat()
        self._began = self._heart(self.rank).stat().st_mtime
        self._thread = threading.Thread(target=self._beating, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        if error is not None and self.folder.exists():
            told = error.message if isinstance(error, SwiftError) else type(error).__name__
            write_atomic(self._failure(self.rank), json.dumps({"host": socket.gethostname(), "message": told}))
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def tell_finished(self) -> None:
        """Nothing of the work folder is needed by this rank any more."""
        with disk_errors(self.folder):
            self._finish(self.rank).touch()

    def wait_until_finished(self, check: Callable[[], None]) -> None:
        """Wait until no other rank needs the work folder any more; one that has gone doesn't."""
        others = [rank for rank in range(self.size) if rank != self.rank]

        def missing() -> list[int]:
            return [rank for rank in others if not self._finish(rank).exists()]

        try:
            self.wait_for(missing, "the end of the run", check)
        except SwiftError as error:
            get_logger().warning("the output is complete, though %s", error.message)

    def mine(self, index: int) -> bool:
        """Whether a task is this rank's."""
        return index % self.size == self.rank

    @property
    def age_s(self) -> float:
        """Seconds since this process joined."""
        return time.monotonic() - self._joined

    def wait_for(self, missing: Callable[[], list[int]], what: str, check: Callable[[], None]) -> None:
        """Wait until nothing is missing.

        Args:
            missing: the ranks that still have something to do. what: it is, for messages.
            check: called now and then; raises when this process is asked to stop.

        Raises:
            SwiftError: a rank that is waited for has failed, or shows no sign of life.
        """
        begin = told = time.monotonic()
        while True:
            left = missing()
            if not left:
                return
            check()
            for rank in left:
                self._refuse_gone(rank, time.monotonic() - begin, what)
            if time.monotonic() - told > _TELL_S:
                told = time.monotonic()
                get_logger().info("rank %d waits for rank %s: %s", self.rank, ", ".join(map(str, left)), what)
            time.sleep(_POLL_S)

    def _refuse_gone(self, rank: int, waited_s: float, what: str) -> None:
        fix = f"start it again (--rank {rank} --world_size {self.size}), and this one: tasks that are done stay done"
        failed = self._failed(rank)
        if failed is not None and rank != self.rank:
            raise SwiftError(f"rank {rank} on {failed['host']} failed: {failed['message']}", where=what, fix=fix)
        age = self._age(rank)
        if age is None and waited_s > self.timeout_s:
            raise SwiftError(f"rank {rank} of {self.size} has not come within {waited_s:.0f} s", where=what, fix=fix)
        if age is not None and min(age, waited_s) > self.timeout_s:
            raise SwiftError(f"rank {rank} of {self.size} shows no sign of life for {age:.0f} s", where=what, fix=fix)

    def _failed(self, rank: int) -> dict[str, str] | None:
        """What a rank has left when it failed, unless that was before this process began: it may have come again."""
        path = self._failure(rank)
        try:
            return json.loads(path.read_text()) if path.stat().st_mtime >= self._began else None
        except (OSError, ValueError):
            return None

    def _age(self, rank: int) -> float | None:
        """Seconds since a rank's last beat; None if there was none."""
        try:
            return self._heart(self.rank).stat().st_mtime - self._heart(rank).stat().st_mtime
        except OSError:
            return None

    def _take(self) -> None:
        """Hold this rank's lock, which the system gives free when the process ends; file systems without locks do
        without one."""
        for path in (self._failure(self.rank), self._finish(self.rank)):
            path.unlink(missing_ok=True)
        with disk_errors(self.folder):
            self._lock = os.open(self.folder / f"{self.rank}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        if fcntl is None:
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(self._lock, 100, 0).decode() or "unknown"
            os.close(self._lock)
            self._lock = None
            raise SwiftError(
                f"another process ({pid}) runs this recipe into the same folder",
                where=str(self.folder.parent),
                fix="wait until it has ended, or end it, or choose another --output; "
                "processes that share the work take --rank and --world_size",
            ) from None
        except OSError:
            get_logger().warning("no file locks there: take care that nothing else writes to %s", self.folder.parent)
            return
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()} on {socket.gethostname()}".encode(), 0)

    def _beating(self) -> None:
        while not self._end.wait(BEAT_S):
            try:
                self._beat()
            except OSError:  # the folder is gone: the run has ended, or somebody removed it, which a task will tell
                return

    def _beat(self) -> None:
        self._heart(self.rank).touch()

    def _heart(self, rank: int) -> Path:
        return self.folder / f"{rank}.beat"

    def _finish(self, rank: int) -> Path:
        return self.folder / f"{rank}.finished"

    def _failure(self, rank: int) -> Path:
        return self.folder / f"{rank}.failed"
