"""Reading the input of a recipe: a shard to batches of documents.

Rows carry the same ids however files are cut or put together. Bad rows end here: they stop the run, or are dropped and
counted under the operator `read`. Knows nothing of stages and tasks.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from swift.core.errors import DataError
from swift.data.engine.document import Document, document_from
from swift.data.engine.recipe import Recipe
from swift.data.engine.shards import Piece
from swift.data.engine.tally import Tally
from swift.data.files import stamp_of
from swift.data.parse_json import non_finite_field, parse_line, wide_number_problem
from swift.data.readers import FileTally, RawRow, parse_raw, read_raw
from swift.data.rows import RowProblem

BATCH_ROWS = 256
BATCH_CHARACTERS = 1 << 20
_COLUMNAR = ("parquet", "arrow")
_MOST_NESTED = 200  # lists and objects in each other; the writer of JSON takes 254, the files between stages add some


class BadShard(Exception):
    """A file that can't be read, as the reader tells it."""

    def __init__(self, error: DataError) -> None:
        super().__init__(str(error))
        self.error = error


def batches_of(readings: Iterable[PieceReading]) -> Iterator[list[Document]]:
    """The documents of several files one after the other, in batches that don't depend on where a file ends."""
    batch: list[Document] = []
    characters = 0
    for reading in readings:
        for document in reading:
            batch.append(document)
            characters += sum(map(len, document.texts))
            if len(batch) >= BATCH_ROWS or characters >= BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch


def unreadable(piece: Piece) -> DataError | None:
    """What is wrong with a file that can't be read to its end; None if it can."""
    try:
        for _ in read_raw(piece.file, FileTally()):
            pass
    except DataError as error:
        return error
    return None


class PieceReading:
    """One pass over a file, or a piece of one: its documents.

    Args:
        piece: what is read. recipe: says what happens to bad rows. tally: of the operator `read`.

    Raises (while iterating):
        BadShard: the file is damaged or empty.
        DataError: it has changed since the run began; a bad row, where the recipe says that one stops the run, or more
            of them than it allows.
    """

    def __init__(self, piece: Piece, recipe: Recipe, tally: Tally) -> None:
        self.piece, self.recipe, self.tally = piece, recipe, tally
        self.spec = recipe.input[piece.input]
        self.notes: list[str] = []
        self.bytes = 0
        # of ids and of random keys; asking the file for each row would cost more than parsing
        self._prefix = str(piece.file.ref(0))[:-1]
        self._key_prefix = str(replace(piece.file, label=piece.key).ref(0))[:-1]
        self._columnar = piece.file.format in _COLUMNAR

    def __iter__(self) -> Iterator[Document]:
        for line, raw in self._rows():
            document = self._document(line, raw)
            if document is not None:
                yield document
        self.require_unchanged()

    def require_unchanged(self) -> None:
        """Compare the file with what it was when the run began.

        Raises:
            DataError: it has changed, so the tasks of the run don't belong together.
        """
        if stamp_of(self.piece.file.location, fresh=True) != self.piece.stamp:
            raise changed_input(self.piece.file.location)

    def _rows(self) -> Iterator[RawRow]:
        facts = FileTally()
        rows = read_raw(self.piece.file, facts)
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
        picks = self.piece.picks
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
            elif (wide := _wide_number(record, raw)) is not None:
                raise wide_number_problem(wide)
            document = document_from(record, doc_id, column=self.spec.text_column)
        except RowProblem as problem:
            self._refuse(problem, doc_id, raw)
            return None
        document.key = f"{self._key_prefix}{line}"
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
        shown = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else "" if isinstance(raw, RowProblem) else raw
        text = str(shown)[:600]
        self.tally.drop(Document(ref, {}, [()], [text]), problem.reason, problem.message)
        refuse_too_many(self.recipe, self.tally.dropped.total(), None)


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


def _wide_number(record: dict[str, Any], raw: bytes | dict[str, Any] | RowProblem) -> str | None:
    """A whole number of more than 64 bits, which would be written as another one; None if there is none.

    The fast parser makes floats of them, so a float of that size sends the line through the slow one.
    """
    waiting: list[Any] = [record]
    while waiting:
        item = waiting.pop()
        kind = type(item)
        if kind is dict:
            waiting.extend(item.values())
        elif kind is list:
            waiting.extend(item)
        elif kind is int and not -(1 << 63) <= item < 1 << 64:
            return str(item)
        elif kind is float and abs(item) >= 1 << 63 and isinstance(raw, bytes):
            found: list[str] = []
            json.loads(raw, parse_int=found.append)
            return next((text for text in found if _is_wide(text)), None)
    return None


def _is_wide(number: str) -> bool:
    if len(number) > 20:  # with more digits than 64 bits have, or with a sign
        return True
    return not -(1 << 63) <= int(number) < 1 << 64


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
