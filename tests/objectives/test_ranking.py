"""Losses of rerankers against the formulas, and log-odds of two words wherever the vocabulary is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from pool import on_ranks
from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Shard
from units_batch import batch_of

from swift.config.degrees import Degrees
from swift.core.errors import DataError, ModelError
from swift.data.units import Kind
from swift.distributed.mesh import Axis, build_mesh
from swift.models.head import OutputHead
from swift.objectives.ranking import RerankerObjective, word_log_odds

P, N = int(Kind.POSITIVE), int(Kind.NEGATIVE)
UNITS = [([P, N, N], ()), ([N, P], ()), ([P, P, N], ()), ([P], ()), ([N, N, P, N], ())]
WIDTH, VOCAB = 6, 11
STARTS = [0, 3, 5, 8, 9, 13]


def scored() -> tuple[OutputHead, torch.Tensor, list[float]]:
    torch.manual_seed(8)
    head, hidden = nn.Linear(WIDTH, 1, dtype=torch.float64), torch.randn(13, WIDTH, dtype=torch.float64)
    return OutputHead(head), hidden, (hidden @ head.weight.T + head.bias)[:, 0].tolist()


def pointwise(scores: list[float]) -> tuple[float, int]:
    kinds = [kind for unit, _ in UNITS for kind in unit]
    p = [1 / (1 + math.exp(-s)) for s in scores]
    losses = [-math.log(q if kind == P else 1 - q) for q, kind in zip(p, kinds, strict=True)]
    return sum(losses) / len(losses), sum((s > 0) == (k == P) for s, k in zip(scores, kinds, strict=True))


def listwise(scores: list[float], t: float) -> tuple[float, float]:
    losses, hits = [], []
    for u, (kinds, _) in enumerate(UNITS):
        own = scores[STARTS[u] : STARTS[u + 1]]
        wrong = [s for s, k in zip(own, kinds, strict=True) if k == N]
        right = [s for s, k in zip(own, kinds, strict=True) if k == P]
        parts = [-math.log(math.exp(s / t) / (math.exp(s / t) + sum(math.exp(w / t) for w in wrong))) for s in right]
        losses.append(sum(parts) / len(parts))
        hits.append(sum(all(s > w for w in wrong) for s in right) / len(right))
    return sum(losses) / len(losses), sum(hits) / len(hits)


def step_in(groups: list[list[int]], objective: RerankerObjective) -> tuple[float, float, torch.Tensor]:
    head, hidden, _ = scored()
    step, terms = {"units": 5.0, "documents": 13.0}, []
    for group in groups:
        rows = [i for unit in group for i in range(STARTS[unit], STARTS[unit + 1])]
        terms.append(objective(hidden[rows], head, batch_of([UNITS[u] for u in group], step=step)))
    loss = sum(term.loss_sum for term in terms) / sum(term.weight for term in terms)
    loss.backward()
    accuracy = sum(float(t.sums["accuracy"]) for t in terms) / sum(t.counts["accuracy"] for t in terms)
    return float(loss.detach()), accuracy, head.module.weight.grad


@pytest.mark.parametrize("groups", [[[0, 1, 2, 3, 4]], [[0], [1], [2], [3], [4]], [[4, 0], [], [3, 1, 2]]])
def test_a_step_is_the_formula_however_it_is_cut(groups):
    scores = scored()[2]
    loss, accuracy, gradient = step_in(groups, RerankerObjective())
    assert (loss, accuracy * 13) == pytest.approx(pointwise(scores), rel=1e-12)
    torch.testing.assert_close(gradient, step_in([[0, 1, 2, 3, 4]], RerankerObjective())[2], rtol=1e-12, atol=1e-15)
    for temperature in (1.0, 0.3):
        objective = RerankerObjective("listwise", temperature)
        loss, accuracy, gradient = step_in(groups, objective)
        assert (loss, accuracy) == pytest.approx(listwise(scores, temperature), rel=1e-12)
        torch.testing.assert_close(gradient, step_in([[0, 1, 2, 3, 4]], objective)[2], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("objective", [RerankerObjective(), RerankerObjective("listwise", 0.5)])
def test_gradients_are_finite_differences(objective):
    head, hidden, _ = scored()
    batch = batch_of(UNITS, step={"units": 5.0, "documents": 13.0})
    assert torch.autograd.gradcheck(lambda h: objective(h, head, batch).loss_sum, (hidden.requires_grad_(),))


@dataclass(frozen=True)
class Words:
    words: tuple[int, int]
    bias: bool = True
    scale: float = 1.0
    softcap: float | None = None


CASES = [Words((2, 9)), Words((9, 2), bias=False), Words((0, 1)), Words((10, 8), True, 0.5, 2.0), Words((5, 6))]


def vocabulary(case: Words) -> tuple[nn.Linear, torch.Tensor]:
    torch.manual_seed(4)
    head = nn.Linear(WIDTH, VOCAB, bias=case.bias, dtype=torch.float64)
    return head, torch.randn(13, WIDTH, dtype=torch.float64, requires_grad=True)


def full(case: Words, axis: Axis | None) -> list[torch.Tensor]:
    """Log-odds, and the gradients of a weighted sum of them: of states, matrix and bias."""
    head, hidden = vocabulary(case)
    if axis:
        for name, parameter in list(head.named_parameters()):
            spread = distribute_tensor(parameter.detach(), axis.device_mesh, [Shard(0)], src_data_rank=None)
            head._parameters[name] = nn.Parameter(spread)
    odds = word_log_odds(hidden, OutputHead(head, case.scale, case.softcap, axis), case.words)
    (odds * torch.arange(1.0, 14.0, dtype=torch.float64)).sum().backward()
    gradients = [p.grad.full_tensor() if axis else p.grad for p in head.parameters()]
    return [odds.detach(), hidden.grad, *gradients]


def by_all_logits(case: Words) -> list[torch.Tensor]:
    head, hidden = vocabulary(case)
    logits = head(hidden) * case.scale
    if case.softcap:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    logprobs = logits.log_softmax(1)
    odds = logprobs[:, case.words[0]] - logprobs[:, case.words[1]]
    (odds * torch.arange(1.0, 14.0, dtype=torch.float64)).sum().backward()
    return [odds.detach(), hidden.grad, *(p.grad for p in head.parameters())]


@pytest.mark.parametrize("case", CASES)
def test_log_odds_are_those_of_the_whole_vocabulary(case):
    torch.testing.assert_close(full(case, None), by_all_logits(case), rtol=1e-12, atol=1e-14)


def on_axis(_: int) -> list[list[torch.Tensor]]:
    axis = build_mesh(Degrees(tp=2), "cpu")["tp"]
    return [full(case, axis) for case in CASES]


def test_a_vocabulary_that_is_cut_over_ranks():
    for results in on_ranks(2, on_axis, 0):  # shares of 6 and 5
        for case, ours in zip(CASES, results, strict=True):
            torch.testing.assert_close(ours, by_all_logits(case), rtol=1e-12, atol=1e-14)


def test_a_head_that_is_more_than_a_matrix():
    case = CASES[0]
    head, hidden = vocabulary(case)
    torch.testing.assert_close(
        word_log_odds(hidden, OutputHead(nn.Sequential(head)), case.words).detach(), by_all_logits(case)[0]
    )
    with pytest.raises(ModelError, match="Sequential"):
        word_log_odds(hidden, OutputHead(nn.Sequential(head), axis=Axis("tp", 2)), case.words)


def on_shared_rows(_: int) -> tuple[float, torch.Tensor]:
    axis = build_mesh(Degrees(ring=2), "cpu")["cp"]
    head, hidden, _ = scored()
    batch = batch_of(UNITS)
    kept = torch.arange(13)[axis.rank :: 2]
    batch.sequences.target, batch.sequences.counted = batch.sequences.target[kept], axis.rank == 0
    terms = RerankerObjective("listwise", 0.5, axis=axis)(hidden[kept], head, batch)
    terms.loss_sum.backward()
    return float(terms.loss_sum.detach()), head.module.weight.grad


def test_ranks_that_share_rows():
    (loss, first), (nothing, second) = on_ranks(2, on_shared_rows, 0)
    expected, _, gradient = step_in([[0, 1, 2, 3, 4]], RerankerObjective("listwise", 0.5))
    assert loss == pytest.approx(5 * expected, rel=1e-12) and nothing == 0
    torch.testing.assert_close(first + second, 5 * gradient, rtol=1e-12, atol=1e-15)


def test_a_reranker_of_two_words_learns_from_their_rows_only():
    head, hidden = vocabulary(CASES[0])
    objective = RerankerObjective(words=(2, 9))
    objective(hidden, OutputHead(head), batch_of(UNITS, step={"units": 5.0, "documents": 13.0})).loss_sum.backward()
    assert torch.nonzero(head.weight.grad.abs().sum(1))[:, 0].tolist() == [2, 9]


def test_what_cannot_be_done_is_said():
    head, hidden, _ = scored()
    with pytest.raises(DataError, match="no document that fits"):
        RerankerObjective("listwise")(hidden[:2], head, batch_of([([N, N], ())]))
    with pytest.raises(ModelError, match="takes 1 number per text"):
        wide = OutputHead(nn.Linear(WIDTH, 2, dtype=torch.float64))
        RerankerObjective()(hidden[:1], wide, batch_of([([P], ())], step={"units": 1.0, "documents": 1.0}))
