"""Answers a file of rows: exactly one result line per row, in order, whatever happens to a row or to the process.

Rows are taken in windows. Within one, prompts of like length are generated together; results are written as soon as
all rows before them are there. Several processes (`WORLD_SIZE`) share the rows, each writing a part of its own; the
first one puts the parts together. They exchange nothing else.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from swift.config.inference import GenerationConfig
from swift.core.errors import SwiftError, UsageError
from swift.data.encoding.encode import ChatEncoder
from swift.inference.engine import Completion, Engine
from swift.inference.inputs import InputRow, Inputs
from swift.inference.progress import Progress
from swift.inference.results import ResultFile, Share, merge_parts, part_path, read_meta

_POLL_S = 0.2


@dataclass(frozen=True)
class BatchReport:
    """How a batch job ended.

    Attributes:
        path: the result file.
        num_rows: rows of the job.
        statuses: lines by status, `ok` and `error`.
        interrupted: whether Ctrl-C ended it; the same start continues it.
        resumed: rows that an earlier start had answered.
    """

    path: Path
    num_rows: int
    statuses: Counter[str]
    interrupted: bool = False
    resumed: int = 0


class Work(Protocol):
    """What answers rows.

    Attributes:
        window: rows taken at a time.
    """

    @property
    def window(self) -> int: ...

    def read(self, inputs: Inputs, indices: range) -> Iterator[Any]:
        """The rows at `indices`, ready to be answered, or with what is wrong with them."""
        ...

    def answer(self, window: list[Any]) -> Iterator[tuple[int, dict[str, Any]]]:
        """(place in the window, result) of every row, as they come."""
        ...


@dataclass(frozen=True)
class Answering:
    """Generates the answers.

    Args:
        encoder: makes the prompts.
        generation: how to answer.
    """

    engine: Engine
    encoder: ChatEncoder
    generation: GenerationConfig

    @property
    def window(self) -> int:
        return self.engine.max_in_flight

    def read(self, inputs: Inputs, indices: range) -> Iterator[InputRow]:
        return inputs.read(self.encoder, indices)

    def answer(self, window: list[InputRow]) -> Iterator[tuple[int, dict[str, Any]]]:
        numbers = []
        for number, row in enumerate(window):
            if row.problem is not None:
                yield number, error_result(row, *row.problem)
            else:
                numbers.append(number)
        prompts = [window[number].prompt or [] for number in numbers]
        seeds = [window[number].index for number in numbers]
        for k, answer in self.engine.generate_each(prompts, self.generation, seeds=seeds):
            row = window[numbers[k]]
            if isinstance(answer, SwiftError):
                yield numbers[k], error_result(row, "not_answerable", answer.message)
            else:
                yield numbers[k], ok_result(row, answer)


@dataclass(frozen=True)
class BatchJob:
    """A batch job, ready to run.

    Args:
        start: gives what answers, the model in memory; called only if there is a row to answer.
        inputs: the rows.
        settings: what the answers depend on besides; plain JSON values. See `ResultFile`.
        path: the result file.
        resume: continue an unfinished file.
        share: which of the processes this is.
    """

    start: Callable[[], Work]
    inputs: Inputs
    settings: dict[str, Any]
    path: Path
    resume: bool = True
    share: Share = field(default_factory=Share)

    def run(self) -> BatchReport:
        """Answer every row that has no line yet.

        Raises:
            UsageError: the result file belongs to something else.
            CheckpointError: another process is writing it.
        """
        if self.share.size == 1:
            return self._answer_share(self.path)
        done = self._already_merged()
        if done is not None:
            return done
        own = part_path(self.path, self.share)
        if not self.resume and own.exists():
            raise UsageError(
                f"{own} is left over from an earlier start", where="--resume", fix=f"delete {self.path}.part-* first"
            )
        report = replace(self._answer_share(own), path=self.path)
        if report.interrupted or self.share.rank > 0:
            return report
        return self._merge()

    def _answer_share(self, path: Path) -> BatchReport:
        with ResultFile(path, self.settings, share=self.share, resume=self.resume) as results:
            first = results.num_lines
            indices = range(self.share.index(first), self.inputs.num_rows, self.share.size)
            interrupted = False
            try:
                if indices:
                    self._answer_rows(indices, results)
                if not results.complete:
                    results.finish()
            except KeyboardInterrupt:
                interrupted = True
            return BatchReport(path, self.inputs.num_rows, results.statuses, interrupted, first)

    def _answer_rows(self, indices: range, results: ResultFile) -> None:
        work = self.start()
        with Progress(results.num_lines + len(indices), results.num_lines) as progress:
            self._answer_windows(work, indices, results, progress)

    def _answer_windows(self, work: Work, indices: range, results: ResultFile, progress: Progress) -> None:
        rows, size = work.read(self.inputs, indices), work.window
        while window := list(islice(rows, size)):
            waiting: dict[int, dict[str, Any]] = {}
            place = 0  # the first row of the window that isn't written yet
            for number, result in work.answer(window):
                waiting[number] = result
                ready = []
                while place in waiting:
                    ready.append(waiting.pop(place))
                    place += 1
                results.append(ready)
                progress.advance(1, result.get("num_tokens", 0))
            results.sync()

    def _already_merged(self) -> BatchReport | None:
        meta = read_meta(self.path)
        if not self.resume or not self.path.exists():
            return None
        if meta is None or meta["settings"] != self.settings or not meta["complete"]:
            raise UsageError(
                f"{self.path} exists and holds something else, or was begun by a single process",
                where="--result_path",
                fix="choose another --result_path, or overwrite it with --resume false",
            )
        return BatchReport(self.path, self.inputs.num_rows, Counter(meta["statuses"]), resumed=meta["num_lines"])

    def _merge(self) -> BatchReport:
        """Wait for the other processes' parts (the launcher ends us if one of them fails) and join them."""
        others = [part_path(self.path, Share(rank, self.share.size)) for rank in range(1, self.share.size)]
        try:
            while not all(
                (meta := read_meta(p)) and meta["complete"] and meta["settings"] == self.settings for p in others
            ):
                time.sleep(_POLL_S)
        except KeyboardInterrupt:
            return BatchReport(self.path, self.inputs.num_rows, Counter(), interrupted=True)
        merge_parts(self.path, self.settings, self.share.size)
        meta = read_meta(self.path) or {"statuses": {}}
        return BatchReport(self.path, self.inputs.num_rows, Counter(meta["statuses"]))


def ok_result(row: InputRow, answer: Completion) -> dict[str, Any]:
    """The result line of an answered row."""
    return {
        **row.result(),
        "status": "ok",
        "response": answer.text,
        "finish_reason": answer.finish_reason,
        "num_tokens": len(answer.tokens),
        "num_prompt_tokens": answer.num_prompt_tokens,
    }


def error_result(row: InputRow, reason: str, message: str) -> dict[str, Any]:
    """The result line of a row that has no answer."""
    return {
        **row.result(),
        "status": "error",
        "reason": reason,
        "error": message,
        "response": None,
        "finish_reason": None,
        "num_tokens": 0,
    }
