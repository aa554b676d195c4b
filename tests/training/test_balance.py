"""Micro-batches in proportion to speed: who runs which, and that nothing else changes."""

import copy
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from equality import assert_equal, build, make_batches, make_optimizer, relative, single_process
from pool import on_ranks

from swift.data.loading.batch import Layout
from swift.data.loading.loader import TrainLoader, deal, turns_of
from swift.data.rows import RowRef
from swift.data.units import NO_NOTES
from swift.distributed import ProcessGroup
from swift.distributed.compression import build_exchange
from swift.distributed.mesh import Axis
from swift.training.balance import MicroBatchBalance, rebalance
from swift.training.precision import Precision
from swift.training.strategy import DataParallel


class Sixty:
    """Sixty examples of a length that tells which."""

    lengths = np.arange(2, 62)

    def __len__(self) -> int:
        return 60

    def notes(self, index: int) -> np.ndarray:
        return NO_NOTES

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full(index + 2, index, np.int32), np.ones(index + 2, np.float32)

    def ref(self, index: int) -> RowRef:
        return RowRef("test", index)


# --- shares ---


def settle(seconds: list[float], shares: list[int]) -> list[int]:
    for _ in range(50):
        shares = rebalance(shares, seconds)
    return shares


@pytest.mark.parametrize(
    ("seconds", "start", "end"),
    [
        ([2, 1], [6, 6], [4, 8]),
        ([1, 1], [6, 6], [6, 6]),
        ([1, 1, 1, 3], [5, 5, 5, 5], [6, 6, 6, 2]),
        ([100, 1], [2, 2], [1, 3]),  # the slowest keeps one
        ([1, 1.02], [8, 8], [8, 8]),  # not worth a change
        ([5, 1, 1], [1, 1, 1], [1, 1, 1]),  # nothing to give
    ],
)
def test_shares_follow_speeds(seconds, start, end):
    assert settle(seconds, start) == end


def test_a_change_is_bounded():
    assert rebalance([32, 32], [3, 1]) == [24, 40]  # an eighth of all


def test_one_odd_measurement_moves_little():
    balance = MicroBatchBalance(None, 2, 12)
    assert not balance.learn([1.0, 1.0])
    assert balance.learn([3.0, 1.0])
    assert sum(balance.shares) == 24 and 8 < balance.shares[0] < 12
    for _ in range(20):
        balance.learn([1.0, 1.0])
    assert abs(balance.shares[0] - 12) <= 1


# --- dealing ---


@pytest.mark.parametrize("shares", [(2, 2), (1, 3), (3, 1), (5, 2, 1)])
def test_shares_deal_the_same_micro_batches(shares):
    layout = Layout(units_per_micro_batch=2)
    for count in (2 * sum(shares), 2 * sum(shares) - 3, 1, 0):  # a whole step; the last one of an epoch
        units = [[i] for i in range(count)]
        parts = [deal(units, layout, rank, len(shares), shares) for rank in range(len(shares))]
        chunks = [units[i : i + 2] for i in range(0, count, 2)]
        expected = sorted([item for unit in chunk for item in unit] for chunk in chunks)
        assert sorted(batch for part in parts for batch in part if batch) == expected
        assert all(part for part in parts), "a rank without a micro-batch would be missed in the exchange"
        if count == 2 * sum(shares):
            assert [len(part) for part in parts] == list(shares)


def test_turns_are_spread_over_the_step():
    assert turns_of([2, 2]) == [0, 1, 0, 1]
    assert turns_of([1, 3]) == [1, 0, 1, 1]


def seen(loaders: list[TrainLoader]) -> list[int]:
    return sorted(ref.line for loader in loaders for batch in loader.next_step() for ref in batch.refs)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_examples_share_a_step_before_and_after_a_change(workers):
    """Also those that were made ahead under the old shares."""
    layout = Layout(units_per_micro_batch=1, micro_batches=3)
    make = lambda rank, workers: TrainLoader(  # noqa: E731
        Sixty(), layout, seed=3, rank=rank, world_size=2, workers=workers, ahead=3 * workers
    )
    even = [make(rank, 0) for rank in range(2)]
    moved = [make(rank, workers) for rank in range(2)]
    for step in range(6):
        if step in (2, 4):
            for loader in moved:
                loader.set_shares((1, 5) if step == 2 else (4, 2))
        assert seen(even) == seen(moved)
    counts = [len(loader.next_step()) for loader in moved]
    assert counts == [4, 2]
    for loader in moved:
        loader.close()


