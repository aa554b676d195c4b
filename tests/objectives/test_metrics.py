"""Metrics against numbers worked out by hand, and against counting over all pairs or all orders."""

from __future__ import annotations

import math
from itertools import pairwise, permutations, product

import numpy as np
import pytest

from swift.objectives.metrics import (
    accuracy,
    class_report,
    confusion_matrix,
    entities,
    entity_report,
    mean_defined,
    multi_label_report,
    regression_scores,
    roc_auc,
    roc_auc_per_class,
)
from swift.objectives.rank_metrics import (
    midranks,
    ndcg,
    pearson,
    ranking_scores,
    recall_at,
    reciprocal_rank,
    retrieval_scores,
    similarity_scores,
    spearman,
)

LABELS, GUESSES = np.array([0, 0, 0, 1, 1, 2]), np.array([0, 0, 1, 1, 2, 0])
NAMES = ["liability", "term", "notice"]


def test_classes_by_hand():
    assert confusion_matrix(LABELS, GUESSES, 3).tolist() == [[2, 1, 0], [0, 1, 1], [1, 0, 0]]
    report = class_report(LABELS, GUESSES, NAMES)
    first, second, third = report.classes
    assert (first.precision, first.recall, first.f1, first.support, first.predicted) == (2 / 3, 2 / 3, 2 / 3, 3, 3)
    assert (second.precision, second.recall, second.f1) == (0.5, 0.5, 0.5)
    assert (third.precision, third.recall, third.f1) == (0.0, 0.0, 0.0)
    assert report.accuracy == 0.5
    micro, macro, weighted = (report.averages[kind] for kind in ("micro", "macro", "weighted"))
    assert micro == pytest.approx({"precision": 0.5, "recall": 0.5, "f1": 0.5})
    assert macro["f1"] == pytest.approx((2 / 3 + 1 / 2) / 3)
    assert weighted["f1"] == pytest.approx((3 * 2 / 3 + 2 * 1 / 2) / 6)


def test_the_report_says_what_is_undefined():
    report = class_report(np.array([0, 0, 1]), np.array([0, 0, 0]), [*NAMES, "never"])
    scores = {score.name: score for score in report.classes}
    assert scores["term"].precision is None and scores["term"].recall == 0.0 == scores["term"].f1
    assert scores["never"] == scores["never"].__class__("never", None, None, None, 0, 0)
    assert report.averages["macro"]["f1"] == pytest.approx(0.8 / 2)  # of the two classes that are there
    assert report.averages["macro"]["precision"] == pytest.approx((2 / 3) / 2)
    assert report.as_text().splitlines() == [
        "           precision  recall      f1  support",
        "liability     0.6667  1.0000  0.8000        2",
        "term               –  0.0000  0.0000        1",
        "notice             –       –       –        0",
        "never              –       –       –        0",
        "micro         0.6667  0.6667  0.6667",
        "macro         0.3333  0.5000  0.4000",
        "weighted      0.4444  0.6667  0.5333",
        "accuracy 0.6667 of 3 rows",
    ]
    assert report.as_dict()["classes"]["term"] == {
        "precision": None, "recall": 0.0, "f1": 0.0, "support": 1, "predicted": 0
    }  # fmt: skip
    numbers = report.numbers()
    assert numbers["f1/liability"] == pytest.approx(0.8) and "f1/never" not in numbers
    assert numbers["macro_f1"] == pytest.approx(0.4) and numbers["accuracy"] == pytest.approx(2 / 3)


def test_several_labels_by_hand():
    labels = np.array([[1, 0, 1], [0, 1, 0], [1, 1, 0], [0, 0, 0]])
    guesses = np.array([[1, 0, 0], [0, 1, 1], [1, 1, 0], [0, 0, 0]])
    report = multi_label_report(labels, guesses, NAMES)
    assert [score.f1 for score in report.classes] == [1.0, 1.0, 0.0]
    assert report.accuracy == 0.5
    assert report.averages["micro"]["f1"] == pytest.approx(2 * 4 / (5 + 5))
    assert report.averages["weighted"]["f1"] == pytest.approx(4 / 5)


def test_nothing_to_judge():
    empty = class_report(np.zeros(0, int), np.zeros(0, int), NAMES)
    assert empty.accuracy is None and empty.averages == {} and empty.numbers() == {}
    assert "0 rows" in empty.as_text()
    assert accuracy(np.zeros(0), np.zeros(0)) is None and regression_scores(np.zeros(0), np.zeros(0)) == {}
    assert spearman(np.zeros(0), np.zeros(0)) is None and pearson(np.ones(1), np.ones(1)) is None
    assert ranking_scores([]) == {"queries_without_positive": 0.0}
    assert entity_report([], []).averages == {}


@pytest.mark.parametrize("seed", range(5))
def test_auc_counts_pairs(seed):
    draw = np.random.default_rng(seed)
    positive, scores = draw.random(40) < 0.3, draw.integers(0, 8, 40) / 8  # many ties
    pairs = [(a > b) + 0.5 * (a == b) for a, b in product(scores[positive], scores[~positive])]
    assert roc_auc(positive, scores) == pytest.approx(sum(pairs) / len(pairs), rel=1e-12)


def test_auc_of_one_kind_is_undefined():
    assert roc_auc(np.ones(3, bool), np.arange(3)) is None and roc_auc(np.zeros(3, bool), np.arange(3)) is None
    scores = np.array([[0.9, 0.1, 0.0], [0.2, 0.7, 0.1], [0.4, 0.5, 0.1], [0.3, 0.6, 0.1]])
    found = roc_auc_per_class(np.array([0, 1, 0, 1]), scores)
    assert found == [1.0, 1.0, None] and mean_defined(found) == 1.0 and mean_defined([None]) is None
    assert roc_auc_per_class(np.array([[1, 0, 0], [0, 1, 1], [0, 0, 1], [1, 0, 0]]), scores)[0] == 0.75


