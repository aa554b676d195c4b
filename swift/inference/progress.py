"""How far a batch job is: a line that renews itself on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_PLAIN_EVERY_S = 10.0


class Progress:
    """Counts answered rows and shows them with an estimate of the time left.

    Args:
        total: rows in all.
        done: rows that an earlier start answered; they don't count for the speed.
        out: defaults to standard error.
    """

    def __init__(self, total: int, done: int = 0, *, out: TextIO | None = None) -> None:
        self._total = total
        self._done = self._begun = done
        self._tokens = 0
        self._out = out or sys.stderr
        self._live = self._out.isatty()
        self._started = time.monotonic()
        self._shown = self._started if not self._live else 0.0

    def advance(self, rows: int, tokens: int) -> None:
        """Some more rows are answered, with so many generated tokens."""
        self._done += rows
        self._tokens += tokens
        now = time.monotonic()
        if self._live:
            self._out.write(f"\r\x1b[K{self.render()}")
            self._out.flush()
        elif now - self._shown >= _PLAIN_EVERY_S:
            self._shown = now
            self._out.write(self.render() + "\n")
            self._out.flush()

    def render(self) -> str:
        """`120/500 rows  24%  85.2 tokens/s  ETA 3m 10s`"""
        elapsed = max(time.monotonic() - self._started, 1e-9)
        answered = self._done - self._begun
        left = (self._total - self._done) * elapsed / answered if answered else None
        share = 100 * self._done // max(1, self._total)
        eta = f"  ETA {human_time(left)}" if left is not None and self._done < self._total else ""
        return f"{self._done}/{self._total} rows  {share}%  {self._tokens / elapsed:.1f} tokens/s{eta}"

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        """End the live line."""
        if self._live:
            self._out.write("\n")
            self._out.flush()


def human_time(seconds: float) -> str:
    """`3725` -> `1h 02m`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 60}m {whole % 60:02d}s" if whole >= 60 else f"{whole}s"
