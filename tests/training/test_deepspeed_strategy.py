"""The strategy by DeepSpeed on two gloo ranks against one process: clipping, rates, decay, what isn't finite."""

import math

import pytest
import torch
import torch.distributed as dist
from distributed.equality import Outcome, assert_equal, build, make_batches
from distributed.pool import on_ranks
from torch import nn

from swift.config.deepspeed import Filling
from swift.config.training import OptimizerConfig
from swift.distributed.process_group import ProcessGroup
from swift.optim import build_optimizer
from swift.optim.optimizers import set_rate
from swift.training.deepspeed import DeepSpeed, make_plan

pytest.importorskip("deepspeed", reason="the extra `deepspeed` is not installed")
slow = pytest.mark.slow

FACTORS = (1.0, 0.5, 0.25)  # of the learning rate, step by step
LIMIT = 0.05  # far below the norms, so that clipping decides about every step
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, adam_epsilon=1e-6)


def one_process(kind: str, tuner: str, *, limit: float = LIMIT) -> tuple[Outcome, list[float]]:
    """Three clipped steps of four micro-batches; the norms before clipping."""
    tiny = build(kind, tuner)
    module = tiny.train_module()
    optimizer = build_optimizer(tiny.whole, OPTIMIZER, tuner_type=tuner)
    trained = {name: p for name, p in tiny.whole.named_parameters() if p.requires_grad}
    batches = make_batches("packed", 4)
    weight = sum(batch.weight for batch in batches)
    outcome, norms = Outcome(), []
    for factor in FACTORS:
        set_rate(optimizer, factor)
        loss = 0.0
        for batch in batches:
            terms = module(batch)
            (terms.loss_sum / weight).backward()
            loss += terms.loss_sum.item() / weight
        outcome.losses.append(loss)
        norms.append(float(nn.utils.clip_grad_norm_(trained.values(), limit or math.inf)))
        optimizer.step()
        optimizer.zero_grad()
    outcome.weights = {name: p.detach().clone() for name, p in trained.items()}
    return outcome, norms


class Rank:
    """This rank's strategy, with half of the micro-batches."""

    def __init__(self, kind: str, tuner: str, preset: str, *, limit: float = LIMIT, dtype: str = "float32") -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.group = ProcessGroup(rank, world, rank)
        self.tiny = tiny = build(kind, tuner)
        optimizer = build_optimizer(tiny.whole, OPTIMIZER, tuner_type=tuner)
        plan = make_plan(preset, Filling(2, world, limit, dtype, 64))
        head = tiny.head.module.parameters()
        self.strategy = DeepSpeed(tiny.train_module(), optimizer, plan, self.group, head=head)
        batches = make_batches("packed", 4)
        self.weight = sum(batch.weight for batch in batches)
        self.batches = batches[rank::world]

    def step(self, rate: float = 1.0, *, spoil: float | None = None, stepping: bool = True):
        """One step; its loss, and what the strategy says.

        Args:
            spoil: of rank 1's first micro-batch: nan multiplies the loss, so that gradients aren't finite; inf is
                added, so that only the loss isn't.
            stepping: whether the loop lets it step; else it drops the gradients, as the loop does.
        """
        strategy, loss = self.strategy, 0.0
        set_rate(strategy.optimizer, rate)
        spoilt = spoil is not None and self.group.rank == 1
        for number, batch in enumerate(self.batches):
            last = number == len(self.batches) - 1
            factor = spoil if spoilt and number == 0 and math.isnan(spoil) else 1.0
            more = spoil if spoilt and number == 0 and math.isinf(spoil) else 0.0
            to_loss = lambda total, factor=factor, more=more: total * factor / self.weight + more  # noqa: E731
            terms = strategy.forward([batch], to_loss, last)
            strategy.backward(terms, to_loss, last)
            loss += terms[0].loss_sum.item() / self.weight
        stepped = strategy.step(None, None) if stepping else None
        strategy.optimizer.zero_grad(set_to_none=True)
        return self.group.sum([loss])[0], stepped

    def weights(self) -> dict[str, torch.Tensor]:
        named = self.tiny.whole.named_parameters()
        return {name: self.strategy.whole(p).clone() for name, p in named if p.requires_grad}


def _train(kind: str, tuner: str, preset: str, limit: float) -> tuple[Outcome, list[float], list[float]]:
    rank = Rank(kind, tuner, preset, limit=limit)
    outcome, norms, rates = Outcome(), [], []
    for factor in FACTORS:
        loss, stepped = rank.step(factor)
        assert stepped.applied
        outcome.losses.append(loss)
        norms.append(stepped.norm)
        rates.append(rank.strategy.engine.get_lr()[0])
    outcome.weights = rank.weights()
    return outcome, norms, rates


