"""The fast LoRA forward: peft's outputs and gradients, less memory, and peft's own way wherever it doesn't apply."""

from __future__ import annotations

import copy

import pytest
import torch
from functorch.compile import make_boxed_func
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from swift.models.adapters import LoRAConfig, Swift
from swift.models.lora_kernel import (
    FastLoRALinear,
    LoRALinearFunction,
    disable_fast_lora,
    enable_fast_lora,
    keep_mask,
)


class Net(nn.Module):
    """Two layers, so that the first gets no input gradient unless asked and the second always does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 10, bias=True), nn.Linear(10, 5, bias=False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def pair(dtype=torch.float32, adapters=("default",), **settings):
    """The same model with peft's forward and with the fast one, all adapter weights nonzero."""
    configs = {name: LoRAConfig(r=3, lora_alpha=5, **settings) for name in adapters}
    slow = Swift.prepare_model(Net().to(dtype), configs)
    with torch.no_grad():
        for name, parameter in slow.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    fast = copy.deepcopy(slow)
    assert enable_fast_lora(fast) == 2
    return slow, fast


X = torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(1))


def outcome(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel()).view(y.shape).to(y)).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(gradient is not None for gradient in gradients.values())
    return {"output": y.detach(), "input": x.grad, **gradients}


def assert_same(slow, fast, x=X, **tolerance):
    left, right = outcome(slow, x), outcome(fast, x)
    assert left.keys() == right.keys() and len(left) >= 6
    for name in left:
        torch.testing.assert_close(right[name], left[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"bias": "all"}, {"bias": "lora_only"}], ids=str)
@pytest.mark.parametrize("shape", [(6,), (1, 6), (4, 6), (2, 7, 6), (2, 3, 4, 6)], ids=str)
def test_outputs_and_gradients_are_pefts(settings, shape):
    slow, fast = pair(**settings)
    assert_same(slow, fast, torch.randn(shape), atol=1e-6, rtol=1e-6)


def test_equal_in_double_precision_and_gradcheck():
    slow, fast = pair(torch.float64)
    assert_same(slow, fast, X.double(), atol=1e-14, rtol=1e-14)
    parameters = [p for p in fast.parameters() if p.requires_grad]

    def run(x, *values):
        names = [name for name, p in fast.named_parameters() if p.requires_grad]
        return torch.func.functional_call(fast, dict(zip(names, values, strict=True)), (x,))

    inputs = (X[:, :2].double().requires_grad_(), *[p.detach().clone().requires_grad_() for p in parameters])
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


def test_gradcheck_of_the_function_with_a_mask():
    torch.manual_seed(0)
    x, w, a, b = (torch.randn(*shape, dtype=torch.float64) for shape in ((4, 6), (5, 6), (2, 6), (5, 2)))
    bias, mask = torch.randn(5, dtype=torch.float64), torch.rand(4, 6) > 0.3
    inputs = [tensor.requires_grad_() for tensor in (x, bias, a, b)]
    assert torch.autograd.gradcheck(lambda x, bias, a, b: LoRALinearFunction.apply(x, w, bias, a, b, mask, 0.7), inputs)
    plain = x @ w.T + bias + 0.7 * (x * mask) @ a.T @ b.T
    torch.testing.assert_close(LoRALinearFunction.apply(x, w, bias, a, b, mask, 0.7), plain)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "aot"])
def test_dropout_given_the_same_mask(compiled, monkeypatch):
    """With the draw fixed, dropout gives what peft's formula gives: mask, scale by 1/(1-p), on the adapter only."""
    _, fast = pair(lora_dropout=0.4)
    mask = torch.rand(2, 7, 6, generator=torch.Generator().manual_seed(5)) > 0.4
    monkeypatch.setattr("swift.models.lora_kernel.keep_mask", lambda x, p: (mask[..., : x.shape[-1]], 1 - p))
    layer = fast.get_base_model().first.train()
    x = X.clone().requires_grad_()
    run = torch.compile(layer, backend="aot_eager") if compiled else layer
    run(x).square().sum().backward()
    a, b = (getattr(layer, name)["default"].weight for name in ("lora_A", "lora_B"))
    copies = [tensor.detach().clone().requires_grad_() for tensor in (X, a, b)]
    dropped = copies[0] * mask / 0.6
    base = layer.base_layer
    y = nn.functional.linear(copies[0], base.weight, base.bias) + dropped @ copies[1].T @ copies[2].T * (5 / 3)
    y.square().sum().backward()
    for ours, theirs in zip((x, a, b), copies, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9, 1e-6])
