"""Fixed-width records on disk, sorted and partitioned by key, read back group by group in bounded memory.

A writer sorts what fits into memory and writes it as a run, with a table of where each partition begins. A reader takes
one partition of the runs of many tasks. If that is more than fits into memory, it goes through the keys range by range,
which costs a binary search in every run for each range and no merging pass. Only a single key with more records than
fit is given in parts.

Knows nothing of what the records mean: the field `key` (uint64) comes first, and records are sorted by all fields.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from swift.core.errors import DataError
from swift.core.files import disk_errors

_TABLE = "runs.npy"
_COPIES = 4  # of the records that are alive while a chunk is sorted: read, sort keys, order, sorted


def hash_cuts(partitions: int) -> np.ndarray:
    """uint64 [partitions - 1]: where the partitions 1, 2, … of evenly spread keys begin."""
    return np.asarray([(part << 64) // partitions for part in range(1, partitions)], dtype=np.uint64)


def records(dtype: np.dtype, **columns: np.ndarray) -> np.ndarray:
    """A structured array of columns of one length."""
    made = np.empty(len(next(iter(columns.values()))), dtype=dtype)
    for name, values in columns.items():
        made[name] = values
    return made


def sort_records(rows: np.ndarray) -> np.ndarray:
    """The records in the order of all their fields, the first one weighing most."""
    rows = rows[np.argsort(rows["key"])]  # a third of the time of sorting by all fields, which only equal keys need
    names = rows.dtype.names or ()
    same = rows["key"][1:] == rows["key"][:-1]
    tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
    if len(tied):
        subset = rows[tied]
        rows[tied] = subset[np.lexsort([subset[name] for name in reversed(names)])]
    return rows


def starts_of(*columns: np.ndarray) -> np.ndarray:
    """bool [n]: where a group of equal values begins in sorted columns."""
    starts = np.zeros(len(columns[0]), dtype=bool)
    if len(starts):
        starts[0] = True
    for column in columns:
        starts[1:] |= column[1:] != column[:-1]
    return starts


class RunWriter:
    """Takes records in any order.

    Args:
        folder: where the runs go.
        dtype: of a record.
        cuts: uint64, the least key of each partition but the first.
        memory_bytes: what may be held; more is written as another run.
        unique: whether equal records are written once in a run (they may still be in several runs).
    """

    def __init__(
        self, folder: Path, dtype: np.dtype, cuts: np.ndarray, memory_bytes: int, *, unique: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.dtype = dtype
        self.cuts = cuts
        self.unique = unique
        self.count = 0
        self._held: list[np.ndarray] = []
        self._held_records = 0
        self._capacity = max(1, memory_bytes // (_COPIES * dtype.itemsize))
        self._tables: list[np.ndarray] = []

    def add(self, rows: np.ndarray) -> None:
        """Append records."""
        self.count += len(rows)
        while self._held_records + len(rows) >= self._capacity:
            room = self._capacity - self._held_records
            self._hold(rows[:room])
            rows = rows[room:]
            self._write_run()
        self._hold(rows)

    def _hold(self, rows: np.ndarray) -> None:
        if len(rows):
            self._held.append(rows)
            self._held_records += len(rows)

    def _write_run(self) -> None:
        rows = sort_records(np.concatenate(self._held))
        if self.unique:
            rows = rows[starts_of(*(rows[name] for name in self.dtype.names or ()))]
        self._held, self._held_records = [], 0
        keys = np.ascontiguousarray(rows["key"])
        inner = np.searchsorted(keys, self.cuts)
        self._tables.append(np.concatenate([[0], inner, [len(rows)]]).astype(np.int64))
        path = self.folder / _run_name(len(self._tables) - 1)
        with disk_errors(path, rows.nbytes):
            rows.tofile(path)

    def close(self) -> None:
        """Write what is left, and the table without which the runs can't be read."""
        if self._held:
            self._write_run()
        table = np.stack(self._tables) if self._tables else np.zeros((0, len(self.cuts) + 2), dtype=np.int64)
        with disk_errors(self.folder / _TABLE, table.nbytes):
            np.save(self.folder / _TABLE, table)


@dataclass(frozen=True)
class _Slice:
    path: Path
    start: int
    stop: int


@dataclass(frozen=True)
class Chunk:
    """Whole groups of records of one key, or a part of a group too large to be held.

    Attributes:
        least, most: keys; the same one if the group comes in parts.
        whole: whether `parts` gives a single, sorted array.
    """

    least: int
    most: int
    whole: bool
    slices: tuple[_Slice, ...]
    dtype: np.dtype
    capacity: int

    def parts(self) -> Iterator[np.ndarray]:
        """The records: sorted if `whole`, else in arrays that are each sorted. Can be gone through repeatedly."""
        if self.whole:
            yield sort_records(np.concatenate([_read(piece, self.dtype) for piece in self.slices]))
            return
        for piece in self.slices:
            for start in range(piece.start, piece.stop, self.capacity):
                yield _read(_Slice(piece.path, start, min(start + self.capacity, piece.stop)), self.dtype)


