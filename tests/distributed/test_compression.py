"""Each way to exchange gradients: the mean where it loses nothing, bytes as the formulas say, and what is learnt."""

import threading

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from torch.nn.parallel import DistributedDataParallel
from toy import build_toy, measure, sentences

from swift.config.communication import read_compression
from swift.core.errors import UsageError
from swift.distributed.compression import GradientExchange, build_exchange
from swift.distributed.compression.methods import TopK, num_sent
from swift.distributed.mesh import Axis
from swift.distributed.traffic import TRAFFIC

STEPS = 100
TOPK = '{"method": "topk", "ratio": 0.1}'
TWO_STAGE = '{"intra": "bf16", "inter": "topk", "ratio": 0.1, "node_size": 2}'
HIERARCHICAL = '{"method": "hierarchical", "node_size": 2}'
RING2D = '{"method": "ring2d", "columns": 2}'
POWERSGD = '{"method": "powersgd", "rank": 4, "start_step": 10}'
# way -> most that its loss may be above that of the plain all-reduce after so many steps. At the same learning rate.
GAPS = {
    HIERARCHICAL: 1e-3,
    RING2D: 1e-3,
    "bf16": 0.02,
    "fp16": 0.02,
    TOPK: 0.15,
    TWO_STAGE: 0.15,
    POWERSGD: 0.25,
}


