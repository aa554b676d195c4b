"""Columnar files: parquet, and arrow in both its forms (file and stream, as `datasets` writes it).

Batches are sized by bytes, so that rows of a megabyte take no more memory than rows of a hundred bytes. Each file has
its own schema; parts of a data set may differ.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from swift.core.errors import DataError
from swift.data.files import DataFile, is_url, open_packed
from swift.data.readers.base import Cursor, FileTally, RawRow
from swift.data.readers.sniff import kind_of, wrong_content

_BATCH_ROWS = 1024
_BATCH_BYTES = 8 << 20


@contextmanager
def _table_errors(file: DataFile) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowKeyError, UnicodeDecodeError, ValueError) as error:
        _refuse_other_content(file)
        raise DataError(
            f"this is not a readable {file.format} file: {(str(error).splitlines() or ['damaged'])[0]}",
            where=file.name,
            fix="fetch it or write it again",
        ) from error
    except OSError as error:
        if error.errno is None:  # arrow's own: a file that ends too early, or damaged pages
            raise DataError(
                f"the {file.format} file is damaged or incomplete: {str(error).splitlines()[0]}",
                where=file.name,
                fix="fetch it or write it again",
            ) from error
        raise


def _refuse_other_content(file: DataFile) -> None:
    """Say what a file is that isn't what its ending says."""
    with open_packed(file.location) as stream:
        head = stream.read(512)
    found = kind_of(head)
    if found is None and head.lstrip()[:1] in (b"{", b"["):
        found = ("text in JSON", ".jsonl" if head.lstrip()[:1] == b"{" else ".json")
    if found and found[1] != f".{file.format}":
        raise wrong_content(file, *found)


@contextmanager
def open_parquet(file: DataFile) -> Iterator[Any]:
    """The file as a `pyarrow.parquet.ParquetFile` that reads page by page."""
    import pyarrow.parquet as pq

    with _table_errors(file), open_packed(file.location, anywhere=True) as stream:
        # pre_buffer would hold the columns of a whole row group
        yield pq.ParquetFile(stream, pre_buffer=False, buffer_size=1 << 20)


def read_parquet(file: DataFile, tally: FileTally, cursor: Cursor) -> Iterator[RawRow]:
    """Rows are numbered from 1 over the whole file, also in a span of row groups."""
    with open_parquet(file) as parquet:
        meta = parquet.metadata
        first, end = file.span or (0, meta.num_row_groups)
        number = sum(meta.row_group(group).num_rows for group in range(first))
        total = max(1, sum(meta.row_group(group).num_rows for group in range(first, end)))
        skip = cursor.row
        for group in range(first, end):
            rows = meta.row_group(group).num_rows
            if skip >= rows:
                skip -= rows
                number += rows
                continue
            size = _batch_rows(meta.row_group(group).total_byte_size, rows)
            for batch in parquet.iter_batches(batch_size=size, row_groups=[group]):
                if skip >= batch.num_rows:
                    skip -= batch.num_rows
                    number += batch.num_rows
                    continue
                number += skip
                for record in batch.slice(skip).to_pylist():
                    number += 1
                    cursor.line = number
                    tally.share = min(1.0, (cursor.row + 1) / total)
                    yield number, without_nulls(record)
                skip = 0


def _batch_rows(num_bytes: int, rows: int) -> int:
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES * rows // max(1, num_bytes)))


def count_parquet(file: DataFile) -> int:
    """Rows of a file or span, from its footer."""
    with open_parquet(file) as parquet:
        first, end = file.span or (0, parquet.metadata.num_row_groups)
        return sum(parquet.metadata.row_group(group).num_rows for group in range(first, end))


def read_arrow(file: DataFile, tally: FileTally, cursor: Cursor) -> Iterator[RawRow]:
    """Rows are numbered from 1. Batches before the cursor are passed over, unread where the file is local."""
    number, skip = 0, cursor.row
    for batch in _arrow_batches(file, tally):
        if skip >= batch.num_rows:
            skip -= batch.num_rows
            number += batch.num_rows
            continue
        step = _batch_rows(batch.nbytes, batch.num_rows)
        number += skip
        for start in range(skip, batch.num_rows, step):
            for record in batch.slice(start, step).to_pylist():
                number += 1
                cursor.line = number
                yield number, without_nulls(record)
        skip = 0


def count_arrow(file: DataFile) -> int:
    """Rows of a file."""
    return sum(batch.num_rows for batch in _arrow_batches(file, FileTally()))


def _arrow_batches(file: DataFile, tally: FileTally) -> Iterator[Any]:
    import pyarrow as pa

    with _table_errors(file), open_packed(file.location, anywhere=True) as stream:
        is_file = stream.peek(8)[:6] == b"ARROW1"
        if is_url(file.location):
            if is_file:
                reader = pa.ipc.open_file(stream)
                for index in range(reader.num_record_batches):
                    tally.share = index / reader.num_record_batches
                    yield reader.get_batch(index)
            else:
                yield from pa.ipc.open_stream(stream)
            return
        if not stream.peek(1):
            return
        # never closed by hand: batches in use point into it, and the last of them frees it
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        yield from _mapped_batches(mapped, is_file, tally)


def _mapped_batches(mapped: mmap.mmap, is_file: bool, tally: FileTally) -> Iterator[Any]:
    """Batches that lie in mapped memory; pages that are done with are given back, or the process would grow."""
    import pyarrow as pa

    source = pa.BufferReader(pa.py_buffer(mapped))
    if is_file:
        reader = pa.ipc.open_file(source)
        for index in range(reader.num_record_batches):
            tally.share = index / reader.num_record_batches
            yield reader.get_batch(index)
            _forget(mapped)
        return
    for batch in pa.ipc.open_stream(source):
        tally.share = source.tell() / len(mapped)
        yield batch
        _forget(mapped)


def _forget(mapped: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def without_nulls(value: Any) -> Any:
    """Tables give every struct all fields of its column, absent ones as null; `content` keeps its null."""
    if isinstance(value, dict):
        return {key: without_nulls(v) for key, v in value.items() if v is not None or key in ("content", "value")}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
