"""Metrics of orders: correlations of ranks, and how early the right documents of a query come.

Where documents have equal scores, a metric is its mean over all orders that these could be in; so it neither depends on
the order of the rows nor rewards a model that scores everything alike. What isn't defined is None: a correlation with
something constant, a query without a right document. Knows NumPy only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np


def midranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1, [n]; equal values have the mean of theirs."""
    _, place, counts = np.unique(np.asarray(values, np.float64), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


def pearson(first: np.ndarray, second: np.ndarray) -> float | None:
    """Linear correlation; None where there are fewer than two rows, or a side is constant."""
    a, b = (np.asarray(x, np.float64) for x in (first, second))
    if len(a) < 2 or np.all(a == a[0]) or np.all(b == b[0]):
        return None
    a, b = a - a.mean(), b - b.mean()
    return float((a @ b) / np.sqrt((a @ a) * (b @ b)))


def spearman(first: np.ndarray, second: np.ndarray) -> float | None:
    """The same of the ranks."""
    return pearson(midranks(first), midranks(second)) if len(first) else None


def _groups(gains: np.ndarray, scores: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Of each stretch of equal scores, best first: how many documents come before it, and its gains."""
    order = np.argsort(-scores, kind="stable")
    borders = [0, *(np.flatnonzero(np.diff(scores[order])) + 1).tolist(), len(scores)]
    for start, end in pairwise(borders):
        yield start, gains[order[start:end]]


def reciprocal_rank(gains: np.ndarray, scores: np.ndarray, k: int | None = None) -> float | None:
    """1 / place of the first right document (gain > 0), 0 if it isn't among the first k."""
    gains, scores = np.asarray(gains, np.float64), np.asarray(scores, np.float64)
    if not (gains > 0).any():
        return None
    for before, tied in _groups(gains, scores):
        right, size = int((tied > 0).sum()), len(tied)
        if not right:
            continue
        expected, none_yet = 0.0, 1.0
        for place in range(size - right + 1):
            first_here = none_yet * right / (size - place)
            expected += first_here / (before + place + 1) if k is None or before + place < k else 0.0
            none_yet -= first_here
        return expected
    raise AssertionError("there is a right document")


def ndcg(gains: np.ndarray, scores: np.ndarray, k: int | None = None) -> float | None:
    """Σ gain / log2(1 + place) over the first k, divided by what the best order has (Järvelin & Kekäläinen 2002; linear
    gains)."""
    gains, scores = np.asarray(gains, np.float64), np.asarray(scores, np.float64)
    discounts = 1 / np.log2(np.arange(2, len(gains) + 2))
    if k is not None:
        discounts[k:] = 0
    best = float(np.sort(gains)[::-1] @ discounts)
    if best <= 0:
        return None
    found = sum(
        float(tied.mean() * discounts[before : before + len(tied)].sum()) for before, tied in _groups(gains, scores)
    )
    return found / best


def recall_at(gains: np.ndarray, scores: np.ndarray, k: int) -> float | None:
    """Share of the right documents (gain > 0) that are among the first k."""
    gains, scores = np.asarray(gains, np.float64), np.asarray(scores, np.float64)
    right = int((gains > 0).sum())
    if not right:
        return None
    found = sum(
        float((tied > 0).sum()) * min(len(tied), max(0, k - before)) / len(tied)
        for before, tied in _groups(gains, scores)
    )
    return found / right


def ranking_scores(
    queries: Sequence[tuple[np.ndarray, np.ndarray]], cuts: Sequence[int] = (1, 5, 10)
) -> dict[str, float]:
    """Means over queries, each (gains [documents], scores [documents]).

    Returns:
        `mrr`, `ndcg`, and `ndcg@k` and `recall@k` for each cut, over the queries that have a right document; how many
        have none is `queries_without_positive`. Without any that has one, only that number.
    """
    judged = [(g, s) for g, s in queries if (np.asarray(g) > 0).any()]
    found = {"queries_without_positive": float(len(queries) - len(judged))}
    if not judged:
        return found

    def mean(values: list[float | None]) -> float:
        return float(np.mean([value for value in values if value is not None]))

    found["mrr"] = mean([reciprocal_rank(g, s) for g, s in judged])
    found["ndcg"] = mean([ndcg(g, s) for g, s in judged])
    for k in cuts:
        found[f"ndcg@{k}"] = mean([ndcg(g, s, k) for g, s in judged])
        found[f"recall@{k}"] = mean([recall_at(g, s, k) for g, s in judged])
    return found


def retrieval_scores(
    anchors: np.ndarray, documents: np.ndarray, right: Sequence[Sequence[int]], cuts: Sequence[int] = (1, 5, 10)
) -> dict[str, float]:
    """`ranking_scores` of each anchor [queries, size] among all documents [documents, size], by cosine; `right[i]` are
    the numbers of anchor i's documents."""
    anchors, documents = (_normalised(x) for x in (anchors, documents))
    queries = []
    for anchor, numbers in zip(anchors, right, strict=True):
        gains = np.zeros(len(documents))
        gains[list(numbers)] = 1.0
        queries.append((gains, documents @ anchor))
    return ranking_scores(queries, cuts)


def similarity_scores(first: np.ndarray, second: np.ndarray, wanted: np.ndarray) -> dict[str, float]:
    """`cosine_pearson` and `cosine_spearman` of pairs of vectors [pairs, size] with the similarities they should have,
    as far as defined."""
    cosines = (_normalised(first) * _normalised(second)).sum(1)
    found = {"cosine_pearson": pearson(cosines, wanted), "cosine_spearman": spearman(cosines, wanted)}
    return {name: value for name, value in found.items() if value is not None}


def _normalised(vectors: np.ndarray) -> np.ndarray:
    vectors = np.asarray(vectors, np.float64)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