# --- training ---


def axis_of_all() -> Axis:
    return Axis("dp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


def strategy_of(tuner: str) -> tuple[DataParallel, torch.nn.Module]:
    tiny = build("tied", tuner)
    exchange = build_exchange(None, axis_of_all(), "cpu")
    exchange.timed = True
    group = ProcessGroup(dist.get_rank(), dist.get_world_size(), dist.get_rank())
    return DataParallel(tiny.train_module(), group, Precision(torch.float32, "cpu"), exchange=exchange), tiny.whole


def uneven_steps(tuner: str, layout: str, counts: list[list[int]]) -> dict:
    """Losses, first gradients and last weights of steps in which ranks run other numbers of micro-batches."""
    strategy, whole = strategy_of(tuner)
    trained = {name: p for name, p in whole.named_parameters() if p.requires_grad}
    optimizer = make_optimizer(list(trained.values()))
    batches = make_batches(layout, sum(counts[0]))
    weight = sum(batch.weight for batch in batches)
    outcome: dict = {"losses": [], "gradients": {}}
    for step, shares in enumerate(counts):
        first = sum(shares[: dist.get_rank()])
        mine = strategy.prepare(batches[first : first + shares[dist.get_rank()]])
        loss = torch.zeros(1)
        for number, portion in enumerate(mine):
            last = number == len(mine) - 1
            terms = strategy.forward(portion, lambda total: total / weight, last)
            strategy.backward(terms, lambda total: total / weight, last)
            loss += sum(float(term.loss_sum) for term in terms) / weight
        dist.all_reduce(loss)
        outcome["losses"].append(loss.item())
        if step == 0:
            outcome["gradients"] = {name: p.grad.clone() for name, p in trained.items()}
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    outcome["weights"] = {name: p.detach().clone() for name, p in trained.items()}
    return outcome


@pytest.mark.parametrize(("tuner", "layout"), [("full", "packed"), ("lora", "padded")])
def test_gradients_do_not_depend_on_who_runs_what(tuner, layout):
    reference = single_process("tied", tuner, layout, count=6)
    for outcome in on_ranks(2, uneven_steps, tuner, layout, [[1, 5], [4, 2], [3, 3]]):
        ours = copy.copy(reference)
        ours.losses, ours.gradients, ours.weights = outcome["losses"], outcome["gradients"], outcome["weights"]
        assert_equal(ours, reference)
        assert max(relative(ours.gradients[n], reference.gradients[n]) for n in ours.gradients) <= 1e-6


class Slow(torch.nn.Module):
    """Sleeps in its forward pass: `pause_s` for each micro-batch."""

    def __init__(self, inner: torch.nn.Module, pause_s: float) -> None:
        super().__init__()
        self.inner, self.pause_s = inner, pause_s

    def forward(self, batch):
        time.sleep(self.pause_s)
        return self.inner(batch)


def balanced_counts(pauses: list[float]) -> list[int]:
    """The shares after some steps in which each rank sleeps so long for a micro-batch."""
    tiny = build("tied", "lora")
    exchange = build_exchange(None, axis_of_all(), "cpu")
    exchange.timed = True
    rank, world = dist.get_rank(), dist.get_world_size()
    group = ProcessGroup(rank, world, rank)
    module = Slow(tiny.train_module(), pauses[rank])
    strategy = DataParallel(module, group, Precision(torch.float32, "cpu"), exchange=exchange)
    balance = MicroBatchBalance(strategy, world, 6)
    (batch,) = make_batches("packed", 1)
    for _ in range(6):
        portions = strategy.prepare([batch] * balance.shares[rank])
        for number, portion in enumerate(portions):
            last = number == len(portions) - 1
            strategy.backward(strategy.forward(portion, torch.mean, last), torch.mean, last)
        balance.learn(group.gather(strategy.busy_s / strategy.busy_tokens))
    return balance.shares


def test_a_rank_that_is_half_as_fast_gets_half_as_much():
    """By counts. The sleep is long beside what the tiny model computes, so that a busy machine changes little."""
    for shares in on_ranks(2, balanced_counts, [0.3, 0.15]):
        assert shares in ([4, 8], [5, 7])
