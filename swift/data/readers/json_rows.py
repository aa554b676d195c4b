"""`.json` files: a list of rows, an object that holds one, a single row, or (often) jsonl under another name.

A list is read through a window over the text, so a file of any size takes the memory of its largest row. An object is
held whole, since what follows decides which of its lists is meant. Every row knows its line.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

from swift.core.errors import DataError, did_you_mean
from swift.data.files import DataFile
from swift.data.parse_json import (
    encoding_complaint,
    json_problem,
    non_finite_field,
    nul_problem,
    number_problem,
    pairs_once,
    refuse_lone_surrogates,
    whole_number,
)
from swift.data.readers import base
from swift.data.readers.base import Cursor, FileTally, RawRow, Text
from swift.data.rows import RowProblem, excerpt

# keys that make a top-level object of a .json file one row rather than a table of rows
_ROW_KEYS = {"messages", "conversations", "conversation", "history", "tools"}
# escapes that may be half a character, and numbers that may be too large for one
_ODD = re.compile(r"\\u[dD][89a-fA-F]|\d[eE]\+?\d{3}|\d{300}")
_SPACE = re.compile(r"[ \t\r\n]*")
_PIECE = 1 << 18  # bytes read at a time, at least
_MARGIN = 16  # characters: no literal or escape is longer


def read_json(file: DataFile, tally: FileTally, cursor: Cursor) -> Iterator[RawRow]:
    """Rows before the cursor are parsed and passed over."""
    with Text(file, tally) as text:
        skip = cursor.row
        for number, row in _rows(_Window(text), file, tally):
            if skip:
                skip -= 1
                continue
            cursor.line = number
            yield number, row


def _rows(window: _Window, file: DataFile, tally: FileTally) -> Iterator[RawRow]:
    start = window.skip(0)
    first = window.at(start)
    if first == "":
        return
    if first == "[":
        if file.part:
            raise DataError(f"the file is a list and has no part {file.part!r}", where=file.name)
        yield from window.items(start, stream=True)
        return
    if first != "{":
        raise DataError("a json file holds a list of rows or an object", where=window.where(start))
    value, end = window.value(start)
    if window.at(window.skip(end)) == "":
        position, single = _rows_in_object(value, window, start, file)
        if single:
            yield window.line(start), _row_or_problem(value, window.text[start:end], window.constant)
        else:
            yield from window.items(position)
        return
    if file.part:
        raise DataError(
            f"one object follows another, and so there is no part {file.part!r}",
            where=window.where(window.skip(end)),
            fix="leave out the part: the file is read as jsonl",
        )
    tally.notes.append(f"{file.name}: read as jsonl (one object after another)")
    while True:
        yield window.line(start), _row_or_problem(value, window.text[start:end], window.constant)
        start = window.skip(window.drop(end))
        if window.at(start) == "":
            return
        value, end = window.value(start)


def _rows_in_object(value: dict[str, Any], window: _Window, start: int, file: DataFile) -> tuple[int, bool]:
    """Where the list of rows begins in a top-level object; or the object itself, when it is a row."""
    lists = {key: item for key, item in value.items() if isinstance(item, list) and item and isinstance(item[0], dict)}
    if file.part:
        if file.part not in value:
            raise DataError(
                f"the object has no part {file.part!r}",
                where=file.name,
                fix=" ".join(filter(None, [did_you_mean(file.part, value), "it has " + ", ".join(value)])),
            )
        if not isinstance(value[file.part], list):
            raise DataError(f"the part {file.part!r} is no list of rows", where=file.name)
        return window.member(start, file.part), False
    if _ROW_KEYS & set(value) or not lists:
        return start, True
    if "data" in lists or len(lists) == 1:
        return window.member(start, "data" if "data" in lists else next(iter(lists))), False
    raise DataError(
        f"the object holds several lists: {', '.join(lists)}",
        where=file.name,
        fix=f"choose one: {file.location.rsplit('/', 1)[-1]}:{next(iter(lists))}",
    )


class _Window:
    """Walks a JSON text value by value, over a piece of the text that grows as a value needs it.

    Positions are those in `text`; `drop` forgets what is before one and moves the others.
    """

    def __init__(self, source: Text) -> None:
        self.source = source
        self.file = source.file
        self.text = ""
        self.ended = False
        self.decoder = json.JSONDecoder(
            object_pairs_hook=pairs_once, parse_constant=self._constant, parse_int=whole_number
        )
        self.constant: str | None = None  # NaN or Infinity, if the last value holds one
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._bytes = source.offset  # read so far
        self._first_line = 1  # of text[0]
        self._first_column = 0  # characters before text[0] in its line
        self._known, self._known_line = 0, 1  # a position, and its line

    def _constant(self, text: str) -> None:
        self.constant = text

    def grow(self) -> bool:
        """Read on, at least as much again as there is: parsing a value anew each time then costs twice, not more."""
        if self.ended:
            return False
        wanted = max(_PIECE, min(len(self.text), base.VALUE_BYTES // 4))
        data = self.source.stream.read(wanted)
        self.ended = len(data) < wanted
        held = self._utf8.getstate()[0]
        try:
            more = self._utf8.decode(data, final=self.ended)
        except UnicodeDecodeError as error:
            raise self._encoding_error(held + data, error) from error
        self._bytes += len(data)
        self.source.offset = self._bytes
        self.source.tell_share()
        if "\x00" in more:
            problem = nul_problem(more)
            raise DataError(problem.message, where=self.file.name, fix=problem.fix)
        self.text += more
        return True

    def _encoding_error(self, data: bytes, error: UnicodeDecodeError) -> DataError:
        message, fix = encoding_complaint(data, error)
        byte = self._bytes - len(self._utf8.getstate()[0]) + error.start + 1
        line = self.line(len(self.text)) + data.count(b"\n", 0, error.start)
        message = message.replace(f"byte {error.start + 1} ", f"byte {byte} of the file ")
        return DataError(message, where=f"{self.file.name}:{line}", fix=fix)

    def drop(self, position: int) -> int:
        """Forget the text before a position, when that is worth it; returns where the position is now."""
        if position < _PIECE:
            return position
        self._first_line = self.line(position)
        start = self.text.rfind("\n", 0, position)
        self._first_column = position - start - 1 if start >= 0 else self._first_column + position
        self.text = self.text[position:]
        self._known, self._known_line = 0, self._first_line
        return 0

    def at(self, position: int) -> str:
        """The character there; empty at the end of the file."""
        while position >= len(self.text):
            if not self.grow():
                return ""
        return self.text[position]

    def skip(self, position: int) -> int:
        """The next position that isn't white space."""
        while True:
            match = _SPACE.match(self.text, position)
            position = match.end() if match else position
            if position < len(self.text) or not self.grow():
                return position

    def line(self, position: int) -> int:
        """The 1-based line of a position."""
        if position < self._known:
            self._known, self._known_line = 0, self._first_line
        self._known_line += self.text.count("\n", self._known, position)
        self._known = position
        return self._known_line

    def where(self, position: int) -> str:
        return f"{self.file.name}:{self.line(position)}"

    def value(self, position: int) -> tuple[Any, int]:
        """The value that starts here, and where it ends."""
        while True:
            self.constant = None
            try:
                value, end = self.decoder.raw_decode(self.text, position)
            except json.JSONDecodeError as error:
                unfinished = error.msg.startswith("Unterminated") or error.pos >= len(self.text) - _MARGIN
                if unfinished and len(self.text) - position > base.VALUE_BYTES:
                    raise self._too_large(position) from error
                if unfinished and self.grow():
                    continue
                raise self._json_error(error) from error
            except RowProblem as problem:
                raise DataError(problem.message, where=self.where(position), fix=problem.fix) from problem
            except RecursionError as error:
                raise DataError("the JSON is nested too deeply", where=self.where(position)) from error
            if end - position > base.VALUE_BYTES:
                raise self._too_large(position)
            if end < len(self.text) or not self.grow():  # a number may go on
                return value, end

    def _too_large(self, position: int) -> DataError:
        return DataError(
            f"the value that starts here is larger than {base.VALUE_BYTES >> 20} MiB",
            where=self.where(position),
            fix="a quote or bracket may not be closed; if the value is meant, write its rows as jsonl",
        )

    def _json_error(self, error: json.JSONDecodeError) -> DataError:
        problem = json_problem(self.text, error)
        line = self._first_line + error.lineno - 1
        column = error.colno + (self._first_column if error.lineno == 1 else 0)
        return DataError(
            problem.message.replace(f"column {error.colno}", f"line {line}, column {column}"),
            where=f"{self.file.name}:{line}",
            fix=problem.fix,
        )

    def items(self, position: int, *, stream: bool = False) -> Iterator[RawRow]:
        """The rows of the list that starts here; `stream`: forgetting what is done with."""
        position = self.skip(position + 1)
        while self.at(position) not in ("", "]"):
            value, end = self.value(position)
            yield self.line(position), _row_or_problem(value, self.text[position:end], self.constant)
            position = self.skip(self.drop(end) if stream else end)
            follows = self.at(position)
            if follows == ",":
                position = self.skip(position + 1)
            elif follows != "]":
                raise self._not_closed(position)
        if not self.at(position):
            raise self._not_closed(position)

    def _not_closed(self, position: int) -> DataError:
        return DataError(
            "the list isn't closed, or a comma is missing" if self.at(position) else "the list isn't closed",
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


def _row_or_problem(value: Any, source: str, constant: str | None) -> dict[str, Any] | RowProblem:
    if not isinstance(value, dict):
        return RowProblem("not_an_object", f"the row is not an object: {excerpt(value)}")
    if constant:
        return number_problem(constant)
    if _ODD.search(source):
        if (field := non_finite_field(value)) is not None:
            return number_problem(f"the value of {field}")
        try:
            refuse_lone_surrogates(value)
        except RowProblem as problem:
            return problem
    return value
