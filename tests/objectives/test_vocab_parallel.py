"""Cross-entropy over a vocabulary that is cut over ranks equals the one of a whole head."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from pool import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Shard

from swift.config.degrees import Degrees
from swift.core.errors import ModelError
from swift.distributed.mesh import Axis, build_mesh
from swift.distributed.traffic import TRAFFIC
from swift.models.head import OutputHead
from swift.objectives.linear_cross_entropy import PLAIN, LossSums, TokenLoss, linear_cross_entropy

TOKENS, WIDTH, VOCAB = 37, 16, 97


@dataclass(frozen=True)
class Case:
    options: TokenLoss = PLAIN
    scale: float = 1.0
    softcap: float | None = None
    bias: bool = False
    trained: bool = True
    dtype: torch.dtype = torch.float32
    head_dtype: torch.dtype | None = None
    chunk: int = 10
    learning: bool = True


@dataclass
class Result:
    sums: list[torch.Tensor]
    grads: dict[str, torch.Tensor] = field(default_factory=dict)


CASES = {
    "plain": Case(),
    "one chunk": Case(chunk=0),
    "smoothing": Case(TokenLoss(smoothing=0.1), bias=True),
    "dft": Case(TokenLoss(dft=True)),
    "both": Case(TokenLoss(0.2, True), scale=0.5, softcap=3.0, bias=True),
    "scale": Case(scale=0.25),
    "softcap": Case(softcap=5.0, bias=True),
    "frozen": Case(TokenLoss(smoothing=0.1), trained=False, bias=True),
    "double": Case(TokenLoss(0.1), dtype=torch.float64, softcap=2.0, scale=3.0, bias=True),
    "half": Case(TokenLoss(0.1), dtype=torch.bfloat16, bias=True),
    "half on a full head": Case(dtype=torch.bfloat16, head_dtype=torch.float32),
    "evaluation": Case(learning=False),
}


def inputs(case: Case) -> tuple[torch.Tensor, nn.Linear, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, WIDTH, generator=draw, dtype=torch.float64).to(case.dtype)
    head = nn.Linear(WIDTH, VOCAB, bias=case.bias, dtype=torch.float64)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    head = head.to(case.head_dtype or case.dtype).requires_grad_(case.trained)
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=draw)
    with torch.no_grad():  # some first guesses are right
        guessed = (hidden.float() @ head.weight.float().t()).argmax(1)
    targets[::4] = guessed[::4]
    return hidden.requires_grad_(case.learning), head, targets, torch.rand(TOKENS, generator=draw)


def evaluate(case: Case, axis: Axis | None) -> Result:
    hidden, head, targets, weights = inputs(case)
    if axis:
        for name, parameter in list(head.named_parameters()):
            spread = distribute_tensor(parameter.detach(), axis.device_mesh, [Shard(0)], src_data_rank=None)
            head._parameters[name] = nn.Parameter(spread, requires_grad=parameter.requires_grad)
    settings = OutputHead(head, case.scale, case.softcap, axis)
    with torch.set_grad_enabled(case.learning):
        sums: LossSums = linear_cross_entropy(hidden, settings, targets, weights, case.options, chunk=case.chunk)
    result = Result([value.detach() for value in sums])
    if case.learning:
        (sums.loss / 7).backward()
        grads: dict[str, Any] = {"hidden": hidden.grad} | {n: p.grad for n, p in head.named_parameters()}
        result.grads = {
            name: grad.full_tensor() if isinstance(grad, DTensor) else grad
            for name, grad in grads.items()
            if grad is not None
        }
    return result


def on_axis(cases: list[Case]) -> list[Result]:
    axis = build_mesh(Degrees(tp=torch.distributed.get_world_size()), "cpu")["tp"]
    return [evaluate(case, axis) for case in cases]


@pytest.mark.parametrize("ranks", [2, 4])  # shares of 49 and 48; of 25, 25, 25 and 22
def test_equals_a_whole_head(ranks):
    for results in on_ranks(ranks, on_axis, list(CASES.values())):
        for (name, case), ours in zip(CASES.items(), results, strict=True):
            theirs = evaluate(case, None)
            tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}[case.dtype]
            torch.testing.assert_close(ours.sums[:2], theirs.sums[:2], rtol=min(tolerance, 2e-6), atol=0, msg=name)
            assert int(ours.sums[2]) == int(theirs.sums[2]) > 0, name
            assert set(ours.grads) == set(theirs.grads), name
            for what, grad in theirs.grads.items():
                assert ours.grads[what].dtype == grad.dtype
                difference = (ours.grads[what] - grad).norm() / grad.norm()
                assert difference <= tolerance, f"{name}: gradient of {what} differs by {difference:.1e}"


def frozen_from_below(_: int) -> list[float]:
    """A target of every share, with a loss that is known: -log of a softmax over distinct logits."""
    axis = build_mesh(Degrees(tp=2), "cpu")["tp"]
    head = nn.Linear(1, 5, bias=False)
    weight = torch.tensor([[3.0], [1.0], [2.0], [5.0], [4.0]])
    head.weight = nn.Parameter(distribute_tensor(weight, axis.device_mesh, [Shard(0)], src_data_rank=None))
    hidden, ones = torch.ones(5, 1), torch.ones(1)
    return [
        float(linear_cross_entropy(hidden[:1], OutputHead(head, axis=axis), torch.tensor([t]), ones).loss)
        for t in range(5)
    ]


def test_reference_numbers():
    logits = torch.tensor([3.0, 1.0, 2.0, 5.0, 4.0], dtype=torch.float64)
    expected = (logits.exp().sum().log() - logits).tolist()
    for losses in on_ranks(2, frozen_from_below, 0):
        assert losses == pytest.approx(expected, rel=1e-6)


def talk(_: int) -> dict:
    axis = build_mesh(Degrees(tp=2), "cpu")["tp"]
    TRAFFIC.reset()
    evaluate(CASES["one chunk"], axis)
    return dict(TRAFFIC.bytes)


def test_five_numbers_per_token_are_exchanged():
    assert on_ranks(2, talk, 0)[0] == {
        ("tp", "all_gather"): 5 * TOKENS * 4,
        ("tp", "all_reduce"): TOKENS * WIDTH * 4,
    }


def refused(_: int) -> list[str]:
    axis = build_mesh(Degrees(tp=2), "cpu")["tp"]
    messages = []
    for head in (nn.Sequential(nn.Linear(4, 8)), nn.Linear(4, 8)):
        try:
            if isinstance(head, nn.Linear):
                OutputHead(head, axis=axis).logits(torch.ones(1, 4))
            else:
                target = torch.zeros(1, dtype=torch.int64)
                linear_cross_entropy(torch.ones(1, 4), OutputHead(head, axis=axis), target, torch.ones(1))
        except ModelError as error:
            messages.append(str(error))
    torch.distributed.barrier()
    return messages


def test_what_cannot_be_done_is_said():
    messages = on_ranks(2, refused, 0)[0]
    assert len(messages) == 2 and "Sequential" in messages[0] and "part of the vocabulary" in messages[1]
    assert all("--tensor_parallel_size" in message for message in messages)