def test_entities_by_hand():
    tags = ["B-PER", "I-PER", "O", "I-ORG", "I-ORG", "B-ORG", "I-PER", "B-LOC"]
    assert entities(tags) == [("PER", 0, 2), ("ORG", 3, 5), ("ORG", 5, 6), ("PER", 6, 7), ("LOC", 7, 8)]
    assert entities([]) == [] == entities(["O", "O"])
    gold = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-LOC"]]
    said = [["B-PER", "O", "O", "B-LOC"], ["B-PER", "B-LOC"]]
    report = entity_report(gold, said)
    scores = {score.name: score for score in report.classes}
    assert scores["LOC"].f1 == 1.0 and scores["PER"].f1 == 0.0 and scores["PER"].predicted == 2
    assert report.averages["micro"] == pytest.approx({"precision": 0.5, "recall": 2 / 3, "f1": 4 / 7})
    with pytest.raises(ValueError, match="as many"):
        entity_report([["O"]], [["O", "O"]])


def test_numbers_by_hand():
    found = regression_scores(np.array([1.0, 2.0, 3.0]), np.array([1.5, 2.0, 2.0]))
    assert found == pytest.approx({"mse": 1.25 / 3, "mae": 0.5, "r2": 1 - 1.25 / 2})
    assert "r2" not in regression_scores(np.ones(3), np.arange(3))


def test_correlations_by_hand():
    assert midranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]
    assert spearman(np.array([1, 2, 3, 4, 5]), np.array([5, 6, 7, 8, 7])) == pytest.approx(0.820782681668123)
    assert pearson(np.array([1, 2, 3]), np.array([2, 4, 7])) == pytest.approx(0.9933992677987828)
    assert pearson(np.ones(4), np.arange(4)) is None and spearman(np.arange(4), np.ones(4)) is None
    vectors = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]])
    found = similarity_scores(vectors, np.array([[3.0, 0.0]] * 3), np.array([0.9, 0.5, 0.1]))
    half = math.sqrt(0.5)  # cosines 1, half, 0
    spread = 1 + 0.5 - (1 + half) ** 2 / 3
    assert found == pytest.approx({"cosine_spearman": 1.0, "cosine_pearson": 0.4 / math.sqrt(spread * 0.32)})


def by_all_orders(gains: list[float], scores: list[float], measure) -> float:
    """The mean of `measure` of the gains in order, over all orders that put no lower score first."""
    found = [
        measure([gains[i] for i in order])
        for order in permutations(range(len(gains)))
        if all(scores[a] >= scores[b] for a, b in pairwise(order))
    ]
    return sum(found) / len(found)


def dcg(gains: list[float], k: int) -> float:
    return sum(gain / math.log2(place + 2) for place, gain in enumerate(gains[:k]))


CASES = [
    ([0, 1, 0, 1, 0], [5, 4, 3, 2, 1]),
    ([1, 0, 0, 1, 0], [1, 1, 1, 1, 1]),
    ([0, 1, 1, 0, 1, 0], [2, 2, 2, 1, 1, 0]),
    ([3, 0, 2, 1, 0], [1, 3, 1, 2, 3]),
    ([1], [0]),
]


@pytest.mark.parametrize("gains, scores", CASES)
@pytest.mark.parametrize("k", [1, 2, 3, 10])
def test_ties_are_averaged_over_their_orders(gains, scores, k):
    g, s = np.array(gains), np.array(scores)
    first = by_all_orders(gains, scores, lambda o: next(i + 1 for i, x in enumerate(o) if x > 0))
    assert first >= 1
    rank = by_all_orders(gains, scores, lambda o: next((1 / (i + 1) for i, x in enumerate(o[:k]) if x > 0), 0.0))
    assert reciprocal_rank(g, s, k) == pytest.approx(rank, rel=1e-12)
    ideal = dcg(sorted(gains, reverse=True), k)
    assert ndcg(g, s, k) == pytest.approx(by_all_orders(gains, scores, lambda o: dcg(o, k) / ideal), rel=1e-12)
    found = by_all_orders(gains, scores, lambda o: sum(x > 0 for x in o[:k]) / sum(x > 0 for x in gains))
    assert recall_at(g, s, k) == pytest.approx(found, rel=1e-12)


def test_queries_by_hand():
    queries = [
        (np.array([0, 1, 0]), np.array([0.9, 0.8, 0.1])),
        (np.array([1, 0, 0]), np.array([0.9, 0.8, 0.1])),
        (np.array([0, 0, 0]), np.array([0.9, 0.8, 0.1])),
    ]
    found = ranking_scores(queries, cuts=(1, 2))
    assert found["queries_without_positive"] == 1 and found["mrr"] == 0.75
    assert found["recall@1"] == 0.5 and found["recall@2"] == 1.0
    assert found["ndcg@2"] == pytest.approx((1 / math.log2(3) + 1) / 2) and found["ndcg@1"] == 0.5
    vectors = np.array([[1.0, 0.0], [0.0, 3.0], [1.0, 1.0]])
    near = retrieval_scores(np.array([[5.0, 0.1], [0.1, 0.2]]), vectors, [[0], [0, 1]], cuts=(1, 2))
    assert near["mrr"] == pytest.approx((1 + 1 / 2) / 2) and near["recall@2"] == pytest.approx((1 + 1 / 2) / 2)
