"""Formats that are read line by line: jsonl, plain text and markdown, csv and tsv.

Memory is that of the longest row; each of them can go on from any position without reading what is before it, unless
the file is packed.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import BinaryIO

import orjson

from swift.core.errors import DataError
from swift.data.files import DataFile, stem_of
from swift.data.parse_json import decode_utf8, nul_problem
from swift.data.readers import base
from swift.data.readers.base import Cursor, FileTally, RawRow, Text, opened
from swift.data.rows import RowProblem, excerpt

_BOM = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n"


def read_jsonl(file: DataFile, tally: FileTally, cursor: Cursor) -> Iterator[RawRow]:
    """A line is a row, and stays bytes."""
    with opened(file, tally, cursor) as text:
        end = file.span[1] if file.span else None
        if not cursor.row:
            if file.span and file.span[0]:
                _enter_span(text, file)
            else:
                _refuse_other_json(text, file)
        stream, offset, number, by_offset = text.stream, text.offset, text.line, file.by_offset
        size = text.size if text.plain else 0
        start = offset if number else 0  # a byte-order mark belongs to the first line
        for line in stream:  # the hot loop: no calls that a line doesn't need
            if end is not None and start >= end:
                return
            begin = start
            start = offset = offset + len(line)
            number += 1
            row = line.strip(_BLANK)
            if row.startswith(_BOM):  # joined files have marks inside
                row = row[3:].lstrip(_BLANK)
            if not row:
                tally.blank += 1
                continue
            if size:
                tally.share = start / size
            elif not number & 63:
                text.tell_share()
            cursor.line, cursor.offset = number, offset
            yield (begin if by_offset else number), row


def _enter_span(text: Text, file: DataFile) -> None:
    """Go to the first line that begins in the span."""
    assert file.span is not None
    text.skip_to(file.span[0] - 1)
    text.offset += len(text.stream.readline())  # the rest of a line that begins in the span before
    text.line = file.first_line or 1


def _refuse_other_json(text: Text, file: DataFile) -> None:
    """A json file under a jsonl name would give one complaint for each of its lines."""
    head = text.stream.peek(1 << 16)  # type: ignore[attr-defined]
    first, newline, rest = head.lstrip(_BLANK).partition(b"\n")
    first = first.strip(_BLANK)
    rename = f"rename it to {stem_of(file.location)}.json"
    if newline and first in (b"{", b"[") and rest.strip(_BLANK):
        raise DataError("this is one JSON value over several lines, not jsonl", where=f"{file.name}:1", fix=rename)
    if not first.startswith(b"["):
        return
    try:
        value = orjson.loads(first)
    except orjson.JSONDecodeError:
        is_list = first.lstrip(b"[ \t").startswith(b"{")
    else:
        is_list = bool(value) and all(isinstance(item, dict) for item in value)
    if is_list:
        raise DataError("this is a JSON list of rows, not jsonl", where=f"{file.name}:1", fix=rename)


def read_txt(file: DataFile, tally: FileTally, cursor: Cursor) -> Iterator[RawRow]:
    """A line is a row; `:paragraphs` cuts at blank lines instead, `:document` (the rule for markdown) not at all.

    A line that can't be read spoils the row that it belongs to, and only that.
    """
    cut = file.part or ("document" if file.format == "md" else "lines")
    widths: list[int] = []
    block: list[str] = []
    start = 1
    problem: tuple[int, RowProblem] | None = None
    with opened(file, tally, cursor) as text:
        for raw in text.lines():
            line, fault = _text_line(raw)
            blank = fault is None and not line.strip()
            if blank and cut != "document":
                tally.blank += 1
            if cut == "lines":
                if blank:
                    continue
                cursor.line, cursor.offset = text.line, text.offset
                if len(widths) < 1000:
                    widths.append(len(line))
                yield text.line, fault or {"text": line}
            elif blank and cut == "paragraphs":
                if block:
                    cursor.line, cursor.offset = text.line, text.offset
                    yield problem or (start, {"text": "\n".join(block)})
                block, problem = [], None
            else:
                start = start if block else text.line
                block.append(line)
                if fault and not problem:
                    problem = (text.line, fault)
        cursor.line, cursor.offset = text.line, text.offset
    whole = "\n".join(block)
    if problem or whole.strip():
        yield problem or (start, {"text": whole})
    if len(widths) >= 20 and sum(50 <= width <= 90 for width in widths) > 0.6 * len(widths) and max(widths) <= 100:
        name = file.location.rsplit("/", 1)[-1]
        tally.notes.append(
            f"{file.name}: each line is a row of its own, but the lines look wrapped at {max(widths)} characters; "
            f"{name}:paragraphs or :document reads them as running text"
        )


def _text_line(raw: bytes) -> tuple[str, RowProblem | None]:
    try:
        line = decode_utf8(raw).rstrip("\r\n")
        if "\x00" in line:
            raise nul_problem(line)
    except RowProblem as problem:
        return "", problem
    return line, None


def read_csv(file: DataFile, tally: FileTally, cursor: Cursor) -> Iterator[RawRow]:
    """The first line that isn't blank names the columns."""
    csv.field_size_limit(2**31 - 1)
    with Text(file, tally) as text:
        lines = _decoded_lines(text)
        try:
            header_line = next(line for line in lines if line.strip())
        except StopIteration:
            return
        delimiter = _delimiter(header_line, file, tally)
        header = next(csv.reader([header_line], delimiter=delimiter))
        _check_header(header, file, text.line)
        if cursor.row:
            text.skip_to(cursor.offset)
            text.line = cursor.line
            lines = _decoded_lines(text)  # a generator over a stream that has been moved
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        while True:
            start = text.line + 1
            text.row_offset = text.offset
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise DataError(
                    f"the csv row that starts here can't be read: {error}",
                    where=f"{file.name}:{start}",
                    fix='a quotation mark inside a quoted cell is written twice (""), and each opened quote is closed',
                ) from error
            if not cells:
                tally.blank += 1
                continue
            cursor.line, cursor.offset = text.line, text.offset
            if len(cells) == len(header):
                yield start, {name: cell or None for name, cell in zip(header, cells)}
            else:
                yield start, _wrong_width(cells, header, delimiter)


