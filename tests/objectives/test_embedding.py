"""Losses of vectors against loops over the papers' formulas; a step's loss doesn't depend on how it is cut."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from pool import on_ranks
from torch import nn
from units_batch import batch_of

from swift.config.degrees import Degrees
from swift.core.errors import DataError, UsageError
from swift.data.units import Kind
from swift.distributed.mesh import build_mesh
from swift.models.head import OutputHead
from swift.objectives.embedding import (
    Contrastive,
    CoSENT,
    CosineSimilarity,
    EmbeddingObjective,
    InfoNCE,
    Matryoshka,
    couple,
    join_units,
    pool,
)

WIDTH = 6
A, P, N = int(Kind.ANCHOR), int(Kind.POSITIVE), int(Kind.NEGATIVE)
HEAD = OutputHead(nn.Identity())
ROWS = [([A, P, N, N], ()), ([A, P], ()), ([A, P, P, N], ()), ([A, P, N], ()), ([A, P, N, N, N], ())]
PAIRS = [([A, P], (value,)) for value in (1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0)]
GRADED = [([A, P], (value,)) for value in (0.9, 0.1, 0.5, 0.5, -0.2)]


def features_of(units: list) -> torch.Tensor:
    torch.manual_seed(11)
    return torch.randn(sum(len(kinds) for kinds, _ in units), WIDTH, dtype=torch.float64)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / math.sqrt(float(a @ a)) / math.sqrt(float(b @ b)))


def spread_out(features: torch.Tensor, units: list) -> list[list[tuple[int, np.ndarray]]]:
    """Each unit's texts: (kind, vector)."""
    rows = iter(features.detach().numpy())
    return [[(kind, next(rows)) for kind in kinds] for kinds, _ in units]


def infonce(features: torch.Tensor, units: list, o: InfoNCE) -> list[float]:
    """Of each unit, written down from the formula."""
    groups, losses = spread_out(features, units), []
    for u, group in enumerate(groups):
        anchor = group[0][1]
        parts = []
        for kind, positive in group:
            if kind != P:
                continue
            own = cosine(anchor, positive)
            z = math.exp(own / o.temperature)
            for v, other in enumerate(groups):
                negatives = [d for k, d in other if k == N]
                if o.hard_negatives is not None and negatives:
                    negatives = (negatives * o.hard_negatives)[: o.hard_negatives]
                if v != u and not o.use_batch:
                    continue
                candidates = negatives if v == u else [d for k, d in other if k == P] + negatives
                for document in candidates:
                    if o.mask_false_negatives and cosine(anchor, document) > own + o.margin:
                        continue
                    z += math.exp(cosine(anchor, document) / o.temperature)
                    if o.include_dd:
                        z += math.exp(cosine(positive, document) / o.temperature)
                between = cosine(anchor, other[0][1])
                if o.include_qq and v != u and not (o.mask_false_negatives and between > own + o.margin):
                    z += math.exp(between / o.temperature)
            parts.append(-math.log(math.exp(own / o.temperature) / z))
        losses.append(sum(parts) / len(parts))
    return losses


