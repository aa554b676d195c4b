"""Log-probabilities of targets and their gradients against full logits in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from pool import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Shard

from swift.config.degrees import Degrees
from swift.core.errors import ModelError
from swift.distributed.mesh import Axis, build_mesh
from swift.models.head import OutputHead
from swift.objectives import logprobs, vocab_stream
from swift.objectives.linear_cross_entropy import linear_cross_entropy
from swift.objectives.logprobs import LOG_COLLISION, TokenLogprobs, token_logprobs

TOKENS, WIDTH, VOCAB = 23, 16, 37


@dataclass(frozen=True)
class Case:
    bias: bool = False
    scale: float = 1.0
    softcap: float | None = None
    kind: str = "trained"  # frozen, hooked: called as a module
    chunk: int = 0
    dtype: torch.dtype = torch.float64
    head_dtype: torch.dtype | None = None


CASES = [
    Case(bias=bias, scale=scale, softcap=softcap, kind=kind, chunk=chunk)
    for bias, scale, softcap in [(False, 1.0, None), (True, 0.3, None), (True, 2.0, 4.0)]
    for kind in ("trained", "frozen", "hooked")
    for chunk in (0, 7)
]


def inputs(case: Case) -> tuple[torch.Tensor, nn.Linear, torch.Tensor, torch.Tensor]:
    """States, head, targets (some of them first guesses), and the gradient that arrives at each log-probability."""
    draw = torch.Generator().manual_seed(4)
    hidden = torch.randn(TOKENS, WIDTH, generator=draw, dtype=torch.float64)
    head = nn.Linear(WIDTH, VOCAB, bias=case.bias, dtype=torch.float64)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=draw)
    targets[::4] = head(hidden).argmax(1)[::4]
    incoming = torch.randn(TOKENS, generator=draw, dtype=torch.float64) * 1e-3
    head = head.to(case.head_dtype or case.dtype).requires_grad_(case.kind != "frozen")
    if case.kind == "hooked":
        head.register_forward_hook(lambda *_: None)
    return hidden.to(case.dtype).requires_grad_(), head, targets, incoming


def expected(case: Case) -> dict[str, np.ndarray]:
    """Values and gradients in numpy, one token after the other, from the formulas at the head of the module."""
    hidden, head, targets, incoming = inputs(case)
    h, w = (t.detach().double().numpy() for t in (hidden, head.weight))
    b = head.bias.detach().double().numpy() if case.bias else np.zeros(VOCAB)
    out: dict[str, Any] = {"logprobs": [], "correct": [], "log_collision": [], "hidden": []}
    grad_weight, grad_bias = np.zeros_like(w), np.zeros_like(b)
    for state, target, factor in zip(h, targets.tolist(), incoming.numpy(), strict=True):
        z = case.scale * (w @ state + b)
        slope = np.full(VOCAB, case.scale)
        if case.softcap:
            slope = slope * (1 - np.tanh(z / case.softcap) ** 2)
            z = case.softcap * np.tanh(z / case.softcap)
        p = np.exp(z) / np.exp(z).sum()
        out["logprobs"].append(np.log(p[target]))
        out["correct"].append(z.argmax() == target)
        out["log_collision"].append(np.log((p**2).sum()))
        dz = factor * ((np.arange(VOCAB) == target) - p) * slope
        out["hidden"].append(dz @ w)
        grad_weight += np.outer(dz, state)
        grad_bias += dz
    return {name: np.array(value) for name, value in out.items()} | {"weight": grad_weight, "bias": grad_bias}


def evaluate(case: Case, axis: Axis | None = None) -> dict[str, torch.Tensor]:
    hidden, head, targets, incoming = inputs(case)
    if axis:
        for name, parameter in list(head.named_parameters()):
            spread = distribute_tensor(parameter.detach(), axis.device_mesh, [Shard(0)], src_data_rank=None)
            head._parameters[name] = nn.Parameter(spread, requires_grad=parameter.requires_grad)
    settings = OutputHead(head, case.scale, case.softcap, axis)
    found = token_logprobs(hidden, settings, targets, chunk=case.chunk, extras=(LOG_COLLISION,))
    (found.logprobs * incoming).sum().backward()
    grads: dict[str, Any] = {"hidden": hidden.grad} | {n: p.grad for n, p in head.named_parameters()}
    whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items() if g is not None}
    assert found.log_collision is not None
    values = {"logprobs": found.logprobs, "correct": found.correct, "log_collision": found.log_collision}
    return {name: value.detach() for name, value in (values | whole).items()}


def assert_same(case: Case, ours: dict[str, torch.Tensor], tolerance: float) -> None:
    theirs = expected(case)
    names = {"logprobs", "correct", "log_collision", "hidden"}
    if case.kind != "frozen":
        names |= {"weight", "bias"} if case.bias else {"weight"}
    assert set(ours) == names
    for name in names - {"correct"}:
        error = np.linalg.norm(ours[name].double().numpy() - theirs[name]) / np.linalg.norm(theirs[name])
        assert error <= tolerance, f"{case}: {name} differs by {error:.1e}"
    if case.dtype == torch.float64:
        assert ours["correct"].tolist() == theirs["correct"].tolist()
        assert 0 < sum(ours["correct"].tolist()) < TOKENS


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_formula(case, monkeypatch):
    monkeypatch.setattr(vocab_stream, "BLOCK", 8)  # several blocks, the last one short
    monkeypatch.setattr(logprobs, "BLOCK", 10)
    assert_same(case, evaluate(case), 1e-11)


@pytest.mark.parametrize(
    "case",
    [
        Case(bias=True, dtype=torch.float32),
        Case(dtype=torch.float32, softcap=5.0),
        Case(dtype=torch.bfloat16, kind="frozen"),
        Case(dtype=torch.bfloat16, head_dtype=torch.float32, bias=True),
    ],
    ids=str,
)
def test_lower_precision(case):
    ours = evaluate(case)
    assert ours["logprobs"].dtype == torch.float32
    assert ours["hidden"].dtype == case.dtype
    if case.kind != "frozen":
        assert ours["weight"].dtype == (case.head_dtype or case.dtype)
    assert_same(case, ours, 2e-6 if case.dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_agrees_with_the_cross_entropy(dtype):
    """The same weights: a weighted sum of log-probabilities is the cross-entropy's negative, also under autocast."""
    for kind in ("frozen", "trained"):
        hidden, head, targets, _ = inputs(Case(dtype=torch.float32, kind=kind))
        weights, gradients = torch.rand(TOKENS, generator=torch.Generator().manual_seed(1)), []
        for way in ("logprobs", "cross-entropy"):
            hidden.grad = head.weight.grad = None
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                if way == "logprobs":
                    loss = -(token_logprobs(hidden, OutputHead(head), targets).logprobs * weights).sum()
                else:
                    loss = linear_cross_entropy(hidden, OutputHead(head), targets, weights).loss
            loss.backward()
            gradients.append([loss.detach(), hidden.grad, *([head.weight.grad] if kind == "trained" else [])])
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        for ours, theirs in zip(*gradients, strict=True):
            assert ours.dtype == theirs.dtype
            assert (ours - theirs).norm() <= tolerance * theirs.norm()