def test_masks_have_the_right_rate_and_no_pattern(p):
    torch.manual_seed(0)
    n = 400_003
    mask, kept = keep_mask(torch.empty(n), p)
    assert mask.shape == (n,) and kept == pytest.approx(1 - p, abs=2**-17 + 1e-12)
    spread = (p * (1 - p) / n) ** 0.5
    assert abs((~mask).float().mean().item() - (1 - kept)) < 5 * spread + 1e-5
    dropped = (~mask).float() - (1 - kept)
    for lag in (1, 2, 3, 4, 8):  # four elements share a random word
        assert abs((dropped[lag:] * dropped[:-lag]).mean().item()) < 5 * max(p * (1 - p), 1e-6) / n**0.5 + 1e-6
    for place in range(4):
        assert abs(dropped[place::4].mean().item()) < 10 * spread + 1e-5


def test_dropout_is_seeded_unbiased_and_off_in_evaluation():
    slow, fast = pair(lora_dropout=0.3)
    torch.manual_seed(3)
    first = fast(X)
    state = torch.get_rng_state()
    second = fast(X)
    assert not torch.equal(first, second)
    torch.set_rng_state(state)
    assert torch.equal(fast(X), second), "a saved generator state brings the same draws"
    layer, theirs = fast.get_base_model().first, slow.get_base_model().first.eval()
    with torch.no_grad():
        expected = theirs(X)
    mean = torch.stack([layer(X.clone().requires_grad_()).detach() for _ in range(3000)]).mean(0)
    torch.testing.assert_close(mean, expected, atol=0.08, rtol=0)
    assert_same(slow.eval(), fast.eval(), atol=1e-6, rtol=1e-6)


def test_compiled_is_the_same():
    slow, fast = pair()
    compiled = torch.compile(fast, backend="aot_eager", fullgraph=True)
    compiled(X).sum().backward()
    slow(X).sum().backward()
    for (name, left), (_, right) in zip(slow.named_parameters(), fast.named_parameters(), strict=True):
        if left.requires_grad:
            torch.testing.assert_close(right.grad, left.grad, msg=name)


def saved_bytes(model, x):
    """Bytes that autograd keeps between forward and backward, each storage once; parameters don't count."""
    seen = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = model(x)
    assert kept.requires_grad
    return sum(seen.values())


def test_it_keeps_less():
    slow, fast = pair(lora_dropout=0.1)
    x = torch.randn(64, 6)
    assert saved_bytes(fast, x) < 0.7 * saved_bytes(slow, x)
    slow, fast = pair()
    assert saved_bytes(fast, x) <= saved_bytes(slow, x)


def test_calls_that_go_pefts_way(monkeypatch):
    slow, fast = pair(adapters=("one", "two"))
    calls = []
    original = LoRALinearFunction.forward

    def counting(ctx, *inputs):
        calls.append(1)
        return original(ctx, *inputs)

    monkeypatch.setattr(LoRALinearFunction, "forward", staticmethod(counting))

    def check(expected_calls):
        calls.clear()
        torch.testing.assert_close(fast(X), slow(X))
        assert len(calls) == expected_calls

    check(2)
    for model in (slow, fast):
        Swift.set_adapter(model, "two")
    check(2)
    for model in (slow, fast):
        Swift.set_adapter(model, ["one", "two"])
    check(0)
    for model in (slow, fast):
        Swift.set_adapter(model, "one")
        Swift.deactivate(model)
    check(0)
    for model in (slow, fast):
        Swift.activate(model)
        Swift.merge(model)
    check(0)
    for model in (slow, fast):
        Swift.unmerge(model)
    check(2)
    with torch.no_grad():
        check(2)
    with torch.autocast("cpu", torch.bfloat16):
        check(0)
    handle = fast.get_base_model().first.base_layer.register_forward_hook(lambda module, inputs, output: output)
    check(1)
    handle.remove()
    fast.get_base_model().second.base_layer.weight.requires_grad_()
    check(1)
    calls.clear()
    fast.get_base_model().first(X, adapter_names=["one", "__base__"])
    assert not calls, "a batch of several adapters"


