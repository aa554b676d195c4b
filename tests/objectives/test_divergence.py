"""Distillation losses against the paper's formulas in plain NumPy loops, and gradients against finite differences."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
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
from swift.objectives.causal_lm import CausalLM
from swift.objectives.distill import DEFAULTS, Distillation, DistillObjective
from swift.objectives.divergence import TopK, generalized_jsd, top_k_divergence

TOKENS, HIDDEN, VOCAB = 9, 5, 11


@dataclass
class Batch:
    target_ids: torch.Tensor
    target_weights: torch.Tensor
    facts: dict[str, torch.Tensor]
    sequences: Any = None

    @property
    def weight(self) -> float:
        return float(self.target_weights.sum())


@dataclass(frozen=True)
class Case:
    form: str = "full"
    options: Distillation = DEFAULTS
    scale: float = 1.0
    softcap: float | None = None
    bias: bool = False
    trained: bool = True
    plain: bool = True
    width: int = VOCAB
    teacher_width: int = VOCAB
    k: int = 3
    old: bool = False
    chunk: int = 4
    dtype: torch.dtype = torch.float64


CASES = {
    **{f"full {beta}": Case(options=Distillation(beta)) for beta in (0.0, 0.2, 0.5, 1.0)},
    **{f"full {beta}, all options": Case(
        options=Distillation(beta, 1.7, 0.3), scale=0.7, softcap=3.0, bias=True) for beta in (0.0, 0.4, 1.0)},
    **{f"top-k {beta}": Case("topk", Distillation(beta)) for beta in (0.0, 0.3, 1.0)},
    **{f"top-k {beta}, all options": Case(
        "topk", Distillation(beta, 0.8, 0.5), scale=1.3, softcap=4.0, bias=True) for beta in (0.0, 0.6, 1.0)},
    **{f"top-k {beta} without the rest": Case("topk", Distillation(beta, 1.5, tail=False)) for beta in (0.0, 0.5, 1.0)},
    "top-1": Case("topk", k=1),
    "top-all": Case("topk", k=VOCAB),
    "one chunk": Case(chunk=0),
    "frozen": Case(trained=False, bias=True),
    "any head": Case(options=Distillation(0.5, 2.0, 0.1), plain=False, scale=0.5, softcap=2.0),
    "any head, top-k": Case("topk", Distillation(1.0), plain=False),
    "padding": Case(options=Distillation(0.3, 1.2, 0.4, vocab_size=VOCAB), width=16, teacher_width=20),
    "padding of the student": Case(options=Distillation(0.0), width=14),
    "padding of the teacher": Case(options=Distillation(1.0), teacher_width=17),
    "padding, top-k": Case("topk", Distillation(0.5, sft_alpha=0.2, vocab_size=VOCAB), width=25),
    "sampled": Case("sampled"),
    "sampled before": Case("sampled", Distillation(temperature=1.4, sft_alpha=0.2), old=True, bias=True),
    "sampled, padding": Case("sampled", Distillation(vocab_size=VOCAB), width=30),
}  # fmt: skip


@dataclass
class World:
    """Everything that a loss is a function of."""

    hidden: torch.Tensor
    student: nn.Linear
    teacher: nn.Linear
    batch: Batch


def build(case: Case) -> World:
    draw = torch.Generator().manual_seed(11)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    def linear(inputs: int, outputs: int) -> nn.Linear:
        layer = nn.Linear(inputs, outputs, bias=case.bias, dtype=torch.float64)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(numbers(*parameter.shape))
        return layer

    student, teacher = linear(HIDDEN, case.width), linear(HIDDEN + 2, case.teacher_width).requires_grad_(False)
    hidden, states = numbers(TOKENS, HIDDEN), numbers(TOKENS, HIDDEN + 2)
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=draw)
    weights = torch.rand(TOKENS, generator=draw, dtype=torch.float64)
    logps = (2 * numbers(TOKENS, VOCAB)).log_softmax(1)
    if case.form == "full":
        facts = {"teacher_hidden": states.to(case.dtype)}
    elif case.form == "topk":
        best = logps.topk(case.k, dim=1)
        facts = {"teacher_topk_ids": best.indices, "teacher_topk_logps": best.values}
    else:
        facts = {"teacher_logps": logps[torch.arange(TOKENS), targets]}
        if case.old:
            facts["old_logps"] = -3 * torch.rand(TOKENS, generator=draw, dtype=torch.float64)
    batch = Batch(targets, weights.float() if case.dtype == torch.float32 else weights, facts)
    student = student.to(case.dtype).requires_grad_(case.trained)
    return World(hidden.to(case.dtype).requires_grad_(), student, teacher.to(case.dtype), batch)


@dataclass
class Result:
    loss: float
    metrics: dict[str, float]
    grads: dict[str, torch.Tensor] = field(default_factory=dict)


def evaluate(case: Case, axis: Axis | None = None, *, cut_teacher: bool = False) -> Result:
    world = build(case)
    student, teacher = world.student, world.teacher
    for module in [student, *([teacher] if cut_teacher else [])] if axis else []:
        for name, parameter in list(module.named_parameters()):
            spread = distribute_tensor(parameter.detach(), axis.device_mesh, [Shard(0)], src_data_rank=None)
            module._parameters[name] = nn.Parameter(spread, requires_grad=parameter.requires_grad)
    heads = OutputHead(student, case.scale, case.softcap, axis), OutputHead(teacher, axis=axis if cut_teacher else None)
    if not case.plain:
        for head in heads:
            head.module.register_forward_hook(lambda *_: None)
            assert not head.plain
    objective = DistillObjective(case.options, heads[1], case.chunk)
    terms = objective(world.hidden, heads[0], world.batch)
    metrics = {name: float(value) / terms.counts[name] for name, value in terms.sums.items()}
    result = Result(float(terms.loss_sum.detach()), metrics)
    (terms.loss_sum * 3.0).backward()
    found: dict[str, Any] = {"hidden": world.hidden.grad} | {n: p.grad for n, p in student.named_parameters()}
    for name, grad in found.items():
        if grad is not None:
            result.grads[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return result


# --- the formulas, one token and one word at a time ---


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = [math.exp(z) for z in logits]
    return np.array([power / math.fsum(powers) for power in powers])


def divergence(student: np.ndarray, teacher: np.ndarray, beta: float) -> float:
    """arXiv 2306.13649, eq. 1 and the limits."""

    def kl(p: np.ndarray, q: np.ndarray) -> float:
        return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)

    if beta == 0:
        return kl(teacher, student)
    if beta == 1:
        return kl(student, teacher)
    mixture = beta * teacher + (1 - beta) * student
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def bucketed(student: np.ndarray, ids: list[int], teacher: list[float], *, tail: bool) -> tuple[np.ndarray, np.ndarray]:
    s, t = np.array([student[i] for i in ids]), np.array(teacher)
    if not tail:
        return s / s.sum(), t / t.sum()
    rest = math.fsum(p for i, p in enumerate(student) if i not in ids)
    if len(ids) == len(student):
        return s, t
    return np.append(s, rest), np.append(t, 1 - math.fsum(t))


def formula(case: Case, arrays: dict[str, np.ndarray], world: World) -> float:
    """The weighted sum of the tokens' losses; `arrays` are the student's states, matrix and bias."""
    options, total = case.options, 0.0
    facts = {name: value.double().numpy() for name, value in world.batch.facts.items()}
    size = min(case.width, case.teacher_width if case.form == "full" else case.width, options.vocab_size or 10**9)
    for i in range(TOKENS):
        logits = arrays["weight"] @ arrays["hidden"][i] + arrays.get("bias", 0.0)
        logits = logits * case.scale
        if case.softcap:
            logits = case.softcap * np.tanh(logits / case.softcap)
        target, weight = int(world.batch.target_ids[i]), float(world.batch.target_weights[i])
        student = softmax(logits[:size] / options.temperature)
        if case.form == "full":
            bias = 0.0 if world.teacher.bias is None else world.teacher.bias.numpy()
            theirs = world.teacher.weight.numpy() @ facts["teacher_hidden"][i] + bias
            loss = divergence(student, softmax(theirs[:size] / options.temperature), options.beta)
        elif case.form == "topk":
            ids = [int(v) for v in facts["teacher_topk_ids"][i]]
            pair = bucketed(student, ids, [math.exp(v) for v in facts["teacher_topk_logps"][i]], tail=options.tail)
            loss = divergence(*pair, options.beta)
        else:
            logp = math.log(student[target])
            base = facts["old_logps"][i] if case.old else arrays["fixed"][i]
            loss = -(facts["teacher_logps"][i] - base) * math.exp(logp - base)
        total += weight * (loss - options.sft_alpha * math.log(softmax(logits)[target]))
    return total


@pytest.mark.parametrize("name", CASES)
def test_equals_the_formula_and_its_finite_differences(name):
    case = CASES[name]
    world, ours = build(case), evaluate(case)
    arrays = {"hidden": world.hidden.detach().numpy().copy()}
    arrays |= {name: parameter.detach().numpy().copy() for name, parameter in world.student.named_parameters()}
    if case.form == "sampled":  # what the student thought of the targets before the step
        logits = arrays["hidden"] @ arrays["weight"].T + arrays.get("bias", 0.0)
        size = case.options.vocab_size or case.width
        rows = [softmax(row[:size] / case.options.temperature) for row in logits]
        arrays["fixed"] = np.array([math.log(row[t]) for row, t in zip(rows, world.batch.target_ids, strict=True)])
    assert ours.loss == pytest.approx(formula(case, arrays, world), rel=1e-11)
    assert set(ours.grads) == {"hidden"} | (set(arrays) - {"hidden", "fixed"} if case.trained else set())
    step = 1e-5
    for what, grad in ours.grads.items():
        array, expected = arrays[what], np.zeros_like(arrays[what])
        for place in np.ndindex(*array.shape):
            kept = array[place]
            array[place] = kept + step
            above = formula(case, arrays, world)
            array[place] = kept - step
            expected[place] = 3.0 * (above - formula(case, arrays, world)) / (2 * step)
            array[place] = kept
        np.testing.assert_allclose(grad.numpy(), expected, rtol=2e-6, atol=2e-8, err_msg=what)
    assert all(grad.abs().sum() > 0 for grad in ours.grads.values())


def test_metrics():
    case = CASES["full 0.4, all options"]
    world, ours = build(case), evaluate(case)
    weights, targets = world.batch.target_weights.numpy(), world.batch.target_ids.tolist()
    student = OutputHead(world.student, case.scale, case.softcap).logits(world.hidden).detach().numpy()
    teacher = world.teacher(world.batch.facts["teacher_hidden"]).numpy()
    tau = case.options.temperature
    expected = dict.fromkeys(ours.metrics, 0.0)
    for i, target in enumerate(targets):
        s, t, weight = softmax(student[i] / tau), softmax(teacher[i] / tau), weights[i] / weights.sum()
        expected["divergence"] += weight * divergence(s, t, case.options.beta)
        expected["nll"] -= weight * math.log(softmax(student[i])[target])
        expected["teacher_nll"] -= weight * math.log(softmax(teacher[i])[target])
        expected["student_entropy"] -= weight * sum(p * math.log(p) for p in s)
        expected["agreement"] += (np.argmax(s) == np.argmax(t)) / TOKENS
        expected["token_accuracy"] += (np.argmax(s) == target) / TOKENS
    assert ours.metrics == pytest.approx(expected)
    assert 0 < expected["agreement"] < 1
    batch = build(CASES["top-k 0.3"]).batch
    covered = (batch.facts["teacher_topk_logps"].exp().sum(1) * batch.target_weights).sum() / batch.weight
    assert evaluate(CASES["top-k 0.3"]).metrics["teacher_topk_mass"] == pytest.approx(float(covered))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_buckets_are_a_lower_bound_that_grows_with_k(beta):
    draw = torch.Generator().manual_seed(2)
    log_s, log_t = (torch.randn(50, 40, generator=draw).double().mul(2).log_softmax(1) for _ in range(2))
    full = generalized_jsd(log_s, log_t, beta).value
    before = torch.zeros(50, dtype=torch.float64)
    for k in (1, 2, 5, 20, 39, 40):
        best = log_t.topk(k, dim=1)
        value = top_k_divergence(log_s, TopK(best.indices, best.values), beta, (0, 40), tail=True).value
        assert (value >= before - 1e-11).all() and (value <= full + 1e-11).all()
        before = value
    torch.testing.assert_close(before, full)
    one = log_t.topk(1, dim=1)
    assert (top_k_divergence(log_s, TopK(*one[::-1]), beta, (0, 40), tail=True).value > 1e-4).any()
    without = top_k_divergence(log_s, TopK(*one[::-1]), beta, (0, 40), tail=False)
    assert without.value.abs().max() < 1e-15 and without.slope.abs().max() < 1e-15


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_where_the_best_tokens_are_all_there_is_no_rest(beta):
    draw = torch.Generator().manual_seed(5)
    log_s, log_t = (torch.randn(20, 30, generator=draw).mul(3).log_softmax(1) for _ in range(2))
    best = log_t.topk(30, dim=1)
    ours = top_k_divergence(log_s, TopK(best.indices, best.values), beta, (0, 30), tail=True)
    torch.testing.assert_close(ours.value, generalized_jsd(log_s, log_t, beta).value, rtol=2e-6, atol=1e-6)


def test_equal_distributions_have_no_divergence_and_no_gradient():
    log_p = torch.randn(6, 13).double().log_softmax(1)
    best = log_p.topk(4, dim=1)
    for beta in (0.0, 0.3, 1.0):
        for result in (
            generalized_jsd(log_p, log_p.clone(), beta),
            top_k_divergence(log_p, TopK(best.indices, best.values), beta, (0, 13), tail=True),
        ):
            assert result.value.abs().max() < 1e-13 and result.slope.abs().max() < 1e-13


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_entries_that_say_nothing_change_nothing(beta, tail):
    log_s = torch.randn(3, 8).double().log_softmax(1)
    ids, logps = torch.tensor([[2, 0], [1, 7], [5, 3]]), torch.tensor([[-0.5, -2.0], [-1.0, -1.5], [-0.2, -4.0]])
    short = top_k_divergence(log_s, TopK(ids, logps), beta, (0, 8), tail=tail)
    ids = torch.cat([ids, torch.tensor([[0, -1, 9], [1, -1, 8], [5, -1, 30]])], 1)
    logps = torch.cat([logps, torch.tensor([[-math.inf, -3.0, -9.0]]).expand(3, 3)], 1)
    longer = top_k_divergence(log_s, TopK(ids, logps), beta, (0, 8), tail=tail)
    torch.testing.assert_close(longer, short)
    nothing = TopK(torch.full((3, 2), -1), torch.full((3, 2), -math.inf))
    empty = top_k_divergence(log_s, nothing, beta, (0, 8), tail=tail)
    assert empty.value.abs().max() < 1e-14 and empty.slope.abs().max() < 1e-14


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_stays_finite_where_probabilities_vanish(beta):
    log_s = torch.zeros(2, 6)
    log_s[:, 0] = 500.0
    log_s = log_s.log_softmax(1)
    rounded = TopK(torch.tensor([[0, 1], [4, 2]]), torch.tensor([[-1e-4, -9.0], [-1e-4, -9.0]]).half())
    assert rounded.logps.float().exp().sum(1).max() > 1
    for result in (
        top_k_divergence(log_s, rounded, beta, (0, 6), tail=True),
        generalized_jsd(log_s, log_s.flip(1), beta),
    ):
        assert result.value.isfinite().all() and result.slope.isfinite().all()
        assert result.value[1] > 0.5
        torch.testing.assert_close(result.slope.sum(1), torch.zeros(2), atol=1e-4, rtol=0)


def test_the_mixture_with_weight_one_and_an_equal_teacher_is_the_likelihood():
    case = Case(options=Distillation(0.5, sft_alpha=1.0))
    world = build(case)
    head = OutputHead(world.student)
    batch = Batch(world.batch.target_ids, world.batch.target_weights, {"teacher_hidden": world.hidden.detach()})
    ours = DistillObjective(case.options, head)(world.hidden, head, batch)
    (grad,) = torch.autograd.grad(ours.loss_sum, world.hidden)
    theirs = CausalLM()(world.hidden, head, batch)
    torch.testing.assert_close(ours.loss_sum, theirs.loss_sum)
    torch.testing.assert_close(grad, torch.autograd.grad(theirs.loss_sum, world.hidden)[0])
    assert ours.weight == theirs.weight and ours.counts["nll"] == pytest.approx(theirs.weight)


def test_micro_batches_add_up():
    case = CASES["top-k 0.6, all options"]
    world = build(case)
    head, objective = OutputHead(world.student, case.scale, case.softcap), DistillObjective(case.options)
    whole = objective(world.hidden, head, world.batch)
    parts = []
    for rows in (slice(0, 2), slice(2, 2), slice(2, TOKENS)):
        batch = Batch(
            world.batch.target_ids[rows],
            world.batch.target_weights[rows],
            {name: value[rows] for name, value in world.batch.facts.items()},
        )
        parts.append(objective(world.hidden[rows], head, batch))
    torch.testing.assert_close(sum(part.loss_sum for part in parts), whole.loss_sum)
    for name, value in whole.sums.items():
        torch.testing.assert_close(sum(part.sums[name] for part in parts), value)
    sum(part.loss_sum for part in parts).backward()
    together = world.hidden.grad.clone()
    world.hidden.grad = None
    whole.loss_sum.backward()
    torch.testing.assert_close(together, world.hidden.grad)


def test_units_keep_the_mean_over_the_tokens_of_the_step():
    case = CASES["full 0.5"]
    world = build(case)
    head, objective = OutputHead(world.student), DistillObjective(case.options, OutputHead(world.teacher))
    plain = objective(world.hidden, head, world.batch)
    units = Batch(**vars(world.batch))
    units.sequences = SimpleNamespace(step={"units": 6.0, "tokens": 4 * world.batch.weight})
    torch.testing.assert_close(objective(world.hidden, head, units).loss_sum, plain.loss_sum * 6 / 4 / plain.weight)


def test_without_gradients_the_value_is_the_same():
    case = CASES["full 1.0, all options"]
    world = build(case)
    head = OutputHead(world.student, case.scale, case.softcap)
    objective = DistillObjective(case.options, OutputHead(world.teacher))
    with torch.no_grad():
        value = objective(world.hidden, head, world.batch).loss_sum
    assert not value.requires_grad and float(value) == pytest.approx(evaluate(case).loss, rel=1e-12)


def test_never_holds_all_logits(monkeypatch):
    largest = 0
    original = torch.Tensor.exp

    def watch(tensor, *args, **kwargs):
        nonlocal largest
        largest = max(largest, tensor.numel())
        return original(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "exp", watch)
    hidden, module = torch.randn(512, 8, requires_grad=True), nn.Linear(8, 1000)
    targets = torch.randint(0, 1000, (512,))
    batch = Batch(targets, torch.ones(512), {"teacher_hidden": torch.randn(512, 8)})
    objective = DistillObjective(teacher=OutputHead(nn.Linear(8, 1000)), chunk=32)
    objective(hidden, OutputHead(module), batch).loss_sum.backward()
    assert largest == 32 * 1000


def test_what_a_batch_must_bring_is_said():
    world = build(Case())
    head = OutputHead(world.student)
    facts = world.batch.facts
    for brought, teacher, message in (
        ({}, None, "nothing is known of the teacher"),
        (facts | {"teacher_logps": torch.ones(TOKENS)}, OutputHead(world.teacher), "several forms"),
        (facts, None, "no head"),
    ):
        batch = Batch(world.batch.target_ids, world.batch.target_weights, brought)
        with pytest.raises(ModelError, match=message):
            DistillObjective(teacher=teacher)(world.hidden, head, batch)


# --- a vocabulary that is cut over ranks ---

CUT = {name: case for name, case in CASES.items() if case.plain}


def on_axis(cases: list[Case]) -> list[tuple[Result, Result]]:
    axis = build_mesh(Degrees(tp=torch.distributed.get_world_size()), "cpu")["tp"]
    return [(evaluate(case, axis), evaluate(case, axis, cut_teacher=True)) for case in cases]


def test_a_cut_vocabulary_equals_a_whole_one():
    """With padding, the second rank of "sampled, padding" and "padding, top-k" has no token that is compared."""
    for results in on_ranks(2, on_axis, list(CUT.values())):
        for (name, case), both in zip(CUT.items(), results, strict=True):
            theirs = evaluate(case)
            for ours in both:
                assert ours.loss == pytest.approx(theirs.loss, rel=1e-11), name
                assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-11), name
                assert set(ours.grads) == set(theirs.grads), name
                for what, grad in theirs.grads.items():
                    torch.testing.assert_close(ours.grads[what], grad, rtol=1e-9, atol=1e-12, msg=f"{name}: {what}")
