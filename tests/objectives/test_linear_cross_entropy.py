"""The chunked cross-entropy against an independent float64 derivation, values and gradients."""

import pytest
import torch
from torch import nn

from swift.models.head import OutputHead
from swift.objectives import vocab_stream
from swift.objectives.linear_cross_entropy import TokenLoss, linear_cross_entropy

TOKENS, HIDDEN, VOCAB = 23, 16, 37


def reference(hidden, weight, bias, targets, weights, *, smoothing, dft, scale, softcap):
    """The formula, written out with full logits; autograd gives the gradients."""
    logits = hidden @ weight.T + (0 if bias is None else bias)
    logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    probabilities = torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)
    target = torch.zeros_like(logits)
    target[torch.arange(len(targets)), targets] = 1 - smoothing
    target += smoothing / logits.shape[1]
    per_token = -(target * torch.log(probabilities)).sum(1)
    factor = weights
    if dft:
        factor = factor * probabilities[torch.arange(len(targets)), targets].detach()
    return (factor * per_token).sum()


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("smoothing", "dft", "scale", "softcap"),
    [
        (0.0, False, 1.0, None),
        (0.1, False, 1.0, None),
        (0.0, True, 1.0, None),
        (0.1, False, 0.3, 5.0),
        (0.0, False, 2.0, 4.0),
    ],
)
@pytest.mark.parametrize("kind", ["trained", "frozen", "recomputed"])
def test_equals_the_formula_in_float64(chunk, bias, smoothing, dft, scale, softcap, kind, monkeypatch):
    monkeypatch.setattr(vocab_stream, "BLOCK", 8)  # a frozen head's vocabulary is taken in blocks, the last one short
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64, requires_grad=True)
    module = nn.Linear(HIDDEN, VOCAB, bias=bias).double()
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    weights = torch.rand(TOKENS, generator=generator).double()
    head = OutputHead(module, scale, softcap)
    if kind == "recomputed":
        module.register_forward_hook(lambda *_: None)
    assert head.plain is (kind != "recomputed")
    module.requires_grad_(kind != "frozen")
    sums = linear_cross_entropy(hidden, head, targets, weights, TokenLoss(smoothing, dft), chunk=chunk)
    (3.0 * sums.loss).backward()
    got = [hidden.grad, module.weight.grad, *([module.bias.grad] if bias else [])]
    if kind == "frozen":
        assert got[1:] == [None] * len(got[1:])
        got = got[:1]

    twin = hidden.detach().clone().requires_grad_()
    parameters = [twin, *(p.detach().clone().requires_grad_() for p in module.parameters())]
    expected = reference(
        twin, parameters[1], parameters[2] if bias else None, targets, weights,
        smoothing=smoothing, dft=dft, scale=scale, softcap=softcap,
    )  # fmt: skip
    (3.0 * expected).backward()
    torch.testing.assert_close(sums.loss, expected.detach(), rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(got, parameters[: len(got)], strict=True):
        torch.testing.assert_close(ours, theirs.grad, rtol=1e-10, atol=1e-12)
    logits = head.logits(hidden.detach())
    assert sums.num_correct == (logits.argmax(1) == targets).sum()


def test_no_targets_gives_zero_and_zero_gradients():
    hidden = torch.randn(0, HIDDEN, requires_grad=True)
    module = nn.Linear(HIDDEN, VOCAB)
    sums = linear_cross_entropy(hidden, OutputHead(module), torch.empty(0, dtype=torch.int64), torch.empty(0))
    sums.loss.backward()
    assert sums.loss == 0
    assert module.weight.grad.abs().sum() == 0


def test_never_holds_all_logits(monkeypatch):
    largest = 0
    original = torch.Tensor.to

    def watch(tensor, *args, **kwargs):
        nonlocal largest
        largest = max(largest, tensor.numel())
        return original(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", watch)
    hidden = torch.randn(512, 8, requires_grad=True)
    module = nn.Linear(8, 1000)
    targets = torch.randint(0, 1000, (512,))
    linear_cross_entropy(hidden, OutputHead(module), targets, torch.ones(512), chunk=32).loss.backward()
    assert 32 * 1000 <= largest < 512 * 1000


@pytest.mark.parametrize("largest", [0, 700], ids=["first block", "later block"])
def test_a_frozen_head_stays_finite_where_exponentials_overflow(largest, monkeypatch):
    monkeypatch.setattr(vocab_stream, "BLOCK", 100)
    module = nn.Linear(HIDDEN, 1000, bias=False).requires_grad_(False)
    module.weight[largest] = 40.0
    hidden = torch.ones(3, HIDDEN, requires_grad=True)
    targets = torch.tensor([largest, 5, 999])
    sums = linear_cross_entropy(hidden, OutputHead(module), targets, torch.ones(3))
    sums.loss.backward()
    expected = nn.functional.cross_entropy(module(hidden.detach()), targets, reduction="sum")
    torch.testing.assert_close(sums.loss, expected)
    torch.testing.assert_close(hidden.grad, module.weight[largest] - module.weight[targets])
    assert sums.num_correct == 1


def test_a_frozen_head_is_measured_the_same_without_a_gradient():
    module = nn.Linear(HIDDEN, VOCAB).requires_grad_(False)
    hidden, targets = torch.randn(TOKENS, HIDDEN), torch.randint(0, VOCAB, (TOKENS,))
    arguments = OutputHead(module), targets, torch.rand(TOKENS)
    learning = linear_cross_entropy(hidden.clone().requires_grad_(), *arguments)
    with torch.no_grad():
        measuring = linear_cross_entropy(hidden, *arguments)
    assert all(torch.equal(a, b) for a, b in zip(learning, measuring, strict=True))
