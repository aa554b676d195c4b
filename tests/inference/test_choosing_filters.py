"""Sampling: which candidates are kept, how often each is drawn, and that a row depends on nothing but itself."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from swift.inference.choosing.filters import Filters, probabilities, row_argmax, sample_tokens

SETTINGS = [
    Filters(1.0),
    Filters(0.7),
    Filters(1.0, top_k=1),
    Filters(1.3, top_k=7),
    Filters(1.0, top_k=300),
    Filters(1.0, top_p=0.5),
    Filters(0.8, top_p=0.9),
    Filters(2.0, top_p=0.999),
    Filters(1.0, min_p=0.05),
    Filters(1.5, min_p=0.9),
    Filters(0.9, top_k=20, top_p=0.8),
    Filters(1.1, top_k=50, top_p=0.95, min_p=0.02),
    Filters(1.0, top_k=100000),
]


def make_scores(rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def kept_by_transformers(scores: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Probabilities after transformers' own warpers, 0 where dropped. [rows, vocab]"""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(filters.temperature)])
    if filters.top_k:
        warpers.append(TopKLogitsWarper(filters.top_k))
    if filters.top_p < 1:
        warpers.append(TopPLogitsWarper(filters.top_p))
    if filters.min_p:
        warpers.append(MinPLogitsWarper(filters.min_p))
    return warpers(None, scores.clone()).softmax(dim=-1)


def reference(scores: np.ndarray, filters: Filters) -> np.ndarray:
    """Probabilities of one row's tokens in float64, straight from the definitions."""
    shares = np.exp((scores - scores.max()) / filters.temperature)
    shares /= shares.sum()
    order = np.argsort(-shares, kind="stable")
    if 0 < filters.top_k < len(shares):
        shares[order[filters.top_k :]] = 0
        shares /= shares.sum()
    if filters.top_p < 1:
        before = 0.0
        for token in order:
            if before >= filters.top_p:
                shares[token], before = 0, before
            else:
                before += shares[token]
        shares /= shares.sum()
    shares[shares < filters.min_p * shares.max()] = 0
    return shares / shares.sum()


