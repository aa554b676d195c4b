"""The rows that a batch job answers: read lazily, in file order, each with its prompt or the reason why it has none.

A row that can't be used is a row all the same: it comes out with its problem, so that it gets its line in the results.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swift.config import SftConfig
from swift.config.data import RowsConfig
from swift.core.errors import SwiftError, UsageError
from swift.core.logging import get_logger
from swift.data.columns import Layout as RowLayout
from swift.data.dataset import prepare_datasets
from swift.data.encoding.encode import ChatEncoder
from swift.data.files import open_packed
from swift.data.pipeline import Encoder
from swift.data.rows import Row, RowProblem, RowRef
from swift.data.selection import TRAIN, data_rng, iter_rows, open_source
from swift.data.sources import parse_source

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
            if self.row.tools:
                fields["tools"] = self.row.tools
            if self.row.extra:
                fields["extra"] = self.row.extra
        return fields


class Inputs:
    """All rows of a job.

    Args:
        datasets: dataset arguments, `path[:subset][#rows]`.
        data: how rows are read.
        seed: of the sample that `#rows` draws.
        split: the sample is the one that training takes for this split, train or validation.
        only: take these rows alone, each once; None for all.
        layout: what rows are read as (`RowOptions.layout`).

    Raises:
        UsageError, DataError: a file is missing, empty or unreadable as a whole.

    Attributes:
        num_rows: how many there are.
        fingerprint: what they are, for the result file's settings: a hash of every file, and how it is read.
    """

    def __init__(
        self,
        datasets: list[str],
        data: RowsConfig,
        seed: int,
        *,
        split: str = TRAIN,
        only: frozenset[RowRef] | None = None,
        layout: RowLayout = "chat",
    ) -> None:
        if not datasets:
            raise UsageError("there are no rows to answer", where="--val_dataset", fix="--val_dataset FILE")
        self._datasets = datasets
        self._data = data
        self._seed = seed
        self._split = split
        self._only = only
        self._layout: RowLayout = layout
        counts = [self._count(text) for text in datasets]
        self.num_rows = sum(counts) if only is None else len(only)
        self.fingerprint: dict[str, Any] = {
            "rows": [
                {"argument": text.rpartition("#")[2] if "#" in text else None, "count": count, "files": _hashes(text)}
                for text, count in zip(datasets, counts, strict=True)
            ],
            "only": sorted(map(str, only)) if only is not None else None,
            "columns": data.columns,
            "auto_columns": not data.disable_auto_column_mapping,
            "sampled": data.dataset_shuffle,
            "data_seed": seed if data.data_seed is None else data.data_seed,
            "split": split,
            "self_cognition": [data.model_name, data.model_author],
        }

    def read(self, encoder: ChatEncoder, indices: range) -> Iterator[InputRow]:
        """The rows at `indices`, encoded."""
        for index, (ref, row) in enumerate(self.rows()):
            if index in indices:
                yield _input_row(index, ref, row, encoder)

    def rows(self) -> Iterator[tuple[RowRef, Row | RowProblem]]:
        """All rows as they were read, with what is wrong with those that couldn't be."""
        rows = iter_rows(
            self._datasets, self._data, need_answer=False, seed=self._seed, split=self._split, layout=self._layout
        )
        if self._only is None:
            yield from rows
            return
        seen: set[RowRef] = set()
        for ref, row in rows:
            if ref in self._only and ref not in seen:
                seen.add(ref)
                yield ref, row

    def _count(self, text: str) -> int:
        reading = open_source(parse_source(text), self._data, data_rng(self._data, self._seed))
        count = sum(len(chunk.rows) for chunk in reading.chunks())
        for note in reading.notes:
            log.info(note)
        if reading.blank:
            log.info("%s: %d blank line(s) are no rows", text, reading.blank)
        return max(count, reading.choice.count or 0)


def evaluation_split(
    config: SftConfig, tokenizer: Any, *, encoder: Encoder | None = None, layout: RowLayout = "chat"
) -> frozenset[RowRef]:
    """The rows that a training run set aside for evaluation (`split_dataset_ratio`), found as it found them.

    Args:
        encoder: of the rows of a task.
    """
    # the tokenizer of a checkpoint carries its template; the file it came from may be gone
    template = replace(config.template, template=None) if tokenizer.chat_template else config.template
    encoder = encoder or ChatEncoder(tokenizer, template)
    prepared = prepare_datasets(config.data, template, encoder, seed=config.training.seed, row_layout=layout)
    held = prepared.val
    return frozenset() if held is None else frozenset(held.ref(index) for index in range(len(held)))


def _input_row(index: int, ref: RowRef, row: Row | RowProblem, encoder: ChatEncoder) -> InputRow:
    result = InputRow(index, ref)
    try:
        if isinstance(row, RowProblem):
            raise row
        result.row = row
        messages, result.reference = split_reference(row.messages)
        result.prompt = prompt_of(row, messages, encoder)
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
        return encoder.encode_text(row.text)
    if not messages:
        raise RowProblem("no_prompt", "the conversation has nothing before its answer", "begin it with a user message")
    return encoder.encode_prompt(messages, row.tools, row.template_kwargs or None)


def _hashes(text: str) -> list[str]:
    """SHA-256 of every file of a dataset argument."""
    hashes = []
    for part in parse_source(text).files:
        with open_packed(part.location) as file:
            hashes.append(hashlib.file_digest(file, "sha256").hexdigest() + (f":{part.part}" if part.part else ""))
    return hashes
