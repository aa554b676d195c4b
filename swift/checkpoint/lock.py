"""One writer per run folder: a job that was queued again must not meet the one that is still saving."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from swift.core.errors import CheckpointError, SwiftError
from swift.core.files import disk_errors
from swift.core.logging import get_logger

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FILE_NAME = ".lock"
_HELD: set[RunLock] = set()  # of this process


class RunLock:
    """The right to write into a run folder, from construction to `close`, or to the end of the process.

    The lock is the operating system's (`flock` on `.lock`), so a killed process leaves none behind. The file stays; it
    tells pid and host of its last holder. Where the file system has no locks, a warning says so and nothing is locked.

    Raises:
        CheckpointError: another process holds it, named by pid and host.
        SwiftError: the folder can't be written.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir.resolve()
        self._descriptor: int | None = None
        path = self.run_dir / FILE_NAME
        with disk_errors(path):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if self._lock(descriptor, path):
                with disk_errors(path):
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode())
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        _HELD.add(self)

    def _lock(self, descriptor: int, path: Path) -> bool:
        """Take the lock; False if there is no such thing here."""
        cause: object = "this system has no flock"
        if fcntl is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                    raise self._taken(descriptor) from None
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                    raise
                cause = error
        get_logger().warning(
            "the run folder can't be locked (%s): take care that no second run writes to %s", cause, path.parent
        )
        return False

    def _taken(self, descriptor: int) -> CheckpointError:
        pid, _, host = os.pread(descriptor, 300, 0).decode(errors="replace").strip().partition(" ")
        who = f"process {pid} on {host}" if pid else "another process"
        return CheckpointError(
            f"{who} is writing to this run folder",
            where=str(self.run_dir),
            fix="wait until it has ended, or end it, or choose another --output_dir",
        )

    def close(self) -> None:
        """Give the folder free."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        _HELD.discard(self)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def alone(run_dir: Path) -> Iterator[bool]:
    """Whether this process may write to the folder and no other one does; then none begins to during the block."""
    if any(lock.run_dir == run_dir.resolve() for lock in _HELD):
        yield True
        return
    try:
        lock = RunLock(run_dir)
    except SwiftError:
        yield False
        return
    with lock:
        yield True


def _forget_in_child() -> None:
    """A forked worker shares the lock; if it outlived a killed run, the folder would stay locked."""
    for lock in list(_HELD):
        with suppress(OSError):
            lock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
