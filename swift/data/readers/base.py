"""What the readers of all formats share: positions, tallies, and how a file is opened and looked at first.

A reader is a generator `(file, tally, cursor) -> rows`. It starts where the cursor points and moves the cursor behind
each row before it gives the row, so that a copy of the cursor resumes there.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from swift.core.errors import DataError
from swift.data.files import BUFFER_BYTES, DataFile, compression_of, open_packed, size_of
from swift.data.readers.sniff import refuse_wrong_content
from swift.data.rows import RowProblem
from swift.data.unpack import unpacked

RawRow = tuple[int, bytes | dict[str, Any] | RowProblem]
BYTE_ORDER_MARKS = (  # UTF-32 first: its little-endian mark begins with UTF-16's
    (b"\xff\xfe\x00\x00", "utf-32"),
    (b"\x00\x00\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
    (codecs.BOM_UTF8, "utf-8"),
)
_SKIP_BYTES = 1 << 20
VALUE_BYTES = 256 << 20  # most that one row, page or member may hold: behind more stands a quote that isn't closed


def read_bounded(stream: BinaryIO, what: str) -> bytes:
    """The rest of a stream that is one row.

    Raises:
        RowProblem: `too_large`, once it is longer than `VALUE_BYTES`; no more than that is held.
    """
    content = stream.read(VALUE_BYTES + 1)
    if len(content) > VALUE_BYTES:
        raise too_large(what)
    return content


def too_large(what: str) -> RowProblem:
    """The problem of a row that is larger than `VALUE_BYTES`."""
    return RowProblem(
        "too_large", f"{what} is larger than {VALUE_BYTES >> 20} MiB", "cut it into pieces, or leave it out"
    )


class EmptyFileError(DataError):
    """A data file without rows: an error by itself, a note when it is one shard of many."""


@dataclass(frozen=True)
class Position:
    """Just behind a row.

    Attributes:
        row: rows given before it.
        line: the last line (or row of a table, or byte) that was used up.
        offset: bytes of the unpacked file before it, where the format is read from front to back.
    """

    row: int = 0
    line: int = 0
    offset: int = 0


@dataclass
class Cursor:
    """A position that a reader moves. `row` is counted by the stream."""

    row: int = 0
    line: int = 0
    offset: int = 0


@dataclass
class FileTally:
    """What a reader notices beside rows; `share` is how much of the file it has gone through."""

    blank: int = 0
    share: float = 0.0
    notes: list[str] = field(default_factory=list)


class Text:
    """A text file opened for reading lines as UTF-8 bytes, at a position.

    Attributes:
        stream: the unpacked bytes, behind any byte-order mark and behind the position.
        offset, line: of the next line; the readers keep them. row_offset: of the row that is being read, kept by csv.
        plain: whether offsets are those of the file on the disk: it is neither packed nor converted.
    """

    def __init__(self, file: DataFile, tally: FileTally) -> None:
        self.file = file
        self.tally = tally
        packed = open_packed(file.location)
        self.codec = compression_of(file.location)
        self._packed = packed
        self.stream: BinaryIO = unpacked(packed, self.codec, file.location) if self.codec else packed
        self.size = 0
        try:
            self._look()
            if file.span is None:
                self.size = size_of(file.location)
        except BaseException:
            self.stream.close()
            raise

    def _look(self) -> None:
        head = self.stream.peek(512)[:512]  # type: ignore[attr-defined]
        mark, encoding = next(((m, name) for m, name in BYTE_ORDER_MARKS if head.startswith(m)), (b"", "utf-8"))
        self.plain = self.codec is None and encoding == "utf-8"
        self.offset = self.line = self.row_offset = 0
        refuse_wrong_content(head, self.file)
        if encoding != "utf-8":
            self.tally.notes.append(f"{self.file.name}: read as {encoding.upper()}, as its byte-order mark says")
            self.stream = io.BufferedReader(_AsUtf8(self.stream, encoding, self.file.name), BUFFER_BYTES)
        elif mark:
            self.stream.read(len(mark))
            self.offset = len(mark)

    def skip_to(self, offset: int) -> None:
        """Go on from a byte: by seeking where that is possible, else by reading up to it.

        Raises:
            DataError: the file ends before it.
        """
        if self.plain and self.stream.seekable():
            self.offset = self.stream.seek(0, io.SEEK_END)
            if offset <= self.offset:
                self.offset = self.stream.seek(offset)
        # a packed file is read up to there; one that is too short fails below
        while self.offset < offset:
            piece = self.stream.read(min(_SKIP_BYTES, offset - self.offset))
            if not piece:
                raise DataError(
                    f"the file ends after {self.offset} bytes, and reading was to go on at byte {offset}",
                    where=self.file.name,
                    fix="it was changed since; start anew",
                )
            self.offset += len(piece)

    def lines(self) -> Iterator[bytes]:
        """The lines; `line` and `offset` stand behind the one given."""
        for raw in self.stream:
            self.offset += len(raw)
            self.line += 1
            self.tell_share()
            yield raw

    def tell_share(self) -> None:
        """Note how far reading has come."""
        if self.size:
            done = self.offset if self.plain else self._packed.tell()
            self.tally.share = min(1.0, done / self.size)

    def __enter__(self) -> Text:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()


class _AsUtf8(io.RawIOBase):
    """UTF-16 or UTF-32 converted on the way; a place that isn't valid is named."""

    def __init__(self, inner: BinaryIO, encoding: str, name: str) -> None:
        self.inner = inner
        self.encoding = encoding
        self.name = name
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._ready = b""
        self._done = 0
        self._held = 0
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and not self._ended:
            data = self.inner.read(BUFFER_BYTES)
            self._ended = not data
            try:
                text = self._decoder.decode(data, final=self._ended)
            except UnicodeDecodeError as error:
                at = self._done - self._held + error.start + 1
                raise DataError(
                    f"the file begins as {self.encoding.upper()} but byte {at} isn't: {error.reason}",
                    where=self.name,
                    fix="write it again as UTF-8",
                ) from error
            self._done += len(data)
            state = self._decoder.getstate()[0]
            self._held = len(state) if isinstance(state, bytes) else 0
            self._ready = text.encode(errors="surrogatepass")
        piece = self._ready[: len(buffer)]
        buffer[: len(piece)] = piece
        self._ready = self._ready[len(piece) :]
        return len(piece)

    def close(self) -> None:
        if not self.closed:
            self.inner.close()
        super().close()


@contextmanager
def opened(file: DataFile, tally: FileTally, cursor: Cursor) -> Iterator[Text]:
    """The text of a file, at the cursor."""
    with Text(file, tally) as text:
        if cursor.row:
            text.skip_to(cursor.offset)
            text.line = cursor.line
        yield text
