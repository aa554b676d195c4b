"""Writing files so that a crash leaves the old one or the new one, never a half of either."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swift.core.errors import SwiftError

FULL_DISK_FIX = "free space, or choose another place"
_NO_PLACE_FIX = "no such file can be made there: choose another place"
_NO_RIGHTS_FIX = "no right to write there: choose another place, or have its rights changed"
# what a file system answers to a write that it refuses, and what helps then
_FIXES = {
    errno.ENOSPC: FULL_DISK_FIX,
    errno.EDQUOT: FULL_DISK_FIX,
    errno.EFBIG: "files of that size aren't allowed there: raise the limit (ulimit -f), or choose another place",
    errno.EROFS: "it is mounted read-only: choose another place",
    errno.EACCES: _NO_RIGHTS_FIX,
    errno.EPERM: _NO_RIGHTS_FIX,
    errno.ENOENT: _NO_PLACE_FIX,
    errno.ENOTDIR: "a part of that path is a file and not a folder: choose another place",
    errno.EEXIST: "a file with the name of the folder is in the way: choose another place",
    errno.EISDIR: "that is a folder: name a file",
    errno.ENAMETOOLONG: "the name is too long: choose a shorter one",
    errno.EIO: "the device or the network share has a fault: choose another place",
}
_OS_NUMBER = re.compile(r"\(os error (\d+)\)")
_RUST_IO = re.compile(r"\(os error \d+\)|I/O error")
_TORCH_IO = re.compile(r"PytorchStreamWriter|enforce fail at inline_container|No space left|file write failed")


def human_bytes(num_bytes: float) -> str:
    """`1536` -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def fsync_dir(path: Path) -> None:
    """Make renames and creations inside `path` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(path: Path) -> None:
    """Make every file below `path`, and the directories themselves, durable."""
    for root, _, names in os.walk(path):
        for name in names:
            descriptor = os.open(Path(root) / name, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        fsync_dir(Path(root))


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replace `path` with `content`: written aside, fsynced, renamed."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    data = content.encode() if isinstance(content, str) else content
    with disk_errors(path, len(data)):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with aside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
        fsync_dir(path.parent)


@contextmanager
def disk_errors(path: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """Turn a write that the file system refuses into an error that names the path, the bytes and what helps."""
    try:
        yield
    except Exception as error:  # the libraries that write files have no common type; what isn't a refusal goes on
        refused = error.errno in _FIXES if isinstance(error, OSError) else is_disk_fault(error)
        if not refused:
            raise
        raise disk_error(path, needed_bytes, error) from error


def is_disk_fault(error: BaseException) -> bool:
    """Whether the file system refused, by what the libraries that write files raise then.

    torch raises RuntimeError, safetensors an error of its own and tokenizers a plain Exception; only the text tells
    them from programming errors of the same types.
    """
    if isinstance(error, OSError):
        return True
    words = str(error)
    if isinstance(error, RuntimeError):
        return bool(_TORCH_IO.search(words))
    from_rust = type(error) is Exception or type(error).__name__ == "SafetensorError"
    return from_rust and bool(_RUST_IO.search(words))


def require_writable(path: Path) -> None:
    """Find out whether `path` can be written, before the work whose result goes there; it is neither made nor changed.

    Raises:
        SwiftError: it can't, with the cause.
    """
    probe = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()


def require_space(path: Path, needed_bytes: int) -> None:
    """Check that `needed_bytes` fit on the file system of `path`, which needn't exist yet.

    Raises:
        SwiftError: they don't.
    """
    if needed_bytes > _free_bytes(path):
        raise disk_error(path, needed_bytes, "not enough free space")


def disk_error(path: Path, needed_bytes: int | None, cause: object) -> SwiftError:
    """The `SwiftError` for a write to `path` that the file system refused."""
    needed = f", {human_bytes(needed_bytes)} needed" if needed_bytes else ""
    return SwiftError(
        f"could not write {path}: {cause}",
        where=f"{human_bytes(_free_bytes(path))} free on that file system{needed}",
        fix=_FIXES.get(_number(cause), FULL_DISK_FIX),
    )


def _number(cause: object) -> int:
    """The operating system's number of a fault; 0 if it isn't told."""
    if isinstance(cause, OSError):
        return cause.errno or 0
    told = _OS_NUMBER.search(str(cause))
    return int(told[1]) if told else 0


def _free_bytes(path: Path) -> int:
    """Free space where `path` is, or would be."""
    existing = path
    while existing != existing.parent:
        try:
            return shutil.disk_usage(existing).free
        except OSError:  # it isn't there, or its name is such that it can't be
            existing = existing.parent
    return shutil.disk_usage(existing).free
