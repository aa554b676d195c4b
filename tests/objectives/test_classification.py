"""Losses over classes of texts and tokens against the formulas, term by term."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from units_batch import batch_of

from swift.core.errors import DataError, UsageError
from swift.data.units import Kind
from swift.models.head import OutputHead
from swift.objectives.classification import ClassificationObjective, ClassLoss, TokenClassificationObjective

WIDTH, LABELS = 6, 4
PLAIN = [int(Kind.PLAIN)]


def model(labels: int = LABELS) -> tuple[OutputHead, torch.Tensor]:
    torch.manual_seed(5)
    return OutputHead(nn.Linear(WIDTH, labels, dtype=torch.float64)), torch.randn(7, WIDTH, dtype=torch.float64)


def logits_of(head: OutputHead, hidden: torch.Tensor) -> np.ndarray:
    return hidden.numpy() @ head.module.weight.detach().numpy().T + head.module.bias.detach().numpy()


def cross_entropy(z: np.ndarray, y: int, smoothing: float, weights: list[float]) -> float:
    """-Σ_c q_c log p_c with q = (1 - e) onehot + e / C, times the weight of the right class."""
    p = [math.exp(v) / sum(math.exp(u) for u in z) for v in z]
    q = [(1 - smoothing) * (c == y) + smoothing / len(z) for c in range(len(z))]
    return -weights[y] * sum(q[c] * math.log(p[c]) for c in range(len(z)))


def binary(z: float, q: float) -> float:
    return -q * math.log(1 / (1 + math.exp(-z))) - (1 - q) * math.log(1 - 1 / (1 + math.exp(-z)))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weights", [(), (0.5, 2.0, 1.0, 0.25)])
def test_one_class(smoothing, weights):
    head, hidden = model()
    labels = [2, 0, 3, 1, 1, 2, 0]
    batch = batch_of([(PLAIN, (float(y),)) for y in labels])
    terms = ClassificationObjective(options=ClassLoss(smoothing, weights))(hidden, head, batch)
    z = logits_of(head, hidden)
    expected = sum(cross_entropy(z[i], y, smoothing, list(weights or (1.0,) * 4)) for i, y in enumerate(labels))
    assert float(terms.loss_sum.detach()) == pytest.approx(expected, rel=1e-12)
    assert terms.weight == 7 and terms.counts == {"accuracy": 7.0}
    assert int(terms.sums["accuracy"]) == sum(int(np.argmax(z[i])) == y for i, y in enumerate(labels))


def test_several_classes():
    head, hidden = model()
    labels = [(0.0, 3.0), (), (1.0,), (0.0, 1.0, 2.0, 3.0), (2.0,), (1.0, 2.0), (3.0,)]
    weights, smoothing = (1.0, 3.0, 0.5, 2.0), 0.1
    objective = ClassificationObjective("multi_label_classification", ClassLoss(smoothing, weights))
    terms = objective(hidden, head, batch_of([(PLAIN, row) for row in labels]))
    z, expected, right = logits_of(head, hidden), 0.0, 0
    for i, row in enumerate(labels):
        hot = [float(c in row) for c in range(LABELS)]
        soft = [h * (1 - smoothing) + smoothing / 2 for h in hot]
        expected += sum(weights[c] * binary(z[i][c], soft[c]) for c in range(LABELS)) / LABELS
        right += all((z[i][c] > 0) == (hot[c] == 1) for c in range(LABELS))
    assert float(terms.loss_sum.detach()) == pytest.approx(expected, rel=1e-7)
    assert int(terms.sums["accuracy"]) == right


def test_numbers():
    head, hidden = model(2)
    values = [(0.5, -1.0)] * 6 + [(2.0, 0.25)]
    terms = ClassificationObjective("regression")(hidden, head, batch_of([(PLAIN, v) for v in values]))
    difference = logits_of(head, hidden) - np.array(values)
    assert float(terms.loss_sum.detach()) == pytest.approx(float((difference**2).sum() / 2), rel=1e-12)
    assert float(terms.sums["absolute_error"]) == pytest.approx(float(abs(difference).sum() / 2), rel=1e-12)


def test_gradients_are_those_of_finite_differences():
    head, hidden = model()
    objective = ClassificationObjective(options=ClassLoss(0.1, (1.0, 2.0, 3.0, 4.0)))
    batch = batch_of([(PLAIN, (float(i % 4),)) for i in range(7)])
    hidden.requires_grad_()
    assert torch.autograd.gradcheck(lambda h: objective(h, head, batch).loss_sum, (hidden,))
    several = batch_of([(PLAIN, (float(i % 4), 1.0)) for i in range(7)])
    labels = ClassificationObjective("multi_label_classification")
    assert torch.autograd.gradcheck(lambda h: labels(h, head, several).loss_sum, (hidden,))


def token_units() -> list[tuple[list[int], tuple[float, ...]]]:
    return [(PLAIN, (0.0, 1.0)), (PLAIN, (3.0,)), (PLAIN, (2.0, 2.0, 1.0)), (PLAIN, (0.0,))]


def whole_loss(groups: list[list[int]], objective: TokenClassificationObjective) -> tuple[float, torch.Tensor]:
    """The step's loss and the head's gradient, cut into these micro-batches of units."""
    head, hidden = model()
    units, offsets = token_units(), [0, 2, 3, 6, 7]
    step = {"units": 4.0, "labelled_tokens": 7.0}
    total = torch.zeros((), dtype=torch.float64)
    weight = 0.0
    for group in groups:
        rows = [i for unit in group for i in range(offsets[unit], offsets[unit + 1])]
        batch = batch_of([units[u] for u in group], [offsets[u + 1] - offsets[u] for u in group], step)
        terms = objective(hidden[rows], head, batch)
        total, weight = total + terms.loss_sum, weight + terms.weight
    (total / weight).backward()
    return float(total.detach()) / weight, head.module.weight.grad


def test_tokens_are_a_mean_over_the_step_however_it_is_cut():
    objective = TokenClassificationObjective(ClassLoss(0.1))
    head, hidden = model()
    z, labels = logits_of(head, hidden), [0, 1, 3, 2, 2, 1, 0]
    expected = sum(cross_entropy(z[i], y, 0.1, [1.0] * 4) for i, y in enumerate(labels)) / 7
    first = whole_loss([[0, 1, 2, 3]], objective)
    assert first[0] == pytest.approx(expected, rel=1e-12)
    for groups in ([[0], [1], [2], [3]], [[2, 0], [3, 1]], [[0, 1], [], [2, 3]]):
        loss, gradient = whole_loss(groups, objective)
        assert loss == pytest.approx(expected, rel=1e-12)
        torch.testing.assert_close(gradient, first[1], rtol=1e-12, atol=1e-15)


def test_labels_cut_along_with_the_targets():
    """Where ranks share rows each has some targets, and their labels from the batch's facts."""
    head, hidden = model()
    units, step = token_units(), {"units": 4.0, "labelled_tokens": 7.0}
    whole = batch_of(units, [2, 1, 3, 1], step)
    objective = TokenClassificationObjective()
    expected = objective(hidden, head, whole).loss_sum
    labels, parts = torch.tensor([0, 1, 3, 2, 2, 1, 0]), []
    for kept in ([0, 3, 6], [1, 2, 4, 5]):
        part = batch_of(units, [2, 1, 3, 1], step)
        part.sequences.target, part.facts["labels"] = part.sequences.target[kept], labels[kept]
        parts.append(objective(hidden[kept], head, part).loss_sum)
    torch.testing.assert_close(sum(parts), expected, rtol=1e-12, atol=0)


