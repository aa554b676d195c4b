"""The input of a recipe: dataset arguments to shards, and a shard to batches of documents.

A shard is a file, or a piece of one; its rows carry the same ids however the file is cut. Bad rows end here: they stop
the run, or are dropped and counted under the operator `read`. Knows nothing of stages and tasks.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from swift.core.errors import DataError, UsageError
from swift.data.engine.document import Document, document_from
from swift.data.engine.recipe import InputSpec, Recipe
from swift.data.engine.tally import Tally
from swift.data.files import DataFile, size_of, stamp_of
from swift.data.parse_json import non_finite_field, parse_line
from swift.data.readers import FileTally, RawRow, parse_raw, read_raw, split_file
from swift.data.rows import RowProblem
from swift.data.sources import parse_source

BATCH_ROWS = 256
BATCH_CHARACTERS = 1 << 20
_COLUMNAR = ("parquet", "arrow")
_MOST_NESTED = 200  # lists and objects in each other; the writer of JSON takes 254, the files between stages add some


@dataclass(frozen=True)
class Picks:
    """`#n`: which rows of a source are taken, told by their numbers over all its files.

    Attributes:
        first: number of the first row of the file. total: rows of the source. count: rows wanted. key: of the draw.
    """

    first: int
    total: int
    count: int
    key: int


@dataclass(frozen=True)
class Shard:
    """A piece of the input.

    Attributes:
        file: what is read. input: which dataset argument of the recipe it belongs to.
        stamp: changes when the file's content may have changed. size: bytes of the whole file.
    """

    file: DataFile
    input: int
    stamp: str
    size: int
    picks: Picks | None = None

    def as_json(self) -> dict[str, Any]:
        """For manifests and fingerprints."""
        values: dict[str, Any] = {"location": self.file.address, "stamp": self.stamp, "bytes": self.size}
        for name in ("part", "span"):
            if getattr(self.file, name) is not None:
                values[name] = getattr(self.file, name)
        if self.picks is not None:
            values["picks"] = [self.picks.first, self.picks.total, self.picks.count, self.picks.key]
        return values


def list_shards(recipe: Recipe) -> list[Shard]:
    """The input of a recipe, cut into shards, in the order in which its rows count.

    Raises:
        UsageError: an argument that can't be meant. DataError: a file that isn't there.
    """
    shards: list[Shard] = []
    seen: dict[tuple[str, str | None], str] = {}
    for number, spec in enumerate(recipe.input):
        source = parse_source(spec.path)
        if source.self_cognition:
            raise UsageError(
                "self-cognition rows are templates that training fills in", where="input", fix="give it to --dataset"
            )
        for file in source.files:
            before = seen.setdefault((file.address, file.part), spec.path)
            if before != spec.path or sum(f == file for f in source.files) > 1:
                raise UsageError(
                    f"{file.address} is read twice: its rows would have the same ids",
                    where=f"input {before} and {spec.path}",
                    fix="name it once; weights of sources belong to the mixing of a training",
                )
        stamped = [(file, stamp_of(file.location), size_of(file.location)) for file in source.files]
        if source.count is not None:
            shards += _picked(stamped, number, source.count, recipe.seed)
            continue
        for file, stamp, size in stamped:
            for piece in _pieces(file, recipe):
                shards.append(Shard(piece, number, stamp, size))
    return shards


def _pieces(file: DataFile, recipe: Recipe) -> list[DataFile]:
    try:
        return split_file(file, recipe.shard_size_bytes)
    except DataError as error:
        if recipe.on_bad_shard == "stop":
            raise with_skip_hint(error) from error
        return [file]  # its task will find the same and skip it


def with_skip_hint(error: DataError) -> DataError:
    """The error about a file that can't be read, with what a recipe can do about it."""
    fix = f"{error.fix}; or on_bad_shard: skip leaves it out" if error.fix else "on_bad_shard: skip leaves it out"
    return DataError(error.message, where=error.where, fix=fix)


def _picked(stamped: list[tuple[DataFile, str, int]], number: int, count: int, seed: int) -> list[Shard]:
    from swift.data.readers import count_raw

    rows = [count_raw(file) for file, _, _ in stamped]
    total = sum(rows)
    if count > total:
        raise UsageError(
            f"{count} rows are wanted, there are {total}",
            where=f"input {number + 1}",
            fix="a recipe takes each row at most once: leave out the number, or lower it",
        )
    return [
        Shard(file, number, stamp, size, Picks(sum(rows[:index]), total, count, seed + number))
        for index, (file, stamp, size) in enumerate(stamped)
    ]


class BadShard(Exception):
    """A shard that can't be read, as the reader tells it."""

    def __init__(self, error: DataError) -> None:
        super().__init__(str(error))
        self.error = error


