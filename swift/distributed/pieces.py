"""Which part of a whole tensor a process holds, as boxes of the whole.

Reading weights, writing checkpoints and gathering all ask this one question, so it is answered in one place, from a
DTensor's placements. A process can hold several boxes of one tensor: its share of a packed matrix (gate and up in one)
is a box of each part. Knows nothing about files.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Shard


@dataclass(frozen=True)
class Piece:
    """One box.

    Attributes:
        offsets: where it begins in the whole tensor; sizes: its shape.
        starts: where it begins in the local tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    starts: tuple[int, ...]

    def view(self, local: torch.Tensor) -> torch.Tensor:
        """The box's part of the local tensor, sharing its memory."""
        for dim, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            local = local.narrow(dim, start, size)
        return local


def pieces_of(tensor: torch.Tensor) -> list[Piece]:
    """The boxes of `tensor` that this process holds; none where it has no share (or an empty one).

    A tensor that isn't a DTensor is held whole.
    """
    if not isinstance(tensor, DTensor):
        zeros = (0,) * tensor.ndim
        return [Piece(zeros, tuple(tensor.shape), zeros)] if tensor.numel() else []
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError("a partial sum is no part of a tensor")
    place = tensor.device_mesh.get_coordinate()
    if place is None:
        return []
    runs = [_runs(_held(tensor, dim, place)) for dim in range(tensor.ndim)]
    return [
        Piece(*(tuple(run[i] for run in combination) for i in range(3))) for combination in itertools.product(*runs)
    ]


def _held(tensor: DTensor, dim: int, place: Any) -> torch.Tensor:
    """The indices along `dim` that this process holds, in the order of its local tensor.

    `fully_shard` cuts what tensor parallelism left, and says so with a strided placement in front: such a cut is made
    last, as it was in fact. (Reading the placements from left to right gives the same, unless the later cut is strided
    too, as that of a packed matrix is.)
    """
    held = torch.arange(tensor.shape[dim])
    cuts = [
        (placement, tensor.device_mesh.size(axis), place[axis])
        for axis, placement in enumerate(tensor.placements)
        if getattr(placement, "dim", None) == dim
    ]
    last = []
    while cuts and _cut_last(cuts):
        last.append((Shard(0), *cuts.pop(0)[1:]))
    for placement, count, index in [*cuts, *reversed(last)]:
        along = Shard(0) if isinstance(placement, Shard) else type(placement)(0, split_factor=placement.split_factor)
        held = along._split_tensor(held, count, with_padding=False, contiguous=False)[0][index]
    return held


def _cut_last(cuts: list[tuple[Any, int, int]]) -> bool:
    placement, rest = cuts[0][0], cuts[1:]
    later = math.prod(count for _, count, _ in rest)
    return bool(rest) and not isinstance(placement, Shard) and placement.split_factor == later


def _runs(held: torch.Tensor) -> list[tuple[int, int, int]]:
    """Consecutive indices as (first index, how many, position of the first one)."""
    if not held.numel():
        return []
    breaks = (torch.diff(held) != 1).nonzero().flatten() + 1
    edges = [0, *breaks.tolist(), held.numel()]
    return [(int(held[a]), b - a, a) for a, b in itertools.pairwise(edges)]
