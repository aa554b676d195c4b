"""Raw rows to encoded rows, in this process or in several, with the same result in the same order.

Rows travel in chunks. A chunk's result depends on its rows alone, and results are taken in the order of the chunks, so
the number of processes changes nothing but the time.
"""

from __future__ import annotations

import hashlib
import math
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import chain, islice
from multiprocessing import get_context, parent_process
from typing import Any, Protocol

import numpy as np
import orjson

from swift.core.errors import DataError
from swift.data.check_units import UnitFacts, unit_facts
from swift.data.handover import UNGUARDED, Handover, handed_over
from swift.data.readers import RawRow, parse_raw
from swift.data.rows import Row, RowProblem, RowRef, excerpt
from swift.data.selfcog import Identity, fill_identity
from swift.data.shapes import RowOptions, normalise_row
from swift.data.units import NO_NOTES

CHUNK_ROWS = 256
CHUNK_BYTES = 1 << 20


class Encoded(Protocol):
    """One example: int32 ids, float32 loss weights, how many tokens were cut off, and float64 notes if it has any."""

    input_ids: np.ndarray
    loss_weights: np.ndarray
    truncated: int
    notes: np.ndarray | None


class Encoder(Protocol):
    """What turns rows into examples (`swift.data.encoding.encode.ChatEncoder`). Sent to worker processes by pickle.

    `counts` and `notices` say what happened while encoding; each chunk takes its share out of them. Every id it gives
    is below `vocab_size`.
    """

    counts: Counter[str]
    notices: list[str]
    vocab_size: int

    def encode_batch(self, rows: Sequence[Row]) -> list[Any]: ...
    def fingerprint(self) -> str: ...
    def tokenizer_parts(self) -> dict[str, str]: ...
    def settings(self) -> dict[str, Any]: ...
    def dated(self) -> list[list[str]]: ...


class TemplateEncoder(Encoder, Protocol):
    """An encoder that a model is trained with: the chat template in force, and the ids that end an answer."""

    template: str | None

    def stop_token_ids(self) -> list[int]: ...


@dataclass
class Chunk:
    """Neighbouring rows of one file, and the names to fill in when they are self-cognition rows."""

    file: str
    rows: list[RawRow]
    identity: Identity | None = None


@dataclass
class RowFacts:
    """What `swift data check` wants to know of a row: a hash of its content, its turns, its characters, and what there
    is beyond a conversation."""

    digest: bytes
    turns: int
    roles: Counter[str]
    characters: int
    unit: UnitFacts


@dataclass
class RowResult:
    """One row's fate: `problem`, or the lengths of its examples."""

    line: int
    problem: RowProblem | None = None
    lengths: list[int] = field(default_factory=list)
    truncated: int = 0
    facts: RowFacts | None = None
    difficulty: float = 0.0


@dataclass
class ChunkResult:
    """The rows of a chunk in order; ids and weights of their examples end to end; notes of each, if any has some."""

    rows: list[RowResult]
    input_ids: np.ndarray
    loss_weights: np.ndarray
    unused: Counter[str]
    columns: set[str]
    encoding: Counter[str]
    notices: list[str]
    notes: list[np.ndarray] | None = None


@dataclass
class Task:
    """What is done with each row: how it is read, what encodes it (None: nothing does), whether facts are wanted, and
    the column that says how difficult it is."""

    options: RowOptions
    encoder: Encoder | None
    facts: bool = False
    difficulty: str | None = None

    def run(self, chunk: Chunk) -> ChunkResult:
        """Parse, normalise and encode a chunk."""
        result = ChunkResult([], np.empty(0, np.int32), np.empty(0, np.float32), Counter(), set(), Counter(), [])
        rows: list[Row] = []
        good: list[RowResult] = []
        for line, raw in chunk.rows:
            fate = RowResult(line)
            result.rows.append(fate)
            try:
                rows.append(self._read(chunk, line, raw, fate, result))
                good.append(fate)
            except RowProblem as problem:
                fate.problem = problem
        if self.encoder:
            self._encode(self.encoder, rows, good, result)
        return result

    def _read(self, chunk: Chunk, line: int, raw: Any, fate: RowResult, result: ChunkResult) -> Row:
        record = parse_raw(raw)
        result.columns.update(record)
        row, unused = normalise_row(record, RowRef(chunk.file, line), self.options)
        if chunk.identity:
            fill_identity(row, chunk.identity)
            unused.discard("tag")
        if self.difficulty is not None:
            fate.difficulty = _difficulty(record, self.difficulty)
            unused.discard(self.difficulty)
        result.unused.update(sorted(unused))  # sets have another order in every process
        if self.facts:
            fate.facts = _facts(row)
        return row

    def _encode(self, encoder: Encoder, rows: list[Row], fates: list[RowResult], result: ChunkResult) -> None:
        ids: list[np.ndarray] = []
        weights: list[np.ndarray] = []
        notes: list[np.ndarray] = []
        for fate, outcome in zip(fates, encoder.encode_batch(rows), strict=True):
            try:
                for example in _examples(outcome):
                    ids.append(example.input_ids)
                    weights.append(example.loss_weights)
                    notes.append(NO_NOTES if example.notes is None else example.notes)
                    fate.lengths.append(len(example.input_ids))
                    fate.truncated += example.truncated
            except RowProblem as problem:
                fate.problem = problem
        result.input_ids = np.concatenate([result.input_ids, *ids])
        result.loss_weights = np.concatenate([result.loss_weights, *weights])
        result.notes = notes if any(map(len, notes)) else None
        result.encoding.update(encoder.counts)
        result.notices.extend(encoder.notices)
        encoder.counts.clear()


