"""The optimizer sees this process's part of each parameter, in the parameter's own memory."""

import pytest
import torch
from pool import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from swift.config.degrees import Degrees
from swift.config.training import OptimizerConfig
from swift.core.errors import UsageError
from swift.distributed.mesh import build_mesh
from swift.optim import build_optimizer, local_parameters

SHAPES = {"matrix": (5, 3), "vector": (1,), "plain": (2, 2), "frozen": (2,)}


def values(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def whole_model() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(value, requires_grad=name != "frozen") for name, value in values(0).items()}


def settings(optim: str) -> OptimizerConfig:
    return OptimizerConfig(optim=optim, learning_rate=0.1, weight_decay=0.1)


def reference(optim: str) -> dict[str, torch.Tensor]:
    model = nn.ParameterDict(whole_model())
    optimizer = build_optimizer(model, settings(optim), tuner_type="full")
    for step in range(3):
        for name, grad in values(step + 1).items():
            model[name].grad = grad if name != "frozen" else None
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.items()}


def spread_model() -> dict[str, nn.Parameter]:
    """Rows over two ranks: rank 1 has none of `vector`; `plain` is on both."""
    device_mesh = build_mesh(Degrees(dp_shard=2), "cpu").fsdp_mesh()
    return {
        name: parameter
        if name == "plain"
        else nn.Parameter(distribute_tensor(parameter.data, device_mesh, [Shard(0)]), requires_grad=name != "frozen")
        for name, parameter in whole_model().items()
    }


def trained(optim: str) -> tuple[dict[str, torch.Tensor], dict[str, list[int]], list[str]]:
    named = spread_model()
    local = local_parameters(named.items())
    optimizer = build_optimizer(local, settings(optim), tuner_type="full")
    assert not any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    for step in range(3):
        for name, grad in values(step + 1).items():
            whole = named[name]
            if name != "frozen":
                cut = isinstance(whole, DTensor)
                whole.grad = distribute_tensor(grad, whole.device_mesh, whole.placements) if cut else grad
        local.hand_over_gradients()
        optimizer.step()
        local.drop_gradients()
        assert all(p.grad is None for p in named.values()) and all(p.grad is None for _, p in local.named())
    states = local.state(optimizer)
    shapes = {
        f"{name}.{key}": list(value.full_tensor().shape)
        for name, state in states.items()
        for key, value in state.items()
        if isinstance(value, DTensor)
    }
    decayed = [n for group in optimizer.param_groups if group["weight_decay"] for n in group["names"]]
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in named.items()}
    return {name: value.detach() for name, value in whole.items()}, shapes, decayed


@pytest.mark.parametrize("optim", ["adamw", "adamw_torch", "sgd"])
def test_parts_are_trained_like_the_whole(optim: str):
    expected = reference(optim)
    for weights, shapes, decayed in on_ranks(2, trained, optim):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-7)
        assert decayed == ["matrix", "plain"]  # by the dimensions of the whole
        if optim != "sgd":
            assert shapes == {
                f"{n}.{k}": list(SHAPES[n]) for n in ("matrix", "vector") for k in ("exp_avg", "exp_avg_sq")
            }


def moved() -> float:
    """The parameter's memory changes after the parts were made, as when weights are loaded or padded."""
    named = spread_model()
    local = local_parameters(named.items())
    optimizer = build_optimizer(local, settings("sgd"), tuner_type="full")
    matrix = named["matrix"]
    matrix._local_tensor = torch.zeros_like(matrix.to_local())
    matrix.grad = torch.ones_like(matrix)
    local.hand_over_gradients()
    optimizer.step()
    return float(matrix.full_tensor().mean())


def test_parts_follow_the_parameter_to_other_memory():
    assert on_ranks(2, moved) == pytest.approx([-0.1, -0.1])


def refused() -> str:
    with pytest.raises(UsageError, match="one number per row and column") as caught:
        build_optimizer(local_parameters(spread_model().items()), settings("adafactor"), tuner_type="full")
    return str(caught.value.fix)


def test_an_optimizer_of_whole_matrices_is_refused_for_parts():
    assert "--optim adamw" in on_ranks(2, refused)[0]
    whole = local_parameters(whole_model().items())
    build_optimizer(whole, settings("adafactor"), tuner_type="full")
