"""The gradient norm of a spread model is that of the whole one, on every rank, whatever the mesh."""

import math

import pytest
import torch
from pool import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from swift.config.degrees import Degrees
from swift.distributed.gradients import clip_gradients, counts_here, global_norm
from swift.distributed.mesh import Mesh, build_mesh
from swift.distributed.spread import Spread
from swift.distributed.traffic import TRAFFIC

SHAPES = {"matrix": (7, 5), "vector": (3,), "expert": (4, 6, 2), "big": (130, 257)}


def gradients(scale: float = 1.0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {name: scale * torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def parameters(grads: dict[str, torch.Tensor]) -> list[tuple[str, nn.Parameter]]:
    named = []
    for name, grad in grads.items():
        parameter = nn.Parameter(torch.zeros_like(grad))
        parameter.grad = grad.clone()
        named.append((name, parameter))
    return named


def reference(limit: float, scale: float = 1.0) -> tuple[float, dict[str, torch.Tensor]]:
    named = parameters({name: grad.double() for name, grad in gradients(scale).items()})
    norm = float(nn.utils.clip_grad_norm_([p for _, p in named], limit or math.inf))
    return norm, {name: p.grad.float() for name, p in named}


@pytest.mark.parametrize("limit", [0.0, 1.0, 1e6])
def test_one_process_agrees_with_torch(limit: float):
    named = parameters(gradients())
    norm = clip_gradients(named, Spread(Mesh()), limit)
    expected, clipped = reference(limit)
    assert norm == pytest.approx(expected, rel=1e-6)
    for name, parameter in named:
        torch.testing.assert_close(parameter.grad, clipped[name], rtol=1e-6, atol=0)


def test_mixed_types_and_missing_gradients():
    grads = gradients()
    grads["vector"] = grads["vector"].bfloat16()
    grads["expert"] = grads["expert"].double()
    named = [*parameters(grads), ("frozen", nn.Parameter(torch.ones(2)))]
    norm = clip_gradients(named, Spread(Mesh()), 0.5)
    expected = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads.values()))
    assert norm == pytest.approx(expected, rel=1e-6)
    assert named[1][1].grad.dtype == torch.bfloat16 and named[-1][1].grad is None
    assert global_norm(named, Spread(Mesh())) == pytest.approx(0.5, rel=1e-3)


def test_a_hundred_million_equal_numbers():
    big = nn.Parameter(torch.full((1,), 0.1).expand(100_000_000))
    big.grad = big.detach()
    assert global_norm([("big", big)], Spread(Mesh())) == pytest.approx(1000, rel=2e-5)  # torch: 960


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_changes_nothing(value: float):
    grads = gradients()
    grads["vector"][1] = value
    named = parameters(grads)
    norm = clip_gradients(named, Spread(Mesh()), 1.0)
    assert not math.isfinite(norm) and (math.isnan(norm) == math.isnan(value))
    torch.testing.assert_close(named[0][1].grad, grads["matrix"], rtol=0, atol=0)


def spread_parameters(mesh: Mesh, layout: str) -> list[tuple[str, nn.Parameter]]:
    """The same gradients, cut as `layout` says: rows over fsdp; columns over tp; experts over ep and efsdp."""
    named = []
    for name, grad in gradients().items():
        device_mesh, placements = mesh.fsdp_mesh(), [Shard(0)]
        if layout == "hsdp":
            placements = [Replicate(), Shard(0)]
        if layout == "tp":
            device_mesh, placements = mesh["tp"].device_mesh, [Shard(0)]
        if layout == "ep" and name == "expert":
            device_mesh, placements = mesh.expert_mesh("ep"), [Shard(0)]
        plain = layout == "plain" or name == "vector"
        whole = nn.Parameter(torch.zeros_like(grad))
        parameter = whole if plain else nn.Parameter(distribute_tensor(whole.data, device_mesh, placements))
        parameter.grad = grad.clone() if plain else distribute_tensor(grad, device_mesh, placements)
        named.append((name, parameter))
    return named


def clipped_on_mesh(degrees: Degrees, layout: str, limit: float) -> tuple[float, dict[str, torch.Tensor], float]:
    mesh = build_mesh(degrees, "cpu")
    named = spread_parameters(mesh, layout)
    TRAFFIC.reset()
    norm = clip_gradients(named, Spread(mesh), limit)
    assert sum(TRAFFIC.calls.values()) == 1
    whole = {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in named}
    return norm, whole


@pytest.mark.parametrize(
    ("degrees", "layout"),
    [
        (Degrees(dp_shard=2), "fsdp"),
        (Degrees(dp_replicate=2), "plain"),
        (Degrees(tp=2), "tp"),
        (Degrees(dp_replicate=2, dp_shard=2), "hsdp"),
        (Degrees(dp_shard=2, tp=2), "fsdp"),
        (Degrees(dp_shard=4, ep=2), "ep"),
        (Degrees(ulysses=2, tp=2), "tp"),
    ],
)
def test_every_rank_gets_the_norm_of_the_whole(degrees: Degrees, layout: str):
    expected, clipped = reference(1.0)
    results = on_ranks(degrees.world_size, clipped_on_mesh, degrees, layout, 1.0)
    for norm, whole in results:
        assert norm == results[0][0]  # to the bit
        assert norm == pytest.approx(expected, rel=1e-6)
        for name, grad in whole.items():
            torch.testing.assert_close(grad, clipped[name], rtol=2e-6, atol=1e-9)


def stages(degrees: Degrees) -> float:
    """Each stage has its own parameters, and a copy of the first one's matrix."""
    mesh = build_mesh(degrees, "cpu")
    stage = mesh["pp"].rank
    grads = gradients()
    own = {n: grads[n] for n in (("matrix", "vector") if stage == 0 else ("matrix", "expert", "big"))}
    return global_norm(parameters(own), Spread(mesh, copies={"matrix"} if stage else set()))


def test_stages_add_up_and_copies_are_left_out():
    expected, _ = reference(0.0)
    assert on_ranks(4, stages, Degrees(pp=2, dp_replicate=2)) == pytest.approx([expected] * 4, rel=1e-6)


def partial(degrees: Degrees) -> str:
    mesh = build_mesh(degrees, "cpu")
    tensor = DTensor.from_local(torch.ones(2), mesh.fsdp_mesh(), [Partial()])
    with pytest.raises(ValueError, match="was not added up"):
        counts_here(tensor, mesh)
    return "refused"


def test_partial_sums_have_no_norm():
    assert on_ranks(2, partial, Degrees(dp_shard=2)) == ["refused"] * 2