def test_small_factors_survive_half_precision():
    """1e-9 is below fp16's smallest number, a usual factor of a token where a step has many."""
    hidden, head, targets, _ = inputs(Case(dtype=torch.float16, head_dtype=torch.float32))
    found = token_logprobs(hidden.detach(), OutputHead(head), targets)
    (found.logprobs.sum() * 1e-9).backward()
    small, head.weight.grad = head.weight.grad, None
    token_logprobs(hidden.detach(), OutputHead(head), targets).logprobs.sum().backward()
    torch.testing.assert_close(small * 1e9, head.weight.grad, rtol=1e-5, atol=1e-6)


def test_gradients_can_be_asked_for_apart():
    """As pipelines do: first for the states, then, from the same graph, for the matrix."""
    case = Case(bias=True)
    hidden, head, targets, incoming = inputs(case)
    loss = (token_logprobs(hidden, OutputHead(head), targets).logprobs * incoming).sum()
    (grad_hidden,) = torch.autograd.grad(loss, [hidden], retain_graph=True)
    grad_weight, grad_bias = torch.autograd.grad(loss, [head.weight, head.bias])
    theirs = expected(case)
    for name, ours in {"hidden": grad_hidden, "weight": grad_weight, "bias": grad_bias}.items():
        np.testing.assert_allclose(ours.numpy(), theirs[name], rtol=1e-9, atol=1e-15)


def test_no_targets_give_zero_gradients():
    for softcap in (None, 3.0):
        hidden = torch.randn(0, WIDTH, requires_grad=True)
        module = nn.Linear(WIDTH, VOCAB)
        found = token_logprobs(hidden, OutputHead(module, softcap=softcap), torch.empty(0, dtype=torch.int64))
        assert found.logprobs.shape == found.correct.shape == (0,)
        found.logprobs.sum().backward()
        assert module.weight.grad.abs().sum() == module.bias.grad.abs().sum() == 0


def test_measured_the_same_without_a_gradient():
    hidden, head, targets, _ = inputs(Case())
    learning: TokenLogprobs = token_logprobs(hidden, OutputHead(head), targets)
    with torch.no_grad():
        measuring = token_logprobs(hidden, OutputHead(head), targets)
    assert torch.equal(learning.logprobs, measuring.logprobs) and not measuring.logprobs.requires_grad
    assert measuring.log_collision is None


CUT = [
    Case(),
    Case(bias=True, scale=0.5, softcap=3.0, chunk=7),
    Case(kind="frozen", bias=True),
    Case(dtype=torch.bfloat16, head_dtype=torch.float32),
]


def on_axis(cases: list[Case]) -> list[dict[str, torch.Tensor]]:
    axis = build_mesh(Degrees(tp=torch.distributed.get_world_size()), "cpu")["tp"]
    results = [evaluate(case, axis) for case in cases]
    with pytest.raises(ModelError, match="Sequential"):
        head = OutputHead(nn.Sequential(nn.Linear(4, 8)), axis=axis)
        token_logprobs(torch.ones(1, 4), head, torch.zeros(1, dtype=torch.int64))
    return results


def test_a_vocabulary_cut_over_ranks():
    for results in on_ranks(2, on_axis, CUT):
        for case, ours in zip(CUT, results, strict=True):
            assert_same(case, ours, 1e-11 if case.dtype == torch.float64 else 2e-2)
