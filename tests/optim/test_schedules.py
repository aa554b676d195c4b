"""Learning-rate schedules against their formulas, and parameter groups."""

import math

import pytest
import torch
from torch import nn

from swift.config.training import OptimizerConfig
from swift.core.errors import UsageError
from swift.optim import build_optimizer, build_schedule, default_learning_rate
from swift.optim.optimizers import parameter_groups, set_rate


def factors(name, total=10, **settings):
    schedule = build_schedule(OptimizerConfig(lr_scheduler_type=name, **settings), total)
    return [schedule.factor(step) for step in range(total)]


def test_cosine_with_warmup():
    got = factors("cosine", warmup_steps=2)
    expected = [0.5, 1.0] + [0.5 * (1 + math.cos(math.pi * k / 8)) for k in range(8)]
    assert got == pytest.approx(expected)


def test_linear_reaches_the_floor():
    assert factors("linear", total=4, min_lr_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])


def test_constant():
    assert factors("constant") == [1.0] * 10
    assert factors("constant_with_warmup", warmup_ratio=0.35) == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 7)


def test_wsd_is_flat_then_falls_over_the_last_fifth():
    got = factors("wsd", total=20, warmup_steps=4, decay_ratio=0.25)
    assert got == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 13 + [0.8, 0.6, 0.4, 0.2])


def test_inverse_sqrt():
    got = factors("inverse_sqrt", total=100, warmup_steps=4)
    assert got[3] == 1.0
    assert got[16] == pytest.approx(math.sqrt(4 / 16))


def test_polynomial():
    assert factors("polynomial", total=4) == pytest.approx([1.0, 0.75**2, 0.25, 0.0625])


def test_default_rates():
    assert default_learning_rate(OptimizerConfig(), "full") == 1e-5
    assert default_learning_rate(OptimizerConfig(), "lora") == 1e-4
    assert default_learning_rate(OptimizerConfig(learning_rate=3e-4), "lora") == 3e-4


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.lora_A = nn.Linear(4, 2, bias=False)
        self.lora_B = nn.Linear(2, 4, bias=False)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.linear(x) + self.lora_B(self.lora_A(x))


def test_decay_spares_vectors_and_lora_plus_speeds_b():
    groups = parameter_groups(Tiny().named_parameters(), learning_rate=1.0, weight_decay=0.1, lora_b_ratio=16)
    described = {tuple(g["names"]): (g["lr"], g["weight_decay"]) for g in groups}
    assert described == {
        ("linear.bias",): (1.0, 0.0),
        ("linear.weight", "lora_A.weight"): (1.0, 0.1),
        ("lora_B.weight",): (16.0, 0.1),
    }


def test_lora_plus_without_lora_is_refused():
    with pytest.raises(UsageError, match=r"LoRA\+"):
        parameter_groups(nn.Linear(2, 2).named_parameters(), learning_rate=1, weight_decay=0, lora_b_ratio=16)


@pytest.mark.parametrize("name", ["adamw", "adamw_torch", "adamw_torch_fused", "sgd", "adafactor"])
def test_every_optimizer_follows_the_schedule(name):
    model = Tiny()
    optimizer = build_optimizer(model, OptimizerConfig(optim=name, learning_rate=0.5), tuner_type="lora")
    set_rate(optimizer, 0.0)
    before = [p.clone() for p in model.parameters()]
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    set_rate(optimizer, 0.5)
    assert {g["lr"] for g in optimizer.param_groups} == {0.25}
    optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_fused_adamw_equals_the_formula():
    """Decoupled weight decay and bias-corrected moments (arXiv 1711.05101, algorithm 2), in float64."""
    model = nn.Linear(3, 2, bias=False).double()
    config = OptimizerConfig(learning_rate=0.01, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8)
    weight = model.weight.detach().clone()
    optimizer = build_optimizer(model, config, tuner_type="full")
    first = second = torch.zeros_like(weight)
    for step in range(1, 4):
        gradient = torch.full_like(weight, 0.3 * step) + weight
        model.weight.grad = gradient.clone()
        optimizer.step()
        first = 0.9 * first + 0.1 * gradient
        second = 0.95 * second + 0.05 * gradient**2
        weight = weight - 0.01 * 0.1 * weight
        weight = weight - 0.01 * (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
        torch.testing.assert_close(model.weight.detach(), weight, rtol=1e-12, atol=1e-14)
