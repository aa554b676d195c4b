"""Trained linear layers: the library's numbers, and only where they are wanted."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from swift.models.trained_linear import LinearFunction, TrainedLinear, enable_trained_linear


def test_first_and_second_derivatives():
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 5), (4, 5), (4,)))
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(LinearFunction.apply, (x, weight, bias))
        assert check(lambda x, weight: LinearFunction.apply(x, weight, None), (x, weight))


@pytest.mark.parametrize("bias", [False, True])
def test_a_model_keeps_its_outputs_and_every_gradient(bias):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=30, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=bias, mlp_bias=bias,
    )  # fmt: skip
    plain = LlamaForCausalLM(config).train()
    plain.model.layers[0].mlp.up_proj.requires_grad_(False)
    fast = copy.deepcopy(plain)
    assert enable_trained_linear(fast.model) == 13
    assert type(fast.lm_head) is type(fast.model.layers[0].mlp.up_proj) is nn.Linear
    assert fast.state_dict().keys() == plain.state_dict().keys()
    used = []
    fast.model.layers[1].mlp.down_proj.register_forward_hook(lambda m, i, output: used.append(output.grad_fn.name()))
    ids = torch.randint(0, 30, (2, 9))
    for model in (plain, fast):
        model(input_ids=ids, use_cache=False).logits.log_softmax(2)[..., 3].sum().backward()
    assert used == ["LinearFunctionBackward"]
    for (name, ours), theirs in zip(fast.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None, name
        else:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=2e-6, msg=name)


def test_calls_that_go_the_layers_own_way():
    layer = nn.Linear(4, 3)
    enable_trained_linear(layer)
    assert type(layer) is TrainedLinear
    with torch.no_grad():
        assert layer(torch.ones(2, 4)).shape == (2, 3)
    assert layer(torch.ones(4)).grad_fn.name() != "LinearFunctionBackward"
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(2, 4)).dtype == torch.bfloat16
    assert layer.double()(torch.ones(2, 4, dtype=torch.float64)).grad_fn.name() != "LinearFunctionBackward"