def axis_of_all() -> Axis:
    return Axis("dp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


def wrap(value: str | None, *, bucket_mib: float = 0.02) -> tuple[DistributedDataParallel, GradientExchange]:
    """A toy in several buckets, whose gradients are exchanged as `value` says."""
    module = DistributedDataParallel(build_toy(), bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True)
    exchange = build_exchange(read_compression(value) if value else None, axis_of_all(), "cpu")
    exchange.register(module)
    return module, exchange


def train(value: str | None, steps: int) -> dict:
    """Loss and weights after some steps; bytes of the last one by axis; buckets of one step."""
    module, _ = wrap(value)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(steps):
        TRAFFIC.reset()
        module(sentences(8, generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    return {"loss": measure(module.module), "weights": weights, "sent": TRAFFIC.per_axis()}


def learn(ways: list[str | None]) -> list[dict]:
    return [train(way, STEPS) for way in ways]


@pytest.fixture(scope="module")
def learnt() -> dict:
    ways = [None, *GAPS]
    ranks = on_ranks(4, learn, ways, timeout_s=280)
    return {way: [rank[number] for rank in ranks] for number, way in enumerate(ways)}


@pytest.mark.parametrize("way", GAPS)
def test_learns_about_as_much_as_with_the_plain_all_reduce(learnt, way):
    plain, ours = learnt[None][0]["loss"], learnt[way][0]["loss"]
    assert plain < 1.5, "the toy learns nothing, so there is nothing to compare"
    assert ours <= plain + GAPS[way], f"{ours} after {plain}"


@pytest.mark.parametrize("way", GAPS)
def test_all_ranks_hold_the_same_bits(learnt, way):
    first, *others = learnt[way]
    assert all(torch.equal(first["weights"], other["weights"]) for other in others)


def expected_bytes(way: str | None) -> dict[str, float]:
    """What the formulas say of four ranks, two in a node, for the toy's gradients."""
    sizes = [tuple(p.shape) for p in build_toy().parameters()]
    elements = sum(torch.Size(s).numel() for s in sizes)
    ring = {w: 2 * (w - 1) / w for w in (2, 4)}
    if way in (None, "bf16", "fp16"):
        return {"dp": ring[4] * elements * (2 if way else 4)}
    if way == HIERARCHICAL:
        return {"intra": ring[2] * elements * 4, "inter": ring[2] * elements / 2 * 4}
    if way == RING2D:
        return {"row": ring[2] * elements * 4, "column": ring[2] * elements / 2 * 4}
    if way == TOPK:
        return {"dp": 3 * 0.1 * elements * 8}
    if way == TWO_STAGE:
        return {"intra": ring[2] * elements * 2, "inter": 0.1 * elements / 2 * 8}
    thin = [4 * sum(s) for s in sizes if len(s) == 2 and 4 * sum(s) * 2 < s[0] * s[1]]
    whole = [torch.Size(s).numel() for s in sizes if not (len(s) == 2 and 4 * sum(s) * 2 < s[0] * s[1])]
    assert thin, "no matrix is worth compressing"
    return {"dp": ring[4] * 4 * (sum(thin) + sum(whole))}


@pytest.mark.parametrize("way", [None, *GAPS])
def test_sends_as_many_bytes_as_predicted(learnt, way):
    expected = expected_bytes(way)
    for rank in learnt[way]:
        assert rank["sent"].keys() == expected.keys()
        for axis, num_bytes in expected.items():  # parts of uneven buckets are rounded
            assert rank["sent"][axis] == pytest.approx(num_bytes, rel=3e-3), axis


def mean_gradients(way: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Of three backward passes: by the exchange, and by plain sums in fp64."""
    module, _ = wrap(way)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(3):  # the buckets change after the first
        letters = sentences(4, generator)
        alone = build_toy()
        alone(letters).backward()
        module.zero_grad()
        module(letters).backward()
    exact = torch.cat([p.grad.flatten() for p in alone.parameters()]).double()
    dist.all_reduce(exact)
    return torch.cat([p.grad.flatten() for p in module.parameters()]), exact / dist.get_world_size()


@pytest.mark.parametrize(
    ("world", "way", "tolerance"),
    [
        (4, HIERARCHICAL, 1e-6),
        (4, RING2D, 1e-6),
        (3, '{"method": "ring2d", "columns": 3}', 1e-6),
        (2, '{"method": "hierarchical", "node_size": 1}', 1e-6),  # as many nodes as ranks
        (2, "hierarchical", 1e-6),  # one node, as the launcher says
        (3, "bf16", 1e-2),
        (2, "fp16", 1e-3),
        (2, '{"method": "topk", "ratio": 1.0}', 1e-6),  # all elements
    ],
)
def test_the_mean_is_the_mean(world, way, tolerance):
    for ours, exact in on_ranks(world, mean_gradients, way):
        assert (ours - exact).norm() <= tolerance * exact.norm()


def residuals() -> list[float]:
    """With error feedback everything is sent in the end: sums of what was given and of what came out."""
    method = TopK(axis_of_all(), 0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    given, got = torch.zeros(200, dtype=torch.float64), torch.zeros(200, dtype=torch.float64)
    for _ in range(30):
        tensor = torch.randn(200, generator=generator, dtype=torch.float64)
        given += tensor
        method.add_up(tensor, "a")
        got += tensor
    rest = method.residuals["a"].clone()
    for total in (given, rest):
        dist.all_reduce(total)
    return [float((given - rest - got).norm()), float(rest.norm())]


def test_error_feedback_keeps_what_was_not_sent():
    for difference, rest in on_ranks(2, residuals):
        assert difference < 1e-9 < rest


def not_a_number() -> tuple[bool, bool]:
    method = TopK(axis_of_all(), 0.1)
    method.add_up(torch.ones(50), "a")
    before = method.residuals["a"].clone()
    tensor = torch.ones(50)
    if dist.get_rank() == 1:
        tensor[3] = float("nan")
    method.add_up(tensor, "a")
    kept = torch.equal(before, method.residuals["a"]) if dist.get_rank() == 1 else True
    return bool(tensor.isnan().any()), kept and bool(method.residuals["a"].isfinite().all())


def test_a_gradient_that_is_not_finite_is_seen_by_all_and_remembered_by_none():
    assert on_ranks(2, not_a_number) == [(True, True), (True, True)]


def go_on(way: str, interrupted: bool) -> torch.Tensor:
    """Weights after eight steps; with an interruption, exchange and buckets are made anew in the middle."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    module, exchange = wrap(way)
    for step in range(8):
        if interrupted and step == 4:
            state, weights = exchange.state_dict(), module.module.state_dict()
            module, exchange = wrap(way)
            module.module.load_state_dict(weights)
            exchange.load_state_dict(state)
        module(sentences(4, generator)).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def both(way: str) -> tuple[float, float, float]:
    whole, cut = go_on(way, False), go_on(way, True)
    start = torch.cat([p.detach().flatten() for p in build_toy().parameters()])
    return float((whole - cut).norm()), float((whole - start).norm()), float(cut.norm())


@pytest.mark.parametrize("way", [TOPK, '{"method": "powersgd", "rank": 1, "start_step": 2}'])
def test_what_is_remembered_survives_a_restart(way):
    """The first step of a process goes whole, so the runs aren't equal; but nothing is lost, so they are near."""
    for difference, moved, _ in on_ranks(2, both, way):
        assert 0 < difference < 0.5 * moved


def impossible() -> str:
    try:
        build_exchange(read_compression('{"method": "hierarchical", "node_size": 3}'), axis_of_all(), "cpu")
    except UsageError as error:
        return error.render()
    return ""


def test_nodes_that_do_not_divide_the_ranks_are_refused():
    for words in on_ranks(2, impossible):
        assert "2 ranks can't be laid out in rows of 3" in words and "such as 2" in words


def fail_in_thread() -> str:
    module, exchange = wrap("bf16")

    class Broken:
        remembers = False

        def average(self, bucket, key):
            raise ValueError("no network")

    exchange.averaging = Broken()
    try:
        module(sentences(4, torch.Generator().manual_seed(1))).backward()
    except Exception as error:
        return str(error)
    return ""


def test_an_error_in_the_exchange_reaches_the_backward_pass():
    assert "no network" in on_ranks(2, fail_in_thread)[0]


def overlapping() -> tuple[bool, int]:
    """Whether a bucket was being exchanged when the first layer's gradient, the last to be computed, was still to come;
    and buckets."""
    module, exchange = wrap("bf16")
    averaging, began, order = exchange.averaging, threading.Event(), []

    class Watched:
        remembers = False

        def average(self, bucket, key):
            order.append(bucket.index())
            began.set()
            averaging.average(bucket, key)

    exchange.averaging = Watched()
    letters, seen = sentences(4, torch.Generator().manual_seed(1)), []
    module(letters).backward()  # the buckets change after it
    began.clear()
    order.clear()
    module.module.embed.weight.register_hook(lambda _: seen.append(began.wait(60)))
    module(letters).backward()
    assert order == sorted(order)
    return seen == [True], len(order)


def test_buckets_are_exchanged_while_backward_goes_on():
    for overlapped, buckets in on_ranks(2, overlapping):
        assert overlapped and buckets > 1


def test_at_least_one_element_is_sent():
    assert num_sent(5, 0.01) == 1 and num_sent(1000, 0.01) == 10 and num_sent(3, 1.0) == 3
