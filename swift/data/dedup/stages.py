"""What the phases of the deduplication operators share: partitions, and records joined back to documents.

Knows nothing of how duplicates are found.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from swift.core.errors import UsageError
from swift.data.dedup.nodes import MAX_SHARDS, node_of, read_id, row_of, shard_of
from swift.data.dedup.runs import Chunk, KeyReader, Runs, starts_of
from swift.data.engine.document import Document
from swift.data.engine.operator import PhaseWork

_MOST_PARTITIONS = 1024


def partitions_of(num_shards: int, asked: int | None, suggested: int = 0) -> int:
    """How many tasks share the keys: as many as asked for, else as suggested, else one for each shard, up to 1024.

    Raises:
        UsageError: more shards than a node can number.
    """
    if num_shards > MAX_SHARDS:
        raise UsageError(
            f"{num_shards} shards are more than the {MAX_SHARDS} that deduplication can number",
            fix="let a shard hold more: raise its size in the recipe",
        )
    return asked or suggested or max(1, min(num_shards, _MOST_PARTITIONS))


def check_partitions(partitions: int | None) -> None:
    """Refuse a number of partitions below 1.

    Raises:
        UsageError: naming it.
    """
    if partitions is not None and partitions < 1:
        raise UsageError(f"partitions is {partitions}: it is a number of tasks, at least 1", where="partitions")


def runs_of(work: PhaseWork, phase: str, tasks: int, dtype: np.dtype, partition: int, name: str = "") -> Runs:
    """One partition of what all tasks of an earlier phase left, with a quarter of the memory for holding it."""
    folders = [work.result(phase, index) / name for index in range(tasks)]
    return Runs(folders, dtype, partition, work.context.memory_bytes // 4)


def joined(work: PhaseWork, shard: int, runs: Runs) -> Iterator[tuple[list[Document], dict[int, np.ndarray]]]:
    """The batches of a shard, each with the records whose key is the node of one of its documents.

    Yields:
        the batch, and place in the batch -> records, for documents that have any.
    """
    reader = KeyReader(runs)
    row = 0
    for batch in work.documents(shard):
        found = reader.take(node_of(shard, row + len(batch)))
        places: dict[int, np.ndarray] = {}
        if len(found):
            borders = np.flatnonzero(np.diff(found["key"])) + 1
            for group in np.split(found, borders):
                places[row_of(int(group["key"][0])) - row] = group
        row += len(batch)
        yield batch, places


def id_of(work: PhaseWork, phase: str, node: int) -> str:
    """The id of a document of any shard, from the file that the phase left for its shard."""
    return read_id(work.result(phase, shard_of(node)), row_of(node))


def repeats(chunk: Chunk) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Of records with `key` and `low` (a hash), `node` and `at` (a place): those that aren't the first of their hash.

    Yields:
        the records, and for each of them the first one of its hash.
    """
    if chunk.whole:
        for rows in chunk.parts():
            starts = starts_of(rows["key"], rows["low"])
            first = rows[starts][np.cumsum(starts) - 1]
            yield rows[~starts], first[~starts]
        return
    firsts: dict[int, np.ndarray] = {}  # by the other half of the hash: practically one
    for rows in chunk.parts():
        starts = starts_of(rows["low"])  # a part is sorted
        for row in rows[starts]:
            firsts.setdefault(int(row["low"]), row)  # parts come in the order of shards, and of documents in a shard
    for rows in chunk.parts():
        for low, first in firsts.items():
            same = rows[(rows["low"] == low) & ((rows["node"] != first["node"]) | (rows["at"] != first["at"]))]
            yield same, np.full(len(same), first, dtype=rows.dtype)
