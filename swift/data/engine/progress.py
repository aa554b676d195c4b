"""What a run prints on standard error: a bar with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

_PLAIN_EVERY_S = 30.0


def duration(seconds: float) -> str:
    """`75` -> `1m15s`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class Progress:
    """One stage after the other."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._live = not quiet and sys.stderr.isatty()
        self._bar: Any = None
        self._task: Any = None
        self._title = ""
        self._done = self._total = self._new = 0
        self._start = self._told = 0.0

    def line(self, words: str) -> None:
        """A plain line."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(words, markup=False, highlight=False)
        else:
            print(words, file=sys.stderr, flush=True)

    def begin(self, title: str, done: int, total: int) -> None:
        """A stage begins, of which some tasks are done already."""
        self._title, self._done, self._total, self._new = title, done, total, 0
        self._start = self._told = time.monotonic()
        already = f", {done} done before" if done else ""
        if not self._live:
            self.line(f"{title}: {total} task(s){already}")
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[eta]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(title, total=total, completed=done, eta="")
        self._bar.start()

    def advance(self) -> None:
        """A task has ended."""
        self._done += 1
        self._new += 1
        now = time.monotonic()
        left = (now - self._start) / self._new * (self._total - self._done)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, eta=f"eta {duration(left)}")
        elif now - self._told > _PLAIN_EVERY_S:
            self._told = now
            self.line(f"{self._title}: {self._done}/{self._total}, eta {duration(left)}")

    def end(self) -> None:
        """The stage is over, or the run is."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            self.line(f"{self._title}: {self._done}/{self._total} in {duration(time.monotonic() - self._start)}")
