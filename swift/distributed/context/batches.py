"""A micro-batch as one row of tokens, and the share of it that one rank of a shared sequence holds.

The row is cut into 2 x ring chunks; the rank at place r of the ring holds chunks r and 2 x ring - 1 - r. Under causal
attention the first tokens of a row have little to do and the last ones much, so each pair of chunks costs the same
(the zig-zag order of Llama 3, arXiv 2407.21783, section 3.3.2). Ulysses ranks cut what a place of the ring holds into
contiguous pieces, in order: when they have exchanged heads for tokens, each of them sees all tokens of its place.

Knows nothing of models: it deals in token ids, positions and targets.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch

from swift.data.loading.batch import Batch, Sequences
from swift.distributed.collectives import all_gather, all_reduce
from swift.distributed.mesh import Axis, Mesh

# Padding's segments are no longer than the longest example, so that positions stay where the model expects them, but
# not shorter than this either: a thousand segments of one token take longer than one of a thousand tokens.
_SHORTEST_PADDING = 128


def rows_length(batch: Batch, mesh: Mesh, multiple: int = 1) -> int:
    """Tokens of the batch as one row, padded so that each rank of `cp` holds a multiple of `multiple`."""
    unit = _unit(mesh, multiple)
    return max(1, -(-batch.input_ids.numel() // unit)) * unit


def cut_batch(batch: Batch, mesh: Mesh, *, pad_token_id: int, multiple: int = 1, length: int | None = None) -> Batch:
    """This rank's share of a micro-batch.

    A padded batch becomes its rows end to end, each one segment, its right padding included: causal attention never
    looks there. The end of the row is filled up with segments of padding that nothing is predicted from.

    Args:
        multiple: what the share's length is to be divisible by.
        length: tokens of the whole row, for batches that must have one shape; default: `rows_length`.

    Returns:
        one row [1, length / cp]. Positions are those in the whole segments, `borders` those of the whole row;
        `target_index` counts in this rank's tokens. `attention_mask` is bool [1, length / cp], real tokens, or None
        where the whole row is real: attention needs no mask, but whoever counts tokens does. `num_tokens` are this
        rank's real ones, so that the sum over `cp` is the batch's.

    Raises:
        ValueError: `length` is too small, or can't be shared.
    """
    tokens = batch.input_ids.numel()
    length = rows_length(batch, mesh, multiple) if length is None else length
    if length < tokens or length % _unit(mesh, multiple):
        raise ValueError(f"a row of {length} tokens can't hold {tokens} in multiples of {_unit(mesh, multiple)}")
    width = batch.input_ids.shape[1]
    borders = list(range(0, tokens + 1, width)) if batch.borders is None else list(batch.borders)
    filling = _padding_lengths(borders, length)
    for size in filling:
        borders.append(borders[-1] + size)
    prefixes = batch.prefixes
    if prefixes is not None:
        if mesh["cp"]:
            raise ValueError("the prompts of units must be written out where ranks share a row")
        prefixes = [*prefixes, *[(0, 0)] * len(filling)]
    fill = batch.input_ids.new_full((length - tokens,), pad_token_id)
    counted = [torch.arange(size, device=fill.device) for size in filling]
    input_ids = torch.cat([batch.input_ids.flatten(), fill])
    position_ids = torch.cat([batch.position_ids.flatten(), *counted])
    real = torch.zeros(length, dtype=torch.bool, device=fill.device)
    if batch.attention_mask is not None:
        real[:tokens] = batch.attention_mask.flatten()
    else:
        real[:tokens] = batch.num_tokens > 0  # a rank that ran out of examples gets one token of padding
    whole = bool(real.all())

    mine = share_index(length, mesh).to(fill.device)
    place = torch.full((length,), -1, device=fill.device)
    place[mine] = torch.arange(len(mine), device=fill.device)
    target_index = place[batch.target_index]
    kept = target_index >= 0
    return Batch(
        input_ids=input_ids[mine][None],
        position_ids=position_ids[mine][None],
        borders=borders,
        attention_mask=None if whole else real[mine][None],
        target_index=target_index[kept],
        target_ids=batch.target_ids[kept],
        target_weights=batch.target_weights[kept],
        refs=batch.refs,
        num_tokens=int(real[mine].sum()),
        prefixes=prefixes,
        sequences=_cut_sequences(batch.sequences, kept, counted=mesh["cp"].rank == 0),
        facts={name: fact[kept] for name, fact in batch.facts.items()},
    )


def _cut_sequences(sequences: Sequences | None, kept: torch.Tensor, *, counted: bool) -> Sequences | None:
    """All sequences, with the targets that this rank has; one rank of those that share the row counts them."""
    return None if sequences is None else replace(sequences, target=sequences.target[kept], counted=counted)


_NUMBERS = "number_of_target"


def number_targets(batch: Batch) -> Batch:
    """The batch, whose targets carry their numbers, so that `join_targets` can put shares together."""
    return replace(batch, facts={**batch.facts, _NUMBERS: torch.arange(len(batch.target_index))})


def join_targets(part: torch.Tensor, mine: Batch, count: int, axis: Axis) -> torch.Tensor:
    """Something of each of a micro-batch's `count` targets, [count, ...], from the shares of the ranks along `axis`.

    Args:
        part: of the targets in `mine`, this rank's share of a numbered batch.
    """
    whole = part.new_zeros(count, *part.shape[1:])
    whole[mine.facts[_NUMBERS]] = part
    return all_reduce(whole, axis) if axis else whole


def share_index(length: int, mesh: Mesh) -> torch.Tensor:
    """Which tokens of a row of `length` this rank holds, in its own order: int64 [length / cp]."""
    ring, ulysses = mesh["ring"], mesh["ulysses"]
    place = _place_index(length, ring.size, ring.rank)
    return place.chunk(ulysses.size)[ulysses.rank]


def join_shares(states: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """The whole row's states, in its order, on every rank of `cp`: [1, length / cp, ...] -> [1, length, ...].

    For looking at them (evaluation of logits, tests): there is no gradient.
    """
    axis = mesh["cp"]
    joined = all_gather(states.detach(), axis, 1)
    size = mesh["ring"].size
    order = torch.cat([_place_index(joined.shape[1], size, rank) for rank in range(size)])
    whole = torch.empty_like(joined)
    whole[:, order.to(joined.device)] = joined
    return whole


def _unit(mesh: Mesh, multiple: int) -> int:
    """What the length of a row must be divisible by."""
    ring, piece = mesh["ring"].size, mesh["ulysses"].size * multiple
    return ring * piece * (2 if ring > 1 and piece % 2 else 1)  # a place of the ring is two chunks of one size


def _place_index(length: int, size: int, rank: int) -> torch.Tensor:
    """Tokens that place `rank` of a ring of `size` holds."""
    if size == 1:
        return torch.arange(length)
    chunks = torch.arange(length).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def _padding_lengths(borders: list[int], length: int) -> list[int]:
    left = length - borders[-1]
    size = max(_SHORTEST_PADDING, *(end - start for start, end in pairwise(borders)))
    return [min(size, left - start) for start in range(0, left, size)]
