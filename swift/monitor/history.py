"""logging.jsonl: one JSON object a line, in the order in which things happened, flushed line by line.

A line is either a measurement, `{"step": 20, "time": 1735689600.1, "loss": 1.23, ...}`, or an event,
`{"step": 20, "time": ..., "event": "checkpoint", "message": "...", ...}`. JSON has no NaN and no Infinity, so such a
value is written as null, and `"nonfinite": {"loss": "nan"}` in the same line says what it was.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from swift.core.files import disk_errors, write_atomic

FILE_NAME = "logging.jsonl"


def encode_line(record: dict[str, Any]) -> str:
    """`record` as one line of strict JSON, non-finite numbers as null plus the `nonfinite` marker."""
    nonfinite: dict[str, str] = {}
    clean = {key: _plain(value, key, nonfinite) for key, value in record.items()}
    if nonfinite:
        clean["nonfinite"] = nonfinite
    return json.dumps(clean, ensure_ascii=False, allow_nan=False)


def _plain(value: Any, path: str, nonfinite: dict[str, str]) -> Any:
    """`value` in JSON's own types; numbers of numpy or torch become Python numbers, paths become text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item, f"{path}.{key}", nonfinite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{path}[{index}]", nonfinite) for index, item in enumerate(value)]
    if not isinstance(value, float) and hasattr(value, "item"):
        return _plain(value.item(), path, nonfinite)
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        nonfinite[path] = "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
        return None
    return str(value)


def read_history(path: Path) -> list[dict[str, Any]]:
    """The lines of a logging.jsonl in order; a line torn by a crash is left out.

    Args:
        path: the file, or the run folder that holds it. A missing file is an empty history.
    """
    path = path / FILE_NAME if path.is_dir() else path
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # only a crash in the middle of a write leaves such a line
        if isinstance(record, dict):
            records.append(record)
    return records


class History:
    """The open logging.jsonl of a run, and its lines in memory for the curves at the end.

    A new run replaces a file that is there; a resumed one (`resume_at`) continues it.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FILE_NAME
        self.records: list[dict[str, Any]] = []
        self._resumed = False
        self._file: IO[str] | None = None
        self._unwritten = False  # the last line was refused and is still in the buffer

    @classmethod
    def of_run(cls, run_dir: Path) -> History:
        """The history of a finished run, for reading."""
        history = cls(run_dir)
        history.records = read_history(run_dir)
        return history

    def resume_at(self, step: int, previous_run: Path | None = None) -> None:
        """Keep the history up to `step` and forget what came after it: those steps are about to be run again.

        Args:
            step: the optimizer step of the checkpoint that is resumed.
            previous_run: folder of the resumed run when the new run writes elsewhere; its history is carried over.
        """
        kept = [record for record in read_history(previous_run or self.path) if _step(record) <= step]
        self.records = kept
        self._resumed = True
        write_atomic(self.path, "".join(encode_line(record) + "\n" for record in kept))

    def write(self, record: dict[str, Any]) -> None:
        """Append one line and flush it."""
        line = encode_line(record)
        self.records.append(json.loads(line))
        self._unwritten = True
        with disk_errors(self.path, len(line)):
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("a" if self._resumed else "w", encoding="utf-8")
            self._file.write(line + "\n")
            self._file.flush()
        self._unwritten = False

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric, lines without a finite value left out."""
        points = [
            (record["step"], record[name])
            for record in self.records
            if "event" not in record and isinstance(record.get(name), (int, float)) and "step" in record
        ]
        return [step for step, _ in points], [float(value) for _, value in points]

    def seconds(self) -> float | None:
        """Training time that the newest `finish` event tells."""
        found = [record.get("seconds") for record in self.records if record.get("event") == "finish"]
        return found[-1] if found else None

    def close(self) -> None:
        """Close the file. After a refused write this raises nothing: the error was told, and hides no other one."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError) if self._unwritten else disk_errors(self.path):
                file.close()


def _step(record: dict[str, Any]) -> int:
    step = record.get("step", 0)
    return step if isinstance(step, int) else 0