def _examples(encoded: list[Encoded] | RowProblem) -> list[Encoded]:
    """The examples that have something to train on; a row that has none is a problem."""
    if isinstance(encoded, RowProblem):
        raise encoded
    useful = [example for example in encoded if example.loss_weights.any()]
    if useful:
        return useful
    if any(example.truncated for example in encoded):
        raise RowProblem(
            "masked_by_truncation",
            "after truncation no trained token is left",
            "raise --max_length, or choose another --truncation_strategy",
        )
    raise RowProblem("all_masked", "no token of this row is trained", 'check its "loss" marks, and --loss_scale')


def _difficulty(record: dict[str, Any], column: str) -> float:
    value = record.get(column)
    try:
        number = float(value) if isinstance(value, (int, float, str)) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if math.isfinite(number):
        return number
    raise RowProblem(
        "no_difficulty",
        f"the column {column!r}, by which --curriculum sorts, holds no number: {excerpt(value)}",
        'give every row one, or use {"difficulty": "length"}',
    )


def _facts(row: Row) -> RowFacts:
    content: Any = row.text if row.text is not None else [row.messages, row.tools]
    more = [row.rejected, row.label, row.positives, row.negatives, row.words, row.spans, row.teacher_prompt]
    if any(value not in (None, []) for value in more):
        content = [content, more]
    digest = hashlib.blake2b(orjson.dumps(content, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()
    texts = [message["content"] for message in row.messages] if row.text is None else [row.text]
    return RowFacts(
        digest,
        sum(message["role"] == "assistant" for message in row.messages),
        Counter(message["role"] for message in row.messages),
        sum(map(len, texts)),
        unit_facts(row),
    )


def chunked(rows: Iterable[RawRow], file: str, identity: Identity | None = None) -> Iterator[Chunk]:
    """Group a file's rows; a chunk ends at `CHUNK_ROWS` rows or `CHUNK_BYTES` bytes."""
    piece: list[RawRow] = []
    size = 0
    for row in rows:
        piece.append(row)
        size += len(row[1]) if isinstance(row[1], bytes) else 512
        if len(piece) >= CHUNK_ROWS or size >= CHUNK_BYTES:
            yield Chunk(file, piece, identity)
            piece, size = [], 0
    if piece:
        yield Chunk(file, piece, identity)


class Workers:
    """Runs chunks, in this process or in several that live as long as the `with` block.

    Args:
        flag: the setting that `num_proc` comes from, for messages.
    """

    def __init__(self, task: Task, num_proc: int, flag: str = "--dataset_num_proc") -> None:
        self.task = task
        self.num_proc = num_proc
        self.flag = flag
        self._pool: ProcessPoolExecutor | None = None
        self._handover: Handover | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool:
            self._pool.shutdown(wait=True, cancel_futures=True)
        if self._handover:
            self._handover.close()

    def run(self, chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, ChunkResult]]:
        """Each chunk with its result, in order.

        Raises:
            DataError: if a worker process dies.
        """
        first = list(islice(chunks, 2))
        if self.num_proc <= 1 or (len(first) < 2 and not self._pool):  # not worth starting processes for
            for chunk in chain(first, chunks):
                yield chunk, self.task.run(chunk)
            return
        waiting: deque[tuple[Chunk, Future[ChunkResult]]] = deque()
        for chunk in chain(first, chunks):
            waiting.append((chunk, self.submit(chunk)))
            if len(waiting) >= 3 * self.num_proc:  # bounds memory; keeps every worker busy
                done, future = waiting.popleft()
                yield done, self.result(future)
        while waiting:
            done, future = waiting.popleft()
            yield done, self.result(future)

    def submit(self, chunk: Any) -> Future[ChunkResult]:
        """Start on a chunk in another process; without processes (`num_proc` 0) do it here, at once."""
        if self.num_proc < 1:
            future: Future[ChunkResult] = Future()
            future.set_result(self.task.run(chunk))
            return future
        if not self._pool:
            # spawn, not fork: threads of tokenizers and torch don't survive a fork
            self._handover = Handover(self.task)
            arguments = (self._handover.path,)
            self._pool = ProcessPoolExecutor(self.num_proc, get_context("spawn"), _start_worker, arguments)
            # one that can't start dies here, and not while a large chunk is being written to it
            self.result(self._pool.submit(_nothing))  # type: ignore[arg-type]
        try:
            return self._pool.submit(_work, chunk)
        except BrokenProcessPool as error:
            raise self._died() from error

    def result(self, future: Future[ChunkResult]) -> ChunkResult:
        """Wait for what `submit` started.

        Raises:
            DataError: a process died.
        """
        try:
            return future.result()
        except BrokenProcessPool as error:
            raise self._died() from error

    def _died(self) -> DataError:
        return DataError(
            "a process that reads rows died (killed for memory, or it could not start)",
            where=self.flag,
            fix=f"lower {self.flag}; {UNGUARDED}",
        )


_task: Task | None = None


def _start_worker(task: str) -> None:
    global _task
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core per worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _task = handed_over(task)


def _end_with_parent() -> None:
    """A worker must not outlive a parent that was killed."""
    parent = parent_process()
    if parent:
        parent.join()
        os._exit(1)


def _nothing() -> None:
    pass


def _work(chunk: Chunk) -> ChunkResult:
    assert _task is not None
    return _task.run(chunk)
