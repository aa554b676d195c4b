"""What one row of data is, after every file format and column layout has been read away.

This file knows the normal form only: `shapes` turns columns into it, `messages` turns the message lists of other tools
into it, and the chat encoder turns it into tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TRAIN, VALIDATION = "train", "validation"  # the two parts of a data set
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class RowRef:
    """Where a row comes from: the file and the 1-based line on which it starts (row number for parquet and arrow).

    `by_offset`: `line` is the number of bytes before the row instead, since counting the lines would have cost a
    second reading of a large file; written `file@byte`.
    """

    file: str
    line: int
    by_offset: bool = False

    def __str__(self) -> str:
        return f"{self.file}{'@' if self.by_offset else ':'}{self.line}"


@dataclass(slots=True)
class Row:
    """One conversation or one plain text; with what is known of it where it is trained on as more than that.

    Attributes:
        ref: where it was read.
        messages: dicts with `role` (system, user, assistant, tool) and `content` (str). An assistant message may carry
            `tool_calls` (`[{"type": "function", "function": {"name": str, "arguments": dict}}]`) and
            `reasoning_content`; a tool message `name` and `tool_call_id`; any message `loss` (bool) and
            `loss_scale` (float). Empty for plain text.
        text: the text of a plain-text row; None for conversations.
        tools: function descriptions, `[{"type": "function", "function": {...}}]`.
        template_kwargs: variables for the chat template that this row sets (`chat_template_kwargs`).
        answer_at: of a preference row: the number of messages that the chosen and the rejected answer share.
        rejected: of a preference row: each worse answer, the messages that follow the first `answer_at`.
        margins: of a preference row: by how much the answer is better than each of `rejected`; empty where not said.
        label: whether the answer is wanted (bool), what a text is (a name, a number, a list of either), a similarity;
            with `words`, the list of their labels.
        positives, negatives: texts that are like the row's own, or answer it, and those that don't: a list of messages
            each.
        words: the words of a text whose words have labels; None for others.
        spans: of the text of the last message: (first character, character behind the last, label name).
        teacher_prompt: what a teacher is asked in place of the prompt; None where it is asked the same.
        extra: the columns nothing above took.
    """

    ref: RowRef
    messages: list[dict[str, Any]]
    text: str | None = None
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    answer_at: int = 0
    rejected: list[list[dict[str, Any]]] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    label: Any = None
    positives: list[list[dict[str, Any]]] = field(default_factory=list)
    negatives: list[list[dict[str, Any]]] = field(default_factory=list)
    words: list[str] | None = None
    spans: list[tuple[int, int, str]] | None = None
    teacher_prompt: list[dict[str, Any]] | None = None


class RowProblem(Exception):
    """Why a row can't be used.

    Args:
        reason: short code under which the ledger counts it: `not_json`, `no_content`, `unknown_role`, `too_long`, ...
        message: what is wrong, one sentence, with the message number or column.
        fix: what to do about it.
        tokens: length of the row in tokens where that is the problem.
    """

    def __init__(self, reason: str, message: str, fix: str | None = None, *, tokens: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.fix = fix
        self.tokens = tokens

    def __reduce__(self):  # survives the way back from a worker process
        return (_rebuild_problem, (self.reason, self.message, self.fix, self.tokens))


def _rebuild_problem(reason: str, message: str, fix: str | None, tokens: int | None) -> RowProblem:
    return RowProblem(reason, message, fix, tokens=tokens)


def excerpt(value: Any, *, around: int = 0, width: int = 80) -> str:
    """A short, one-line quotation of `value`, centred on character `around`."""
    text = value if isinstance(value, str) else repr(value)
    start = max(0, min(around - width // 2, len(text) - width))
    piece = text[start : start + width]
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in piece)
    return ("…" if start else "") + shown + ("…" if start + width < len(text) else "")
