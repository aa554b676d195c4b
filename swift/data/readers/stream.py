"""Any data file as a stream of raw rows that can be left and taken up again, whole or split into pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from swift.core.errors import DataError
from swift.data.files import DataFile, compression_of, open_packed, remote_errors, size_of
from swift.data.parse_json import parse_line
from swift.data.readers.archive import read_tar
from swift.data.readers.base import Cursor, EmptyFileError, FileTally, Position, RawRow
from swift.data.readers.documents import read_html, read_pdf
from swift.data.readers.json_rows import read_json
from swift.data.readers.lines import count_line_ends, read_csv, read_jsonl, read_txt
from swift.data.readers.tables import count_arrow, count_parquet, open_parquet, read_arrow, read_parquet
from swift.data.rows import RowProblem

LINE_REF_BYTES = 64 << 20  # jsonl files up to this size keep line numbers when they are split
_READERS: dict[str, Callable[[DataFile, FileTally, Cursor], Iterator[RawRow]]] = {
    "jsonl": read_jsonl,
    "json": read_json,
    "csv": read_csv,
    "tsv": read_csv,
    "txt": read_txt,
    "md": read_txt,
    "parquet": read_parquet,
    "arrow": read_arrow,
    "html": read_html,
    "pdf": read_pdf,
    "tar": read_tar,
}


class RowStream:
    """The rows of a file, or of a piece of one, from a position on.

    A jsonl row stays bytes (`parse_raw` parses it); the other formats give objects. A row that is broken by itself
    comes as a `RowProblem` in its place. Iterating again goes on behind the last row given.

    Args:
        file: what to read.
        tally: filled on the way.
        at: where to start; a `position` that an earlier stream over the same file had.

    Raises:
        EmptyFileError: from iterating, when a whole file has no rows.
        DataError: from iterating, when the file is missing, damaged, or something else than its ending says.
    """

    def __init__(self, file: DataFile, tally: FileTally, at: Position = Position()) -> None:  # noqa: B008 - frozen
        self.file = file
        self.tally = tally
        self._cursor = Cursor(at.row, at.line, at.offset)

    @property
    def position(self) -> Position:
        """Just behind the last row given."""
        return Position(self._cursor.row, self._cursor.line, self._cursor.offset)

    def __iter__(self) -> Iterator[RawRow]:
        cursor = self._cursor
        with remote_errors(self.file.name):
            for row in _READERS[self.file.format](self.file, self.tally, cursor):
                cursor.row += 1
                yield row
        if not cursor.row and self.file.span is None:
            raise self._empty()

    def _empty(self) -> EmptyFileError:
        blank = f"only {self.tally.blank} blank line(s)" if self.tally.blank else "no rows"
        size = size_of(self.file.location)
        return EmptyFileError(
            f"the file has {blank}" if size else "the file is empty (0 bytes)",
            where=self.file.name,
            fix="give a file with rows, or leave it out of --dataset",
        )


def read_raw(file: DataFile, tally: FileTally) -> Iterator[RawRow]:
    """The rows of one file in order, each with its number (see `RowStream`)."""
    return iter(RowStream(file, tally))


def count_raw(file: DataFile) -> int:
    """Number of rows that `read_raw` would give, without parsing them where the format allows."""
    with remote_errors(file.name):
        if file.format == "parquet":
            return count_parquet(file)
        if file.format == "arrow":
            return count_arrow(file)
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


def split_file(file: DataFile, target_bytes: int) -> list[DataFile]:
    """Cut a file into pieces of about `target_bytes` that can be read side by side, in order.

    Jsonl that isn't packed is cut by bytes, parquet by row groups; other files stay whole. References of rows don't
    depend on the cutting: up to 64 MiB a jsonl row is `file:line`, above `file@byte`, however large the pieces.
    """
    if file.span is not None or target_bytes < 1:
        raise DataError("only a whole file can be split, into pieces of at least a byte", where=file.name)
    with remote_errors(file.name):
        if file.format == "parquet":
            return _split_parquet(file, target_bytes)
        if file.format == "jsonl" and compression_of(file.location) is None:
            return _split_jsonl(file, target_bytes)
    return [file]


def _split_jsonl(file: DataFile, target_bytes: int) -> list[DataFile]:
    size = size_of(file.location)
    if size <= min(target_bytes, LINE_REF_BYTES):
        return [file]
    with open_packed(file.location) as stream:
        if stream.peek(2)[:2] in (b"\xff\xfe", b"\xfe\xff", b"\x00\x00") or not stream.seekable():
            return [file]  # UTF-16 and UTF-32 are converted on the way; some servers give no parts
        pieces = max(1, -(-size // target_bytes))
        edges = [size * index // pieces for index in range(pieces + 1)]
        first_lines: list[int | None] = [None] * pieces
        if size <= LINE_REF_BYTES:
            stops = [max(0, edge - 1) for edge in edges[:-1]]
            first_lines = [count + 1 for count in count_line_ends(stream, stops)]
    return [
        DataFile(file.location, file.part, (start, end), first, file.label)
        for start, end, first in zip(edges, edges[1:], first_lines)
    ]


def _split_parquet(file: DataFile, target_bytes: int) -> list[DataFile]:
    with open_parquet(file) as parquet:
        meta = parquet.metadata
        sizes = [
            sum(meta.row_group(group).column(c).total_compressed_size for c in range(meta.num_columns))
            for group in range(meta.num_row_groups)
        ]
    spans: list[tuple[int, int]] = []
    start = total = 0
    for group, size in enumerate(sizes):
        if total and total + size > target_bytes:
            spans.append((start, group))
            start, total = group, 0
        total += size
    if not spans:
        return [file]
    spans.append((start, len(sizes)))
    return [DataFile(file.location, file.part, span, None, file.label) for span in spans]
