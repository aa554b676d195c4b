"""Metrics of classes, numbers and entities, from arrays of labels and predictions, and a report per class.

A metric that isn't defined is None: precision of a class that was never predicted, recall of one that never occurs,
the area under a curve with one kind of rows. Means over classes take the classes that occur or were predicted, with 0
for what is undefined in them. Knows NumPy only. Metrics of orders are in `rank_metrics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from swift.objectives.rank_metrics import midranks


@dataclass(frozen=True)
class ClassScore:
    """How well one class was found.

    Attributes:
        precision: right share of its predictions; recall: found share of its rows; f1: 2 tp / (2 tp + fp + fn).
        support: its rows; predicted: predictions of it.
    """

    name: str
    precision: float | None
    recall: float | None
    f1: float | None
    support: int
    predicted: int


@dataclass(frozen=True)
class ClassReport:
    """Scores of all classes and their means.

    Attributes:
        accuracy: rows that are right as a whole; None where it has no meaning (entities).
        averages: precision, recall and f1 under `micro`, `macro`, and `weighted` (by support); empty without rows.
        rows: how many were judged.
    """

    classes: tuple[ClassScore, ...]
    averages: dict[str, dict[str, float]]
    accuracy: float | None
    rows: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "rows": self.rows,
            "accuracy": self.accuracy,
            "classes": {score.name: {k: v for k, v in vars(score).items() if k != "name"} for score in self.classes},
            "averages": self.averages,
        }

    def numbers(self) -> dict[str, float]:
        """`accuracy`, `macro_f1`, `micro_f1`, `weighted_f1`, and `f1/<class>`, as far as defined."""
        found = {"accuracy": self.accuracy} | {f"{kind}_f1": mean["f1"] for kind, mean in self.averages.items()}
        found |= {f"f1/{score.name}": score.f1 for score in self.classes}
        return {name: value for name, value in found.items() if value is not None}

    def as_text(self) -> str:
        """A table; what is undefined is a dash."""
        width = max([len("weighted"), *(len(score.name) for score in self.classes)])
        lines = [f"{'':{width}}  precision  recall      f1  support"]
        for s in self.classes:
            lines.append(
                f"{s.name:{width}}  {_cell(s.precision, 9)}  {_cell(s.recall, 6)}  {_cell(s.f1, 6)}  {s.support:7d}"
            )
        for kind, m in self.averages.items():
            lines.append(f"{kind:{width}}  {_cell(m['precision'], 9)}  {_cell(m['recall'], 6)}  {_cell(m['f1'], 6)}")
        lines.append(f"accuracy {_cell(self.accuracy, 0)} of {self.rows} rows")
        return "\n".join(lines)


def _cell(value: float | None, width: int) -> str:
    return f"{'–' if value is None else f'{value:.4f}':>{width}}"


def accuracy(labels: np.ndarray, predictions: np.ndarray) -> float | None:
    """Share of rows that are right, all labels of a row together where there are several."""
    if not len(labels):
        return None
    same = np.asarray(labels) == np.asarray(predictions)
    return float((same if same.ndim == 1 else same.all(1)).mean())


def confusion_matrix(labels: np.ndarray, predictions: np.ndarray, num_classes: int) -> np.ndarray:
    """int64 [classes, classes]: rows of class i for which j was predicted."""
    places = np.asarray(labels, np.int64) * num_classes + np.asarray(predictions, np.int64)
    return np.bincount(places, minlength=num_classes**2).reshape(num_classes, num_classes)


def class_report(labels: np.ndarray, predictions: np.ndarray, names: Sequence[str]) -> ClassReport:
    """Of one class per row: labels and predictions int [rows], from 0."""
    matrix = confusion_matrix(labels, predictions, len(names))
    return _report(names, matrix.diagonal(), matrix.sum(1), matrix.sum(0), accuracy(labels, predictions), len(labels))


def multi_label_report(labels: np.ndarray, predictions: np.ndarray, names: Sequence[str]) -> ClassReport:
    """Of several classes per row: labels and predictions bool [rows, classes]."""
    true, said = np.asarray(labels, bool).reshape(-1, len(names)), np.asarray(predictions, bool).reshape(-1, len(names))
    return _report(names, (true & said).sum(0), true.sum(0), said.sum(0), accuracy(true, said), len(true))


def entity_report(labels: Sequence[Sequence[str]], predictions: Sequence[Sequence[str]]) -> ClassReport:
    """Of entities in rows of BIO tags: right are those whose type, start and end agree (CoNLL-2003's measure)."""
    true = [{(row, *entity) for entity in entities(tags)} for row, tags in enumerate(labels)]
    said = [{(row, *entity) for entity in entities(tags)} for row, tags in enumerate(predictions)]
    if any(len(a) != len(b) for a, b in zip(labels, predictions, strict=True)):
        raise ValueError("a row has not as many predicted tags as tokens")
    all_true, all_said = set().union(*true), set().union(*said)
    names = sorted({entity[1] for entity in all_true | all_said})
    counts = [[sum(e[1] == n for e in found) for n in names] for found in (all_true & all_said, all_true, all_said)]
    hits, support, predicted = (np.array(column, np.int64) for column in counts)
    return _report(names, hits, support, predicted, None, len(labels))


def entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """(type, start, end) of each entity. I- after another type, or after no entity, begins one, as in conlleval."""
    found: list[tuple[str, int, int]] = []
    kind, start = "", 0
    for place, tag in enumerate([*tags, "O"]):
        mark, _, name = tag.partition("-")
        if kind and (mark != "I" or name != kind):
            found.append((kind, start, place))
            kind = ""
        if mark in ("B", "I") and not kind:
            kind, start = name, place
    return found


def _report(
    names: Sequence[str],
    hits: np.ndarray,
    support: np.ndarray,
    predicted: np.ndarray,
    right: float | None,
    rows: int,
) -> ClassReport:
    """From each class's true positives, rows and predictions."""

    def share(part: float, whole: float) -> float | None:
        return float(part / whole) if whole else None

    columns = zip(names, hits.tolist(), support.tolist(), predicted.tolist(), strict=True)
    classes = tuple(ClassScore(n, share(h, p), share(h, s), share(2 * h, s + p), s, p) for n, h, s, p in columns)
    present = [score for score in classes if score.support or score.predicted]
    averages: dict[str, dict[str, float]] = {}
    if present:
        total, truly, said = int(hits.sum()), int(support.sum()), int(predicted.sum())
        pooled = (share(total, said), share(total, truly), share(2 * total, truly + said))
        averages["micro"] = dict(zip(("precision", "recall", "f1"), (value or 0.0 for value in pooled), strict=True))
        for kind, weights in (("macro", [1] * len(present)), ("weighted", [score.support for score in present])):
            if sum(weights):
                averages[kind] = {
                    measure: float(np.average([getattr(s, measure) or 0.0 for s in present], weights=weights))
                    for measure in ("precision", "recall", "f1")
                }
    return ClassReport(classes, averages, right, rows)


def roc_auc(positive: np.ndarray, scores: np.ndarray) -> float | None:
    """P(a positive row scores above a negative one), ties counting half (Mann-Whitney). None with one kind of rows."""
    positive = np.asarray(positive, bool)
    above, below = int(positive.sum()), int((~positive).sum())
    if not above or not below:
        return None
    return float((midranks(scores)[positive].sum() - above * (above + 1) / 2) / (above * below))


def roc_auc_per_class(labels: np.ndarray, scores: np.ndarray) -> list[float | None]:
    """Each class against the rest: labels int [rows] or bool [rows, classes], scores [rows, classes]."""
    labels = np.asarray(labels)
    hot = labels if labels.ndim == 2 else labels[:, None] == np.arange(scores.shape[1])[None]
    return [roc_auc(hot[:, c], scores[:, c]) for c in range(scores.shape[1])]


def mean_defined(values: Sequence[float | None]) -> float | None:
    """The mean of what is defined; None if nothing is."""
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None


def regression_scores(wanted: np.ndarray, given: np.ndarray) -> dict[str, float]:
    """`mse`, `mae`, and `r2` where the wanted numbers [rows] or [rows, outputs] differ (mean over outputs that do)."""
    if not len(wanted):
        return {}
    wanted, given = (np.asarray(a, np.float64).reshape(len(a), -1) for a in (wanted, given))
    error = given - wanted
    found = {"mse": float((error**2).mean()), "mae": float(np.abs(error).mean())}
    spread = ((wanted - wanted.mean(0)) ** 2).sum(0)
    r2 = [1 - float(e) / float(s) if s > 0 else None for e, s in zip((error**2).sum(0), spread, strict=True)]
    mean = mean_defined(r2)
    return found if mean is None else {**found, "r2": mean}
