"""Answers a file of rows: exactly one result line per row, in order, whatever happens to a row or to the process.

Rows are taken as others are answered, so that what runs the model is never out of work; a result is written as soon as
all rows before it are there. Several processes (`WORLD_SIZE`) share the rows, each writing a part of its own; the
first one puts the parts together. They exchange nothing else.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from swift.config.inference import GenerationConfig
from swift.core.errors import DataError, SwiftError, UsageError
from swift.data.encoding.encode import ChatEncoder
from swift.inference.decoding import decode
from swift.inference.engine import Engine
from swift.inference.inputs import InputRow, Inputs
from swift.inference.progress import Progress
from swift.inference.requests import Completion, SamplingParams
from swift.inference.results import ResultFile, Share, merge_parts, part_path, read_meta

_POLL_S = 0.2
_SYNC_EVERY_S = 5.0  # what the end of the machine can lose; the end of the process loses nothing


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
    """What answers rows."""

    def read(self, inputs: Inputs, indices: range) -> Iterator[Any]:
        """The rows at `indices`, ready to be answered, or with what is wrong with them."""
        ...

    def answer(self, rows: Iterator[Any]) -> Iterator[tuple[int, dict[str, Any]]]:
        """(place among `rows`, result) of every row, as they come. Rows are taken as there is room for them."""
        ...


class Answering:
    """Generates the answers.

    Args:
        encoder: makes the prompts.
        generation: how to answer.

    Raises:
        UsageError: several answers to a row are wanted, and without sampling they would be the same.
    """

    def __init__(self, engine: Engine, encoder: ChatEncoder, generation: GenerationConfig) -> None:
        self._engine, self._encoder, self._generation = engine, encoder, generation
        self._params = engine.sampling(generation)
        count = generation.num_return_sequences
        if count > 1 and self._params.temperature == 0:
            raise UsageError(
                f"{count} answers to a row would be the same: this model doesn't sample unless told to",
                where="--num_return_sequences",
                fix="--temperature 1, or another value above 0",
            )

    def read(self, inputs: Inputs, indices: range) -> Iterator[InputRow]:
        return inputs.read(self._encoder, indices)

    def answer(self, rows: Iterator[InputRow]) -> Iterator[tuple[int, dict[str, Any]]]:
        unusable: deque[tuple[int, dict[str, Any]]] = deque()
        answered: dict[int, _Answered] = {}
        count = self._generation.num_return_sequences

        def asked() -> Iterator[tuple[tuple[int, int], list[int], SamplingParams]]:
            for place, row in enumerate(rows):
                if row.problem is not None:
                    unusable.append((place, error_result(row, *row.problem)))
                    continue
                answered[place] = _Answered(row)
                for draw in range(count):
                    yield (place, draw), row.prompt or [], replace(self._params, seed=self._seed(row, draw))

        for (place, draw), answer in self._engine.answer(asked()):
            while unusable:
                yield unusable.popleft()
            if isinstance(answer, SwiftError) and not isinstance(answer, DataError):
                raise answer  # of the engine, not of the row: another start may answer it
            if isinstance(answer, Completion) and answer.finish_reason == "cancelled":
                raise SwiftError("the engine was closed before all rows were answered", fix="start again to go on")
            there = answered[place]
            there.answers[draw] = answer
            if len(there.answers) == count:
                yield place, self._result(answered.pop(place))
        yield from unusable

    def _seed(self, row: InputRow, draw: int) -> str:
        """Of the row alone, so that a job that goes on draws what it would have drawn."""
        seed = f"{self._generation.seed}/{row.index}"
        return seed if draw == 0 else f"{seed}/{draw}"

    def _result(self, answered: _Answered) -> dict[str, Any]:
        row, answers = answered.row, [answered.answers[draw] for draw in sorted(answered.answers)]
        whole: list[Completion] = []
        for answer in answers:
            if isinstance(answer, SwiftError):
                return error_result(row, "not_answerable", answer.message)
            whole.append(answer)
        return ok_result(row, whole, self._engine.tokenizer)


@dataclass
class _Answered:
    """A row, and its answers by number."""

    row: InputRow
    answers: dict[int, Completion | SwiftError] = field(default_factory=dict)


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
            waiting: dict[int, dict[str, Any]] = {}
            place, synced_at = 0, time.monotonic()  # the first row that isn't written yet
            for number, result in work.answer(work.read(self.inputs, indices)):
                waiting[number] = result
                ready = []
                while place in waiting:
                    ready.append(waiting.pop(place))
                    place += 1
                results.append(ready)
                progress.advance(1, num_tokens(result))
                if time.monotonic() - synced_at > _SYNC_EVERY_S:
                    results.sync()
                    synced_at = time.monotonic()

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


def ok_result(row: InputRow, answers: list[Completion], tokenizer: Any) -> dict[str, Any]:
    """The result line of an answered row: of its first answer, and all of them where there are several."""
    said = [_said(answer, tokenizer) for answer in answers]
    return {
        **row.result(),
        "status": "ok",
        **said[0],
        "num_prompt_tokens": answers[0].num_prompt_tokens,
        **({"responses": said} if len(said) > 1 else {}),
    }


def num_tokens(result: dict[str, Any]) -> int:
    """Generated tokens of a result line."""
    return sum(each.get("num_tokens", 0) for each in result.get("responses", [result]))


def _said(answer: Completion, tokenizer: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "response": answer.text,
        "finish_reason": answer.finish_reason,
        "num_tokens": len(answer.tokens),
    }
    if answer.logprobs is not None:
        fields["logprobs"] = _logprobs(answer, answer.logprobs, tokenizer)
    return fields


def _logprobs(answer: Completion, logprobs: list[float], tokenizer: Any) -> list[dict[str, Any]]:
    """Of each token: its id, its text as it stands alone, its log-probability, and those of the likeliest there."""

    def told(token: int, logprob: float) -> dict[str, Any]:
        return {
            "id": token,
            "token": decode(tokenizer, [token], skip_special_tokens=False),
            "logprob": logprob,
        }

    entries = [told(token, logprob) for token, logprob in zip(answer.tokens, logprobs, strict=True)]
    for entry, top in zip(entries, answer.top_logprobs or (), strict=False):
        entry["top_logprobs"] = [told(*each) for each in top]
    return entries


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
