"""From documents that share a band to clusters, and to the documents that have to go.

A pair counts if the share of equal hashes in both signatures, cut to 16 bits each, is high enough. Members of a band's
group are compared with its first member, those that aren't like it with the first of them, and so on; so the pairs are
linear in the size of the group. Knows nothing of texts and of how signatures are made.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from swift.core.files import disk_errors
from swift.data.dedup.components import EDGE, components
from swift.data.dedup.minhash import similarity
from swift.data.dedup.nodes import ROW_BITS, ROW_MASK
from swift.data.dedup.runs import Chunk, Runs, RunWriter, records, starts_of

MOST_LEADERS = 8  # members of one band's group that others are compared with
_ROWS_MAPPED = 4096
_SIGNATURES = "signatures.bin"
_LENGTHS = "lengths.bin"
_NO_CUTS = np.zeros(0, dtype=np.uint64)


class Keepers:
    """Writes what later phases ask of single documents of a shard: signatures (16 bits a hash) and lengths."""

    def __init__(self, folder: Path, *, signatures: bool, lengths: bool) -> None:
        self.folder = folder
        self._signatures = (folder / _SIGNATURES).open("wb") if signatures else None
        self._lengths = (folder / _LENGTHS).open("wb") if lengths else None

    def add(self, signatures: np.ndarray, texts: list[str]) -> None:
        """The next documents: uint32 [texts, hashes] and the texts."""
        with disk_errors(self.folder, signatures.nbytes // 2):
            if self._signatures:
                self._signatures.write(signatures.astype("<u2").tobytes())
            if self._lengths:
                self._lengths.write(np.array([len(text) for text in texts], dtype="<i8").tobytes())

    def close(self) -> None:
        with disk_errors(self.folder):
            for file in (self._signatures, self._lengths):
                if file:
                    file.close()


def gather(folders: list[Path], name: str, dtype: str, width: int, nodes: np.ndarray) -> np.ndarray:
    """[nodes, width] values that the shards' files hold for nodes (any order, repetitions allowed)."""
    wanted, places = np.unique(nodes, return_inverse=True)
    out = np.empty((len(wanted), width), dtype=dtype)
    shards = (wanted >> np.uint64(ROW_BITS)).astype(np.int64)
    for shard in np.unique(shards).tolist():
        inside = np.flatnonzero(shards == shard)
        rows = (wanted[inside] & np.uint64(ROW_MASK)).astype(np.int64)
        for start in range(0, len(rows), _ROWS_MAPPED):  # what is mapped and touched counts as memory of the process
            part = rows[start : start + _ROWS_MAPPED]
            first, count = int(part[0]), int(part[-1] - part[0]) + 1
            offset = first * width * out.itemsize
            values = np.memmap(folders[shard] / name, dtype=dtype, mode="r", offset=offset, shape=(count, width))
            out[inside[start : start + len(part)]] = values[part - first]
    return out[places]


