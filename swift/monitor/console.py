"""What a run prints: plain lines everywhere, plus one live progress line when stdout is a terminal.

rich is imported only for the live line. While it is shown, the package's log messages go through it as well, so that
they appear above the line instead of in the middle of it.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from typing import Any, Protocol

from swift.core.logging import get_logger
from swift.monitor import text

_LIVE = ("loss", "rewards/margins", "rewards/accuracies", "tokens_per_second")
_WINDOW_STEPS = (
    50  # the ETA follows the recent pace: evaluation, compilation and length changes make old steps misleading
)


class Console(Protocol):
    """Where lines go, and what happens on each step."""

    def line(self, words: str) -> None: ...
    def begin(self, total_steps: int, step: int) -> None: ...
    def progress(self, step: int, metrics: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class Pace:
    """Estimates the time left from the last steps."""

    def __init__(self, total_steps: int, step: int) -> None:
        self.total_steps = total_steps
        self._marks: deque[tuple[float, int]] = deque([(time.monotonic(), step)], maxlen=_WINDOW_STEPS)

    def mark(self, step: int) -> None:
        """Note that `step` has just ended."""
        self._marks.append((time.monotonic(), step))

    def eta_s(self) -> float:
        """Seconds to the last step; NaN until one step has been timed."""
        (begin, first), (end, last) = self._marks[0], self._marks[-1]
        if last <= first:
            return float("nan")
        return (end - begin) / (last - first) * max(0, self.total_steps - last)


class PlainConsole:
    """Lines only: for files, pipes and `--disable_tqdm`."""

    def line(self, words: str) -> None:
        try:
            print(words, flush=True)
        except BrokenPipeError:  # the reader has gone (`| head`, a lost terminal): train on, logging.jsonl has it all
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            get_logger().warning("nobody reads the output any more; the run goes on and logs into its folder")

    def begin(self, total_steps: int, step: int) -> None:
        pass

    def progress(self, step: int, metrics: dict[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class LiveConsole:
    """Lines above one progress line that is redrawn at most ten times a second."""

    def __init__(self) -> None:
        from rich.console import Console as RichConsole

        self._console = RichConsole(highlight=False, soft_wrap=True)
        self._bar: Any = None
        self._task: Any = None
        self._pace: Pace | None = None
        self._streams: list[tuple[logging.StreamHandler[Any], Any]] = []

    def line(self, words: str) -> None:
        self._console.print(words, markup=False)

    def begin(self, total_steps: int, step: int) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        self._pace = Pace(total_steps, step)
        self._bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[words]}"),
            console=self._console,
            refresh_per_second=10,
            transient=True,
        )
        self._task = self._bar.add_task("", total=total_steps, completed=step, words="")
        self._bar.start()
        for handler in get_logger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.__stderr__:
                self._streams.append((handler, handler.setStream(sys.stderr)))  # now rich's proxy

    def progress(self, step: int, metrics: dict[str, float]) -> None:
        if self._bar is None or self._pace is None:
            return
        self._pace.mark(step)
        shown = {name: metrics[name] for name in _LIVE if name in metrics}
        words = "  ".join([*text.metric_words(shown), f"eta {text.duration(self._pace.eta_s())}"])
        self._bar.update(self._task, completed=step, words=words)

    def close(self) -> None:
        if self._bar is not None:
            for handler, stream in self._streams:
                handler.setStream(stream)
            self._streams.clear()
            self._bar.stop()
            self._bar = None


def make_console(*, live: bool) -> Console:
    """A live console if `live` and stdout is a terminal, else a plain one."""
    return LiveConsole() if live and sys.stdout.isatty() else PlainConsole()
