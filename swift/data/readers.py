"""Files to raw rows: one reader per format, each a generator in file order that names the line of every row.

A jsonl row stays bytes (worker processes parse it); the other formats give objects. A row that is broken by itself
comes out as a `RowProblem` in its place; a file that can't be read any further raises `DataError`.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

from swift.core.errors import DataError, did_you_mean
from swift.data.parse_json import decode_utf8, json_problem, nul_problem, pairs_once, parse_line, refuse_lone_surrogates
from swift.data.rows import RowProblem, excerpt
from swift.data.sources import COMPRESSIONS, DataFile

RawRow = tuple[int, bytes | dict[str, Any] | RowProblem]
# keys that make a top-level object of a .json file one row rather than a table of rows
_ROW_KEYS = {"messages", "conversations", "conversation", "history", "tools"}
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_BOMS = (  # UTF-32 first: its little-endian mark begins with UTF-16's
    (b"\xff\xfe\x00\x00", "utf-32"),
    (b"\x00\x00\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
    (b"\xef\xbb\xbf", "utf-8-sig"),
)


@dataclass
class FileTally:
    """What a reader notices beside rows; `share` is how much of the file it has gone through."""

    blank: int = 0
    share: float = 0.0
    notes: list[str] = field(default_factory=list)


def read_raw(file: DataFile, tally: FileTally) -> Iterator[RawRow]:
    """The rows of one file in order.

    Raises:
        DataError: the file is missing, damaged, in no known encoding, or has no rows at all.
    """
    kind = file.format
    empty = True
    with _file_errors(file):
        if kind == "parquet":
            rows = _read_parquet(file, tally)
        else:
            rows = _TEXT_READERS[kind](file, tally)
        for row in rows:
            empty = False
            yield row
    if empty:
        blank = f"only {tally.blank} blank line(s)" if tally.blank else "no rows"
        size = file.path.stat().st_size
        raise DataError(
            f"the file has {blank}" if size else "the file is empty (0 bytes)",
            where=str(file.path),
            fix="give a file with rows, or leave it out of --dataset",
        )


def count_raw(file: DataFile) -> int:
    """Number of rows that `read_raw` would give, without parsing them where the format allows."""
    if file.format == "parquet":
        import pyarrow.parquet as pq

        with _file_errors(file):
            return pq.ParquetFile(file.path).metadata.num_rows
    return sum(1 for _ in read_raw(file, FileTally()))


def parse_raw(value: bytes | dict[str, Any] | RowProblem) -> dict[str, Any]:
    """The object of a raw row.

    Raises:
        RowProblem: if there is none.
    """
    if isinstance(value, bytes):
        return parse_line(value)
    if isinstance(value, RowProblem):
        raise value
    return value


@contextmanager
def _file_errors(file: DataFile) -> Iterator[None]:
    """Failures of the file as a whole, as errors that name it."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"the compressed file is damaged or incomplete: {error}",
            where=str(file.path),
            fix="fetch or compress it again",
        ) from error
    except OSError as error:
        raise DataError(f"the file can't be read: {error.strerror or error}", where=str(file.path)) from error


def _open(file: DataFile, tally: FileTally) -> IO[bytes]:
    """The bytes as UTF-8 without a byte-order mark: unpacked, and converted where the mark says UTF-16 or UTF-32."""
    stream: Any
    if file.path.suffix.lower() == ".gz":
        stream = gzip.open(file.path)  # noqa: SIM115 - the reader that asked for it closes it
    elif file.path.suffix.lower() == ".zst":
        import zstandard

        stream = io.BufferedReader(_ZstStream(zstandard.open(file.path), zstandard.ZstdError))
    else:
        stream = file.path.open("rb")
    buffered = stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(stream)
    head = buffered.peek(4)[:4]
    encoding = next((name for mark, name in _BOMS if head.startswith(mark)), None)
    if encoding == "utf-8-sig":
        buffered.read(3)
    elif encoding:
        tally.notes.append(f"{file.path}: read as {encoding.upper()}, as its byte-order mark says")
        data = buffered.read()
        buffered.close()
        try:
            return io.BytesIO(data.decode(encoding).encode())
        except UnicodeDecodeError as error:
            raise DataError(
                f"the file begins as {encoding.upper()} but byte {error.start + 1} isn't: {error.reason}",
                where=str(file.path),
                fix="write it again as UTF-8",
            ) from error
    return buffered


