"""The rows that a batch job answers: read lazily, in file order, each with its prompt or the reason why it has none.

A row that can't be used is a row all the same: it comes out with its problem, so that it gets its line in the results.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swift.config.data import DataConfig
from swift.core.errors import SwiftError, UsageError
from swift.core.logging import get_logger
from swift.data.encode import ChatEncoder
from swift.data.readers import FileTally, parse_raw, read_raw
from swift.data.rows import Row, RowProblem, RowRef
from swift.data.shapes import ANSWER_COLUMNS, RowOptions, normalise_row
from swift.data.sources import Source, parse_source
from swift.inference.prompts import conversation_prompt, text_prompt

log = get_logger("inference")


@dataclass
class InputRow:
    """One row to answer.

    Attributes:
        index: its number among all rows, from 0.
        ref: file and line.
        row: what was read; None if it couldn't be.
        prompt: token ids; None if there is a problem.
        reference: the answer that the row came with.
        problem: (code, message) of what is wrong with it.
    """

    index: int
    ref: RowRef
    row: Row | None = None
    prompt: list[int] | None = None
    reference: str | None = None
    problem: tuple[str, str] | None = None

    def result(self) -> dict[str, Any]:
        """The fields of its result line that the row itself gives."""
        fields: dict[str, Any] = {"index": self.index, "source": str(self.ref), "labels": self.reference}
        if self.row is not None:
            fields["messages"] = self.row.messages
            if self.row.text is not None:
                fields["text"] = self.row.text
            if self.row.extra:
                fields["extra"] = self.row.extra
        return fields


@dataclass
class Inputs:
    """All rows of a job.

    Raises:
        UsageError, DataError: on creation, when a file is missing, empty or unreadable as a whole.

    Attributes:
        num_rows: how many there are.
        fingerprint: what they are, for the result file's settings: a hash of every file and how it is read.
    """

    config: DataConfig
    sources: list[Source] = field(init=False)
    num_rows: int = field(init=False)
    fingerprint: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        arguments = self.config.val_dataset or self.config.dataset
        if not arguments:
            raise UsageError("there are no rows to answer", where="--val_dataset", fix="--val_dataset FILE")
        self.sources = [parse_source(text) for text in arguments]
        named = next((source.text for source in self.sources if source.self_cognition), None)
        if named:
            raise UsageError(
                f"{named} has blanks for a name and an author, which only training fills in",
                where="--val_dataset",
                fix="give a file of questions, or ask interactively",
            )
        counts = [self._count(source) for source in self.sources]
        self.num_rows = sum(counts)
        self.fingerprint = {
            "rows": [
                {"sha256": [_sha256(file.path) for file in source.files], "part": source.files[0].part, "count": count}
                for source, count in zip(self.sources, counts, strict=True)
            ],
            "columns": self.config.columns,
            "auto_columns": not self.config.disable_auto_column_mapping,
        }

    def read(self, encoder: ChatEncoder, indices: range) -> Iterator[InputRow]:
        """The rows at `indices`, encoded."""
        options = RowOptions(
            columns=tuple((self.config.columns or {}).items()),
            auto=not self.config.disable_auto_column_mapping,
            need_answer=False,
        )
        for index, (ref, raw) in enumerate(self._raw()):
            if index in indices:
                yield _input_row(index, ref, raw, options, encoder)

    def _raw(self) -> Iterator[tuple[RowRef, Any]]:
        for source in self.sources:
            left = source.count
            for file in source.files:
                for line, raw in read_raw(file, FileTally()):
                    if left == 0:
                        break
                    left = None if left is None else left - 1
                    yield RowRef(str(file.path), line), raw

    def _count(self, source: Source) -> int:
        count = 0
        tally = FileTally()
        for file in source.files:
            for _ in read_raw(file, tally):
                count += 1
        for note in (*source.notes, *tally.notes):
            log.info(note)
        if tally.blank:
            log.info("%s: %d blank line(s) are no rows", source.text, tally.blank)
        if source.count is not None and source.count > count:
            log.info("%s: there are %d rows", source.text, count)
        return count if source.count is None else min(count, source.count)


def _input_row(index: int, ref: RowRef, raw: Any, options: RowOptions, encoder: ChatEncoder) -> InputRow:
    result = InputRow(index, ref)
    try:
        record = {k: v for k, v in parse_raw(raw).items() if v is not None or k not in ANSWER_COLUMNS}
        result.row, _ = normalise_row(record, ref, options)
        messages, result.reference = split_reference(result.row.messages)
        result.prompt = prompt_of(result.row, messages, encoder)
    except RowProblem as problem:
        result.problem = (problem.reason, " ".join(filter(None, [problem.message, problem.fix and f"({problem.fix})"])))
    except SwiftError as error:
        result.problem = ("not_encodable", error.message)
    return result


def split_reference(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str | None]:
    """The conversation up to the answer that is asked for, and the answer it came with, if it ends in one.

    An answer that only calls tools is given as JSON.
    """
    if not messages or messages[-1]["role"] != "assistant":
        return list(messages), None
    last = messages[-1]
    text = last.get("content") or ""
    if not text and last.get("tool_calls"):
        text = json.dumps(last["tool_calls"], ensure_ascii=False)
    return list(messages[:-1]), text


def prompt_of(row: Row, messages: list[dict[str, Any]], encoder: ChatEncoder) -> list[int]:
    """Token ids of a row's prompt.

    Raises:
        RowProblem: there is nothing to answer.
        TemplateError: the chat template refuses the conversation.
    """
    if row.text is not None:
        return text_prompt(encoder, row.text)
    if not messages:
        raise RowProblem("no_prompt", "the conversation has nothing before its answer", "begin it with a user message")
    return conversation_prompt(encoder, messages, row.tools, row.template_kwargs or None)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
