"""Attention over tiles of the score matrix: partial results, how they are merged, and their gradients.

Each tile gives an output and the log-sum-exp of its scores; two of them over the same queries merge to what both
together would give (Dao et al., arXiv 2205.14135, section 3.1). Backwards, each tile needs the merged output and
log-sum-exp only. Triangles and full rectangles go to fused kernels; what these don't know (windows, soft caps, values
of another size than keys) to plain products, some queries at a time.

Tensors here are of one row: [heads, tokens, head_dim]. Sums over tiles are fp32, of fp64 tensors fp64. What is for CUDA
has not yet been run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from swift.distributed.context.tiles import Tile
from swift.models.attention_blocks import blocked_backward, blocked_forward, suits_blocks

aten = torch.ops.aten

# Scores that the plain products hold at a time, and the number of queries that this may come to.
_SCORES = 1 << 22
_FEWEST_ROWS, _MOST_ROWS = 16, 512

Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Scores(NamedTuple):
    """How scores come from queries and keys: scale * q k, then cap * tanh(scores / cap), within a sliding window."""

    scale: float
    window: int | None = None
    softcap: float | None = None


class Inputs(NamedTuple):
    """query [heads, tokens, head_dim], key [kv_heads, tokens, head_dim], value [kv_heads, tokens, value_dim]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def of(self, tile: Tile) -> Inputs:
        keys = slice(tile.k_start, tile.k_end)
        return Inputs(self.query[:, tile.q_start : tile.q_end], self.key[:, keys], self.value[:, keys])


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type of sums over tiles."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Running:
    """Output [heads, tokens, value_dim] and log-sum-exp [heads, tokens] of the tiles so far.

    The log-sum-exp is fp64: the tiles' shares must add up to 1, or gradients that are small differences of large
    numbers (queries' and keys', where values are alike) lose a digit with each merge.
    """

    def __init__(self, query: torch.Tensor, value_dim: int) -> None:
        heads, tokens, _ = query.shape
        self.output = query.new_zeros(heads, tokens, value_dim, dtype=wide(query.dtype))
        self.logsumexp = query.new_full((heads, tokens), float("-inf"), dtype=torch.float64)

    def add(self, tile: Tile, part: torch.Tensor, logsumexp: torch.Tensor) -> None:
        rows = slice(tile.q_start, tile.q_end)
        output, before = self.output[:, rows], self.logsumexp[:, rows]
        logsumexp = logsumexp.double()
        total = torch.logaddexp(before, logsumexp)
        output.mul_(_share(before, total, output.dtype))
        output.addcmul_(part.to(output.dtype), _share(logsumexp, total, output.dtype))
        before.copy_(total)

    def finish(self, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp in the type of sums, once `sinks` [heads] have taken their part of every query."""
        total = self.logsumexp
        if sinks is not None:
            total = torch.logaddexp(total, sinks.double()[:, None])
            self.output.mul_(_share(self.logsumexp, total, self.output.dtype))
        return self.output, total.to(self.output.dtype)


def _share(logsumexp: torch.Tensor, total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (logsumexp - total).exp_()[..., None].to(dtype)


def attend(tiles: list[Tile], inputs: Inputs, scores: Scores, running: Running) -> None:
    """Add the tiles to `running`."""
    plain, others = _split(tiles, inputs, scores)
    if inputs.query.device.type == "cuda":
        for kind in _kinds(plain):
            for tile, part, logsumexp in _cuda_forward(kind, inputs, scores.scale):
                running.add(tile, part, logsumexp)
    else:
        for tile in plain:
            running.add(tile, *_cpu_forward(tile, inputs.of(tile), scores.scale))
    for tile in others:
        running.add(tile, *_products_forward(tile, inputs.of(tile), scores))


def attend_backward(
    tiles: list[Tile],
    inputs: Inputs,
    scores: Scores,
    merged: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sums: Grads,
) -> None:
    """Add the tiles' gradients to `sums`, of query, key and value.

    Args:
        merged: the gradient of the merged output, that output in the inputs' dtype, and the merged log-sum-exp.
    """
    plain, others = _split(tiles, inputs, scores)
    found: list[tuple[Tile, Grads]] = []
    if inputs.query.device.type == "cuda":
        for kind in _kinds(plain):
            found += _cuda_backward(kind, inputs, merged, scores.scale)
        _add(found, sums)
    else:
        for tile in plain:
            _add([(tile, _cpu_backward(tile, inputs.of(tile), _rows(merged, tile), scores.scale))], sums)
    for tile in others:
        _add([(tile, _products_backward(tile, inputs.of(tile), _rows(merged, tile), scores))], sums)


def _add(found: list[tuple[Tile, Grads]], sums: Grads) -> None:
    for tile, (query, key, value) in found:
        sums[0][:, tile.q_start : tile.q_end] += query
        sums[1][:, tile.k_start : tile.k_end] += key
        sums[2][:, tile.k_start : tile.k_end] += value


def _rows(merged: Grads, tile: Tile) -> Grads:
    grad, output, logsumexp = (tensor[:, tile.q_start : tile.q_end] for tensor in merged)
    return grad, output, logsumexp


def _split(tiles: list[Tile], inputs: Inputs, scores: Scores) -> tuple[list[Tile], list[Tile]]:
    """Tiles that a fused kernel does, and the others."""
    fused = scores.softcap is None and inputs.query.shape[2] == inputs.value.shape[2]
    fused &= inputs.query.device.type == "cpu" or inputs.query.dtype in (torch.bfloat16, torch.float16)
    plain: list[Tile] = []
    others: list[Tile] = []
    for tile in tiles:
        simple = fused and (tile.triangular or tile.full) and tile.within(scores.window)
        (plain if simple else others).append(tile)
    return plain, others


# --- CPU: the flash kernel, or batched products for triangles of middling size ---


def _cpu_forward(tile: Tile, inputs: Inputs, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value = inputs
    heads, tokens, head_dim = query.shape
    if tile.full:
        folded = query.reshape(key.shape[0], -1, head_dim)  # heads that share a key head: more queries of one head
        output, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
            folded[None], key[None], value[None], 0.0, False, scale=scale
        )
        return output.reshape(heads, tokens, head_dim), logsumexp.reshape(heads, tokens)
    if suits_blocks(tokens, query.dtype, backward=False):
        return blocked_forward(query, key, value, scale)
    key, value = (_expand(t, heads) for t in (key, value))
    output, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        query[None], key[None], value[None], 0.0, True, scale=scale
    )
    return output[0], logsumexp[0]


def _cpu_backward(tile: Tile, inputs: Inputs, merged: Grads, scale: float) -> Grads:
    query, key, value = inputs
    grad, output, logsumexp = merged
    heads, kv_heads = query.shape[0], key.shape[0]
    if tile.full:
        rows = [t.reshape(kv_heads, -1, t.shape[2])[None] for t in (grad, query, output)]
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            rows[0], rows[1], key[None], value[None], rows[2], logsumexp.reshape(1, kv_heads, -1), 0.0, False,
            scale=scale,
        )  # fmt: skip
        return grads[0].reshape(query.shape), grads[1][0], grads[2][0]
    if suits_blocks(tile.num_queries, query.dtype, backward=True):
        return blocked_backward(grad, (query, key, value), output, logsumexp, scale)
    wide_key, wide_value = (_expand(t, heads) for t in (key, value))
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad[None], query[None], wide_key[None], wide_value[None], output[None], logsumexp[None], 0.0, True,
        scale=scale,
    )  # fmt: skip
    return grads[0][0], *(t[0].unflatten(0, (kv_heads, -1)).sum(1) for t in grads[1:])


def _expand(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    repeats = heads // tensor.shape[0]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, 0)


# --- any device, window, soft cap and sizes: products of some queries at a time ---


class _Block(NamedTuple):
    """Queries and keys of a tile, counted in it; `hidden` [queries, keys] are the pairs that don't see each other."""

    queries: slice
    keys: slice
    hidden: torch.Tensor | None


def _blocks(tile: Tile, heads: int, window: int | None, device: torch.device) -> Iterator[_Block]:
    reach = tile.num_keys if window is None else min(tile.num_keys, window)
    rows = min(max(_SCORES // (heads * reach), _FEWEST_ROWS), _MOST_ROWS)
    for start in range(0, tile.num_queries, rows):
        end = min(start + rows, tile.num_queries)
        first = 0 if window is None else max(0, tile.ahead + start - window + 1)
        last = min(tile.num_keys, tile.ahead + end)
        hidden = None
        if last > tile.ahead + start + 1 or (window is not None and tile.ahead + end - first > window):
            queries = torch.arange(tile.ahead + start, tile.ahead + end, device=device)
            distance = queries[:, None] - torch.arange(first, last, device=device)
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        yield _Block(slice(start, end), slice(first, last), hidden)


def _block_scores(queries: torch.Tensor, keys: torch.Tensor, block: _Block, scores: Scores) -> torch.Tensor:
    """[kv_heads, group * queries, keys], hidden pairs at -inf."""
    found = torch.bmm(queries * scores.scale, keys.mT)
    if scores.softcap is not None:
        found = found.div_(scores.softcap).tanh_().mul_(scores.softcap)
    if block.hidden is not None:
        found.unflatten(1, (-1, block.hidden.shape[0])).masked_fill_(block.hidden, float("-inf"))
    return found


def _fold(tensor: torch.Tensor, kv_heads: int, rows: slice) -> torch.Tensor:
    """Rows of [heads, tokens, n] as [kv_heads, group * rows, n], in the type of sums."""
    return tensor[:, rows].reshape(kv_heads, -1, tensor.shape[2]).to(wide(tensor.dtype))


def _products_forward(tile: Tile, inputs: Inputs, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
    heads, tokens, _ = inputs.query.shape
    kv_heads = inputs.key.shape[0]
    key, value = (t.to(wide(t.dtype)) for t in (inputs.key, inputs.value))
    output = key.new_empty(heads, tokens, value.shape[2])
    logsumexp = key.new_empty(heads, tokens)
    for block in _blocks(tile, heads, scores.window, key.device):
        found = _block_scores(_fold(inputs.query, kv_heads, block.queries), key[:, block.keys], block, scores)
        total = found.logsumexp(2, keepdim=True)
        part = torch.bmm(found.sub_(total).exp_(), value[:, block.keys])
        output[:, block.queries] = part.view(heads, -1, value.shape[2])
        logsumexp[:, block.queries] = total.view(heads, -1)
    return output, logsumexp


def _products_backward(tile: Tile, inputs: Inputs, merged: Grads, scores: Scores) -> Grads:
    heads, kv_heads = inputs.query.shape[0], inputs.key.shape[0]
    key, value = (t.to(wide(t.dtype)) for t in (inputs.key, inputs.value))
    grad, output, logsumexp = merged
    grad_query = key.new_empty(inputs.query.shape)
    grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
    for block in _blocks(tile, heads, scores.window, key.device):
        queries, grads, outputs = (_fold(t, kv_heads, block.queries) for t in (inputs.query, grad, output))
        keys, values = key[:, block.keys], value[:, block.keys]
        found = _block_scores(queries, keys, block, scores)
        weights = (found - _fold(logsumexp[..., None], kv_heads, block.queries)).exp_()
        grad_value[:, block.keys].baddbmm_(weights.mT, grads)
        grad_scores = torch.bmm(grads, values.mT).sub_((grads * outputs).sum(2, keepdim=True)).mul_(weights)
        if scores.softcap is not None:  # hidden pairs have a weight of 0, and so has their gradient
            slope = 1 - (found / scores.softcap).square_()
            grad_scores *= slope.masked_fill_(weights == 0, 0.0)
        grad_query[:, block.queries] = torch.bmm(grad_scores, keys).mul_(scores.scale).view(heads, -1, key.shape[2])
        grad_key[:, block.keys].baddbmm_(grad_scores.mT, queries, alpha=scores.scale)
    return grad_query, grad_key, grad_value


# --- CUDA: all tiles of a kind in one call of the flash kernel for segments ---


class _Kind(NamedTuple):
    """Tiles laid end to end: where each begins among the queries and among the keys, and the longest ones."""

    tiles: list[Tile]
    causal: bool

    def rows(self, tensor: torch.Tensor, *, keys: bool) -> torch.Tensor:
        """The tiles' rows of [heads, tokens, n] as [rows, heads, n]."""
        parts = [tensor[:, t.k_start : t.k_end] if keys else tensor[:, t.q_start : t.q_end] for t in self.tiles]
        return torch.cat(parts, 1).transpose(0, 1).contiguous()

    def borders(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        sizes = [[t.num_queries for t in self.tiles], [t.num_keys for t in self.tiles]]
        starts = [torch.tensor([0, *s], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device) for s in sizes]
        return starts[0], starts[1], max(sizes[0]), max(sizes[1])

    def parts(self, tensor: torch.Tensor, *, keys: bool) -> list[torch.Tensor]:
        """[rows, heads, n] as one [heads, tokens, n] for each tile."""
        sizes = [t.num_keys if keys else t.num_queries for t in self.tiles]
        return [part.transpose(0, 1) for part in tensor.split(sizes)]


def _kinds(tiles: list[Tile]) -> list[_Kind]:
    kinds = [_Kind([t for t in tiles if not t.full], True), _Kind([t for t in tiles if t.full], False)]
    return [kind for kind in kinds if kind.tiles]


def _cuda_forward(kind: _Kind, inputs: Inputs, scale: float) -> Iterator[tuple[Tile, torch.Tensor, torch.Tensor]]:
    query, key, value = kind.rows(inputs.query, keys=False), *(kind.rows(t, keys=True) for t in inputs[1:])
    output, logsumexp, *_ = aten._flash_attention_forward(
        query, key, value, *kind.borders(query.device), 0.0, kind.causal, False, scale=scale
    )
    lse = logsumexp.split([t.num_queries for t in kind.tiles], 1)  # [heads, rows]
    yield from zip(kind.tiles, kind.parts(output, keys=False), lse, strict=True)


def _cuda_backward(kind: _Kind, inputs: Inputs, merged: Grads, scale: float) -> list[tuple[Tile, Grads]]:
    query, key, value = kind.rows(inputs.query, keys=False), *(kind.rows(t, keys=True) for t in inputs[1:])
    grad, output = (kind.rows(t, keys=False) for t in merged[:2])
    logsumexp = torch.cat([merged[2][:, t.q_start : t.q_end] for t in kind.tiles], 1)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
    found: Any = aten._flash_attention_backward(
        grad, query, key, value, output, logsumexp, *kind.borders(query.device), 0.0, kind.causal,
        no_dropout, torch.empty(0, device=query.device), scale=scale,
    )  # fmt: skip
    parts = [kind.parts(found[0], keys=False), *(kind.parts(t, keys=True) for t in found[1:3])]
    return [(tile, (q, k, v)) for tile, q, k, v in zip(kind.tiles, *parts, strict=True)]
