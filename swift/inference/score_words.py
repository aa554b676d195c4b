"""What is asked of a model about a row, and what its outputs mean in words: one class for each task.

Knows nothing of models: outputs come as `Prediction`s, and leave as the fields of a result line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from swift.data.encoding.encode import Encoded
from swift.data.encoding.units import UnitEncoder
from swift.data.labels import OUTSIDE, LabelSpace
from swift.data.rows import Row, RowProblem
from swift.objectives.metrics import entities
from swift.objectives.predictions import Prediction, Report
from swift.objectives.task_metrics import (
    ClassMetrics,
    RankMetrics,
    TokenMetrics,
    VectorMetrics,
    is_bio,
    probabilities,
    sigmoid,
)


@dataclass(frozen=True)
class Asked:
    """A row and the units that say what is wanted of the model.

    Attributes:
        labelled: whether it came with what the model should say.
    """

    row: Row
    units: tuple[Encoded, ...]
    labelled: bool


class Answerer(Protocol):
    """How rows of a task are asked about and answered.

    Attributes:
        means: whether of each sequence the mean of the outputs is wanted (see `predictions`).
    """

    @property
    def means(self) -> bool: ...

    def ask(self, row: Row) -> Asked:
        """Raises RowProblem."""
        ...

    def answer(self, asked: Asked, found: Sequence[Prediction]) -> dict[str, Any]:
        """The fields of the result line."""
        ...

    def report(self, judged: Sequence[Prediction]) -> Report: ...


@dataclass(frozen=True)
class ClassAnswers:
    """`label` and `probabilities`; `labels` where there can be several; `value` in regression."""

    encoder: UnitEncoder
    space: LabelSpace
    means: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        return self.space.names or tuple(str(number) for number in range(self.space.num_labels))

    def ask(self, row: Row) -> Asked:
        labelled = row.label is not None
        stand_in: Any = {"regression": [0.0] * self.space.num_labels, "multi_label_classification": []}
        known = row if labelled else replace(row, label=stand_in.get(self.space.problem, 0))
        return Asked(row, tuple(self.encoder.encode(known)), labelled)

    def answer(self, asked: Asked, found: Sequence[Prediction]) -> dict[str, Any]:
        logits = found[0].outputs[0][0]
        expected = {"expected": asked.row.label} if asked.labelled else {}
        if self.space.problem == "regression":
            values = [float(value) for value in logits]
            return {"value": values[0] if len(values) == 1 else values, **expected}
        chances = dict(zip(self.names, probabilities(logits, self.space.problem).tolist(), strict=True))
        if self.space.problem == "multi_label_classification":
            return {"labels": [n for n, z in zip(self.names, logits) if z > 0], "probabilities": chances, **expected}
        return {"label": self.names[int(logits.argmax())], "probabilities": chances, **expected}

    def report(self, judged: Sequence[Prediction]) -> Report:
        return ClassMetrics(self.space.problem, self.names).report(judged)


@dataclass(frozen=True)
class TokenAnswers:
    """`entities`, stretches of characters with a label; of rows of words also the `labels` of the words."""

    encoder: UnitEncoder
    space: LabelSpace
    means: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return self.space.names or tuple(str(number) for number in range(self.space.num_labels))

    def ask(self, row: Row) -> Asked:
        known = row
        if row.words is not None and row.label is None:
            known = replace(row, label=[0] * len(row.words))
        elif row.words is None and row.spans is None:
            if OUTSIDE not in self.names:
                raise RowProblem("no_words", "the classes are those of words, and the row has a text", 'give "tokens"')
            known = replace(row, spans=[])
        labelled = row.spans is not None if row.words is None else row.label is not None
        return Asked(row, tuple(self.encoder.encode(known)), labelled)

    def answer(self, asked: Asked, found: Sequence[Prediction]) -> dict[str, Any]:
        logits, row = found[0].outputs[0], asked.row
        chances = probabilities(logits, "single_label_classification")
        tags = [self.names[number] for number in logits.argmax(1).tolist()]
        # without B- and I-, neighbours with one label are one stretch
        named = tags if is_bio(self.names) else [tag if tag == OUTSIDE else f"I-{tag}" for tag in tags]
        text, places = self._places(row, len(tags))
        result: dict[str, Any] = {}
        if row.words is not None:
            result["labels"] = tags
        result["entities"] = [
            {"start": start, "end": end, "label": label, "text": text[start:end], "score": float(score)}
            for label, start, end, score in _entities(named, places, text, chances.max(1))
        ]
        if asked.labelled:
            result["expected"] = row.label if row.words is not None else [list(span) for span in row.spans or []]
        return result

    def _places(self, row: Row, count: int) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the characters of each labelled token; of words, of the whole word."""
        if row.words is not None:
            ends = np.cumsum([len(word) + 1 for word in row.words]).tolist()
            every = [(end - 1 - len(word), end - 1) for word, end in zip(row.words, ends)]
            text = " ".join(row.words)
        else:
            (closed,) = self.encoder.closed.encode_batch([row], offsets=True)
            if isinstance(closed, RowProblem):
                raise closed
            every = [place for place in closed.offsets if place is not None]
            text = row.messages[-1]["content"]
        return text, every[-count:] if self.encoder.strategy == "left" else every[:count]

    def report(self, judged: Sequence[Prediction]) -> Report:
        return TokenMetrics(self.names).report(judged)