OPTIONS = {
    "plain": InfoNCE(),
    "temperature": InfoNCE(temperature=0.5),
    "own negatives": InfoNCE(use_batch=False),
    "one negative": InfoNCE(hard_negatives=1),
    "two negatives": InfoNCE(hard_negatives=2),
    "no negatives": InfoNCE(hard_negatives=0),
    "mask": InfoNCE(mask_false_negatives=True),
    "narrow mask": InfoNCE(mask_false_negatives=True, margin=-0.2),
    "qq": InfoNCE(include_qq=True),
    "dd": InfoNCE(include_dd=True),
    "all": InfoNCE(0.3, True, 2, True, 0.05, True, True),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_infonce(name):
    features = features_of(ROWS)
    got = couple(features, batch_of(ROWS).sequences, OPTIONS[name])
    assert got.value.tolist() == pytest.approx(infonce(features, ROWS, OPTIONS[name]), rel=1e-10)


def test_options_of_infonce_change_it():
    features = features_of(ROWS)
    sums = {name: round(sum(infonce(features, ROWS, option)), 9) for name, option in OPTIONS.items()}
    assert len(set(sums.values())) == len(sums), sums


def test_a_false_negative_is_left_out():
    """The second unit's positive is the first one's anchor again: far above its positive."""
    units = [([A, P], ()), ([A, P], ())]
    features = torch.eye(4, WIDTH, dtype=torch.float64)
    features[1, 0] = features[3, 0] = 1.0  # cosines with the first anchor: 0.71, and 1 below
    features[3, 3] = 0.0
    masked = couple(features, batch_of(units).sequences, InfoNCE(1.0, mask_false_negatives=True))
    kept = couple(features, batch_of(units).sequences, InfoNCE(1.0, mask_false_negatives=True, margin=0.3))
    assert float(masked.value[0]) == pytest.approx(0.0, abs=1e-12)  # no candidate is left
    assert float(kept.value[0]) == pytest.approx(math.log(1 + math.exp(1 - math.sqrt(0.5))), rel=1e-12)
    assert kept.hits.tolist() == [0.0, 0.0]


def pair_loss(features: torch.Tensor, units: list, loss) -> list[float]:
    groups = spread_out(features, units)
    pairs = [(u, cosine(g[0][1], text), units[u][1]) for u, g in enumerate(groups) for kind, text in g[1:]]
    kinds = [kind for g in groups for kind, _ in g[1:]]
    rows = [(u, c, v[0] if v else float(k == P)) for (u, c, v), k in zip(pairs, kinds, strict=True)]
    if isinstance(loss, CoSENT):
        total = sum(math.exp(loss.scale * (cj - ci)) for _, ci, yi in rows for _, cj, yj in rows if yi > yj)
        return [math.log(1 + total)] * len(units)
    values: list[list[float]] = [[] for _ in units]
    far = max((1 - c for _, c, y in rows if y == 1), default=math.inf)
    near = min((1 - c for _, c, y in rows if y == 0), default=-math.inf)
    for u, c, y in rows:
        if isinstance(loss, CosineSimilarity):
            values[u].append((c - y) ** 2)
            continue
        d = 1 - c
        value = d * d if y == 1 else max(0.0, loss.margin - d) ** 2
        counts = not loss.hard_only or (d > near if y == 1 else d < far)
        values[u].append(value * counts * (1 if loss.hard_only else 0.5))
    return [sum(v) / len(v) for v in values]


@pytest.mark.parametrize(
    "loss", [CosineSimilarity(), Contrastive(), Contrastive(1.2), Contrastive(1.2, True), CoSENT(), CoSENT(3.0)]
)
@pytest.mark.parametrize("units", [PAIRS, ROWS, PAIRS[:1], PAIRS[1:2]], ids=["pairs", "rows", "alike", "unlike"])
def test_pair_losses(loss, units):
    features = features_of(units)
    got = couple(features, batch_of(units).sequences, loss)
    assert got.value.tolist() == pytest.approx(pair_loss(features, units, loss), rel=1e-10, abs=1e-14)


def test_graded_similarities():
    features = features_of(GRADED)
    for loss in (CosineSimilarity(), CoSENT()):
        got = couple(features, batch_of(GRADED).sequences, loss)
        assert got.value.tolist() == pytest.approx(pair_loss(features, GRADED, loss), rel=1e-10)


@pytest.mark.parametrize("loss", [OPTIONS["all"], InfoNCE(0.5), Contrastive(1.2, True), CoSENT(2.0)])
def test_cotangents_are_finite_differences(loss):
    """Of the sum over units, of whole vectors and of their heads, by stepping each number of each text."""
    units = ROWS if isinstance(loss, InfoNCE) else PAIRS
    features, sequences, nested = features_of(units), batch_of(units).sequences, Matryoshka((2, 4), (0.5, 2.0))
    got = couple(features, sequences, loss, nested)
    for text in range(len(features)):
        for number in range(WIDTH):
            step = torch.zeros_like(features)
            step[text, number] = 1e-6
            up, down = (couple(features + s, sequences, loss, nested).value.sum() for s in (step, -step))
            assert float(got.cotangent[text, number]) == pytest.approx(float(up - down) / 2e-6, rel=1e-5, abs=1e-7)


def test_matryoshka_adds_the_losses_of_heads():
    features, sequences, loss = features_of(ROWS), batch_of(ROWS).sequences, InfoNCE(0.5)
    got = couple(features, sequences, loss, Matryoshka((2, 4, WIDTH), (0.5, 2.0, 9.0)))  # the whole one counts once
    parts = [np.array(infonce(features[:, :size], ROWS, loss)) for size in (WIDTH, 2, 4)]
    np.testing.assert_allclose(got.value.numpy(), parts[0] + 0.5 * parts[1] + 2.0 * parts[2], rtol=1e-10)
    with pytest.raises(UsageError, match="no first 7"):
        couple(features, sequences, loss, Matryoshka((7,)))


LENGTHS = [3, 1, 2, 4, 1, 1, 2, 3, 1, 2, 2, 1, 1, 2, 3, 1, 2, 1]


def step_in(groups: list[list[int]], objective: EmbeddingObjective) -> tuple[float, torch.Tensor, float]:
    """Both passes of a step cut into these micro-batches: loss, gradient of a matrix below the states, accuracy."""
    torch.manual_seed(3)
    states = torch.randn(sum(LENGTHS), WIDTH, dtype=torch.float64)
    matrix = torch.randn(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True)
    texts = np.split(np.arange(len(LENGTHS)), np.cumsum([len(kinds) for kinds, _ in ROWS])[:-1])
    tokens = np.split(np.arange(sum(LENGTHS)), np.cumsum(LENGTHS)[:-1])
    mean = objective.pooling == "mean"
    batches, rows = [], []
    for group in groups:
        mine = [text for unit in group for text in texts[unit].tolist()]
        counts = [LENGTHS[text] if mean else 1 for text in mine]
        batches.append(batch_of([ROWS[unit] for unit in group], counts))
        rows.append([t for text in mine for t in (tokens[text].tolist() if mean else [int(tokens[text][-1])])])
    if objective.loss.couples:
        with torch.no_grad():
            measured = [objective.probe(states[r] @ matrix, HEAD, b) for r, b in zip(rows, batches, strict=True)]
            pooled = [pool(m, b.sequences, objective.pooling) for m, b in zip(measured, batches, strict=True)]
        units = join_units([b.sequences for b in batches])
        found = couple(torch.cat(pooled), units, objective.loss, objective.matryoshka)
        by_text = found.cotangent.split([len(p) for p in pooled])
        by_unit = [[len(group) for group in groups]]
        for batch, cotangent, value, hits in zip(
            batches, by_text, found.value.split(by_unit[0]), found.hits.split(by_unit[0]), strict=True
        ):
            batch.sequences.facts.update(cotangent=cotangent, value=value, hits=hits)
    terms = [objective(states[r] @ matrix, HEAD, b) for r, b in zip(rows, batches, strict=True)]
    weight = sum(term.weight for term in terms)
    loss = sum(term.loss_sum for term in terms) / weight
    loss.backward()
    hits = sum(float(term.sums["accuracy"]) for term in terms) / weight
    return float(loss.detach()), matrix.grad, hits


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("loss", [OPTIONS["all"], InfoNCE(use_batch=False)])
def test_a_step_is_the_same_however_it_is_cut(loss, pooling):
    objective = EmbeddingObjective(loss, pooling, Matryoshka((3,)))
    expected = step_in([[0, 1, 2, 3, 4]], objective)
    for groups in ([[0], [1], [2], [3], [4]], [[4, 1], [0, 3, 2]], [[0, 1], [], [2, 3, 4]]):
        got = step_in(groups, objective)
        assert got[0] == pytest.approx(expected[0], rel=1e-12) and got[2] == pytest.approx(expected[2])
        torch.testing.assert_close(got[1], expected[1], rtol=1e-10, atol=1e-13)


def test_the_two_passes_give_the_gradient_of_one():
    """Against autograd through the plain formula of the whole step."""
    loss = InfoNCE(0.5)
    _, gradient, _ = step_in([[0, 1], [2], [3, 4]], EmbeddingObjective(loss))
    torch.manual_seed(3)
    states = torch.randn(sum(LENGTHS), WIDTH, dtype=torch.float64)[np.cumsum(LENGTHS) - 1]
    matrix = torch.randn(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True)
    vectors = torch.nn.functional.normalize(states @ matrix, dim=1)
    starts, total = np.cumsum([0] + [len(kinds) for kinds, _ in ROWS]), 0.0
    for u, (kinds, _) in enumerate(ROWS):
        positives = [i for i, kind in enumerate(kinds) if kind == P]
        for i in positives:
            candidates = [starts[u] + i] + [starts[u] + j for j, kind in enumerate(kinds) if kind == N]
            for v, (others, _) in enumerate(ROWS):
                candidates += [starts[v] + j for j, kind in enumerate(others) if v != u and kind != A]
            scores = vectors[candidates] @ vectors[starts[u]] / 0.5
            total = total + (scores.logsumexp(0) - scores[0]) / len(positives)
    (total / len(ROWS)).backward()
    torch.testing.assert_close(gradient, matrix.grad, rtol=1e-10, atol=1e-13)


@dataclass
class Share:
    loss: float
    weight: float
    gradient: torch.Tensor


def on_shared_rows(pooling: str) -> Share:
    """This rank's part of a batch whose targets lie on both."""
    axis = build_mesh(Degrees(ring=2), "cpu")["cp"]
    units = [([A, P], (0.3,)), ([A, P], (0.8,))]
    counts = [3, 2, 4, 2] if pooling == "mean" else [1] * 4
    torch.manual_seed(2)
    hidden = torch.randn(sum(counts), WIDTH, dtype=torch.float64, requires_grad=True)
    batch = batch_of(units, counts)
    kept = torch.arange(sum(counts))[axis.rank :: 2] if axis else torch.arange(sum(counts))
    batch.sequences.target, batch.sequences.counted = batch.sequences.target[kept], axis.rank == 0
    terms = EmbeddingObjective(CosineSimilarity(), pooling, axis=axis)(hidden[kept], HEAD, batch)
    terms.loss_sum.backward()
    return Share(float(terms.loss_sum.detach()), terms.weight, hidden.grad)


def alone(pooling: str) -> Share:
    units = [([A, P], (0.3,)), ([A, P], (0.8,))]
    counts = [3, 2, 4, 2] if pooling == "mean" else [1] * 4
    torch.manual_seed(2)
    hidden = torch.randn(sum(counts), WIDTH, dtype=torch.float64, requires_grad=True)
    terms = EmbeddingObjective(CosineSimilarity(), pooling)(hidden, HEAD, batch_of(units, counts))
    terms.loss_sum.backward()
    return Share(float(terms.loss_sum.detach()), terms.weight, hidden.grad)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_ranks_that_share_rows(pooling):
    shares, whole = on_ranks(2, on_shared_rows, pooling), alone(pooling)
    assert [share.weight for share in shares] == [2.0, 0.0] and shares[1].loss == 0
    assert shares[0].loss == pytest.approx(whole.loss, rel=1e-12)
    torch.testing.assert_close(sum(share.gradient for share in shares), whole.gradient, rtol=1e-12, atol=1e-15)


def test_what_cannot_be_done_is_said():
    features = features_of([([A, N], ())])
    with pytest.raises(DataError, match="no positive"):
        couple(features, batch_of([([A, N], ())]).sequences, InfoNCE())
    for kinds in ([P, N], [A, A], [A]):
        with pytest.raises(DataError, match="needs one text"):
            couple(features[: len(kinds)], batch_of([(kinds, ())]).sequences, InfoNCE())
    with pytest.raises(UsageError, match="other anchors"):
        InfoNCE(use_batch=False, include_qq=True)
    with pytest.raises(UsageError, match="temperature"):
        InfoNCE(temperature=0.0)