def _wrong_width(cells: list[str], header: list[str], delimiter: str) -> RowProblem:
    return RowProblem(
        "csv_columns",
        f"the row has {len(cells)} cells, the header {len(header)}: {excerpt(delimiter.join(cells))}",
        "quote cells that contain the separator or a line break",
    )


def _decoded_lines(text: Text) -> Iterator[str]:
    for raw in text.lines():
        if text.offset - text.row_offset > base.VALUE_BYTES:
            raise DataError(
                f"a csv row that ends at this line or behind it is longer than {base.VALUE_BYTES >> 20} MiB",
                where=f"{text.file.name}:{text.line}",
                fix="a quote may not be closed; if the row is meant, write it as jsonl",
            )
        try:
            line = decode_utf8(raw)
            if "\x00" in line:
                raise nul_problem(line)
        except RowProblem as problem:
            where = f"{text.file.name}:{text.line}"
            raise DataError(problem.message, where=where, fix=problem.fix) from problem
        yield line


def _delimiter(header: str, file: DataFile, tally: FileTally) -> str:
    expected = "\t" if file.format == "tsv" else ","
    if expected in header:
        return expected
    for other in (",", ";", "\t"):
        if other in header:
            tally.notes.append(f"{file.name}: columns are separated by {other!r}, not {expected!r}")
            return other
    return expected


def _check_header(header: list[str], file: DataFile, line: int) -> None:
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None or "" in header:
        what = f"the column {twice!r} occurs twice" if twice else "a column has no name"
        raise DataError(
            f"{what} in the header: {', '.join(header)}",
            where=f"{file.name}:{line}",
            fix="give each column its own name",
        )


def count_line_ends(stream: BinaryIO, stops: list[int]) -> list[int]:
    """How many line ends there are before each of some rising byte positions of a file opened at its start."""
    counts: list[int] = []
    done = total = 0
    for stop in stops:
        while done < stop:
            piece = stream.read(min(1 << 20, stop - done))
            if not piece:
                break
            done += len(piece)
            total += piece.count(b"\n")
        counts.append(total)
    return counts
