"""Classes or numbers of whole texts, and classes of single tokens.

A head gives each target's state one logit per label. The losses are the usual ones: softmax cross-entropy where one
class is right, a binary cross-entropy per label where several may be, and squared error for numbers. Each is summed
over the targets that this rank has, so ranks that share a row need not talk.

Knows nothing of models or loops; labels are numbers from `Batch.sequences.values`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional as F

from swift.core.errors import DataError, ModelError, UsageError
from swift.data.loading.batch import Batch, Sequences
from swift.models.head import OutputHead
from swift.objectives.causal_lm import LossTerms

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]


@dataclass(frozen=True)
class ClassLoss:
    """Options of the losses over classes.

    Attributes:
        smoothing: share e of the target that is spread over all classes (arXiv 1512.00567, section 7); with several
            labels, targets become e / 2 and 1 - e / 2.
        class_weights: factor on the loss of each class: of the right one, or of each label where there are several.
            Empty: 1 each. The sum is divided by units or tokens, not by weights, so weights with mean 1 over the
            training rows keep the learning rate's meaning.
    """

    smoothing: float = 0.0
    class_weights: tuple[float, ...] = ()

    def weights_for(self, logits: torch.Tensor) -> torch.Tensor:
        """[labels], of the logits' dtype and device.

        Raises:
            UsageError: there are not as many weights as labels.
        """
        labels = logits.shape[1]
        if self.class_weights and len(self.class_weights) != labels:
            raise UsageError(
                f"{len(self.class_weights)} class weights for {labels} labels",
                where="--class_weights",
                fix="one for each label, or leave them out",
            )
        return logits.new_tensor(self.class_weights or (1.0,) * labels)

    def one_of(self, logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        """[n]: w_y [(1 - e) (lse(z) - z_y) + e (lse(z) - mean(z))] for logits [n, labels] and classes int64 [n]."""
        logprobs = logits.log_softmax(1)
        loss = -logprobs.gather(1, classes[:, None])[:, 0]
        if self.smoothing:
            loss = (1 - self.smoothing) * loss - self.smoothing * logprobs.mean(1)
        return self.weights_for(logits)[classes] * loss

    def several_of(self, logits: torch.Tensor, hot: torch.Tensor) -> torch.Tensor:
        """[n]: the mean over labels of w_c times the binary cross-entropy, for `hot` [n, labels] of 0 and 1."""
        soft = hot * (1 - self.smoothing) + self.smoothing / 2
        losses = F.binary_cross_entropy_with_logits(logits, soft, reduction="none")
        return (losses * self.weights_for(logits)).mean(1)


@dataclass(frozen=True)
class ClassificationObjective:
    """Classes or numbers of texts: one target per unit, the state of its last (or only trained) token."""

    problem_type: ProblemType = "single_label_classification"
    options: ClassLoss = ClassLoss()

    def __call__(self, hidden: torch.Tensor, head: OutputHead, batch: Batch) -> LossTerms:
        """hidden: [sequences of this rank, hidden]. Adds up the units' losses.

        Raises:
            DataError: a row has no label, too many, or one that the head has no place for.
        """
        logits = head.logits(hidden)
        sequences = _sequences(batch)
        rows = _values_of_targets(sequences)
        places = [str(batch.refs[unit]) for unit in sequences.unit[sequences.target].tolist()]
        if self.problem_type == "regression":
            wanted = logits.new_tensor(_numbers(rows, logits.shape[1], places)).view(-1, logits.shape[1])
            losses = (logits - wanted).square().mean(1)
            name, good = "absolute_error", (logits - wanted).detach().abs().mean(1)
        elif self.problem_type == "multi_label_classification":
            hot = multi_hot(rows, logits.shape[1], places).to(logits)
            losses = self.options.several_of(logits, hot)
            name, good = "accuracy", ((logits > 0) == (hot > 0)).all(1)
        else:
            classes = torch.tensor(_one_each(rows, logits.shape[1], places), dtype=torch.int64, device=logits.device)
            losses = self.options.one_of(logits, classes)
            name, good = "accuracy", logits.argmax(1) == classes
        return LossTerms(losses.sum(), batch.weight, {name: good.sum()}, {name: float(len(good))})

    def probe(self, hidden: torch.Tensor, head: OutputHead, batch: Batch) -> torch.Tensor:
        """What predictions are made from: logits [sequences, labels]."""
        return head.logits(hidden)

    def evaluation(self) -> ClassificationObjective:
        """The plain loss, whatever is trained."""
        return ClassificationObjective(self.problem_type)


@dataclass(frozen=True)
class TokenClassificationObjective:
    """Classes of tokens: a target for each labelled token, its own state. A mean over the step's labelled tokens."""

    options: ClassLoss = ClassLoss()

    def __call__(self, hidden: torch.Tensor, head: OutputHead, batch: Batch) -> LossTerms:
        """hidden: [labelled tokens of this rank, hidden].

        Reads `facts["labels"]`, int64 [targets], where ranks share rows (`token_labels` gives them for a whole batch),
        and the step's `units` and `labelled_tokens`.

        Raises:
            DataError: the labels don't fit the tokens, or the head.
        """
        logits = head.logits(hidden)
        sequences = _sequences(batch)
        labels = batch.facts["labels"] if "labels" in batch.facts else token_labels(batch)
        labels = labels.to(logits.device)
        outside = (labels < 0) | (labels >= logits.shape[1])
        if bool(outside.any()):
            unit = int(sequences.unit[sequences.target[outside.nonzero()[0, 0]]])
            raise _out_of_range(float(labels[outside][0]), logits.shape[1], str(batch.refs[unit]))
        losses = self.options.one_of(logits, labels)
        scale = sequences.step["units"] / sequences.step["labelled_tokens"] if len(labels) else 0.0
        right = (logits.argmax(1) == labels).sum()
        count = float(len(labels))
        return LossTerms(
            losses.sum() * scale,
            batch.weight,
            {"token_accuracy": right, "token_loss": losses.detach().sum()},
            {"token_accuracy": count, "token_loss": count},
        )

    def step_counts(self, batch: Batch) -> dict[str, float]:
        """What of a whole micro-batch goes into the step's divisors."""
        return {"labelled_tokens": float(len(batch.target_index))}

    def probe(self, hidden: torch.Tensor, head: OutputHead, batch: Batch) -> torch.Tensor:
        """What predictions are made from: logits [targets, labels]."""
        return head.logits(hidden)

    def evaluation(self) -> TokenClassificationObjective:
        """The plain loss, whatever is trained."""
        return TokenClassificationObjective()


