"""Connected components of a graph given as edges on disk: which documents belong to one cluster of duplicates.

If the distinct nodes fit into memory, a union-find goes over the edges once; edges that arrive are reduced to a
spanning forest whenever they fill their share. If they don't, the edges are rewritten in sorted passes until they form
stars (alternating large-star and small-star, Kiveris et al. 2014, "Connected Components in MapReduce and Beyond"), each
pass in bounded memory. Both give the same result: every node but the least of its component, with that least node.

Knows nothing of what nodes are.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from swift.core.errors import SwiftError
from swift.data.compiled import has_numba
from swift.data.dedup.runs import Runs, RunWriter, records, starts_of

EDGE = np.dtype([("key", "<u8"), ("other", "<u8")])
_NO_CUTS = np.zeros(0, dtype=np.uint64)
_BYTES_PER_NODE = 32  # the sorted nodes, their positions, their parents, and what makes them
_BYTES_PER_EDGE = 64  # the edge, its ends as positions, and the sorting of both
_MOST_PASSES = 200


@dataclass
class Components:
    """Where the result is, and how it came about.

    Attributes:
        folder: of runs of `EDGE`: key = node, other = the least node of its component; least nodes aren't in.
        passes: over the edges on disk; 0 if all fitted into memory.
        nodes: in the result.
    """

    folder: Path
    passes: int = 0
    nodes: int = 0


def components(edges: Iterator[np.ndarray], scratch: Path, memory_bytes: int) -> Components:
    """The components of a graph.

    Args:
        edges: arrays of `EDGE`; direction, order and repetitions don't matter.
        scratch: a folder for files of passes; the result is in it.
        memory_bytes: that may be held.
    """
    forest = _Forest(memory_bytes // 2)
    spilled: RunWriter | None = None
    for rows in edges:
        if spilled is None and not forest.add(rows):
            spilled = RunWriter(scratch / "edges", EDGE, _NO_CUTS, memory_bytes // 4, unique=True)
            spilled.add(_both_ways(forest.edges()))
        if spilled is not None:
            spilled.add(_both_ways(rows))
    if spilled is not None:
        forest.clear()
        spilled.close()
        return _by_passes(spilled.folder, scratch, memory_bytes)
    result = RunWriter(scratch / "components", EDGE, _NO_CUTS, memory_bytes // 4, unique=True)
    result.add(forest.edges())
    result.close()
    return Components(result.folder, nodes=result.count)


class _Forest:
    """Edges, reduced to (node, least node of its component) whenever they fill their share of memory."""

    def __init__(self, memory_bytes: int) -> None:
        self.most_edges = max(1, memory_bytes // (_BYTES_PER_EDGE + _BYTES_PER_NODE))
        self._held: list[np.ndarray] = []
        self._count = 0

    def add(self, rows: np.ndarray) -> bool:
        """Take edges; False if the forest doesn't fit any more (the edges of this call aren't taken then)."""
        for start in range(0, len(rows), self.most_edges):
            part = rows[start : start + self.most_edges]
            if self._count + len(part) > self.most_edges:
                self._reduce()
                if self._count + len(part) > self.most_edges:
                    return False  # what was taken of this call is in the forest, and harmless there
            self._held.append(part)
            self._count += len(part)
        return True

    def edges(self) -> np.ndarray:
        """`EDGE` of every node that isn't the least of its component."""
        self._reduce()
        return self._held[0] if self._held else np.zeros(0, dtype=EDGE)

    def clear(self) -> None:
        self._held, self._count = [], 0

    def _reduce(self) -> None:
        if self._held:
            reduced = stars(np.concatenate(self._held))
            self._held, self._count = [reduced], len(reduced)


def stars(edges: np.ndarray) -> np.ndarray:
    """`EDGE` (node, least node of its component) for every node that isn't the least, by node; in memory."""
    nodes, places = np.unique(np.concatenate([edges["key"], edges["other"]]), return_inverse=True)
    parents = np.arange(len(nodes), dtype=np.int64)
    left, right = places[: len(edges)], places[len(edges) :]
    if has_numba():
        from swift.data.dedup import kernels

        kernels.union(parents, left, right)
    else:
        _union_numpy(parents, left, right)
    moved = np.flatnonzero(parents != np.arange(len(nodes)))
    return records(EDGE, key=nodes[moved], other=nodes[parents[moved]])


