"""Attention over a paged cache: its meaning, and that a row's bits are its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from swift.core.errors import ModelError
from swift.inference.paged import attention
from swift.inference.paged.attention import paged_attention
from swift.inference.paged.cache import KVCache, LayerShape
from swift.inference.paged.step import Step, running

LAYER = 3  # as the model counts; the cache holds this one alone


@dataclass(frozen=True)
class Case:
    """Heads and what is done with scores."""

    heads: int = 6
    kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


CASES = {
    "grouped": Case(),
    "one-head-each": Case(heads=4, kv_heads=4, block_size=8),
    "one-key-head": Case(heads=5, kv_heads=1, key_dim=64, value_dim=64, block_size=32),
    "window": Case(window=7),
    "window-of-one": Case(window=1, block_size=8),
    "softcap": Case(softcap=2.0),
    "sinks": Case(sinks=True),
    "two-widths": Case(heads=4, kv_heads=4, key_dim=24, value_dim=16),
    "odd-width": Case(key_dim=13, value_dim=7, block_size=5),
    "everything": Case(key_dim=20, value_dim=36, block_size=8, window=11, softcap=3.0, sinks=True),
}


class Requests:
    """Requests with random queries, keys and values, and a cache that any of their rows can be run over."""

    def __init__(self, case: Case, lengths: list[int], *, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.case, self.lengths = case, lengths
        draw = np.random.default_rng(seed)
        self.rows = [
            [
                torch.from_numpy(draw.standard_normal((heads, n, dim), dtype=np.float32))
                for heads, dim in (
                    (case.heads, case.key_dim),
                    (case.kv_heads, case.key_dim),
                    (case.kv_heads, case.value_dim),
                )
            ]
            for n in lengths
        ]
        self.sinks = torch.from_numpy(draw.standard_normal(case.heads, dtype=np.float32)) if case.sinks else None
        self.dtype = dtype
        self.new_cache(seed)

    def new_cache(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        """An empty cache whose blocks lie in another order; what nobody has written yet is NaN."""
        case, size = self.case, self.case.block_size
        counts = [-(-n // size) for n in self.lengths]
        shape = LayerShape(case.kv_heads, case.key_dim, case.value_dim)
        self.cache = KVCache({LAYER: shape}, sum(counts), size, dtype, torch.device("cpu"))
        for tensor in (*self.cache.keys, *self.cache.values):
            tensor.fill_(float("nan"))
        order = np.random.default_rng(seed).permutation(sum(counts)).astype(np.int32)
        self.tables = np.split(order, np.cumsum(counts)[:-1])

    def run(self, spans: list[tuple[int, int, int]], fillers: int = 0) -> list[torch.Tensor]:
        """Run rows [start, end) of requests, given as (request, start, end), in one step.

        Returns:
            for each span [rows, heads, value_dim].
        """
        size, case = self.case.block_size, self.case
        packed = [torch.cat([self.rows[r][k][:, a:b] for r, a, b in spans], dim=1) for k in range(3)]
        packed = [torch.cat([t, torch.ones(t.shape[0], fillers, t.shape[2])], dim=1).to(self.dtype) for t in packed]
        slots = [
            np.concatenate([self.tables[r][np.arange(a, b) // size] * size + np.arange(a, b) % size])
            for r, a, b in spans
        ]
        slots.append(np.full(fillers, self.cache.filler_slot))
        tables = np.full((len(spans), max(len(self.tables[r]) for r, _, _ in spans)), 0, dtype=np.int32)
        first = np.cumsum([0, *(b - a for _, a, b in spans)])
        for place, (r, _, _) in enumerate(spans):
            tables[place, : len(self.tables[r])] = self.tables[r]
        step = Step(
            self.cache,
            int(first[-1]) + fillers,
            np.concatenate(slots).astype(np.int64),
            np.array([(first[k], b - a, a) for k, (_, a, b) in enumerate(spans)], dtype=np.int32),
            tables,
        )
        module: Any = SimpleNamespace(layer_idx=LAYER)
        with running(step), torch.inference_mode():
            output, weights = paged_attention(
                module,
                *(t[None] for t in packed),
                None,
                sliding_window=case.window,
                softcap=case.softcap,
                s_aux=self.sinks,
            )
        assert weights is None
        assert output.shape == (1, step.num_rows, case.heads, case.value_dim)
        assert output.dtype == self.dtype
        assert not output[0, int(first[-1]) :].any()  # fillers
        return [output[0, first[k] : first[k + 1]] for k in range(len(spans))]

    def whole(self) -> list[torch.Tensor]:
        """Each request in one piece, all together."""
        return self.run([(r, 0, n) for r, n in enumerate(self.lengths)])

    def reference(self, request: int) -> np.ndarray:
        """The same in float64, with all scores written out: [rows, heads, value_dim]."""
        case = self.case
        q, k, v = (t.double().numpy() for t in self.rows[request])
        shared = case.heads // case.kv_heads
        k, v = np.repeat(k, shared, axis=0), np.repeat(v, shared, axis=0)
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(case.key_dim)
        if case.softcap:
            scores = case.softcap * np.tanh(scores / case.softcap)
        n = q.shape[1]
        row, column = np.arange(n)[:, None], np.arange(n)[None]
        seen = (column <= row) & (column > row - (case.window or n + 1))
        weights = np.where(seen, np.exp(scores), 0)
        total = weights.sum(-1, keepdims=True)
        if self.sinks is not None:
            total = total + np.exp(self.sinks.double().numpy())[:, None, None]
        return (weights / total @ v).transpose(1, 0, 2)


@pytest.fixture(params=["compiled", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both implementations."""
    if request.param == "torch":
        monkeypatch.setattr(attention, "_compiled", lambda: False)
    return str(request.param)


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_the_formula_says(name: str, way: str) -> None:
    requests = Requests(CASES[name], [37, 5, 18])
    for r, found in enumerate(requests.whole()):
        np.testing.assert_allclose(found.double().numpy(), requests.reference(r), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", CASES)
def test_pieces_of_requests_see_what_came_before(name: str, way: str) -> None:
    requests = Requests(CASES[name], [37, 23])
    requests.run([(0, 0, 20), (1, 0, 1)], fillers=3)
    found = requests.run([(1, 1, 23), (0, 20, 37)], fillers=1)
    np.testing.assert_allclose(found[0].double().numpy(), requests.reference(1)[1:], rtol=0, atol=2e-6)
    np.testing.assert_allclose(found[1].double().numpy(), requests.reference(0)[20:], rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", CASES)
def test_bits_depend_on_nothing_but_the_request(name: str) -> None:
    requests = Requests(CASES[name], [70, 41, 3])
    wanted = requests.whole()
    rng = np.random.default_rng(1)
    for attempt in range(4):  # other blocks, other chunks, other neighbours
        requests.new_cache(seed=attempt + 10)
        done = [0, 0, 0]
        most = [1, 3, 17, 70][attempt]
        while done != requests.lengths:
            waiting = [r for r in range(3) if done[r] < requests.lengths[r]]
            chosen = rng.permutation(waiting)[: rng.integers(1, 4)]
            spans = [
                (int(r), done[r], min(requests.lengths[r], done[r] + int(rng.integers(1, most + 1)))) for r in chosen
            ]
            for (r, start, end), found in zip(spans, requests.run(spans, fillers=int(rng.integers(0, 4))), strict=True):
                assert torch.equal(found, wanted[r][start:end])
                done[r] = end


@pytest.mark.parametrize("name", ["grouped", "window", "sinks"])
def test_bits_do_not_depend_on_the_block_size(name: str) -> None:
    found = [Requests(replace(CASES[name], block_size=size), [70, 9]).whole() for size in (16, 8, 5)]
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(other, found[0], strict=True))


def test_bits_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(CASES["grouped"], [300, 1, 50])
    wanted = requests.whole()
    monkeypatch.setattr(attention, "_WORTH_A_THREAD", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        found = requests.whole()
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_scores_of_any_size() -> None:
    requests = Requests(Case(), [40])
    query, key, value = requests.rows[0]
    for factor in (1e-3, 30.0, 300.0):
        requests.rows[0] = [query * factor, key, value]
        requests.new_cache(0)
        scores = requests.reference(0) if factor < 100 else None
        found = requests.whole()[0]
        assert torch.isfinite(found).all()
        if scores is not None:
            np.testing.assert_allclose(found.double().numpy(), scores, rtol=0, atol=2e-5)


def test_both_ways_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(replace(CASES["everything"], heads=8), [50, 7])
    compiled = requests.whole()
    monkeypatch.setattr(attention, "_compiled", lambda: False)
    for a, b in zip(requests.whole(), compiled, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    requests = Requests(CASES["everything"], [37, 5], dtype=dtype)
    requests.new_cache(0, dtype)
    bound = {torch.bfloat16: 4e-2, torch.float16: 6e-3, torch.float64: 1e-6}[dtype]
    for r, found in enumerate(requests.whole()):
        np.testing.assert_allclose(found.double().numpy(), requests.reference(r), rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_caches_of_a_wide_model(dtype: torch.dtype, way: str) -> None:
    requests = Requests(CASES["everything"], [37, 5])
    requests.new_cache(0, dtype)
    found = requests.whole()
    # what is lost is the cache's rounding, nothing else
    requests.rows = [[q, k.to(dtype).float(), v.to(dtype).float()] for q, k, v in requests.rows]
    for r, rows in enumerate(found):
        np.testing.assert_allclose(rows.double().numpy(), requests.reference(r), rtol=0, atol=2e-6)


def test_a_copied_block_holds_the_same() -> None:
    requests = Requests(Case(), [20, 20])
    wanted = requests.whole()[0]
    for source, target in zip(requests.tables[0], requests.tables[1], strict=True):
        requests.cache.copy_block(int(source), int(target))
    requests.rows[1] = requests.rows[0]
    assert torch.equal(requests.run([(1, 15, 20)])[0], wanted[15:])


def test_outside_of_a_step() -> None:
    module: Any = SimpleNamespace(layer_idx=0)
    tensor = torch.zeros(1, 1, 1, 8)
    with pytest.raises(ModelError, match="inside of an engine's step"):
        paged_attention(module, tensor, tensor, tensor, None)