class Runs:
    """One partition of the runs in several folders.

    Attributes:
        splits: ranges of keys that were cut because their records didn't fit into memory.
    """

    def __init__(self, folders: list[Path], dtype: np.dtype, partition: int, memory_bytes: int) -> None:
        self.dtype = dtype
        self.capacity = max(1, memory_bytes // (_COPIES * dtype.itemsize))
        self.splits = 0
        self._slices = []
        for folder in folders:
            for number, row in enumerate(_table(folder)):
                if row[partition + 1] > row[partition]:
                    path = folder / _run_name(number)
                    self._slices.append(_Slice(path, int(row[partition]), int(row[partition + 1])))

    def __len__(self) -> int:
        return sum(piece.stop - piece.start for piece in self._slices)

    def chunks(self) -> Iterator[Chunk]:
        """All records, in chunks of ascending keys."""
        yield from self._cut(self._slices)

    def rows(self) -> Iterator[np.ndarray]:
        """All records in arrays of ascending keys; a group that isn't held whole isn't sorted by its other fields."""
        for chunk in self.chunks():
            yield from chunk.parts()

    def _cut(self, slices: list[_Slice]) -> Iterator[Chunk]:
        if not slices:
            return
        ends = [_key_range(piece, self.dtype) for piece in slices]
        least, most = min(end[0] for end in ends), max(end[1] for end in ends)
        total = sum(piece.stop - piece.start for piece in slices)
        if total <= self.capacity or least == most:
            yield Chunk(least, most, total <= self.capacity, tuple(slices), self.dtype, self.capacity)
            return
        self.splits += 1
        pieces = min(most - least + 1, 256, 2 * -(-total // self.capacity))
        lower = [least + (most - least + 1) * part // pieces for part in range(1, pieces)]
        tables = [_positions(piece, self.dtype, lower) for piece in slices]
        for part in range(pieces):
            inner = [
                _Slice(piece.path, table[part], table[part + 1])
                for piece, table in zip(slices, tables)
                if table[part + 1] > table[part]
            ]
            yield from self._cut(inner)


def _run_name(number: int) -> str:
    return f"run-{number:05d}.bin"


def _table(folder: Path) -> np.ndarray:
    try:
        return np.load(folder / _TABLE)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"an earlier phase left no usable table of its runs: {error}",
            where=str(folder / _TABLE),
            fix="delete the run's folder and run again",
        ) from error


def _read(piece: _Slice, dtype: np.dtype) -> np.ndarray:
    count = piece.stop - piece.start
    rows = np.fromfile(piece.path, dtype=dtype, count=count, offset=piece.start * dtype.itemsize)
    if len(rows) != count:
        raise DataError(
            f"the file of an earlier phase is too short: {len(rows)} of {count} records",
            where=f"{piece.path}, byte {(piece.start + len(rows)) * dtype.itemsize}",
            fix="delete the run's folder and run again",
        )
    return rows


def _key_range(piece: _Slice, dtype: np.dtype) -> tuple[int, int]:
    first = _read(_Slice(piece.path, piece.start, piece.start + 1), dtype)["key"][0]
    last = _read(_Slice(piece.path, piece.stop - 1, piece.stop), dtype)["key"][0]
    return int(first), int(last)


def _positions(piece: _Slice, dtype: np.dtype, lower: list[int]) -> list[int]:
    """Where each range of keys begins in a sorted slice; `lower` are the least keys of all ranges but the first."""
    keys = np.memmap(piece.path, dtype=dtype, mode="r")["key"]
    found = [piece.start]
    for key in lower:
        found.append(bisect_left(keys, key, lo=found[-1], hi=piece.stop))
    return [*found, piece.stop]


class KeyReader:
    """Goes through one partition beside something else that ascends by the same key."""

    def __init__(self, runs: Runs) -> None:
        self._arrays = runs.rows()
        self._held = np.zeros(0, dtype=runs.dtype)

    def take(self, stop: int) -> np.ndarray:
        """The records of keys below `stop` that weren't taken yet, by key."""
        taken = []
        while True:
            end = int(np.searchsorted(np.ascontiguousarray(self._held["key"]), np.uint64(stop)))
            taken.append(self._held[:end])
            self._held = self._held[end:]
            if len(self._held):
                break
            following = next(self._arrays, None)
            if following is None:
                break
            self._held = following
        return np.concatenate(taken)
