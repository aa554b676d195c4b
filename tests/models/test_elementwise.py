"""RMS norm and SwiGLU as autograd functions: the library's own numbers, and only where the module is known."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from swift.models.elementwise import RMSNormFunction, SwiGLUFunction, enable_fast_elementwise

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 30}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}


def double(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def test_first_and_second_derivatives():
    torch.manual_seed(0)
    gate, up, x, weight = double(3, 4), double(3, 4), double(2, 3, 5), double(5)
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(SwiGLUFunction.apply, (gate, up))
        assert check(lambda x, weight: RMSNormFunction.apply(x, weight, 1e-2), (x, weight))


def outcome(model, dtype):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 30, (2, 7), generator=generator)
    logits = model.to(dtype)(input_ids=ids, use_cache=False).logits.float()
    logits.log_softmax(2)[..., 3].sum().backward()
    return [logits.detach(), *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("frozen", ["nothing", "norms", "first layer"])
@pytest.mark.parametrize(
    ("kind", "config"), [(LlamaForCausalLM, LlamaConfig), (Qwen3ForCausalLM, Qwen3Config)], ids=["llama", "qwen3"]
)
def test_a_model_keeps_its_outputs_and_gradients(kind, config, frozen, recompute):
    torch.manual_seed(0)
    plain = kind(config(**SIZES, **HEADS)).train()
    for name, parameter in plain.named_parameters():
        with torch.no_grad():
            parameter.add_(0.1 * torch.randn_like(parameter))
        frozen_here = {"nothing": False, "norms": "norm" in name, "first layer": "embed" in name or ".0." in name}
        parameter.requires_grad_(not frozen_here[frozen])
    fast = copy.deepcopy(plain)
    norms = 9 if kind is Qwen3ForCausalLM else 5
    assert enable_fast_elementwise(fast) == norms + 2
    assert fast.state_dict().keys() == plain.state_dict().keys()
    assert isinstance(fast.model.norm, type(plain.model.norm))
    if recompute:
        fast.gradient_checkpointing_enable({"use_reentrant": False})
    used = []
    fast.model.norm.register_forward_hook(lambda module, inputs, output: used.append(output.grad_fn.name()))
    for ours, theirs in zip(outcome(fast, torch.float32), outcome(plain, torch.float32), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)
    assert used == ["RMSNormFunctionBackward"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_where_the_library_does(dtype):
    torch.manual_seed(0)
    norm = LlamaRMSNorm(32).to(dtype)
    mlp = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=64)).to(dtype)
    x = torch.randn(2, 5, 32, dtype=dtype)
    for module in (norm, mlp):
        fast = copy.deepcopy(module)
        assert enable_fast_elementwise(fast) == 1
        left, right = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected, got = module(left), fast(right)
        assert torch.equal(got, expected)
        expected.sum().backward()
        got.sum().backward()
        torch.testing.assert_close(right.grad, left.grad)
        for ours, theirs in zip(fast.parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


def test_without_a_gradient_the_librarys_forward_runs():
    norm = LlamaRMSNorm(8)
    enable_fast_elementwise(norm)
    with torch.no_grad():
        assert torch.equal(norm(torch.ones(2, 8)), LlamaRMSNorm(8)(torch.ones(2, 8)))


def test_less_is_kept_for_the_backward_pass():
    mlp = LlamaMLP(LlamaConfig(hidden_size=8, intermediate_size=64, num_attention_heads=1)).requires_grad_(False)
    x = torch.randn(1, 50, 8, requires_grad=True)

    def kept(module):
        tensors = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: tensors.setdefault(t.data_ptr(), t), lambda t: t):
            module(x)
        return sum(t.numel() for t in tensors.values() if t.dim() == 3 and t.shape[2] == 64)

    before = kept(mlp)
    enable_fast_elementwise(mlp)
    assert (before, kept(mlp)) == (3 * 50 * 64, 2 * 50 * 64)


class OwnNorm(LlamaRMSNorm):
    """The same class but for its forward."""

    def forward(self, hidden_states):
        return self.weight * hidden_states


def test_modules_that_compute_something_else_stay_as_they_are():
    torch.manual_seed(0)
    patched = LlamaRMSNorm(4)
    patched.forward = lambda hidden_states: hidden_states
    others = nn.ModuleList([OwnNorm(4), Gemma2RMSNorm(4), nn.RMSNorm(4), nn.Linear(4, 4), patched])
    kinds = [type(module) for module in others]
    assert enable_fast_elementwise(others) == 0
    assert [type(module) for module in others] == kinds


def test_another_activation_goes_the_librarys_way():
    config = LlamaConfig(hidden_size=8, intermediate_size=16, num_attention_heads=1, hidden_act="gelu")
    mlp = LlamaMLP(config)
    fast = copy.deepcopy(mlp)
    assert enable_fast_elementwise(fast) == 1
    x = torch.randn(3, 8)
    torch.testing.assert_close(fast(x), mlp(x), rtol=0, atol=0)
    assert fast.down_proj(torch.zeros(1, 16)).shape == (1, 8)
