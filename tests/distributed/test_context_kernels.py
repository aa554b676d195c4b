"""Tiles merged to a row's attention, in one process: every kernel, against one dense softmax in float64."""

from __future__ import annotations

import pytest
import torch

from swift.distributed.context.gather_kv import dropout_attention, tiled_attention
from swift.distributed.context.kernels import Inputs, Scores
from swift.distributed.context.tiles import gathered_tiles, whole_tiles

SHORT = [0, 5, 6, 30, 64]
LONG = [0, 300, 310, 700]  # long enough for the batched products, and for more than one block of the plain ones


def dense(inputs: Inputs, borders: list[int], scores: Scores, sinks: torch.Tensor | None) -> torch.Tensor:
    """Written from the definition; nothing shared with the code under test."""
    query, key, value = inputs
    groups = query.shape[0] // key.shape[0]
    position = torch.arange(borders[-1])
    segment = torch.bucketize(position, torch.tensor(borders), right=True)
    seen = (segment[:, None] == segment) & (position[:, None] >= position)
    if scores.window is not None:
        seen &= position[:, None] - position < scores.window
    heads = []
    for head in range(query.shape[0]):
        logits = query[head] @ key[head // groups].T * scores.scale
        if scores.softcap is not None:
            logits = scores.softcap * torch.tanh(logits / scores.softcap)
        weights = torch.where(seen, logits, -torch.inf).exp()
        total = weights.sum(1, keepdim=True) + (0 if sinks is None else sinks[head].exp())
        heads.append(weights / total @ value[head // groups])
    return torch.stack(heads)


def draw(borders: list[int], heads: int, kv_heads: int, value_dim: int = 16, dtype=torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(borders[-1])
    shapes = (heads, borders[-1], 16), (kv_heads, borders[-1], 16), (kv_heads, borders[-1], value_dim), (heads,)
    return [
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes
    ]


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


CASES = {
    "plain": (SHORT, 4, 4, 16, None, None, False),
    "groups": (LONG, 4, 2, 16, None, None, False),
    "window": (SHORT, 4, 2, 16, 7, None, False),
    "long window": (LONG, 2, 1, 16, 100, None, False),
    "softcap": (SHORT, 4, 2, 16, None, 3.0, False),
    "sinks": (SHORT, 4, 2, 16, None, None, True),
    "two head sizes": (LONG, 2, 2, 8, None, None, False),
    "all of it": (LONG, 4, 2, 24, 50, 2.0, True),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_tiles_are_the_dense_attention(case, size):
    borders, heads, kv_heads, value_dim, window, softcap, has_sinks = CASES[case]
    *inputs, sinks = draw(borders, heads, kv_heads, value_dim)
    scores = Scores(0.3, window, softcap)
    expected = dense(Inputs(*inputs), borders, scores, sinks if has_sinks else None)
    mine = torch.cat([torch.arange(n).chunk(2 * size)[i] for n, i in [(borders[-1], 0), (borders[-1], -1)]])
    mine = torch.arange(borders[-1]) if size == 1 else mine
    grad = torch.randn(heads, len(mine), value_dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = [*inputs, sinks] if has_sinks else inputs
    theirs = torch.autograd.grad((expected[:, mine] * grad).sum(), wanted)
    tiles = gathered_tiles(borders, size, 0, window)
    shared = Inputs(inputs[0][:, mine], *inputs[1:])
    output = tiled_attention(shared, sinks if has_sinks else None, tiles, scores)
    ours = torch.autograd.grad((output * grad).sum(), wanted)
    assert difference(output, expected[:, mine]) < 1e-12
    assert [difference(a, b) < 1e-12 for a, b in zip(ours, theirs, strict=True)] == [True] * len(wanted)


@pytest.mark.parametrize("window", [None, 40])
def test_half_precision_is_summed_in_full(window):
    borders = [0, 100, 640]
    *inputs, sinks = draw(borders, 4, 2)
    expected = dense(Inputs(*inputs), borders, Scores(0.3, window), sinks)
    theirs = torch.autograd.grad(expected.sum(), inputs)
    halves = [t.detach().bfloat16().requires_grad_() for t in inputs]
    output = tiled_attention(
        Inputs(*halves), sinks.bfloat16(), gathered_tiles(borders, 1, 0, window), Scores(0.3, window)
    )
    ours = torch.autograd.grad(output.sum(), halves)
    assert output.dtype == torch.bfloat16 and difference(output, expected) < 0.01
    assert all(a.dtype == torch.bfloat16 and difference(a, b) < 0.03 for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_attention_with_dropout_sees_the_same_keys(case):
    borders, heads, kv_heads, value_dim, window, softcap, has_sinks = CASES[case]
    *inputs, sinks = draw(borders, heads, kv_heads, value_dim)
    scores, tiles = Scores(0.3, window, softcap), whole_tiles(borders, 1, 0)
    expected = dense(Inputs(*inputs), borders, scores, sinks if has_sinks else None)
    arguments = (Inputs(*inputs), sinks if has_sinks else None, tiles, scores)
    assert difference(dropout_attention(*arguments, 0.0), expected) < 1e-12
    torch.manual_seed(0)
    dropped = torch.stack([dropout_attention(*arguments, 0.3) for _ in range(2)])
    assert difference(dropped[0], dropped[1]) > 0.1
