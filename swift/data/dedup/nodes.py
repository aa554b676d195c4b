"""A document's number in a run, and the file that leads from numbers back to ids.

A node is shard and row in one 64-bit integer, so nodes sort in input order. Knows nothing of what is compared.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import zstandard

from swift.core.errors import DataError
from swift.core.files import disk_errors

ROW_BITS = 40
MAX_SHARDS = 1 << (63 - ROW_BITS)
ROW_MASK = (1 << ROW_BITS) - 1
_IDS_PER_BLOCK = 1024
_DATA = "ids.zst"
_OFFSETS = "ids.npy"


def node_of(shard: int, row: int) -> int:
    """The node of the `row`-th document (from 0) of a shard."""
    return shard << ROW_BITS | row


def shard_of(node: int) -> int:
    """The shard of a node."""
    return int(node) >> ROW_BITS


def row_of(node: int) -> int:
    """The row of a node in its shard."""
    return int(node) & ROW_MASK


def shard_cuts(num_shards: int) -> np.ndarray:
    """uint64 [num_shards - 1]: where the nodes of shards 1, 2, … begin."""
    return np.arange(1, num_shards, dtype=np.uint64) << np.uint64(ROW_BITS)


class IdWriter:
    """Writes the ids of a shard's documents, in order, in blocks that are compressed (about 5 bytes a document)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        self._block: list[str] = []
        self._ends = [0]
        with disk_errors(folder / _DATA):
            self._file = (folder / _DATA).open("wb")

    def add(self, ids: list[str]) -> None:
        """Append the ids of the next documents."""
        self.count += len(ids)
        self._block += ids
        while len(self._block) >= _IDS_PER_BLOCK:
            self._flush(self._block[:_IDS_PER_BLOCK])
            del self._block[:_IDS_PER_BLOCK]

    def _flush(self, ids: list[str]) -> None:
        data = zstandard.compress(json.dumps(ids).encode(), 3)
        with disk_errors(self.folder / _DATA, len(data)):
            self._file.write(data)
        self._ends.append(self._ends[-1] + len(data))

    def close(self) -> None:
        """Write what is left and the table of blocks."""
        if self._block:
            self._flush(self._block)
        with disk_errors(self.folder / _OFFSETS):
            self._file.close()
            np.save(self.folder / _OFFSETS, np.asarray(self._ends, dtype=np.int64))


def read_id(folder: Path, row: int) -> str:
    """The id of a shard's `row`-th document.

    Raises:
        DataError: the folder holds no such row.
    """
    written = (folder / _DATA).stat()
    block = _read_block(folder, row // _IDS_PER_BLOCK, (written.st_mtime_ns, written.st_ino))
    if row % _IDS_PER_BLOCK >= len(block):
        raise DataError(f"there is no document {row}", where=str(folder), fix="delete the run's folder and run again")
    return block[row % _IDS_PER_BLOCK]


@lru_cache(maxsize=64)
def _read_block(folder: Path, block: int, stamp: tuple[int, int]) -> list[str]:
    """The ids of a block; `stamp` tells a folder from an earlier one of that name."""
    ends = np.load(folder / _OFFSETS, mmap_mode="r")
    if block + 1 >= len(ends):
        return []
    with (folder / _DATA).open("rb") as file:
        file.seek(int(ends[block]))
        return json.loads(zstandard.decompress(file.read(int(ends[block + 1] - ends[block]))))