def _union_numpy(parents: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
    """`kernels.union` without numba: hang larger roots below smaller ones until no edge joins two trees."""
    while True:
        a, b = parents[left], parents[right]
        apart = a != b
        if not apart.any():
            return
        left, right, a, b = left[apart], right[apart], a[apart], b[apart]
        np.minimum.at(parents, np.maximum(a, b), np.minimum(a, b))
        while True:  # every node directly below its root
            above = parents[parents]
            if np.array_equal(above, parents):
                break
            parents[:] = above


def _both_ways(edges: np.ndarray) -> np.ndarray:
    edges = edges[edges["key"] != edges["other"]]
    turned = records(EDGE, key=edges["other"], other=edges["key"])
    return np.concatenate([edges, turned])


def _by_passes(folder: Path, scratch: Path, memory_bytes: int) -> Components:
    """Alternate the two star operations until neither changes an edge."""
    for number in range(1, _MOST_PASSES):
        large = RunWriter(scratch / f"large-{number}", EDGE, _NO_CUTS, memory_bytes // 4, unique=True)
        changed = _large_star(Runs([folder], EDGE, 0, memory_bytes // 4), large)
        large.close()
        shutil.rmtree(folder)
        small = RunWriter(scratch / f"small-{number}", EDGE, _NO_CUTS, memory_bytes // 4, unique=True)
        changed += _small_star(Runs([large.folder], EDGE, 0, memory_bytes // 4), small)
        small.close()
        shutil.rmtree(large.folder)
        folder = small.folder
        if not changed:
            result = RunWriter(scratch / "components", EDGE, _NO_CUTS, memory_bytes // 4, unique=True)
            last = -1
            for rows in Runs([folder], EDGE, 0, memory_bytes // 4).rows():
                down = rows[(rows["key"] > rows["other"]) & (rows["key"].astype(np.int64) != last)]
                down = down[starts_of(down["key"])]  # a node has one neighbour now, though perhaps many times
                last = int(down["key"][-1]) if len(down) else last
                result.add(down)
            result.close()
            shutil.rmtree(folder)
            return Components(result.folder, passes=number, nodes=result.count)
    raise SwiftError("the clusters of duplicates didn't settle", where=str(scratch), fix="report this as a bug")


def _neighbourhoods(runs: Runs) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(node, neighbour, least neighbour) of edges given both ways; a large neighbourhood comes in several pieces."""
    for chunk in runs.chunks():
        least_of_all = None
        if not chunk.whole:
            least_of_all = min(int(part["other"].min()) for part in chunk.parts())
        for part in chunk.parts():
            part = part[starts_of(part["key"], part["other"])]
            starts = starts_of(part["key"])
            least = part["other"][starts][np.cumsum(starts) - 1]
            if least_of_all is not None:
                least = np.full(len(part), least_of_all, dtype=np.uint64)
            yield part["key"], part["other"], least


def _large_star(runs: Runs, out: RunWriter) -> int:
    """Join each node's larger neighbours to the least of its neighbours and itself; returns the edges that changed.

    What is written is the input of `_small_star`: each edge once, at its larger end.
    """
    changed = 0
    for node, neighbour, least in _neighbourhoods(runs):
        larger = neighbour > node
        least = np.minimum(least, node)
        changed += int((larger & (least != node)).sum())
        out.add(records(EDGE, key=neighbour[larger], other=least[larger]))
    return changed


def _small_star(runs: Runs, out: RunWriter) -> int:
    """Join each node's smaller neighbours, and itself, to the least of them; returns the edges that changed.

    What is written is the input of `_large_star`: each edge both ways.
    """
    changed = 0
    for node, neighbour, least in _neighbourhoods(runs):  # every neighbour is smaller than the node here
        moved = neighbour != least
        changed += int(moved.sum())
        out.add(_both_ways(records(EDGE, key=neighbour[moved], other=least[moved])))
        first = starts_of(node)
        out.add(_both_ways(records(EDGE, key=node[first], other=least[first])))
    return changed