@pytest.mark.parametrize("filters", SETTINGS, ids=str)
@pytest.mark.parametrize("vocab", [40, 8256])
def test_drawn_tokens_are_those_that_transformers_keeps(filters, vocab):
    """Draws as dense as they come: every kept token that has a share is drawn, and no other one."""
    scores = make_scores(1, vocab, seed=vocab)
    num = 1000
    draws = [(k + 0.5) / num for k in range(num)]
    drawn = set()
    for start in range(0, num, 100):
        part = draws[start : start + 100]
        drawn.update(sample_tokens(scores.expand(len(part), -1), part, [filters] * len(part)).tolist())
    shares = kept_by_transformers(scores, filters)[0]
    assert drawn <= set(shares.nonzero()[:, 0].tolist())
    assert drawn >= set((shares > 2 / num).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("filters", SETTINGS, ids=str)
def test_tokens_are_drawn_as_often_as_their_probability(filters):
    """A chi-square test against float64, with fixed seeds."""
    scores = make_scores(1, 70, seed=5, spread=1.5)
    wanted = reference(scores[0].double().numpy(), filters)
    num = 8000
    draws = [random.Random(f"seed/{k}").random() for k in range(num)]
    counts = np.bincount(sample_tokens(scores.expand(num, -1), draws, [filters] * num).numpy(), minlength=70)
    assert counts[wanted == 0].sum() == 0
    likely = wanted * num >= 5
    statistic = ((counts[likely] - wanted[likely] * num) ** 2 / (wanted[likely] * num)).sum()
    degrees = max(1, likely.sum() - 1)
    assert statistic < degrees + 4 * math.sqrt(2 * degrees)


def test_draws_follow_the_order_of_candidates():
    """Without top_k and top_p by token id, with them by probability."""
    scores = torch.tensor([[0.1, 0.6, 0.3]]).log()
    assert sample_tokens(scores.expand(3, -1), [0.05, 0.5, 0.75], [Filters()] * 3).tolist() == [0, 1, 2]
    assert sample_tokens(scores.expand(3, -1), [0.05, 0.65, 0.95], [Filters(top_k=3, top_p=0.99)] * 3).tolist() == [
        1,
        2,
        0,
    ]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocab", [1003, 49152])
def test_a_row_depends_on_itself_only(vocab, threads):
    """Bits: probabilities, and tokens at draws on the very edges between two tokens."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows, filters = len(SETTINGS), SETTINGS
        scores = make_scores(rows, vocab, seed=1) * torch.linspace(0.5, 3, rows)[torch.arange(rows) * 5 % rows, None]
        together = probabilities(scores, [row.temperature for row in filters])
        edges = []
        for row in range(rows):
            alone = probabilities(scores[row : row + 1].clone(), [filters[row].temperature])
            assert torch.equal(alone[0], together[row])
            order = alone[0].sort(descending=True).values if filters[row].top_p < 1 or filters[row].top_k else alone[0]
            edges.append(order.cumsum(dim=-1)[row % 5].item())
        for shift in (0.0, 1e-7, -1e-7):
            draws = [min(max(edge + shift, 0.0), 0.9999999) for edge in edges]
            tokens = sample_tokens(scores, draws, filters).tolist()
            for row in range(rows):
                alone = scores[row : row + 1].clone()
                assert sample_tokens(alone, [draws[row]], [filters[row]]).tolist() == [tokens[row]]
            order = torch.randperm(rows, generator=torch.Generator().manual_seed(3)).tolist()
            mixed = sample_tokens(scores[order], [draws[k] for k in order], [filters[k] for k in order])
            assert mixed.tolist() == [tokens[k] for k in order]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [(0, 1), (1, 0), (0, 1, 2), (2, 0, 1)])
def test_rows_that_need_more_candidates_keep_their_places(rows):
    scores = make_scores(3, 9000, spread=0.1)
    filters = [Filters(top_p=0.99), Filters(top_k=300), Filters(top_k=3)]
    draws = [0.95, 0.9, 0.5]
    alone = [sample_tokens(scores[k : k + 1], draws[k : k + 1], filters[k : k + 1]).item() for k in range(3)]
    together = sample_tokens(scores[list(rows)], [draws[k] for k in rows], [filters[k] for k in rows])
    assert together.tolist() == [alone[k] for k in rows]


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-6, 1e30, 1e300])
@pytest.mark.parametrize("vocab", [3, 64, 5000])
def test_extreme_temperatures_are_greedy_or_uniform(temperature, vocab):
    scores = make_scores(4, vocab, spread=50.0)
    scores[1, 0] = -torch.inf
    scores[2] *= 1e30
    for filters in (Filters(temperature), Filters(temperature, top_k=2), Filters(temperature, top_p=1e-9),
                    Filters(temperature, top_k=2, top_p=0.5, min_p=1.0)):  # fmt: skip
        tokens = sample_tokens(scores, [0.0, 0.3, 0.999, 0.6], [filters] * 4)
        if temperature < 1:
            assert tokens.tolist() == scores.argmax(dim=-1).tolist()
        assert tokens[1] != 0
    probs = probabilities(scores, [temperature] * 4)
    assert bool(torch.isfinite(probs).all())
    if temperature > 1:
        assert probs[0].max() == pytest.approx(1 / vocab, rel=1e-5)
    assert probs[1, 0] == 0


@pytest.mark.parametrize("filters", [Filters(), Filters(top_k=4), Filters(top_p=0.99), Filters(min_p=0.1)], ids=str)
@pytest.mark.parametrize("draw", [0.0, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_drawn(filters, draw):
    scores = torch.full((2, 200), -torch.inf)
    scores[0, 77] = scores[1, 13] = scores[1, 150] = 1.0
    drawn = sample_tokens(scores, [draw, draw], [filters] * 2).tolist()
    assert drawn == [77, 13 if draw == 0 else 150]


@pytest.mark.parametrize("vocab", [40, 300, 49152])
def test_equal_candidates_go_by_their_id(vocab):
    """So that top_k=1 is greedy; scores of bfloat16 models are often equal."""
    scores = make_scores(8, vocab, spread=1.0).round()
    for filters in (Filters(top_k=1), Filters(top_p=1e-6), Filters(top_k=5, top_p=1e-6)):
        assert sample_tokens(scores, [0.7] * 8, [filters] * 8).tolist() == scores.argmax(dim=-1).tolist()


@pytest.mark.parametrize("vocab", [1, 50, 128, 1000, 49152])
def test_the_largest_value_is_found_at_its_first_place(vocab):
    scores = make_scores(6, vocab).round()  # many equal values
    values, places = row_argmax(scores)
    assert places.tolist() == scores.numpy().argmax(axis=-1).tolist()
    assert values.tolist() == scores.amax(dim=-1).tolist()
    scores[3, vocab // 2] = torch.nan
    assert row_argmax(scores)[0].isnan().tolist() == [False, False, False, True, False, False]