def token_labels(batch: Batch) -> torch.Tensor:
    """int64 [targets]: the label of each target of a batch that isn't cut.

    Raises:
        DataError: a row has not as many labels as labelled tokens.
    """
    sequences = _sequences(batch)
    found = torch.bincount(sequences.unit[sequences.target].cpu(), minlength=sequences.num_units).tolist()
    for unit, (count, labels) in enumerate(zip(found, sequences.values, strict=True)):
        if count != len(labels):
            raise DataError(
                f"{len(labels)} labels for {count} labelled tokens",
                where=str(batch.refs[unit]),
                fix="give each labelled token one label",
            )
    return torch.tensor([int(label) for labels in sequences.values for label in labels], dtype=torch.int64)


def multi_hot(rows: Sequence[Sequence[float]], num_labels: int, places: Sequence[str]) -> torch.Tensor:
    """fp32 [rows, labels]: 1 at each row's labels.

    Raises:
        DataError: a label is no number of a class; `places` says where each row is from.
    """
    hot = torch.zeros(len(rows), num_labels)
    for row, (labels, place) in enumerate(zip(rows, places, strict=True)):
        for label in labels:
            hot[row, _class_number(label, num_labels, place)] = 1.0
    return hot


def _sequences(batch: Batch) -> Sequences:
    if batch.sequences is None:
        raise ValueError("a batch without units has no labels")
    return batch.sequences


def _values_of_targets(sequences: Sequences) -> list[tuple[float, ...]]:
    return [sequences.values[unit] for unit in sequences.unit[sequences.target].tolist()]


def _one_each(rows: Sequence[Sequence[float]], num_labels: int, places: Sequence[str]) -> list[int]:
    for labels, place in zip(rows, places, strict=True):
        if len(labels) != 1:
            raise DataError(
                f"a row has {len(labels)} labels where one is right",
                where=place,
                fix="--problem_type multi_label_classification, or one label per row",
            )
    return [_class_number(labels[0], num_labels, place) for labels, place in zip(rows, places, strict=True)]


def _numbers(rows: Sequence[Sequence[float]], num_labels: int, places: Sequence[str]) -> list[Sequence[float]]:
    for numbers, place in zip(rows, places, strict=True):
        if len(numbers) != num_labels:
            raise DataError(
                f"a row has {len(numbers)} numbers, and the head gives {num_labels}", where=place, fix="--num_labels"
            )
    return list(rows)


def _class_number(label: float, num_labels: int, place: str) -> int:
    if label != int(label) or not 0 <= label < num_labels:
        raise _out_of_range(label, num_labels, place)
    return int(label)


def _out_of_range(label: float, num_labels: int, place: str) -> DataError:
    return DataError(
        f"label {label:g} is no class: there are {num_labels}, from 0 to {num_labels - 1}",
        where=place,
        fix="correct the row, or --num_labels",
    )


def check_head(logits: torch.Tensor, wanted: int, task: str) -> None:
    """See that a head gives as many numbers per state as a task takes.

    Raises:
        ModelError: it doesn't.
    """
    if logits.shape[1] != wanted:
        raise ModelError(
            f"{task} takes {wanted} number{'s' if wanted > 1 else ''} per text, and the model's head gives "
            f"{logits.shape[1]}",
            fix=f"load the model with --num_labels {wanted}",
        )
