"""The columns of a row: what they are called, each read at most once, and how rows are to be read.

Knows nothing of what a layout makes of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from swift.data.rows import RowProblem, excerpt

Layout = Literal["chat", "pairs", "binary", "prompts", "labelled", "tokens", "embedding", "rerank"]
# sequences that an example can have at most, each as long as max_length allows; of the other layouts nobody knows
MOST_SEQUENCES: dict[Layout, int] = {"chat": 1, "pairs": 2, "binary": 1, "prompts": 2, "labelled": 1, "tokens": 1}

MESSAGE_COLUMNS = ("messages", "conversations", "conversation")
PROMPT_COLUMNS = ("query", "prompt", "input", "instruction", "question", "problem")
ANSWER_COLUMNS = (
    "response",
    "answer",
    "output",
    "targets",
    "target",
    "answer_key",
    "answers",
    "solution",
    "completion",
)
TEXT_COLUMNS = ("text", "content")
SYSTEM_COLUMNS = ("system", "system_prompt")
MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")
REJECTED_COLUMNS = ("rejected_response", "rejected", "rejected_messages", "response_k")
CHOSEN_COLUMNS = ("chosen", "chosen_response", "chosen_messages", "response_j")
# what --disable_auto_column_mapping leaves
EXACT_COLUMNS = frozenset(
    {"messages", "query", "response", "system", "history", "tools", "text", "chat_template_kwargs"}
    | {"rejected_response", "rejected_messages", "margin", "label", "teacher_prompt"}
    | {"tokens", "labels", "spans", "positive_messages", "negative_messages"}
)


@dataclass(frozen=True)
class RowOptions:
    """How rows are read.

    Attributes:
        columns: renames, `{"ask": "query"}`: the row's `ask` is read as `query`.
        auto: whether other tools' column names are understood.
        need_answer: whether a conversation without an assistant turn is refused (true for training).
        layout: what a row has to be: `chat` a conversation or a text; `pairs` an answer and worse ones; `binary` an
            answer and whether it is wanted; `prompts` a conversation whose answer may be missing; `labelled` a text
            and its label; `tokens` words and a label for each; `embedding` and `rerank` a text and those that are
            like it, or aren't.
    """

    columns: tuple[tuple[str, str], ...] = ()
    auto: bool = True
    need_answer: bool = True
    layout: Layout = "chat"


class Columns:
    """A row's columns, each taken at most once; a column that holds null counts as absent but for its name.

    Attributes:
        unused: message keys that nothing read.
    """

    def __init__(self, values: dict[str, Any], auto: bool) -> None:
        self.values = values
        self.auto = auto
        self.taken: set[str] = set()
        self.unused: set[str] = set()

    def peek(self, name: str) -> Any:
        """The value, without taking it."""
        return self.values.get(name) if self.auto or name in EXACT_COLUMNS else None

    def take(self, name: str) -> Any:
        """The value; the column counts as read."""
        if not self.auto and name not in EXACT_COLUMNS:
            return None
        self.taken.add(name)
        return self.values.get(name)

    def first(self, names: tuple[str, ...]) -> tuple[str | None, Any]:
        """The first of these columns that has a value; else the first that exists (its value is null); else none."""
        names = tuple(name for name in names if self.auto or name in EXACT_COLUMNS)
        for name in names:
            if self.values.get(name) is not None:
                return name, self.take(name)
        for name in names:
            if name in self.values:
                return name, self.take(name)
        return None, None

    def rest(self) -> dict[str, Any]:
        """What nothing took."""
        return {name: v for name, v in self.values.items() if v is not None and name not in self.taken}


def rename(record: dict[str, Any], renames: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """The record under the names that `--columns` gives."""
    if not renames:
        return record
    renamed = dict(record)
    for old, new in renames:
        if old not in record:
            continue
        renamed.pop(old, None)
        if record.get(new) is not None and record[old] is not None and new not in dict(renames):
            raise RowProblem(
                "contradiction",
                f"--columns reads {old!r} as {new!r}, but the row has {new!r} as well",
                "rename one of them",
            )
    for old, new in renames:
        if old in record:
            renamed[new] = record[old]
    return renamed


def plain_text(name: str, value: Any) -> str:
    """The text that a column holds; refuses null and everything else, by name."""
    if isinstance(value, str):
        return value
    if value is None:
        raise RowProblem("no_content", f"{name!r} is null or empty")
    raise RowProblem("content_type", f"{name!r} is not a text: {excerpt(value)}", "write it as a JSON string")


def number_in(name: str, value: Any, reason: str) -> float:
    """The finite number that a column holds, also one written as text (in csv everything is)."""
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if math.isfinite(number):
        return number
    raise RowProblem(reason, f"{name!r} is not a number: {excerpt(value)}", "write a number, or leave the column out")
