"""Connected components: in memory and by passes on disk, against a union-find over a dict."""

from __future__ import annotations

import numpy as np
import pytest

from swift.data.dedup import components as module
from swift.data.dedup.components import EDGE, components, stars
from swift.data.dedup.runs import Runs, records


def by_dict(pairs) -> dict[int, int]:
    parents: dict[int, int] = {}

    def root(node):
        while parents.setdefault(node, node) != node:
            node = parents[node]
        return node

    for left, right in pairs:
        a, b = root(int(left)), root(int(right))
        parents[max(a, b)] = min(a, b)
    return {node: root(node) for node in parents if root(node) != node}


def graph(kind: str, size: int) -> np.ndarray:
    rng = np.random.default_rng(size)
    if kind == "random":
        pairs = rng.integers(0, size, (size * 2 // 3, 2))
    elif kind == "path":
        pairs = np.stack([np.arange(size), np.arange(size) + 1], 1)[rng.permutation(size)]
    elif kind == "star":
        pairs = np.stack([np.full(size, size // 2), rng.integers(0, size, size)], 1)
    else:  # pairs, most of them several times
        pairs = np.repeat(rng.integers(0, size, (size // 4, 1)) * 2 + np.array([[0, 1]]), 4, axis=0)
    return pairs.astype(np.uint64) << np.uint64(35)


@pytest.mark.parametrize("numba", [True, False])
@pytest.mark.parametrize("kind", ["random", "path", "star", "pairs"])
@pytest.mark.parametrize("size", [5, 60, 400])
def test_components_in_memory_and_on_disk(tmp_path, monkeypatch, kind, size, numba):
    monkeypatch.setattr(module, "has_numba", lambda: numba)
    pairs = graph(kind, size)
    wanted = by_dict(pairs)
    edges = records(EDGE, key=pairs[:, 0], other=pairs[:, 1])
    for memory, on_disk in ((1 << 20, False), (size * 8, len(wanted) * 192 > size * 8)):
        scratch = tmp_path / str(memory)
        found = components(iter(np.array_split(edges, 4)), scratch, memory)
        assert bool(found.passes) == on_disk
        rows = [row for part in Runs([found.folder], EDGE, 0, memory).rows() for row in part.tolist()]
        assert dict(rows) == wanted
        assert len(rows) == len(wanted) == found.nodes
        assert sorted(path.name for path in scratch.iterdir()) == ["components"]  # passes leave nothing behind


def test_no_edges(tmp_path):
    found = components(iter([]), tmp_path, 1 << 20)
    assert found.nodes == 0
    assert list(Runs([found.folder], EDGE, 0, 1 << 20).rows()) == []


def test_stars_are_sorted_by_node():
    edges = records(EDGE, key=np.array([9, 4, 7, 3]), other=np.array([4, 2, 7, 8]))
    assert stars(edges).tolist() == [(4, 2), (8, 3), (9, 2)]
