"""Writing files so that a crash leaves the old one or the new one, never a half of either."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swift.core.errors import SwiftError


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
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    data = content.encode() if isinstance(content, str) else content
    with disk_errors(path, len(data)):
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
    """Turn a full disk, a read-only file system or missing rights into an error that names the path and the bytes."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG):
            raise
        raise disk_error(path, needed_bytes, error) from error


def disk_error(path: Path, needed_bytes: int | None, cause: object) -> SwiftError:
    """The `SwiftError` for a write to `path` that the file system refused."""
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    needed = f", {human_bytes(needed_bytes)} needed" if needed_bytes else ""
    return SwiftError(
        f"could not write {path}: {cause}",
        where=f"{human_bytes(free)} free on that file system{needed}",
        fix="free space or choose another place with --output_dir; --save_total_limit N keeps fewer checkpoints",
    )
