"""Our own ring against the library's all-reduce: any size, any type, the same bits on every rank."""

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks

from swift.distributed.compression import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from swift.distributed.compression.ring import own_share
from swift.distributed.mesh import Axis
from swift.distributed.traffic import TRAFFIC

SIZES = (0, 1, 2, 3, 7, 64, 1000, 4099)  # smaller than the ranks, uneven, a prime
TYPES = (torch.float32, torch.float64, torch.bfloat16)


def axis_of_all() -> Axis:
    return Axis("dp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


def draw(size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * size + dist.get_rank())
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def reduce_all(chunk_bytes: int, in_flight: int) -> list:
    results = []
    for dtype in TYPES:
        for size in SIZES:
            ours, theirs = draw(size, dtype), draw(size, dtype)
            exact = theirs.double().clone()
            ring_all_reduce(ours, axis_of_all(), chunk_bytes=chunk_bytes, in_flight=in_flight)
            dist.all_reduce(theirs)
            dist.all_reduce(exact)
            results.append((dtype, ours, theirs, exact))
    return results


@pytest.mark.parametrize(
    ("world", "chunk_bytes", "in_flight"),
    [(2, 1 << 20, 4), (3, 256, 4), (4, 64, 2), (4, 1000, 1)],  # one chunk a part, many, a pipeline of one
)
def test_same_sums_as_the_library(world, chunk_bytes, in_flight):
    ranks = on_ranks(world, reduce_all, chunk_bytes, in_flight)
    for results in zip(*ranks, strict=True):
        dtype, ours, theirs, exact = results[0]
        assert all(torch.equal(ours, other[1]) for other in results), "ranks hold different bits"
        tolerance = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 0.03}[dtype]
        assert torch.allclose(ours.double(), exact, rtol=tolerance, atol=tolerance)
        assert torch.allclose(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance)


def halves() -> tuple:
    axis, size = axis_of_all(), 1001
    tensor = draw(size, torch.float64)
    exact = tensor.clone()
    dist.all_reduce(exact)
    TRAFFIC.reset()
    share = ring_reduce_scatter(tensor, axis, chunk_bytes=400)
    own_right = torch.allclose(share, own_share(exact, axis))
    ring_all_gather(tensor, axis, chunk_bytes=400)
    return own_right, torch.allclose(tensor, exact), TRAFFIC.bytes["dp", "ring"], share.shape[0]


def test_each_half_does_its_part_and_sends_the_least_possible():
    world, size = 4, 1001
    results = on_ranks(world, halves)
    assert all(scattered and whole for scattered, whole, _, _ in results)
    assert sum(share for *_, share in results) == size
    # each round passes one part on: all ranks together send every part w - 1 times, in each half
    assert sum(sent for _, _, sent, _ in results) == 2 * (world - 1) * size * 8


def in_two_groups() -> list:
    grid = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    inner = grid["inner"]
    axis = Axis("inner", 2, inner.get_local_rank(), inner.get_group())
    tensor = torch.full((3, 5), float(dist.get_rank() + 1))
    return ring_all_reduce(tensor, axis).unique().tolist()


def test_a_ring_over_some_of_the_ranks():
    assert on_ranks(4, in_two_groups) == [[3.0], [3.0], [7.0], [7.0]]


def test_one_rank_has_the_sum_already():
    tensor = torch.arange(5.0)
    assert ring_all_reduce(tensor, Axis("dp")).tolist() == [0, 1, 2, 3, 4]