def test_other_layers_are_left_alone():
    model = Swift.prepare_model(Net(), LoRAConfig(r=2, use_dora=True))
    plain = copy.deepcopy(model)
    enable_fast_lora(model)
    torch.testing.assert_close(model(X), plain(X))
    _, fast = pair()
    disable_fast_lora(fast)
    assert {type(fast.get_base_model().first), type(fast.get_base_model().second)} == {PeftLinear}
    enable_fast_lora(fast)
    assert isinstance(fast.get_base_model().first, FastLoRALinear)


def test_saving_merging_and_copying_see_a_peft_layer(tmp_path):
    slow, fast = pair()
    Swift.save(fast, tmp_path / "fast")
    Swift.save(slow, tmp_path / "slow")
    names = [(tmp_path / kind / "adapter_model.safetensors").read_bytes() for kind in ("fast", "slow")]
    assert names[0] == names[1]
    torch.testing.assert_close(copy.deepcopy(fast)(X), slow(X))
    expected = slow(X)
    torch.testing.assert_close(Swift.merge_and_unload(fast)(X), expected)


@pytest.mark.parametrize(
    "backend", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)], ids=["eager", "aot", "inductor"]
)
def test_each_layer_draws_its_own_mask_and_uses_it_backward(backend):
    """Equal layers on one input differ by their masks alone; they are linear, so x·dy/dx must give y back."""

    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.left = nn.Linear(16, 16, bias=False)
            self.right = copy.deepcopy(self.left)

        def forward(self, x):
            return self.left(x), self.right(x), self.right(x)

    model = Swift.prepare_model(Twins(), LoRAConfig(r=4, lora_alpha=64, lora_dropout=0.5)).train()
    inner = model.get_base_model()
    with torch.no_grad():
        for matrix in ("lora_A", "lora_B"):
            value = torch.randn_like(getattr(inner.left, matrix)["default"].weight)
            for layer in (inner.left, inner.right):
                getattr(layer, matrix)["default"].weight.copy_(value)
    enable_fast_lora(model)
    run = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    x = torch.randn(3, 5, 16, requires_grad=True)
    left, right, again = run(x)
    assert not torch.allclose(left, right, atol=0.1) and not torch.allclose(right, again, atol=0.1)
    total = left.sum() + 2 * right.sum() + 3 * again.sum()
    total.backward()
    torch.testing.assert_close((x.grad * x).sum(), total, atol=1e-3, rtol=1e-4)
    torch.manual_seed(9)
    again = run(x)[0]
    assert not torch.equal(again, run(x)[0])
    torch.manual_seed(9)
    assert torch.equal(again, run(x)[0])


@pytest.mark.parametrize("needs", [[True, True, True], [False, True, True], [True, False, False]], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_the_operators_of_compiled_code_tell_their_shapes(needs, masked):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, matrix_a, matrix_b, grad = (
        torch.randn(s, generator=generator) for s in ((2, 3, 5), (7, 5), (7,), (4, 5), (7, 4), (2, 3, 7))
    )
    mask = torch.rand(x.shape, generator=generator) > 0.5 if masked else None
    checks = ("test_schema", "test_faketensor")
    arguments = (x, weight, bias, matrix_a, matrix_b, mask, 0.5)
    torch.library.opcheck(torch.ops.swift.lora_forward.default, arguments, test_utils=checks)
    _, reduced = torch.ops.swift.lora_forward(*arguments)
    others = [weight, matrix_a, matrix_b, reduced]
    torch.library.opcheck(torch.ops.swift.lora_backward.default, (grad, x, others, mask, 0.5, needs), test_utils=checks)


def test_compiled_code_takes_each_layer_as_one_operator():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    _, fast = pair()
    torch.compile(fast, backend=aot_autograd(fw_compiler=backend, bw_compiler=backend))(X).sum().backward()
    assert ["lora" in graph.code and "mm" not in graph.code for graph in graphs] == [True, True]