class _ZstStream(io.RawIOBase):
    """A zstandard reader whose damage errors are `EOFError`, as gzip's are."""

    def __init__(self, inner: Any, failure: type[Exception]) -> None:
        self.inner = inner
        self.failure = failure

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self.inner.read(len(buffer))
        except self.failure as error:
            raise EOFError(str(error)) from error
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self.inner.close()
        super().close()


def _read_jsonl(file: DataFile, tally: FileTally) -> Iterator[RawRow]:
    with _open(file, tally) as stream:
        for number, line in enumerate(_counted(stream, file, tally), 1):
            line = line.strip(b" \t\r\n").removeprefix(b"\xef\xbb\xbf")  # joined files have marks inside
            if line:
                yield number, line
            else:
                tally.blank += 1


def _read_txt(file: DataFile, tally: FileTally) -> Iterator[RawRow]:
    """A line is a row; `:paragraphs` cuts at blank lines instead, `:document` not at all."""
    cut = file.part or "lines"
    widths: list[int] = []
    block: list[str] = []
    start = 1
    with _open(file, tally) as stream:
        for number, raw in enumerate(_counted(stream, file, tally), 1):
            try:
                line = decode_utf8(raw).rstrip("\r\n")
                if "\x00" in line:
                    raise nul_problem(line)
            except RowProblem as problem:
                yield number, problem
                continue
            blank = not line.strip()
            if blank and cut != "document":
                tally.blank += 1
            if cut == "lines":
                if not blank:
                    if len(widths) < 1000:
                        widths.append(len(line))
                    yield number, {"text": line}
            elif blank and cut == "paragraphs":
                if block:
                    yield start, {"text": "\n".join(block)}
                block = []
            else:
                start = start if block else number
                block.append(line)
    text = "\n".join(block)
    if text.strip():
        yield start, {"text": text}
    if len(widths) >= 20 and sum(50 <= width <= 90 for width in widths) > 0.6 * len(widths) and max(widths) <= 100:
        tally.notes.append(
            f"{file.path}: each line is a row of its own, but the lines look wrapped at {max(widths)} characters; "
            f"{file.path.name}:paragraphs or :document reads them as running text"
        )


def _read_csv(file: DataFile, tally: FileTally) -> Iterator[RawRow]:
    csv.field_size_limit(2**31 - 1)
    with _open(file, tally) as stream:
        lines = _decoded_lines(_counted(stream, file, tally), file)
        try:
            header_line = next(line for line in lines if line.strip())
        except StopIteration:
            return
        delimiter = _delimiter(header_line, file, tally)
        header = next(csv.reader([header_line], delimiter=delimiter))
        _check_header(header, file)
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        before = 1
        while True:
            start = before + reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise DataError(
                    f"the csv row that starts here can't be read: {error}",
                    where=f"{file.path}:{start}",
                    fix='a quotation mark inside a quoted cell is written twice (""), and each opened quote is closed',
                ) from error
            if not cells:
                tally.blank += 1
            elif len(cells) != len(header):
                yield (
                    start,
                    RowProblem(
                        "csv_columns",
                        f"the row has {len(cells)} cells, the header {len(header)}: {excerpt(delimiter.join(cells))}",
                        "quote cells that contain the separator or a line break",
                    ),
                )
            else:
                yield start, {name: cell or None for name, cell in zip(header, cells)}


