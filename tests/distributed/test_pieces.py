"""The boxes that a process holds of a tensor, against what torch really puts on each rank."""

import torch
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from swift.distributed.pieces import pieces_of


def check(whole: torch.Tensor, spread: DTensor) -> None:
    local, seen = spread.to_local(), 0
    for piece in pieces_of(spread):
        box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))
        assert torch.equal(piece.view(local), whole[box]), (spread.placements, piece)
        seen += piece.view(local).numel()
    assert seen == local.numel(), spread.placements


def check_placements() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for shape in ((8, 6), (7, 5), (3, 9), (1, 4)):
        whole = torch.arange(float(shape[0] * shape[1])).view(shape)
        for placements in (
            (Shard(0), Shard(1)),
            (Shard(1), Replicate()),
            (Shard(0), Shard(0)),
            (Replicate(), _StridedShard(0, split_factor=2)),
            (Replicate(), _StridedShard(1, split_factor=3)),
        ):
            if shape != (8, 6) and any(isinstance(placement, _StridedShard) for placement in placements):
                continue  # torch itself makes no uneven strided shards
            check(whole, distribute_tensor(whole, mesh, placements))


def check_fully_shard() -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    packed = _StridedShard(0, split_factor=2)
    for shape in ((16, 3), (12, 2), (8, 1)):
        whole = torch.arange(float(shape[0] * shape[1])).view(shape)
        for cut in (Shard(0), packed, Shard(1)):
            if shape[1] % 2 and isinstance(cut, Shard) and cut.dim == 1:
                continue
            layer = nn.Linear(shape[1], shape[0], bias=False)
            layer.weight = nn.Parameter(distribute_tensor(whole, grid["tp"], [cut]))
            fully_shard(layer, mesh=grid["fsdp"])
            check(whole, layer.weight)


def test_pieces_are_what_torch_puts_there():
    on_ranks(4, check_placements)


def test_pieces_of_weights_that_fully_shard_cut_again():
    on_ranks(4, check_fully_shard)


def test_a_tensor_that_is_not_spread_is_one_piece():
    (piece,) = pieces_of(torch.zeros(3, 2))
    assert (piece.offsets, piece.sizes, piece.starts) == ((0, 0), (3, 2), (0, 0))
    assert len(pieces_of(torch.zeros(()))) == 1
