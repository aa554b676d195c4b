"""Collectives are counted once each, memory as it comes and goes, and small numbers are known of fake tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from swift.config.degrees import Degrees
from swift.distributed.collectives import all_gather, all_reduce, all_to_all, all_to_all_rows, reduce_scatter
from swift.distributed.experts.dispatch import through_experts, uniform_routing
from swift.distributed.mesh import Mesh, build_mesh
from swift.distributed.trace import ACTIVATIONS, WEIGHTS, Trace
from swift.distributed.trace_world import pretend
from swift.distributed.traffic import TRAFFIC

KIB = 1024


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    with pretend(3, 8):
        yield build_mesh(Degrees(dp_shard=2, tp=4), "cpu")


def test_our_collectives_are_counted_as_we_count_them(mesh: Mesh) -> None:
    axis = mesh["tp"]
    TRAFFIC.reset()
    with FakeTensorMode(), Trace(mesh, fake=True) as trace:
        tensor = torch.zeros(8, 8)
        all_reduce(tensor, axis)
        all_gather(tensor, axis, 1)
        reduce_scatter(tensor, axis, 0)
        all_to_all(tensor, axis, 0, 1)
        all_to_all_rows(tensor, axis, [1, 2, 5, 0], [2, 2, 2, 2])
        dist.all_reduce(tensor)
    counted = trace.counts[""]
    assert counted.calls.pop(("world", "all_reduce")) == 1
    assert counted.bytes.pop(("world", "all_reduce")) == 2 * (7 / 8) * 256
    assert counted.calls == TRAFFIC.calls
    assert counted.bytes == TRAFFIC.bytes
    assert not trace.unknown


def test_a_collective_that_nobody_knows_is_told_of(mesh: Mesh) -> None:
    with FakeTensorMode(), Trace(mesh, fake=True) as trace:
        tensor = torch.zeros(8)
        dist.reduce(tensor, 0, group=mesh["tp"].group)
        dist.barrier(group=mesh["tp"].group)
    assert trace.unknown == {"reduce_"}
    assert not trace.counts[""].calls


@pytest.mark.parametrize("fake", [False, True])
def test_memory_comes_and_goes(fake: bool) -> None:
    weights = torch.zeros(KIB)
    with FakeTensorMode() if fake else torch.no_grad():
        if fake:
            weights = torch.zeros(KIB)
        with Trace(Mesh(), fake=fake) as trace:
            trace.hold([weights], WEIGHTS)
            trace.part = "first"
            one = weights + 1
            view = one[10:]
            two = one * 2  # 3 x 4 KiB live
            del one, two
            assert view.shape[0] == KIB - 10
            trace.part = "second"
            three = torch.empty(2, dtype=torch.float64)
            del view, three
            trace.part = "third"
            torch.empty(1, dtype=torch.float64)
    assert trace.peaks["first"].parts == {WEIGHTS: 4 * KIB, ACTIVATIONS: 8 * KIB}
    assert trace.peaks["second"].total == 8 * KIB + 16  # the view holds what it is of
    assert trace.peaks["third"].total == 4 * KIB + 8


def test_products_are_counted() -> None:
    with FakeTensorMode(), Trace(Mesh(), fake=True) as trace:
        torch.zeros(3, 5) @ torch.zeros(5, 7)
    assert trace.counts[""].flops == 2 * 3 * 5 * 7


def test_numbers_that_the_host_made_are_known() -> None:
    with FakeTensorMode(), Trace(Mesh(), fake=True):
        borders = torch.tensor([0, 5, 12], dtype=torch.int32)
        assert borders.tolist() == [0, 5, 12]
        assert (borders[1:] - borders[:-1]).tolist() == [5, 7]
        assert [int(part) for part in torch.arange(4).split(1)] == [0, 1, 2, 3]
        assert torch.rand(3).sum().item() == 1.0  # not known
        assert bool(torch.rand(3).all())


def test_numbers_that_come_from_others_are_not_known(mesh: Mesh) -> None:
    with FakeTensorMode(), Trace(mesh, fake=True):
        flag = torch.zeros(1, dtype=torch.int32)
        assert flag.item() == 0
        dist.all_reduce(flag, group=mesh["tp"].group)
        assert flag.item() == 1


def test_uniform_routing_sends_each_rank_its_share(mesh: Mesh) -> None:
    axis, seen = mesh["tp"], []

    def compute(rows: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(rows.shape))
        return rows

    with uniform_routing(), FakeTensorMode(), Trace(mesh, fake=True) as trace:
        hidden, chosen, weights = torch.zeros(12, 4), torch.zeros(12, 2, dtype=torch.int64), torch.zeros(12, 2)
        result = through_experts(hidden, chosen, weights, axis, 2, compute)
    assert result.shape == (12, 4)
    assert seen == [(24, 4)]  # 3 rows of each of 8 experts go out, and 6 come in from each of 4 ranks
    rows = 18 * 4 * 4  # to the three other ranks
    counts = 3 * 2 * 8
    assert trace.counts[""].bytes["tp", "all_to_all"] == 2 * rows + counts
