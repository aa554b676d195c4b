"""Metrics of a whole evaluation for each task: what the probes of objectives said of all units, as numbers and a table.

The same functions judge a model while it is trained and when it answers files, so the numbers are the same. Knows
nothing of models or loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swift.data.units import Kind
from swift.objectives.classification import ProblemType
from swift.objectives.metrics import (
    ClassReport,
    class_report,
    entity_report,
    mean_defined,
    multi_label_report,
    regression_scores,
    roc_auc,
    roc_auc_per_class,
)
from swift.objectives.predictions import Prediction, Report
from swift.objectives.rank_metrics import pearson, ranking_scores, retrieval_scores, similarity_scores, spearman

MAX_CLASSES_SHOWN = 60


@dataclass(frozen=True)
class ClassMetrics:
    """Of `seq_cls`: accuracy, F1 and the areas under curves; of numbers errors and correlations.

    Attributes:
        names: of the classes, in the order of their numbers.
    """

    problem_type: ProblemType
    names: tuple[str, ...]

    def report(self, predictions: Sequence[Prediction]) -> Report:
        if not predictions:
            return Report({})
        logits = np.stack([prediction.outputs[0][0] for prediction in predictions])
        if self.problem_type == "regression":
            return _numbers(np.array([prediction.values for prediction in predictions]), logits)
        chances = probabilities(logits, self.problem_type)
        if self.problem_type == "multi_label_classification":
            hot = np.zeros(logits.shape, bool)
            for row, prediction in enumerate(predictions):
                hot[row, [int(label) for label in prediction.values]] = True
            found = multi_label_report(hot, logits > 0, self.names)
            areas = roc_auc_per_class(hot, chances)
        else:
            labels = np.array([int(prediction.values[0]) for prediction in predictions])
            found = class_report(labels, logits.argmax(1), self.names)
            areas = roc_auc_per_class(labels, chances)
            areas = areas[1:] if len(areas) == 2 else areas  # of two classes: of the second, as is usual
        numbers = class_numbers(found)
        if (area := mean_defined(areas)) is not None:
            numbers["auc"] = area
        return Report(numbers, _table(found))


@dataclass(frozen=True)
class TokenMetrics:
    """Of `token_cls`: of entities where labels are B- and I-, else of tokens."""

    names: tuple[str, ...]

    @property
    def bio(self) -> bool:
        return is_bio(self.names)

    def report(self, predictions: Sequence[Prediction]) -> Report:
        labels = [[int(value) for value in prediction.values] for prediction in predictions]
        said = [prediction.outputs[0].argmax(1).tolist() for prediction in predictions]
        true, given = (np.array([tag for row in rows for tag in row], np.int64) for rows in (labels, said))
        if not len(true):
            return Report({})
        token_report = class_report(true, given, self.names)
        found = token_report
        if self.bio:
            found = entity_report(*([[self.names[tag] for tag in row] for row in rows] for rows in (labels, said)))
        numbers = {**class_numbers(found), "token_accuracy": token_report.accuracy or 0.0}
        return Report(numbers, _table(found))


@dataclass(frozen=True)
class VectorMetrics:
    """Of `embedding`: correlations with wanted similarities where rows have them; else how well each text finds its
    own positives among all texts of the evaluation that aren't anchors.

    Attributes:
        dims: sizes of shortened vectors that are judged as well.
    """

    dims: tuple[int, ...] = ()

    def report(self, predictions: Sequence[Prediction]) -> Report:
        if not predictions:
            return Report({})
        numbers = self._of(predictions, None)
        for dim in self.dims:
            numbers |= {f"{name}/{dim}": value for name, value in self._of(predictions, dim).items()}
        return Report(numbers)

    def _of(self, predictions: Sequence[Prediction], dim: int | None) -> dict[str, float]:
        anchors: list[np.ndarray] = []
        documents: list[np.ndarray] = []
        right: list[list[int]] = []
        wanted: list[float] = []
        for prediction in predictions:
            vectors = [output[0][:dim] for output in prediction.outputs]
            own = []
            for kind, vector in zip(prediction.kinds, vectors, strict=True):
                if kind == Kind.ANCHOR:
                    anchors.append(vector)
                    continue
                own += [len(documents)] if kind == Kind.POSITIVE else []
                documents.append(vector)
            right.append(own)
            wanted += prediction.values[:1]
        if len(wanted) == len(predictions):
            return similarity_scores(np.stack(anchors), np.stack(documents), np.array(wanted))
        return retrieval_scores(np.stack(anchors), np.stack(documents), right)


@dataclass(frozen=True)
class RankMetrics:
    """Of rerankers: where the right documents of a query come among its own; the area under the curve over all."""

    def report(self, predictions: Sequence[Prediction]) -> Report:
        queries = []
        for prediction in predictions:
            gains = np.array([kind == Kind.POSITIVE for kind in prediction.kinds], np.float64)
            queries.append((gains, np.array([float(output.mean()) for output in prediction.outputs])))
        if not queries:
            return Report({})
        numbers = ranking_scores(queries)
        area = roc_auc(np.concatenate([g for g, _ in queries]) > 0, np.concatenate([s for _, s in queries]))
        if area is not None:
            numbers["auc"] = area
        return Report(numbers)


TaskMetrics = ClassMetrics | TokenMetrics | VectorMetrics | RankMetrics


def probabilities(logits: np.ndarray, problem_type: str) -> np.ndarray:
    """fp64 of logits [..., labels]: of each label by itself where there can be several, else of one among all."""
    logits = logits.astype(np.float64)
    if problem_type == "multi_label_classification":
        return sigmoid(logits)
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def sigmoid(values: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x), also where e^-x is beyond fp64."""
    return np.exp(-np.logaddexp(0, -values))


def is_bio(names: Sequence[str]) -> bool:
    """Whether labels are those of entities, `B-` and `I-`."""
    return any(name.startswith("B-") for name in names)


def class_numbers(found: ClassReport) -> dict[str, float]:
    """`accuracy`; `f1_macro`, `f1_micro`, `f1_weighted`; `precision_macro`, `recall_macro`; `f1/<class>`."""
    numbers = {} if found.accuracy is None else {"accuracy": found.accuracy}
    for kind, means in found.averages.items():
        numbers |= {f"{measure}_{kind}": means[measure] for measure in (means if kind == "macro" else ("f1",))}
    return numbers | {f"f1/{score.name}": score.f1 for score in found.classes if score.f1 is not None}


def _table(found: ClassReport) -> str:
    words = found.as_text()
    if len(found.classes) <= MAX_CLASSES_SHOWN:
        return words
    lines = words.splitlines()
    left = len(found.classes) - MAX_CLASSES_SHOWN
    return "\n".join([*lines[: MAX_CLASSES_SHOWN + 1], f"… {left} more classes", *lines[1 + len(found.classes) :]])


def _numbers(wanted: np.ndarray, given: np.ndarray) -> Report:
    numbers = regression_scores(wanted, given)
    for name, measure in (("pearson", pearson), ("spearman", spearman)):
        value = mean_defined([measure(given[:, k], wanted[:, k]) for k in range(wanted.shape[1])])
        if value is not None:
            numbers[name] = value
    return Report(numbers)