def test_bad_labels_are_refused_with_their_row():
    head, hidden = model()
    cases = [
        (ClassificationObjective(), (4.0,), "label 4 is no class"),
        (ClassificationObjective(), (1.5,), "label 1.5 is no class"),
        (ClassificationObjective(), (1.0, 2.0), "2 labels where one"),
        (ClassificationObjective("multi_label_classification"), (-1.0,), "label -1"),
        (ClassificationObjective("regression"), (1.0,), "1 numbers"),
        (TokenClassificationObjective(), (7.0,), "label 7"),
        (TokenClassificationObjective(), (1.0, 2.0), "2 labels for 1 labelled"),
    ]
    for objective, values, message in cases:
        good = (0.0,) * 4 if getattr(objective, "problem_type", "") == "regression" else (0.0,)
        batch = batch_of([(PLAIN, good), (PLAIN, values)], step={"units": 2.0, "labelled_tokens": 2.0})
        with pytest.raises(DataError, match=message) as caught:
            objective(hidden[:2], head, batch)
        assert caught.value.where == "rows.jsonl:2"
    with pytest.raises(UsageError, match="3 class weights for 4"):
        ClassificationObjective(options=ClassLoss(0.0, (1.0, 1.0, 1.0)))(hidden[:1], head, batch_of([(PLAIN, (0.0,))]))


def test_a_rank_without_examples_has_a_loss_of_nothing():
    head, _ = model()
    nothing = torch.zeros(0, WIDTH, dtype=torch.float64, requires_grad=True)
    for objective in (ClassificationObjective(), ClassificationObjective("regression"), TokenClassificationObjective()):
        terms = objective(nothing, head, batch_of([]))
        terms.loss_sum.backward()
        assert float(terms.loss_sum.detach()) == 0 == terms.weight and not head.module.weight.grad.any()