def _counted(stream: IO[bytes], file: DataFile, tally: FileTally) -> Iterator[bytes]:
    """The lines of a stream; keeps `tally.share`, unless the file is packed and its length unknown."""
    packed = file.path.suffix.lower() in COMPRESSIONS
    size = 0 if packed else file.path.stat().st_size
    done = 0
    for line in stream:
        done += len(line)
        if size:
            tally.share = min(1.0, done / size)
        yield line


def _decoded_lines(stream: Iterator[bytes], file: DataFile) -> Iterator[str]:
    for number, raw in enumerate(stream, 1):
        try:
            line = decode_utf8(raw)
            if "\x00" in line:
                raise nul_problem(line)
        except RowProblem as problem:
            raise DataError(problem.message, where=f"{file.path}:{number}", fix=problem.fix) from problem
        yield line


def _delimiter(header: str, file: DataFile, tally: FileTally) -> str:
    expected = "\t" if file.format == "tsv" else ","
    if expected in header:
        return expected
    for other in (",", ";", "\t"):
        if other in header:
            tally.notes.append(f"{file.path}: columns are separated by {other!r}, not {expected!r}")
            return other
    return expected


def _check_header(header: list[str], file: DataFile) -> None:
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None or "" in header:
        what = f"the column {twice!r} occurs twice" if twice else "a column has no name"
        raise DataError(
            f"{what} in the header: {', '.join(header)}", where=f"{file.path}:1", fix="give each column its own name"
        )


