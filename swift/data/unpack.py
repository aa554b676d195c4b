"""Packed streams (.gz .zst .bz2 .xz) as plain bytes: several members in a row, bounded memory, damage named.

A stream that ends inside a member is torn: Python's own readers differ in whether they notice. Here all four formats go
through one loop that does, and says how many bytes came out before.
"""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

from swift.core.errors import DataError

MAGIC = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd", "bzip2": b"BZh", "xz": b"\xfd7zXZ\x00"}
_PIECE = 1 << 20  # bytes unpacked at a time
_READ = 1 << 17  # packed bytes read at a time
_ZSTD_BLOCK = 1 << 17
_SKIPPABLE = (0x184D2A50).to_bytes(4, "little")[1:]  # zstd: frames of user data, which hold no content


class _Member(Protocol):
    """The decompressor of one member. `feed` takes packed bytes (b"" for more of what it holds)."""

    eof: bool
    needs_input: bool
    unused_data: bytes

    def feed(self, data: bytes) -> bytes: ...


class _Bounded:
    """bz2 and lzma."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    eof = property(lambda self: self.inner.eof)
    needs_input = property(lambda self: self.inner.needs_input)
    unused_data = property(lambda self: self.inner.unused_data)

    def feed(self, data: bytes) -> bytes:
        return self.inner.decompress(data, _PIECE)


class _Gzip:
    """zlib keeps what it didn't get to, instead of holding it."""

    def __init__(self) -> None:
        self.inner = zlib.decompressobj(31)  # 31: a gzip header, and its checksum is tested

    eof = property(lambda self: self.inner.eof)
    needs_input = property(lambda self: not self.inner.unconsumed_tail)
    unused_data = property(lambda self: self.inner.unused_data)

    def feed(self, data: bytes) -> bytes:
        return self.inner.decompress(self.inner.unconsumed_tail + data, _PIECE)


