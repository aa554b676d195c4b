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
    """Its decompressor gives all that a piece unpacks to, so pieces are small, and smaller when they unpack to much."""

    needs_input = True

    def __init__(self) -> None:
        import zstandard

        self.inner = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()

    eof = property(lambda self: self.inner.eof)
    unused_data = property(lambda self: self.inner.unused_data)

    def feed(self, data: bytes) -> bytes:
        return self.inner.decompress(data)


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
        self._step = _READ if codec != "zstd" else 1 << 10
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
            data = self._waiting or self.packed.read(self._step)
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
        if self.codec == "zstd" and len(data) > self._step:
            data, self._waiting = data[: self._step], data[self._step :]
        try:
            piece = member.feed(data)
        except self._failures as error:
            raise self._damaged(str(error)) from error
        if member.eof:
            self._waiting = member.unused_data + self._waiting
            self._member = None
        if self.codec == "zstd":
            self._step = min(1 << 14, self._step * 2) if len(piece) < _PIECE else max(16, self._step // 4)
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