def _entities(
    tags: list[str], places: list[tuple[int, int]], text: str, chances: np.ndarray
) -> list[tuple[str, int, int, float]]:
    """(label, first character, character behind the last, mean probability of its tokens) of each stretch."""
    found = []
    for label, first, last in entities(tags):
        start, end = places[first][0], places[last - 1][1]
        start += len(text[start:end]) - len(text[start:end].lstrip())
        found.append((label, start, end, float(chances[first:last].mean())))
    return found


@dataclass(frozen=True)
class VectorAnswers:
    """`embedding`, of length 1; `similarities` to the row's own positives and negatives, if it has any.

    Attributes:
        dim: keep the first so many numbers; None: all.
    """

    encoder: UnitEncoder
    dim: int | None = None
    means: bool = True

    def ask(self, row: Row) -> Asked:
        return Asked(row, tuple(self.encoder.encode(row)), bool(row.positives))

    def answer(self, asked: Asked, found: Sequence[Prediction]) -> dict[str, Any]:
        anchor, *others = [_unit_vector(output[0][: self.dim]) for output in found[0].outputs]
        result: dict[str, Any] = {"embedding": anchor.tolist()}
        if others:
            texts = [texts[-1]["content"] for texts in (*asked.row.positives, *asked.row.negatives)]
            result["similarities"] = [
                {"text": text, "similarity": float(anchor @ other)} for text, other in zip(texts, others, strict=True)
            ]
        return result

    def report(self, judged: Sequence[Prediction]) -> Report:
        cut = [replace(each, outputs=tuple(output[:, : self.dim] for output in each.outputs)) for each in judged]
        return VectorMetrics().report(cut)


def _unit_vector(vector: np.ndarray) -> np.ndarray:
    return vector / max(float(np.linalg.norm(vector)), 1e-12)


@dataclass(frozen=True)
class RankAnswers:
    """`scores` of the row's documents, best first; `index` counts its positives, then its negatives.

    Attributes:
        activation: scores from 0 to 1.
    """

    encoder: UnitEncoder
    activation: bool = True
    means: bool = True

    def ask(self, row: Row) -> Asked:
        if not row.positives and not row.negatives:
            raise RowProblem("no_documents", "the row has no document to score", 'give it "documents": ["…", "…"]')
        return Asked(row, tuple(self.encoder.encode(row)), bool(row.positives))

    def answer(self, asked: Asked, found: Sequence[Prediction]) -> dict[str, Any]:
        scores = np.array([float(output[0]) for output in found[0].outputs])
        shown = sigmoid(scores) if self.activation else scores
        row = asked.row
        texts = [document[-1]["content"] for document in (*row.positives, *row.negatives)]
        ranked: list[dict[str, Any]] = []
        for index in np.argsort(-scores, kind="stable").tolist():
            entry = {"document": texts[index], "score": float(shown[index]), "index": index}
            ranked.append({**entry, "fits": index < len(row.positives)} if asked.labelled else entry)
        return {"scores": ranked}

    def report(self, judged: Sequence[Prediction]) -> Report:
        return RankMetrics().report(judged)


@dataclass(frozen=True)
class RewardAnswers:
    """`reward` of the last answer; of pairs also the rewards of the worse ones.

    Attributes:
        single: encodes a conversation with one answer; pairs: one with worse ones too.
    """

    single: UnitEncoder
    pairs: UnitEncoder
    means: bool = True

    def ask(self, row: Row) -> Asked:
        if row.rejected:
            return Asked(row, tuple(self.pairs.encode(row)), True)
        if row.text is not None:
            raise RowProblem("no_assistant", "the row is a text without a prompt and an answer", "name the columns")
        return Asked(row, tuple(self.single.encode(replace(row, label=True))), False)

    def answer(self, asked: Asked, found: Sequence[Prediction]) -> dict[str, Any]:
        result: dict[str, Any] = {"reward": float(found[0].outputs[0][0].item())}
        if asked.row.rejected:
            result["rejected_rewards"] = [float(each.outputs[1][0].item()) for each in found]
        return result

    def report(self, judged: Sequence[Prediction]) -> Report:
        margins = np.array([each.outputs[0].item() - each.outputs[1].item() for each in judged])
        return Report({"accuracy": float((margins > 0).mean()), "margin": float(margins.mean())})