class Signatures:
    """The signatures of all shards, for verifying candidates.

    Args:
        folders: of each shard, as `Keepers` left them.
        hashes: in a signature.
        memory_bytes: for signatures that are compared at a time.
    """

    def __init__(self, folders: list[Path], hashes: int, memory_bytes: int) -> None:
        self.folders = folders
        self.hashes = hashes
        self._pairs_at_a_time = max(1, memory_bytes // (10 * hashes))

    def pairs(self, bands: Runs, least: float) -> Iterator[np.ndarray]:
        """`EDGE` (node, an earlier node of its band's group) of sufficient similarity; of any, if `least` is 0."""
        for chunk in bands.chunks():
            if chunk.whole:
                for rows in chunk.parts():
                    yield from self._of_groups(rows, least)
            else:
                yield from self._of_giant(chunk, least)

    def _of_groups(self, rows: np.ndarray, least: float) -> Iterator[np.ndarray]:
        starts = starts_of(rows["key"])
        alone = starts & np.append(starts[1:], True)
        rows = rows[~alone]
        for _ in range(MOST_LEADERS):
            if not len(rows):
                return
            starts = starts_of(rows["key"])
            leaders = rows["node"][starts][np.cumsum(starts) - 1]
            edges = records(EDGE, key=rows["node"][~starts], other=leaders[~starts])
            alike = self._alike(edges, least)
            yield edges[alike]
            rows = rows[~starts][~alike]

    def _of_giant(self, chunk: Chunk, least: float) -> Iterator[np.ndarray]:
        """The same for one group, whose parts come in the order of nodes."""
        leaders: list[int] = []
        for part in chunk.parts():
            nodes = part["node"]
            for which in range(MOST_LEADERS):
                if not len(nodes):
                    break
                if which == len(leaders):
                    leaders.append(int(nodes[0]))
                    nodes = nodes[1:]
                edges = records(EDGE, key=nodes, other=np.full(len(nodes), leaders[which], dtype=np.uint64))
                alike = self._alike(edges, least)
                yield edges[alike]
                nodes = nodes[~alike]

    def _alike(self, edges: np.ndarray, least: float) -> np.ndarray:
        alike = np.ones(len(edges), dtype=bool)
        for start in range(0, len(edges) if least > 0 else 0, self._pairs_at_a_time):
            part = edges[start : start + self._pairs_at_a_time]
            both = gather(self.folders, _SIGNATURES, "<u2", self.hashes, np.concatenate([part["key"], part["other"]]))
            alike[start : start + len(part)] = similarity(both[: len(part)], both[len(part) :]) >= least
        return alike


def write_clusters(
    edges: Runs, folder: Path, shard_cuts: np.ndarray, lengths: list[Path] | None, memory_bytes: int
) -> None:
    """Write the nodes that go, each with the node of its cluster that stays, to runs in `folder/dropped` by shard.

    Args:
        edges: between nodes.
        folder: of the task; `clusters.json` there tells how many nodes go and over how many passes they were found.
        shard_cuts: where shards begin.
        lengths: the shards' folders, if the longest of a cluster stays; else the first does.
        memory_bytes: that may be held.
    """
    scratch = folder / "scratch"
    scratch.mkdir()
    found = components(edges.rows(), scratch, memory_bytes // 2)
    dropped = RunWriter(folder / "dropped", EDGE, shard_cuts, memory_bytes // 8)
    members = Runs([found.folder], EDGE, 0, memory_bytes // 8)
    if lengths is None:
        for rows in members.rows():
            dropped.add(rows)
    else:
        by_root = RunWriter(scratch / "by-root", EDGE, _NO_CUTS, memory_bytes // 8)
        for rows in members.rows():
            by_root.add(records(EDGE, key=rows["other"], other=rows["key"]))
        by_root.close()
        for chunk in Runs([by_root.folder], EDGE, 0, memory_bytes // 8).chunks():
            for rows in _all_but_longest(chunk, lengths):
                dropped.add(rows)
    dropped.close()
    shutil.rmtree(scratch)
    report = folder / "clusters.json"
    with disk_errors(report):
        report.write_text(json.dumps({"dropped": dropped.count, "passes": found.passes}), encoding="utf-8")


def _all_but_longest(chunk: Chunk, lengths: list[Path]) -> Iterator[np.ndarray]:
    """`EDGE` (node, longest node of its cluster; of equals the first) for whole clusters given as (root, node)."""
    if chunk.whole:
        for rows in chunk.parts():
            roots = np.unique(rows["key"])
            keys = np.concatenate([roots, rows["key"]])
            nodes = np.concatenate([roots, rows["other"]])
            sizes = gather(lengths, _LENGTHS, "<i8", 1, nodes)[:, 0]
            order = np.lexsort([nodes, -sizes, keys])
            keys, nodes = keys[order], nodes[order]
            starts = starts_of(keys)
            longest = nodes[starts][np.cumsum(starts) - 1]
            yield records(EDGE, key=nodes[~starts], other=longest[~starts])
        return
    best = min(_longest(np.array([chunk.least], dtype=np.uint64), lengths), *_longest_of_parts(chunk, lengths))[1]
    if best != chunk.least:
        yield records(EDGE, key=np.array([chunk.least], dtype=np.uint64), other=np.array([best], dtype=np.uint64))
    for part in chunk.parts():
        nodes = part["other"][part["other"] != best]
        yield records(EDGE, key=nodes, other=np.full(len(nodes), best, dtype=np.uint64))


def _longest_of_parts(chunk: Chunk, lengths: list[Path]) -> list[tuple[int, int]]:
    return [_longest(part["other"], lengths) for part in chunk.parts()]


def _longest(nodes: np.ndarray, lengths: list[Path]) -> tuple[int, int]:
    """(minus the length, node) of the longest, the first of equals."""
    sizes = gather(lengths, _LENGTHS, "<i8", 1, nodes)[:, 0]
    return min(zip((-sizes).tolist(), nodes.tolist()))