class _Zstd:
    """Its decompressor gives all that it is fed unpacks to, up to 30,000 times as much. So it is fed a few blocks at a
    time: none unpacks to more than 128 KiB (RFC 8878, section 3.1.1)."""

    def __init__(self) -> None:
        import zstandard

        self.inner = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        self._failure = zstandard.ZstdError
        self._held = b""
        self._at = 0  # of `_held`, fed so far
        self._left = 0  # bytes of the present header, block or checksum that are still to be fed
        self._next: Callable[[memoryview], int] | None = self._frame_header
        self._has_checksum = False
        self.needs_input = True

    eof = property(lambda self: self.inner.eof)
    unused_data = property(lambda self: self.inner.unused_data + self._held[self._at :])

    def feed(self, data: bytes) -> bytes:
        held = self._held = self._held[self._at :] + data
        end, blocks = 0, 0
        view = memoryview(held)
        while blocks < _PIECE // _ZSTD_BLOCK:
            if not self._left:
                if self._next is None:  # whatever follows is another member's, or not expected
                    break
                self._left = self._next(view[end:])
                if not self._left:  # not even its length is there
                    break
            take = min(self._left, len(held) - end)
            end += take
            self._left -= take
            if self._left:
                break
            blocks += 1
        self._at = end
        self.needs_input = end == len(held) or (self._next is not None and blocks < _PIECE // _ZSTD_BLOCK)
        piece = self.inner.decompress(held[:end]) if end else b""
        if self._next is None and not self._left and not self.inner.eof:
            raise self._failure("the frame goes on behind its last block")
        return piece

    def _frame_header(self, view: memoryview) -> int:
        """Its length; 0 if too little of it is there."""
        if len(view) < 8:
            return 0
        if view[1:4] == _SKIPPABLE:
            self._next = None
            return 8 + int.from_bytes(view[4:8], "little")
        flags = view[4]
        one_segment = flags >> 5 & 1
        self._has_checksum = bool(flags >> 2 & 1)
        self._next = self._block
        return 5 + (not one_segment) + (0, 1, 2, 4)[flags & 3] + (one_segment, 2, 4, 8)[flags >> 6]

    def _block(self, view: memoryview) -> int:
        if len(view) < 3:
            return 0
        header = int.from_bytes(view[:3], "little")
        if header & 1:  # the last one
            self._next = self._checksum if self._has_checksum else None
        return 3 + (1 if header >> 1 & 3 == 1 else header >> 3)  # kind 1: one byte, many times

    def _checksum(self, view: memoryview) -> int:
        self._next = None
        return 4


_MEMBERS: dict[str, Callable[[], Any]] = {
    "gzip": _Gzip,
    "zstd": _Zstd,
    "bzip2": lambda: _Bounded(bz2.BZ2Decompressor()),
    "xz": lambda: _Bounded(lzma.LZMADecompressor()),
}


def unpacked(packed: BinaryIO, codec: str, name: str) -> io.BufferedReader:
    """The content of a packed stream, which is closed with it.

    Args:
        packed: the packed bytes.
        codec: `gzip`, `zstd`, `bzip2` or `xz`.
        name: of the file, for errors.

    Raises:
        DataError: from a read, when the stream is damaged or ends too early.
    """
    return io.BufferedReader(_Unpacked(packed, codec, name), _PIECE // 4)


class _Unpacked(io.RawIOBase):
    def __init__(self, packed: BinaryIO, codec: str, name: str) -> None:
        self.packed = packed
        self.codec = codec
        self.file = name
        self._member: _Member | None = None
        self._waiting = b""  # packed bytes not fed yet
        self._ready = memoryview(b"")
        self._out = 0
        self._failures = _failures(codec)

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        """Unpacked bytes so far."""
        return self._out

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._unpack():
                return 0
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        self._out += size
        return size

    def _unpack(self) -> bool:
        """Make the next piece ready, which may be empty; False at the end."""
        member = self._member
        data = b""
        if member is None or member.needs_input:
            data = self._waiting or self.packed.read(_READ)
            self._waiting = b""
            if not data:
                if member is not None:
                    raise self._damaged(f"it ends in the middle of its {self.codec} data")
                return False
        if member is None:
            data = self._next_member(data)
            if not data:
                return True
            member = self._member = _MEMBERS[self.codec]()
        try:
            piece = member.feed(data)
        except self._failures as error:
            raise self._damaged(str(error)) from error
        if member.eof:
            self._waiting = member.unused_data + self._waiting
            self._member = None
        self._ready = memoryview(piece)
        return True

    def _next_member(self, data: bytes) -> bytes:
        """The beginning of another member, without the padding that tape programs leave; enough to tell what it is."""
        if self._out and self.codec in ("gzip", "xz"):
            data = data.lstrip(b"\0")
        magic = MAGIC[self.codec]
        while data and len(data) < max(len(magic), 4):
            more = self.packed.read(_READ)
            if not more:
                break
            data += more
        if data and not data.startswith(magic) and not (self.codec == "zstd" and data[1:4] == _SKIPPABLE):
            what = "something else follows its data" if self._out else f"it is no {self.codec} file"
            raise self._damaged(f"{what} ({data[:12]!r} …)", plain=not self._out)
        return data

    def _damaged(self, why: str, *, plain: bool = False) -> DataError:
        unpacked_name = self.file.rsplit(".", 1)[0]
        return DataError(
            f"the compressed file is damaged or incomplete: {why}",
            where=f"{self.file} (after {self._out} unpacked bytes)",
            fix=f"if it isn't packed at all, rename it to {unpacked_name}; else fetch or pack it again"
            if plain
            else "fetch or compress it again",
        )

    def close(self) -> None:
        if not self.closed:
            self.packed.close()
        super().close()


def _failures(codec: str) -> tuple[type[Exception], ...]:
    if codec == "zstd":
        import zstandard

        return (zstandard.ZstdError,)
    return {"gzip": (zlib.error,), "bzip2": (OSError, ValueError), "xz": (lzma.LZMAError,)}[codec]
