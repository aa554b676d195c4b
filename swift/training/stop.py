"""Ctrl-C and SIGTERM as a request: finish the step, save, end well. A second Ctrl-C ends the run at once."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

from swift.core.logging import rank


class StopRequest:
    """Context manager that catches SIGINT and SIGTERM; `requested` names the first one received."""

    def __init__(self) -> None:
        self.requested: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._previous[number] = signal.signal(number, self._receive)
            except ValueError:  # not the main thread: the caller's own handlers stay in force
                break
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            os.write(2, b"\nstopped at once; the last complete checkpoint is intact\n")
            os._exit(130)
        if not self.requested:
            self.requested = signal.Signals(number).name
            if rank() == 0:
                os.write(
                    2, f"\n{self.requested}: finishing this step and saving (Ctrl-C again: stop at once)\n".encode()
                )
