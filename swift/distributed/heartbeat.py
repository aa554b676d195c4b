"""A sign of life in a file: one process works for as long as it takes, the others wait and notice when it is gone.

No collective and no time-out is involved, so preparing data may take hours; and a process that was killed is missed
after seconds where its pid can be looked up, else after `PATIENCE_S` without a beat.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from swift.core.errors import SwiftError
from swift.core.files import disk_errors

BEAT_S = 2.0
PATIENCE_S = 180.0  # a stalled network file system is no death


class Heartbeat:
    """Beats into a file, from a thread, for as long as the `with` block lasts.

    Args:
        path: the file; its folder is made. It is removed at the end.
        every_s: seconds between two beats.
    """

    def __init__(self, path: Path, *, every_s: float = BEAT_S) -> None:
        self.path, self.every_s = path, every_s
        self.words = "starting"
        self._count = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def say(self, words: str) -> None:
        """How far the work has come, for those who wait."""
        self.words = words

    def __enter__(self) -> Heartbeat:
        with disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._beat()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.path.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._stop.wait(self.every_s):
            try:
                self._beat()
            except OSError:  # the work itself will say what is the matter with the disk
                continue

    def _beat(self) -> None:
        self._count += 1
        beat = {"pid": os.getpid(), "host": socket.gethostname(), "beat": self._count, "words": self.words}
        aside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        aside.write_text(json.dumps(beat))
        aside.replace(self.path)


class Watch:
    """Looks after another process's heartbeat.

    Args:
        path: its file.
        what: what it does, for the error: "rank 0 prepares the data".
        patience_s: without a new beat for so long it counts as dead.
    """

    def __init__(self, path: Path, what: str, *, patience_s: float = PATIENCE_S) -> None:
        self.path, self.what, self.patience_s = path, what, patience_s
        self._last: dict[str, Any] | None = None
        self._changed_s = time.monotonic()

    def check(self) -> None:
        """Look once; before the first beat only patience counts.

        Raises:
            SwiftError: the process is gone.
        """
        now = time.monotonic()
        try:
            beat = json.loads(self.path.read_text())
        except (OSError, ValueError):  # not begun, just ended, or a stale handle
            beat = self._last
        if beat != self._last:
            self._last, self._changed_s = beat, now
        elif self._dead() or now - self._changed_s > self.patience_s:
            raise self._gone(now - self._changed_s)

    def _dead(self) -> bool:
        """Whether the pid can be looked up here and isn't there."""
        if self._last is None or self._last["host"] != socket.gethostname():
            return False
        try:
            os.kill(self._last["pid"], 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False

    def _gone(self, silent_s: float) -> SwiftError:
        if self._last is None:
            return SwiftError(
                f"{self.what}, and has shown no sign of life for {silent_s:.0f} s", where=str(self.path), fix=_FIX
            )
        who = f"process {self._last['pid']} on {self._last['host']}"
        return SwiftError(
            f"{self.what}, and {who} is gone (last sign of life {silent_s:.0f} s ago: {self._last['words']})",
            where=str(self.path),
            fix=_FIX,
        )


_FIX = "look at that process's own messages; was it killed for memory?"
