"""Which candidates a sampled token is drawn from, and the drawing: temperature, top_k, top_p, min_p, in this order.

Works on rows of scores; knows nothing of requests. What happens to a row depends on that row alone, bit for bit: only
operations that treat each row by itself are used (softmax, cumsum, topk, max; no sums over a dimension, which torch may
split among threads when there are few rows), and how many candidates are sorted is decided row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

_BLOCK = 64  # columns whose maxima are compared first when the largest of a row is searched
# sorted candidates, and the number of blocks that the vocabulary is cut into to find them; then the whole vocabulary
_TIERS = ((32, 2048), (256, 4096), (2048, 0))
# temperatures are kept inside what fp32 can divide by: smaller ones are greedy already, larger ones uniform
_COLDEST, _HOTTEST = 1e-37, 1e37


class Filters(NamedTuple):
    """How one row is sampled.

    Attributes:
        temperature: above 0.
        top_k: candidates kept; 0 is off.
        top_p: share of probability kept, of what top_k leaves; 1 is off.
        min_p: candidates below this share of the likeliest one's probability are dropped; 0 is off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def row_argmax(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest value of each row and the first place where it stands; NaN counts as the largest.

    Several times as fast as `Tensor.max` on a CPU, which compares one value at a time.

    Args:
        scores: [rows, vocab], contiguous.

    Returns:
        values [rows] and int64 places [rows].
    """
    rows, vocab = scores.shape
    if vocab % _BLOCK or vocab < 2 * _BLOCK:
        values, places = scores.max(dim=-1)
        return values, places
    blocks = scores.view(rows, -1, _BLOCK)
    values, block = blocks.amax(dim=-1).max(dim=-1)
    inside = blocks[torch.arange(rows, device=scores.device), block].argmax(dim=-1)
    return values, block * _BLOCK + inside


def probabilities(scores: torch.Tensor, temperatures: Sequence[float]) -> torch.Tensor:
    """Softmax of the scores at each row's temperature, [rows, vocab]; finite whatever the temperature."""
    bounded = [min(max(value, _COLDEST), _HOTTEST) for value in temperatures]
    column = torch.tensor(bounded, dtype=scores.dtype, device=scores.device)[:, None]
    return (scores - scores.amax(dim=-1, keepdim=True)).div_(column).softmax(dim=-1)


def sample_tokens(scores: torch.Tensor, draws: Sequence[float], filters: Sequence[Filters]) -> torch.Tensor:
    """One token for each row by its random number.

    Args:
        scores: [rows, vocab] fp32; at least one of a row finite, none NaN or +inf.
        draws: for each row a number from 0 to below 1.
        filters: for each row.

    Returns:
        int64 [rows].
    """
    vocab = scores.shape[1]
    probs = probabilities(scores, [row.temperature for row in filters])
    at = torch.tensor(list(draws), dtype=probs.dtype, device=probs.device)[:, None]
    chosen = torch.empty(len(filters), dtype=torch.int64, device=probs.device)
    ranked = [row for row, wanted in enumerate(filters) if 0 < wanted.top_k < vocab or wanted.top_p < 1]
    if len(ranked) < len(filters):
        rows = [row for row in range(len(filters)) if row not in ranked]
        weights = _drop_unlikely(_some(probs, rows), [filters[row].min_p for row in rows])
        chosen[rows] = _draw(weights, _some(at, rows))
    for width, blocks in (*_TIERS, (vocab, 0)):
        rows = [row for row in ranked if width >= vocab or filters[row].top_k <= width]
        if not rows:
            continue
        likeliest, tokens = _largest(_some(probs, rows), min(width, vocab), blocks)
        weights, enough = _keep(likeliest, [filters[row] for row in rows])
        places = _draw(weights, _some(at, rows))
        chosen[rows] = tokens.gather(1, places[:, None])[:, 0]
        # who hasn't got its share yet is drawn again, among more candidates
        done = {row for row, full in zip(rows, enough.tolist()) if full or width >= vocab}
        ranked = [row for row in ranked if row not in done]
    return chosen


def take_rows(values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Some rows of a matrix, a copy."""
    return values.index_select(0, torch.tensor(rows, device=values.device))


def _some(values: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """The same for rows in order; no copy when it is all of them."""
    return values if len(rows) == values.shape[0] else take_rows(values, rows)


def _largest(probs: torch.Tensor, width: int, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` largest of each row, largest first, and where they stand: both [rows, width].

    They lie in the blocks with the `width` largest maxima, so few values need to be sorted. Block b holds the places
    b, b + num_blocks, b + 2 * num_blocks ...; places left over at the end are candidates in any case.
    """
    rows, vocab = probs.shape
    if width == vocab:
        values, places = probs.sort(dim=-1, descending=True, stable=True)
        return values, places
    height = vocab // num_blocks if num_blocks else 0
    if height < 2:
        values, places = probs.topk(width, dim=-1)
        return _first_id_first(values, places)
    even = num_blocks * height
    maxima = probs[:, :even].view(rows, height, num_blocks).amax(dim=1)
    offsets = torch.arange(height, device=probs.device)[:, None] * num_blocks
    inside = (maxima.topk(width, dim=-1).indices[:, None, :] + offsets).view(rows, -1)
    rest = torch.arange(even, vocab, device=probs.device).expand(rows, -1)
    candidates = torch.cat([inside, rest], dim=1)
    values, order = probs.gather(1, candidates).topk(width, dim=-1)
    return _first_id_first(values, candidates.gather(1, order))


def _first_id_first(values: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Order equal values by place, as greedy choice does."""
    places, order = places.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, places.gather(1, order)


def _keep(likeliest: torch.Tensor, filters: Sequence[Filters]) -> tuple[torch.Tensor, torch.Tensor]:
    """Set what the filters drop to 0; and whether the share of top_p was full among these candidates, [rows]."""
    width = likeliest.shape[1]
    limits = [row.top_k or width for row in filters]
    if min(limits) < width:
        places = torch.arange(width, device=likeliest.device)
        likeliest = likeliest * (places < torch.tensor(limits, device=likeliest.device)[:, None])
    cumulative = likeliest.cumsum(dim=-1)
    wanted = torch.tensor([row.top_p for row in filters], dtype=likeliest.dtype, device=likeliest.device)[:, None]
    limited = torch.tensor([row.top_k > 0 for row in filters], device=likeliest.device)[:, None]
    share = torch.where(limited, wanted * cumulative[:, -1:], wanted)
    enough = (limited | (cumulative[:, -1:] > share))[:, 0]
    kept = likeliest * ((cumulative - likeliest < share) | (wanted >= 1))
    return _drop_unlikely(kept, [row.min_p for row in filters]), enough


def _drop_unlikely(probs: torch.Tensor, min_p: Sequence[float]) -> torch.Tensor:
    """Set to 0 what is below a share of the likeliest, in place."""
    if not any(min_p):
        return probs
    column = torch.tensor(list(min_p), dtype=probs.dtype, device=probs.device)[:, None]
    return probs.masked_fill_(probs < column * probs.amax(dim=-1, keepdim=True), 0.0)


def _draw(weights: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The first place whose cumulative weight exceeds the draw's share of all; never one of weight 0. [rows]

    The weights are used up: new memory costs as much as the sums.
    """
    cumulative = weights.cumsum_(dim=-1)
    total = cumulative[:, -1:].contiguous()
    # strictly below the total, whatever rounding does to the product: so the place exists, and its weight isn't 0
    wanted = torch.minimum(at * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, wanted, right=True)[:, 0].clamp_max(weights.shape[-1] - 1)  # NaN
