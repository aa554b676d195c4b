"""A server program of another project as a child process: started, watched until it answers, and never left behind.

It heads a process group, so that everything it started ends with it. A minder (`minder.py`) between it and this process
ends the group when this process is gone, also by `kill -9`. What it says goes to a file whose last lines explain a
failed start. Knows nothing of models or of what the server is asked.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from swift.core.errors import SwiftError

_MINDER = Path(__file__).with_name("minder.py")
_LOG_LINES = 20
_POLL_S = 0.1
_GRACE_S = 10.0  # a server on its way out still answers what it holds


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class ServerProcess:
    """A running server.

    Args:
        command: program and arguments.
        log_file: takes what it prints; parents are made.
        environment: variables besides those of this process.

    Raises:
        SwiftError: the program can't be run.
    """

    def __init__(self, command: Sequence[str], log_file: Path, environment: Mapping[str, str] | None = None) -> None:
        self.log_file = log_file
        log_file.parent.mkdir(parents=True, exist_ok=True)
        read, write = os.pipe()
        try:
            with log_file.open("wb") as log:
                self._minder = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_MINDER), str(os.getpid()), str(write), *command],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(environment or {})},
                    start_new_session=True,
                    pass_fds=(write,),
                )
        finally:
            os.close(write)
            with os.fdopen(read) as report:
                said = report.readline().strip()
        if not said.isdigit():
            self._minder.communicate()
            raise SwiftError(
                f"{command[0]} can't be run: {said.removeprefix('!') or 'it was not started'}",
                where=str(command[0]),
                fix="give the path of a program that is there and may be run",
            )
        self._pid = int(said)
        self._finalizer = weakref.finalize(self, _end, self._minder, self._pid)

    @property
    def pid(self) -> int:
        """Of the server, which leads its process group."""
        return self._pid

    @property
    def running(self) -> bool:
        return self._minder.poll() is None

    def wait_until(self, url: str, *, timeout_s: float) -> None:
        """Return when `url` answers with 200.

        Raises:
            SwiftError: the server ended before, or took longer; the message has its last words. It is gone then.
        """
        deadline = time.monotonic() + timeout_s
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never by way of a proxy
        while self.running:
            with suppress(OSError, urllib.error.URLError), opener.open(url, timeout=5) as answer:
                if answer.status == 200:
                    return
            if time.monotonic() > deadline:
                self.close()
                raise SwiftError(
                    f"the server did not answer within {timeout_s:.0f} s; it said last:\n{self.last_words()}",
                    where=str(self.log_file),
                    fix="read the whole log, or wait longer",
                )
            time.sleep(_POLL_S)
        status = self._minder.returncode
        self.close()
        raise SwiftError(
            f"the server ended with status {status} before it answered; it said last:\n{self.last_words()}",
            where=str(self.log_file),
            fix="read the whole log",
        )

    def last_words(self) -> str:
        """The last lines of the log."""
        lines = self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:])

    def close(self) -> None:
        """End it and all that it started. Idempotent."""
        self._finalizer()


def _end(minder: subprocess.Popen[bytes], group: int) -> None:
    """First politely; whoever is left of the group is killed, by the minder where it was not killed itself."""
    assert minder.stdin is not None
    if minder.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            minder.wait(_GRACE_S)
    if minder.poll() is None or minder.returncode < 0:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    minder.stdin.close()
    minder.wait()
