"""Where a conversation's lines come from and go to: a terminal with line editing, or a pipe.

Answers go to standard output and everything else to standard error, so that a piped conversation leaves the answers
alone in the output.
"""

from __future__ import annotations

import io
import sys
from typing import TextIO


class Terminal:
    """Reads lines and writes answers and notes.

    Args:
        source, answers, notes: default to the process's standard streams.
    """

    def __init__(
        self, source: TextIO | None = None, answers: TextIO | None = None, notes: TextIO | None = None
    ) -> None:
        self._source = source or sys.stdin
        self._answers = answers or sys.stdout
        self._notes = notes or sys.stderr
        self.interactive = self._source.isatty()
        if isinstance(self._source, io.TextIOWrapper):
            self._source.reconfigure(errors="replace")  # a stray byte costs a character, not the conversation
        if self.interactive and self._source is sys.stdin:
            _enable_line_editing()

    def read(self, prompt: str) -> str | None:
        """One line without its end; None at the end of input. The prompt is shown to people only."""
        if self.interactive and self._source is sys.stdin:
            try:
                return input(prompt)
            except EOFError:
                return None
        line = self._source.readline()
        return line.removesuffix("\n").removesuffix("\r").removeprefix("\ufeff") if line else None

    def write(self, text: str) -> None:
        """Part of an answer, shown at once."""
        self._answers.write(text)
        self._answers.flush()

    def note(self, text: str) -> None:
        """A line that isn't part of an answer."""
        self._notes.write(text + "\n")
        self._notes.flush()


def _enable_line_editing() -> None:
    """Arrow keys and a history of lines, where Python was built with them."""
    try:
        import readline  # noqa: F401 - importing it is what switches `input` over
    except ImportError:
        return
