"""Records to files: jsonl, plain or packed, and parquet, so that the same records always give the same bytes.

A file is written beside its place under a hidden name, made durable, and moved into place when it is complete. What was
interrupted leaves at most a hidden file, which no reader takes for data.
"""

from __future__ import annotations

import gzip
import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from swift.core.errors import DataError, UsageError
from swift.core.files import disk_errors, fsync_dir
from swift.data.parse_json import non_finite_field

FORMATS = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet")
_BUFFER_BYTES = 1 << 20
_GROUP_BYTES = 16 << 20  # of records in a row group of parquet, measured as JSON
_GROUP_ROWS = 10_000


@dataclass(frozen=True)
class WrittenFile:
    """A complete file: `rows` records in `bytes` bytes with this `sha256` (hex)."""

    path: Path
    rows: int
    bytes: int
    sha256: str


class _Sink:
    """Takes the bytes of a file in order; hashes and counts them."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.num_bytes = 0
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        piece = memoryview(data).cast("B")
        self.file.write(piece)
        self.digest.update(piece)
        self.num_bytes += len(piece)
        return len(piece)

    def tell(self) -> int:
        return self.num_bytes

    def flush(self) -> None:
        self.file.flush()

    closed = False

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        """Left to the writer, which has to make the file durable first."""


class RecordWriter:
    """Writes records to one file, which is there when `close` returns and not before.

    As a context manager it closes at the end; after an exception nothing is left.

    Args:
        path: where the file goes; its folder is made. A file that is there is replaced in the end.
        format: one of `FORMATS`; None takes it from the name.

    Raises:
        UsageError: the format isn't known.
        SwiftError: the disk is full, read-only, or the place can't be written.
        DataError: from `write` or `close`, a record can't be written in this format.
    """

    def __init__(self, path: str | Path, format: str | None = None) -> None:
        self.path = Path(path)
        self.format = format or format_of_name(self.path)
        if self.format not in FORMATS:
            raise UsageError(f"there is no format {format!r} to write", fix=f"choose one of {', '.join(FORMATS)}")
        self.rows = 0
        self._aside = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        with disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._aside.open("wb", buffering=_BUFFER_BYTES)
        self._sink = _Sink(self._file)
        self._lines, self._finish_lines = _line_sink(self._sink, self.format)
        self._table = _ParquetParts(self.path, self._aside, self._sink) if self.format == "parquet" else None
        self._done = False

    def write(self, records: list[dict[str, Any]]) -> None:
        """Add records. How they are grouped into calls makes no difference to the file."""
        for record in records:
            try:
                line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
            except (TypeError, ValueError) as error:  # orjson.JSONEncodeError is a TypeError
                raise DataError(
                    f"record {self.rows + 1} can't be written: {error}",
                    where=str(self.path),
                    fix="records hold texts, numbers up to 64 bits, booleans, lists and objects with texts as keys",
                ) from error
            if b"null" in line and (field := non_finite_field(record)) is not None:  # orjson writes them as null
                raise DataError(
                    f"record {self.rows + 1} can't be written: its field {field} is NaN or infinity",
                    where=str(self.path),
                    fix="what makes the field should leave it out, or make it None",
                )
            with disk_errors(self.path, len(line)):
                if self._table:
                    self._table.add(record, len(line))
                else:
                    self._lines(line)
            self.rows += 1

    def close(self) -> WrittenFile:
        """Make the file durable and move it into place."""
        try:
            with disk_errors(self.path):
                if self._table:
                    self._table.finish()
                self._finish_lines()
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                self._aside.replace(self.path)
                fsync_dir(self.path.parent)
                self._done = True
        finally:
            self.discard()
        return WrittenFile(self.path, self.rows, self._sink.num_bytes, self._sink.digest.hexdigest())

    def discard(self) -> None:
        """Leave nothing behind, unless the file is complete."""
        if self._table:
            self._table.discard()
        if not self._done:
            with suppress(OSError):  # what it still holds may not fit, and isn't wanted
                self._file.close()
            self._aside.unlink(missing_ok=True)

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.discard()
        elif not self._done:
            self.close()


def format_of_name(path: Path) -> str:
    """The format that a name's ending stands for.

    Raises:
        UsageError: none that can be written.
    """
    for name in FORMATS:
        if path.name.endswith(f".{name}"):
            return name
    raise UsageError(
        f"{path.name!r} says no format that can be written",
        where=str(path),
        fix=f"let it end in .{', .'.join(FORMATS)}",
    )


def _line_sink(sink: _Sink, kind: str) -> tuple[Callable[[bytes], Any], Callable[[], None]]:
    """How a line is written, and what is left to do at the end."""
    if kind == "jsonl.gz":
        packer = gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=sink, mtime=0)
        return packer.write, packer.close
    if kind == "jsonl.zst":
        import zstandard

        zst = zstandard.ZstdCompressor(level=3, write_checksum=True).stream_writer(sink, closefd=False)  # type: ignore[arg-type]
        return zst.write, zst.close
    return sink.write, lambda: None


class _ParquetParts:
    """Row groups of records whose columns aren't known beforehand.

    Each group goes aside with the columns that it has; at the end, when all columns are known, the groups are put
    together. Groups are cut by records alone, so calls of `write` don't show in the file.
    """

    def __init__(self, path: Path, aside: Path, sink: _Sink) -> None:
        self.path = path
        self.parts = aside.with_suffix(".parts")
        self.sink = sink
        self._records: list[dict[str, Any]] = []
        self._bytes = 0
        self._rows = 0
        self._schemas: list[Any] = []
        self._offsets: list[tuple[int, int]] = []
        self._spool: BinaryIO | None = None

    def add(self, record: dict[str, Any], num_bytes: int) -> None:
        """Take a record of this size."""
        self._records.append(record)
        self._bytes += num_bytes
        if self._bytes >= _GROUP_BYTES or len(self._records) >= _GROUP_ROWS:
            self._put_aside()

    def _put_aside(self) -> None:
        import pyarrow as pa

        try:
            table = pa.Table.from_pylist(self._with_all_keys())
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError) as error:
            first = self._rows + 1
            raise self._mixed(f"records {first} to {self._rows + len(self._records)}", error) from error
        if self._records and not table.column_names:
            raise self._mixed(
                f"records {self._rows + 1} to {self._rows + len(self._records)}", ValueError("none has any")
            )
        self._rows += len(self._records)
        self._records, self._bytes = [], 0
        self._schemas.append(table.schema)
        if self._spool is None:
            self._spool = self.parts.open("w+b")
        start = self._spool.tell()
        with pa.ipc.new_stream(self._spool, table.schema) as writer:
            writer.write_table(table)
        self._offsets.append((start, self._spool.tell()))

    def _with_all_keys(self) -> list[dict[str, Any]]:
        keys = dict.fromkeys(key for record in self._records for key in record)
        return [{key: record.get(key) for key in keys} for record in self._records]  # pyarrow takes the first's keys

    def _mixed(self, where: str, error: Exception) -> DataError:
        return DataError(
            f"the columns of {where} have no common type: {str(error).splitlines()[0]}",
            where=str(self.path),
            fix="write jsonl.zst, in which rows may differ",
        )

    def finish(self) -> None:
        """Write the file."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self._records or not self._schemas:
            self._put_aside()
        assert self._spool is not None
        try:
            schema = pa.unify_schemas(self._schemas, promote_options="permissive")
            with pq.ParquetWriter(self.sink, schema, compression="zstd") as writer:
                for start, end in self._offsets:
                    self._spool.seek(start)
                    with pa.ipc.open_stream(pa.py_buffer(self._spool.read(end - start))) as stream:
                        table = stream.read_all()
                    columns = [
                        table[name].cast(kind) if name in table.column_names else pa.nulls(len(table), kind)
                        for name, kind in zip(schema.names, schema.types)
                    ]
                    writer.write_table(pa.table(columns, schema=schema), row_group_size=_GROUP_ROWS)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            raise self._mixed("the file", error) from error

    def discard(self) -> None:
        """Remove what was put aside."""
        if self._spool:
            with suppress(OSError):  # as above
                self._spool.close()
        self.parts.unlink(missing_ok=True)