def _read_parquet(file: DataFile, tally: FileTally) -> Iterator[RawRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        number = 0
        parquet = pq.ParquetFile(file.path)
        for batch in parquet.iter_batches(batch_size=1024):
            for record in batch.to_pylist():
                number += 1
                tally.share = number / parquet.metadata.num_rows
                yield number, _without_nulls(record)
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise DataError(
            f"this is not a readable parquet file: {str(error).splitlines()[0]}",
            where=str(file.path),
            fix="write it again",
        ) from error


def _without_nulls(value: Any) -> Any:
    """Parquet gives every struct all fields of its column, absent ones as null; `content` keeps its null."""
    if isinstance(value, dict):
        return {key: _without_nulls(v) for key, v in value.items() if v is not None or key in ("content", "value")}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


# --- .json: a list of rows, an object that holds one, a single row, or (often) jsonl under another name ---


def _read_json(file: DataFile, tally: FileTally) -> Iterator[RawRow]:
    with _open(file, tally) as stream:
        raw = stream.read()
    try:
        text = decode_utf8(raw)
        if "\x00" in text:
            raise nul_problem(text)
    except RowProblem as problem:
        raise DataError(problem.message, where=str(file.path), fix=problem.fix) from problem
    scanner = _Scanner(text, file)
    start = scanner.skip(0)
    if start == len(text):
        return
    if text[start] == "[":
        if file.part:
            raise DataError(f"the file is a list and has no part {file.part!r}", where=str(file.path))
        yield from scanner.items(start)
        return
    if text[start] != "{":
        raise DataError("a json file holds a list of rows or an object", where=scanner.where(start))
    value, end = scanner.value(start)
    if scanner.skip(end) < len(text) and not file.part:
        tally.notes.append(f"{file.path}: read as jsonl (one object after another)")
        while start < len(text):
            value, end = scanner.value(start)
            yield scanner.line(start), _row_or_problem(value, scanner.suspect)
            start = scanner.skip(end)
        return
    yield from scanner.items(*_rows_in_object(value, scanner, start, file))


def _rows_in_object(value: dict[str, Any], scanner: _Scanner, start: int, file: DataFile) -> tuple[int, bool]:
    """Where the list of rows begins in a top-level object; or the object itself, when it is a row."""
    lists = {key: item for key, item in value.items() if isinstance(item, list) and item and isinstance(item[0], dict)}
    if file.part:
        if file.part not in value:
            raise DataError(
                f"the object has no part {file.part!r}",
                where=str(file.path),
                fix=" ".join(filter(None, [did_you_mean(file.part, value), "it has " + ", ".join(value)])),
            )
        return scanner.member(start, file.part), False
    if _ROW_KEYS & set(value) or not lists:
        return start, True
    if "data" in lists or len(lists) == 1:
        return scanner.member(start, "data" if "data" in lists else next(iter(lists))), False
    raise DataError(
        f"the object holds several lists: {', '.join(lists)}",
        where=str(file.path),
        fix=f"choose one: {file.path.name}:{next(iter(lists))}",
    )


class _Scanner:
    """Walks a JSON text value by value, so that each row's line is known."""

    def __init__(self, text: str, file: DataFile) -> None:
        self.text = text
        self.file = file
        self.suspect = _SURROGATE.search(text) is not None
        self.decoder = json.JSONDecoder(object_pairs_hook=pairs_once, parse_constant=lambda _: None)
        self._position, self._line = 0, 1

    def skip(self, position: int) -> int:
        """The next position that isn't white space."""
        while position < len(self.text) and self.text[position] in " \t\r\n":
            position += 1
        return position

    def line(self, position: int) -> int:
        """The 1-based line of a position; positions are asked for in rising order."""
        if position < self._position:
            self._position, self._line = 0, 1
        self._line += self.text.count("\n", self._position, position)
        self._position = position
        return self._line

    def where(self, position: int) -> str:
        return f"{self.file.path}:{self.line(position)}"

    def value(self, position: int) -> tuple[Any, int]:
        """The value that starts here, and where it ends."""
        try:
            return self.decoder.raw_decode(self.text, position)
        except json.JSONDecodeError as error:
            problem = json_problem(self.text, error)
            raise DataError(
                problem.message.replace(f"column {error.colno}", f"line {error.lineno}, column {error.colno}"),
                where=f"{self.file.path}:{error.lineno}",
                fix=problem.fix,
            ) from error
        except RowProblem as problem:
            raise DataError(problem.message, where=self.where(position), fix=problem.fix) from problem
        except RecursionError as error:
            raise DataError("the JSON is nested too deeply", where=self.where(position)) from error

    def items(self, position: int, single: bool = False) -> Iterator[RawRow]:
        """The rows of the list that starts here (or the one object)."""
        if single:
            yield self.line(position), _row_or_problem(self.value(position)[0], self.suspect)
            return
        position = self.skip(position + 1)
        while position < len(self.text) and self.text[position] != "]":
            value, end = self.value(position)
            yield self.line(position), _row_or_problem(value, self.suspect)
            position = self.skip(end)
            if self.text[position : position + 1] == ",":
                position = self.skip(position + 1)
            elif self.text[position : position + 1] != "]":
                raise DataError(
                    "the list isn't closed, or a comma is missing"
                    if position < len(self.text)
                    else "the list isn't closed",
                    where=self.where(position),
                    fix="the file was cut off, or edited by hand: write it again",
                )

    def member(self, position: int, name: str) -> int:
        """Where the value of a key of the object that starts here begins."""
        position = self.skip(position + 1)
        while True:
            key, end = self.value(position)
            position = self.skip(self.skip(end) + 1)
            if key == name:
                return position
            position = self.skip(self.skip(self.value(position)[1]) + 1)


def _row_or_problem(value: Any, suspect: bool) -> dict[str, Any] | RowProblem:
    if not isinstance(value, dict):
        return RowProblem("not_an_object", f"the row is not an object: {excerpt(value)}")
    if suspect:
        try:
            refuse_lone_surrogates(value)
        except RowProblem as problem:
            return problem
    return value


_TEXT_READERS = {"jsonl": _read_jsonl, "json": _read_json, "csv": _read_csv, "tsv": _read_csv, "txt": _read_txt}
