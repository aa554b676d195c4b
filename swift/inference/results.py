"""The result file of a batch job: one JSON line per input row, in order, that a later start can continue.

Beside `results.jsonl` lies `results.jsonl.meta.json` with the settings and rows that the answers belong to. A line
counts once it is complete; whatever a killed process left after the last complete line is cut off.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from swift.core.errors import CheckpointError, UsageError
from swift.core.files import disk_errors, write_atomic
from swift.core.logging import get_logger

log = get_logger("inference")

_FORMAT = 1


def meta_path(path: Path) -> Path:
    """Where the description of a result file is."""
    return path.with_name(path.name + ".meta.json")


def read_meta(path: Path) -> dict[str, Any] | None:
    """The description of the result file at `path`; None if there is none that can be read."""
    try:
        meta = json.loads(meta_path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return meta if isinstance(meta, dict) and meta.get("format") == _FORMAT else None


def unfinished_results(folder: Path, settings: dict[str, Any]) -> Path | None:
    """The newest unfinished result file in `folder` that belongs to `settings` and that no process is writing."""
    found = []
    for description in folder.glob("*.jsonl.meta.json"):
        path = description.with_name(description.name.removesuffix(".meta.json"))
        meta = read_meta(path)
        if path.is_file() and meta and not meta["complete"] and meta["settings"] == settings and not _is_locked(path):
            found.append((path.stat().st_mtime_ns, path))
    return max(found)[1] if found else None


@dataclass(frozen=True)
class Share:
    """The rows that one of several processes answers: `rank`, `rank + size`, `rank + 2 size`, …"""

    rank: int = 0
    size: int = 1

    def index(self, position: int) -> int:
        """Row index of the line at `position` (from 0) of this share's file."""
        return self.rank + position * self.size


class ResultFile:
    """An open result file, positioned after its last complete line.

    Args:
        path: the file. Its folder is made.
        settings: what the answers depend on, as plain JSON values.
        share: which rows the file holds.
        resume: continue a file of the same settings. False: start over, whatever is there.

    Raises:
        UsageError: the file belongs to other settings or to something else, and `resume` is true.
        CheckpointError: another process is writing it.

    Attributes:
        num_lines: complete lines in the file.
        statuses: how many of them have which status.
        complete: whether the job was finished already.
    """

    def __init__(
        self, path: Path, settings: dict[str, Any], *, share: Share | None = None, resume: bool = True
    ) -> None:
        self.path = path
        self.num_lines = 0
        self.statuses: Counter[str] = Counter()
        self.complete = False
        self._settings = settings
        self._share = share or Share()
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = path.open("r+b" if path.exists() else "w+b")
        try:
            _lock(self._file, path)
            self._begin(resume)
        except BaseException:
            self._file.close()
            raise

    def append(self, results: Iterable[dict[str, Any]]) -> None:
        """Write the next results, in order; they survive the end of this process, however it comes."""
        results = list(results)
        if not results:
            return
        data = b"".join(json.dumps(result, ensure_ascii=False).encode() + b"\n" for result in results)
        with disk_errors(self.path, len(data)):
            self._file.write(data)
            self._file.flush()
        self.num_lines += len(results)
        self.statuses.update(result["status"] for result in results)

    def sync(self) -> None:
        """Make what is written survive the end of the machine as well."""
        with disk_errors(self.path):
            os.fsync(self._file.fileno())

    def finish(self) -> None:
        """Mark the job as complete."""
        self.sync()
        self.complete = True
        self._write_meta()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, resume: bool) -> None:
        meta = read_meta(self.path)
        has_lines = os.fstat(self._file.fileno()).st_size > 0
        if resume and has_lines and meta is None:
            raise UsageError(
                f"{self.path} exists and wasn't written by this command",
                where="--result_path",
                fix="choose another --result_path, or overwrite it with --resume false",
            )
        if resume and meta is not None and meta["settings"] != self._settings:
            differences = _differences(meta["settings"], self._settings)
            raise UsageError(
                f"{self.path} holds answers of other rows or settings: {differences}",
                where="--result_path",
                fix="choose another --result_path, or overwrite it with --resume false",
            )
        if resume and meta is not None:
            self._keep_complete_lines()
            self.complete = bool(meta["complete"]) and self.num_lines == meta["num_lines"]
        else:
            with disk_errors(self.path):
                self._file.truncate(0)
            self._write_meta()

    def _keep_complete_lines(self) -> None:
        end = 0
        self._file.seek(0)
        for line in self._file:
            status = _status_of(line, self._share.index(self.num_lines))
            if status is None:
                log.warning("%s: line %d is incomplete and is written again", self.path, self.num_lines + 1)
                break
            end += len(line)
            self.num_lines += 1
            self.statuses[status] += 1
        self._file.seek(end)
        self._file.truncate()

    def _write_meta(self) -> None:
        meta = {
            "format": _FORMAT,
            "settings": self._settings,
            "complete": self.complete,
            "num_lines": self.num_lines,
            "statuses": dict(self.statuses),
        }
        write_atomic(meta_path(self.path), json.dumps(meta, ensure_ascii=False, indent=1) + "\n")


def part_path(path: Path, share: Share) -> Path:
    """Where one of several processes writes its share of the result file at `path`."""
    return path.with_name(f"{path.name}.part-{share.rank}-of-{share.size}")


def merge_parts(path: Path, settings: dict[str, Any], size: int) -> None:
    """Make the result file of the finished shares, in row order, and remove the shares.

    Raises:
        CheckpointError: a share ends before its rows do.
    """
    parts = [part_path(path, Share(rank, size)) for rank in range(size)]
    aside = path.with_name(f".{path.name}.merging")
    streams = [part.open("rb") for part in parts]
    total = sum((read_meta(part) or {"num_lines": 0})["num_lines"] for part in parts)
    try:
        with disk_errors(path), aside.open("wb") as merged:
            for index in range(total):
                line = streams[index % size].readline()
                if _status_of(line, index) is None:
                    raise CheckpointError(
                        f"row {index} is missing", where=str(parts[index % size]), fix="start again to answer it"
                    )
                merged.write(line)
            merged.flush()
            os.fsync(merged.fileno())
        aside.replace(path)
    finally:
        for stream in streams:
            stream.close()
        aside.unlink(missing_ok=True)
    statuses: Counter[str] = Counter()
    for part in parts:
        statuses.update((read_meta(part) or {"statuses": {}})["statuses"])
    meta = {"format": _FORMAT, "settings": settings, "complete": True, "num_lines": total, "statuses": dict(statuses)}
    write_atomic(meta_path(path), json.dumps(meta, ensure_ascii=False, indent=1) + "\n")
    for part in parts:
        part.unlink()
        meta_path(part).unlink()


def _status_of(line: bytes, index: int) -> str | None:
    """The status of a complete line of row `index`; None for anything else."""
    if not line.endswith(b"\n"):
        return None
    try:
        result = json.loads(line)
    except ValueError:
        return None
    if not isinstance(result, dict) or result.get("index") != index:
        return None
    return result.get("status")


def _differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    shown = []
    for name in names[:4]:
        old, new = (json.dumps(values.get(name), ensure_ascii=False) for values in (before, now))
        shown.append(f"{name} {old} there, {new} now" if len(old) + len(new) < 80 else f"{name} differs")
    return "; ".join(shown) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _lock(file: IO[bytes], path: Path) -> None:
    """Hold the file for this process; the lock goes with the process, however it ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise CheckpointError(
            f"another process is writing {path}",
            where="--result_path",
            fix="wait for it, or choose another --result_path",
        ) from error


def _is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