@pytest.mark.parametrize(
    "kind, tuner, preset, limit",
    [
        ("tied", "full", "zero2", LIMIT),
        ("tied", "full", "zero3", LIMIT),
        ("gqa", "lora", "zero1", 0.0),
        pytest.param("gqa", "lora", "zero3", LIMIT, marks=slow),
        pytest.param("untied", "full", "zero1", LIMIT, marks=slow),
        pytest.param("qk_norm", "full", "zero2_offload", LIMIT, marks=slow),
        pytest.param("untied", "full", "zero3_offload", LIMIT, marks=slow),
        pytest.param("moe", "full", "zero3", LIMIT, marks=slow),
        pytest.param("moe", "full", "zero2", 0.0, marks=slow),
    ],
)
def test_clipped_steps_with_falling_rates_are_those_of_one_process(kind, tuner, preset, limit):
    expected, norms = one_process(kind, tuner, limit=limit)
    for ours, our_norms, rates in on_ranks(2, _train, kind, tuner, preset, limit):
        assert_equal(ours, expected)
        assert our_norms == pytest.approx(norms, rel=2e-5)
        assert rates == pytest.approx([OPTIMIZER.learning_rate * factor for factor in FACTORS])


def _spoil(preset: str, spoil: float, stepping: bool) -> tuple[bool, Outcome]:
    """A step with a loss that isn't finite, or with gradients that aren't, between two good ones."""
    rank = Rank("untied", "full", preset)
    outcome = Outcome()
    outcome.losses.append(rank.step(FACTORS[0])[0])
    before = rank.weights()
    _, stepped = rank.step(FACTORS[1], spoil=spoil, stepping=stepping)
    assert stepped is None or (not stepped.applied and not math.isfinite(stepped.norm))
    after = rank.weights()
    same = all(torch.equal(before[name], after[name]) for name in before)
    outcome.losses += [rank.step(factor)[0] for factor in FACTORS[1:]]
    outcome.weights = rank.weights()
    return same, outcome


@pytest.mark.parametrize(
    "preset, spoil, stepping",
    [
        ("zero2", math.nan, True),
        ("zero3", math.inf, False),
        pytest.param("zero1", math.inf, True, marks=slow),
        pytest.param("zero2", math.nan, False, marks=slow),
        pytest.param("zero3", math.nan, True, marks=slow),
        pytest.param("zero2_offload", math.inf, False, marks=slow),
        pytest.param("zero3_offload", math.nan, False, marks=slow),
    ],
)
def test_a_step_that_is_not_finite_changes_nothing_now_or_later(preset, spoil, stepping):
    expected, _ = one_process("untied", "full")
    for same, ours in on_ranks(2, _spoil, preset, spoil, stepping):
        assert same
        assert_equal(ours, expected)


def _hold_bf16(preset: str) -> tuple[dict, dict, list[float], float]:
    rank = Rank("untied", "full", preset, dtype="bfloat16")
    buffers = {name: b.dtype for name, b in rank.tiny.whole.named_buffers()}
    held = {name: p.dtype for name, p in rank.tiny.whole.named_parameters()}
    losses = [rank.step(factor)[0] for factor in FACTORS]
    rank.strategy.module.eval()
    evaluated = rank.strategy.evaluate(rank.batches[0])
    return buffers, held, losses, float(evaluated.loss_sum)


@pytest.mark.parametrize("preset", ["zero2", pytest.param("zero3", marks=slow)])
def test_bf16_casts_weights_and_leaves_position_tables_alone(preset):
    expected, _ = one_process("untied", "full")
    for buffers, held, losses, evaluated in on_ranks(2, _hold_bf16, preset):
        assert set(held.values()) == {torch.bfloat16}
        assert buffers and set(buffers.values()) == {torch.float32}
        assert losses == pytest.approx(expected.losses, rel=1e-2)
        assert math.isfinite(evaluated)


def _put_back(preset: str) -> tuple[float, float, float]:
    """A batch's loss: before two steps, after them, and with the first weights put back."""
    rank = Rank("untied", "full", preset)
    strategy, parameters = rank.strategy, list(rank.tiny.whole.parameters())
    before = [strategy.whole(p).clone() for p in parameters]
    losses = []
    for number in range(3):
        strategy.module.eval()
        losses.append(float(strategy.evaluate(rank.batches[0]).loss_sum))
        strategy.module.train()
        if number == 0:
            rank.step(), rank.step()
        elif number == 1:
            with strategy.opened(parameters), torch.no_grad():
                for parameter, value in zip(parameters, before, strict=True):
                    parameter.copy_(value)
    return tuple(losses)


@pytest.mark.parametrize("preset", ["zero3", pytest.param("zero2", marks=slow)])
def test_earlier_weights_can_be_put_back(preset):
    for first, later, again in on_ranks(2, _put_back, preset):
        assert again == first != later
