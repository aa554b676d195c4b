"""Which rows of a dataset argument count, in what order, and how often.

`#n` takes n rows: a sample drawn with the seed (in file order) or, without shuffling, the first n; above the number of
rows it repeats them. Everything is read in one stream; sampling counts the rows beforehand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from swift.config.data import RowsConfig
from swift.core.logging import get_logger
from swift.data.columns import Layout
from swift.data.files import size_of
from swift.data.pipeline import Chunk, chunked
from swift.data.readers import EmptyFileError, FileTally, RawRow, count_raw, parse_raw, read_raw
from swift.data.rows import TRAIN, VALIDATION, Row, RowProblem, RowRef
from swift.data.selfcog import Identity, fill_identity, identity_from
from swift.data.shapes import RowOptions, normalise_row
from swift.data.sources import Source, parse_source

log = get_logger("data")


@dataclass
class Choice:
    """Which rows of a source count.

    Attributes:
        ordinals: row numbers (from 0, over all files) to take; None for all.
        limit: take this many from the beginning; None for all.
        count: rows wanted in all; None for as many as there are.
        shuffle: whether the incomplete last repetition is drawn at random.
    """

    ordinals: frozenset[int] | None = None
    limit: int | None = None
    count: int | None = None
    shuffle: bool = False

    def repetitions(self, read: int, rng: np.random.Generator) -> list[int]:
        """Row numbers to add after the first pass, when more rows are wanted than the `read` there are."""
        if self.count is None or read == 0 or self.count <= read:
            return []
        times, rest = divmod(self.count, read)
        chosen = sorted(rng.choice(read, rest, replace=False).tolist()) if self.shuffle else list(range(rest))
        return list(range(read)) * (times - 1) + chosen


def choose(source: Source, shuffle: bool, rng: np.random.Generator) -> Choice:
    """The rows that `#n` asks for."""
    if source.count is None:
        return Choice()
    if not shuffle:
        return Choice(limit=source.count, count=source.count)
    total = count_rows(source)
    if source.count >= total:
        return Choice(count=source.count, shuffle=True)
    return Choice(frozenset(rng.choice(total, source.count, replace=False).tolist()), count=source.count, shuffle=True)


def count_rows(source: Source) -> int:
    """The rows of all files of a source; shards without any count as 0 beside others."""
    total = 0
    for file in source.files:
        try:
            total += count_raw(file)
        except EmptyFileError:
            if len(source.files) == 1:
                raise
    return total


@dataclass
class SourceReading:
    """One pass over the chosen rows of a source: `chunks` gives them; blank lines and notes add up on the way.

    A shard without rows is a note among others, and an error when it is the only file or when all are like it.
    """

    source: Source
    choice: Choice
    identity: Identity | None = None
    blank: int = 0
    notes: list[str] = field(default_factory=list)
    _ordinal: int = 0
    _bytes_done: int = 0
    _tally: FileTally = field(default_factory=FileTally)
    _size: int = 0
    _empty: list[str] = field(default_factory=list)

    def chunks(self) -> Iterator[Chunk]:
        """The rows, in order, grouped for the pipeline."""
        for file in self.source.files:
            if self.choice.limit is not None and self._ordinal >= self.choice.limit:
                return
            self._tally = tally = FileTally()
            self._size = size_of(file.location)
            try:
                yield from chunked(self._chosen(read_raw(file, tally)), file.name, self.identity)
            except EmptyFileError as error:
                self._empty.append(file.name)
                if len(self._empty) == len(self.source.files):
                    raise
                log.debug("%s", error)
            self.blank += tally.blank
            self.notes += tally.notes
            self._bytes_done += self._size
            self._size = 0
        if self._empty:
            names = ", ".join(self._empty[:5]) + (", …" if len(self._empty) > 5 else "")
            self.notes.append(f"{self.source.text}: {len(self._empty)} file(s) without rows: {names}")

    @property
    def bytes_done(self) -> float:
        """Bytes of the files that have been read."""
        return self._bytes_done + self._tally.share * self._size

    def _chosen(self, rows: Iterator[RawRow]) -> Iterator[RawRow]:
        choice = self.choice
        for row in rows:
            if choice.limit is not None and self._ordinal >= choice.limit:
                return
            if choice.ordinals is None or self._ordinal in choice.ordinals:
                yield row
            self._ordinal += 1


@dataclass
class Progress:
    """How far reading has come; `report` is called now and then.

    Attributes:
        rows: rows done.
        share: of all bytes to be read, from 0 to 1.
        seconds: since the start.
    """

    report: Callable[[Progress], None] | None
    sources: Sequence[Source]
    rows: int = 0
    share: float = 0.0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._total = sum(size_of(file.location) for source in self.sources for file in source.files)
        self._finished, self._start = 0.0, time.monotonic()

    def add(self, rows: int, reading: SourceReading) -> None:
        """Count the rows of a chunk and report."""
        self.rows += rows
        self._tell(self._finished + reading.bytes_done)

    def finish(self, source: Source) -> None:
        """A source is through."""
        self._finished += sum(size_of(file.location) for file in source.files)
        self._tell(self._finished)

    def _tell(self, bytes_done: float) -> None:
        self.share = min(1.0, bytes_done / max(1, self._total))
        self.seconds = time.monotonic() - self._start
        if self.report:
            self.report(self)


def open_source(source: Source, data: RowsConfig, rng: np.random.Generator) -> SourceReading:
    """Start reading a source as `data` says."""
    identity = identity_from(data.model_name, data.model_author) if source.self_cognition else None
    return SourceReading(source, choose(source, data.dataset_shuffle, rng), identity, notes=list(source.notes))


def row_options(data: RowsConfig, *, need_answer: bool, layout: Layout = "chat") -> RowOptions:
    """How rows are read under these settings."""
    return RowOptions(tuple((data.columns or {}).items()), not data.disable_auto_column_mapping, need_answer, layout)


def data_rng(data: RowsConfig, seed: int, *path: int) -> np.random.Generator:
    """The random stream at `path`: (0, n) for the n-th training source, (1, n) for evaluation, (2,) for the split."""
    return np.random.default_rng([seed if data.data_seed is None else data.data_seed, *path])


def iter_rows(
    datasets: list[str],
    data: RowsConfig,
    *,
    need_answer: bool = False,
    seed: int = 42,
    split: str = TRAIN,
    layout: Layout = "chat",
) -> Iterator[tuple[RowRef, Row | RowProblem]]:
    """Each row of these dataset arguments in order, or what is wrong with it.

    `#n` takes the rows that a training run with this seed takes for `split`, train or validation.
    """
    options = row_options(data, need_answer=need_answer, layout=layout)
    for number, text in enumerate(datasets):
        rng = data_rng(data, seed, int(split == VALIDATION), number)
        reading = open_source(parse_source(text), data, rng)
        found: list[tuple[RowRef, Row | RowProblem]] = []
        for chunk in reading.chunks():
            for line, raw in chunk.rows:
                ref = RowRef(chunk.file, line)
                item = (ref, _row_or_problem(raw, ref, options, reading.identity))
                yield item
                if reading.choice.count is not None:
                    found.append(item)
        for index in reading.choice.repetitions(len(found), rng):
            yield found[index]


def _row_or_problem(
    raw: bytes | dict | RowProblem, ref: RowRef, options: RowOptions, identity: Identity | None
) -> Row | RowProblem:
    try:
        row, _ = normalise_row(parse_raw(raw), ref, options)
        if identity:
            fill_identity(row, identity)
    except RowProblem as problem:
        return problem
    return row