class ShardReading:
    """One pass over a shard.

    Args:
        shard: what is read. spec: its dataset argument. recipe: says what happens to bad rows.
        tally: of the operator `read`.

    Raises (while iterating):
        BadShard: the file is damaged, empty, or has changed since the run began.
        DataError: a bad row, where the recipe says that one stops the run, or more of them than it allows.
    """

    def __init__(self, shard: Shard, spec: InputSpec, recipe: Recipe, tally: Tally) -> None:
        self.shard, self.spec, self.recipe, self.tally = shard, spec, recipe, tally
        self.notes: list[str] = []
        self.bytes = 0
        self._bad = 0
        self._prefix = str(shard.file.ref(0))[:-1]  # of ids; asking the file for each row would cost more than parsing
        self._columnar = shard.file.format in _COLUMNAR

    def __iter__(self) -> Iterator[list[Document]]:
        batch: list[Document] = []
        characters = 0
        for line, raw in self._rows():
            document = self._document(line, raw)
            if document is None:
                continue
            batch.append(document)
            characters += sum(map(len, document.texts))
            if len(batch) >= BATCH_ROWS or characters >= BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
        if batch:
            yield batch
        self.require_unchanged()

    def require_unchanged(self) -> None:
        """Compare the file with what it was when the run began.

        Raises:
            DataError: it has changed, so the shards of the run don't belong together.
        """
        if stamp_of(self.shard.file.location, fresh=True) != self.shard.stamp:
            raise changed_input(self.shard.file.location)

    def _rows(self) -> Iterator[RawRow]:
        facts = FileTally()
        rows = read_raw(self.shard.file, facts)
        wanted = self._wanted()
        number = 0
        while True:
            try:
                row = next(rows)
            except StopIteration:
                break
            except DataError as error:
                raise BadShard(error) from error
            if wanted is None or wanted(number):
                yield row
            number += 1
        self.notes += facts.notes

    def _wanted(self) -> Any:
        picks = self.shard.picks
        if picks is None:
            return None
        from swift.data.loading.order import FeistelOrder

        order = FeistelOrder(picks.total, picks.key, 0)
        return lambda number: order[picks.first + number] < picks.count

    def _document(self, line: int, raw: bytes | dict[str, Any] | RowProblem) -> Document | None:
        self.tally.read += 1
        doc_id = f"{self._prefix}{line}"
        try:
            record = parse_line(raw) if isinstance(raw, bytes) else parse_raw(raw)
            if not isinstance(raw, bytes) or raw.count(b"[") + raw.count(b"{") > _MOST_NESTED:
                _refuse_deep(record)
            if self._columnar:
                if non_finite_field(record) is not None:
                    self.tally.count("numbers", "NaN or infinity, read as null")
                record = {key: _plain(value) for key, value in record.items()}
            document = document_from(record, doc_id, column=self.spec.text_column)
        except RowProblem as problem:
            self._refuse(problem, doc_id, raw)
            return None
        if self.spec.source is not None:
            document.meta["source"] = self.spec.source
            self.tally.count("source", self.spec.source)
        domain = domain_of(record)
        if domain is not None:
            self.tally.count("domain", domain)
        characters = 0
        for text in document.texts:
            characters += len(text)
            self.bytes += len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        self.tally.characters_in += characters
        self.tally.observe("characters", characters)
        self.tally.kept += 1
        return document

    def _refuse(self, problem: RowProblem, ref: str, raw: Any) -> None:
        if self.recipe.on_bad_row == "stop":
            raise DataError(
                f"bad row ({problem.reason}): {problem.message}",
                where=ref,
                fix="; or ".join(
                    filter(None, [problem.fix, "on_bad_row: drop counts and drops bad rows instead of stopping"])
                ),
            )
        self._bad += 1
        shown = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else "" if isinstance(raw, RowProblem) else raw
        text = str(shown)[:600]
        self.tally.drop(Document(ref, {}, [()], [text]), problem.reason, problem.message)
        refuse_too_many(self.recipe, self._bad, None)


def refuse_too_many(recipe: Recipe, bad: int, read: int | None) -> None:
    """Stop when more rows are bad than `max_bad_rows` allows; a share is judged only once all rows have been `read`.

    Raises:
        DataError: if so.
    """
    limit = recipe.max_bad_rows
    if limit < 1:
        if read is None or bad <= limit * read:
            return
        share = f"{bad} of {read} rows are bad, more than the {limit:.3g} that max_bad_rows allows"
    elif bad > limit:
        share = f"at least {bad} rows are bad, more than the {limit:.0f} that max_bad_rows allows"
    else:
        return
    raise DataError(share, where="input", fix="look at them with `swift data check`; or raise max_bad_rows")


def changed_input(location: str) -> DataError:
    """The error for an input file that isn't what it was when the run began."""
    return DataError(
        "an input file has changed since this run began",
        where=location,
        fix="--restart forgets what is done and reads everything again; or put the old file back",
    )


def _refuse_deep(record: dict[str, Any]) -> None:
    """A row that can be read but not be written again is a bad row.

    Raises:
        RowProblem: if so.
    """
    level: list[Any] = [record]
    for _ in range(_MOST_NESTED):
        level = [
            item
            for value in level
            for item in (value.values() if isinstance(value, dict) else value)
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise RowProblem("too_deep", f"the row holds more than {_MOST_NESTED} lists or objects within each other")


def domain_of(record: dict[str, Any]) -> str | None:
    """The host in the row's `url`, without `www.`; None if there is none."""
    url = record.get("url")
    if not isinstance(url, str):
        return None
    _, found, rest = url.partition("://")
    host = (rest if found else url).partition("/")[0].rpartition("@")[2].partition(":")[0].lower()
    return host.removeprefix("www.") or None


def _plain(value: Any) -> Any:
    """A value of a columnar file as JSON has it; the result is the same whether or not a stage lies between."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    return str(value) if isinstance(value, (decimal.Decimal, datetime.timedelta)) else value
