"""A model with a head of its own, line by line: a text comes in, its label, entities, score or reward goes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swift.core.errors import UsageError
from swift.data.rows import Row, RowRef
from swift.inference.scoring import Scorer
from swift.inference.terminal import Terminal

_EXIT = ("/exit", "/quit")
# what is asked for: once for each answer, or before several
_FIRST = {"reranker": "query", "generative_reranker": "query", "reward": "prompt"}
_THEN = {"reranker": "document", "generative_reranker": "document", "reward": "answer"}


class ScoreTalk:
    """One interactive session.

    Args:
        name: of the task (`Judge.name`).
        load: gives the scorer.
        terminal: where lines come from.

    Raises:
        UsageError: vectors aren't for people to read.
    """

    def __init__(self, name: str, load: Callable[[], Scorer], terminal: Terminal) -> None:
        if name == "embedding":
            raise UsageError(
                "a vector is nothing to read on a terminal",
                where="--val_dataset",
                fix="give a file of texts: --val_dataset FILE; its result lines have an `embedding` each",
            )
        self._name, self._scorer, self._terminal = name, load(), terminal
        self._first: str | None = None

    def run(self) -> int:
        """Read and answer until the end of input, `/exit` or Ctrl-C; returns the exit code, 0."""
        if self._terminal.interactive:
            again = f"; an empty line begins with another {_FIRST[self._name]}" if self._name in _FIRST else ""
            self._terminal.note(f"one line is one text; /exit or Ctrl-D leaves{again}")
        try:
            while (line := self._terminal.read(f"{self._wanted()}> ")) is not None and line.strip() not in _EXIT:
                self._take(line)
        except KeyboardInterrupt:
            pass
        return 0

    def _wanted(self) -> str:
        if self._name not in _FIRST:
            return "text"
        return _FIRST[self._name] if self._first is None else _THEN[self._name]

    def _take(self, line: str) -> None:
        if not line.strip():
            self._first = None
            return
        if self._name in _FIRST and self._first is None:
            self._first = line
            return
        row = Row(RowRef("line", 1), [{"role": "user", "content": self._first or line}])
        if self._name == "reward":
            row.messages.append({"role": "assistant", "content": line})
        elif self._name in _FIRST:
            row.negatives = [[{"role": "assistant", "content": line}]]
        asked = self._scorer.asked(0, row.ref, row)
        (_, result) = next(self._scorer.answer([asked]))
        if result["status"] == "error":
            self._terminal.note(f"error: {result['error']}")
            return
        self._terminal.write(_shown(result) + "\n")


def _shown(result: dict[str, Any]) -> str:
    """The answer in one line."""
    if "label" in result:
        others = sorted(result["probabilities"].items(), key=lambda pair: -pair[1])
        return f"{result['label']}  ({', '.join(f'{name} {chance:.3f}' for name, chance in others[:5])})"
    if "probabilities" in result:
        said = [f"{name} {result['probabilities'][name]:.3f}" for name in result["labels"]]
        return ", ".join(said) or "(none)"
    if "entities" in result:
        said = [f"{each['label']} {each['text']!r} {each['score']:.3f}" for each in result["entities"]]
        return ", ".join(said) or "(none)"
    if "scores" in result:
        return f"{result['scores'][0]['score']:.4f}"
    return str(result["reward"] if "reward" in result else result["value"])
