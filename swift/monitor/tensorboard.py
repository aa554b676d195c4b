"""TensorBoard event files without TensorBoard: scalars only, written with the standard library.

A file is a sequence of TFRecords (length, masked CRC32C of the length, payload, masked CRC32C of the payload; all
little endian) whose payloads are `Event` protocol-buffer messages. The few fields used are encoded by hand below; field
numbers are those of tensorboard's public event.proto and summary.proto.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path

from swift.core.files import disk_errors

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SESSION_START = 1  # SessionLog.START: TensorBoard forgets earlier points at or after this event's step


def _crc32c_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE = _crc32c_table()


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), as RFC 3720 appendix B.4 defines it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def masked_crc32c(data: bytes) -> int:
    """The rotated and offset checksum that TFRecord files hold."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def tf_record(payload: bytes) -> bytes:
    """`payload` framed as one TFRecord."""
    length = struct.pack("<Q", len(payload))
    return length + struct.pack("<I", masked_crc32c(length)) + payload + struct.pack("<I", masked_crc32c(payload))


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # negative int64 is sent as its two's complement
    out = bytearray()
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(number: int, wire: int, body: bytes) -> bytes:
    prefix = _varint(number << 3 | wire)
    return prefix + (_varint(len(body)) + body if wire == _BYTES else body)


def _event(step: int, field: bytes, wall_time: float | None = None) -> bytes:
    """An `Event` message: wall_time = 1, step = 2, then `field`."""
    seconds = struct.pack("<d", time.time() if wall_time is None else wall_time)
    return _field(1, _FIXED64, seconds) + _field(2, _VARINT, _varint(step)) + field


def _scalar_summary(values: dict[str, float]) -> bytes:
    """`Event.summary` (5) with one `Summary.value` (1) per metric: tag = 1, simple_value = 2."""
    body = b"".join(
        _field(1, _BYTES, _field(1, _BYTES, tag.encode()) + _field(2, _FIXED32, _float32(value)))
        for tag, value in values.items()
    )
    return _field(5, _BYTES, body)


def _float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:  # a finite double that float32 can't hold
        return struct.pack("<f", float("inf") if value > 0 else float("-inf"))


class EventWriter:
    """Appends scalars to a new event file in `folder`.

    Args:
        folder: created if missing.
        first_step: for a resumed run, the first step that will be written; earlier files' points at or after it vanish
            from the curves.
    """

    def __init__(self, folder: Path, *, first_step: int | None = None) -> None:
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self.path = folder / name
        self._unwritten = False  # the last record was refused and is still in the buffer
        with disk_errors(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("wb")
        self._write(_event(0, _field(3, _BYTES, b"brain.Event:2")))
        if first_step is not None:
            start = _field(7, _BYTES, _field(1, _VARINT, _varint(_SESSION_START)))
            self._write(_event(first_step, start))

    def add(self, step: int, values: dict[str, float]) -> None:
        """Write `values` (tag to number) at `step` and flush."""
        self._write(_event(step, _scalar_summary(values)))

    def _write(self, event: bytes) -> None:
        record = tf_record(event)
        self._unwritten = True
        with disk_errors(self.path, len(record)):
            self._file.write(record)
            self._file.flush()
        self._unwritten = False

    def close(self) -> None:
        """Close the file. After a refused write this raises nothing: the error was told, and hides no other one."""
        with suppress(OSError) if self._unwritten else disk_errors(self.path):
            self._file.close()
