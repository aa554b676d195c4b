"""Steps of a model spread by fsdp, or copied, are those of one process: losses, gradients, clipping, weights."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import pytest
import torch
from equality import Outcome, Tiny, assert_equal, build, make_batches, relative, single_process, whole_tensor
from pool import on_ranks
from torch import nn

from swift.config.degrees import Degrees
from swift.config.parallel import ParallelConfig
from swift.config.training import OptimizerConfig
from swift.config.tuner import TunerConfig
from swift.core.errors import UsageError
from swift.data.loading.batch import Batch
from swift.distributed.mesh import build_mesh
from swift.distributed.sharding import apply_fsdp, sharded_modules
from swift.distributed.spread import Spread
from swift.optim import build_optimizer, local_parameters
from swift.training.precision import Precision
from swift.training.sharded import Sharded, check_sharded_tuner

OPTIMIZER = OptimizerConfig(learning_rate=1e-3, adam_beta2=0.95, adam_epsilon=1e-6, weight_decay=0.01)


@dataclass
class Case:
    """What to run: the layout on ranks, the model and the batches."""

    degrees: Degrees
    stage: int = 3
    kind: str = "qk_norm"
    tuner: str = "full"
    layout: str = "packed"
    micro_batches: int = 2  # a rank and step
    limit: float = 0.0
    fsdp: bool = True
    offload: bool = False
    compute: torch.dtype = torch.float32
    settings: dict = field(default_factory=dict)

    @property
    def config(self) -> ParallelConfig:
        kind = "none" if not self.fsdp else "hsdp" if self.degrees.dp_replicate > 1 else "fsdp2"
        return ParallelConfig(fsdp=kind, zero_stage=self.stage, fsdp_cpu_offload=self.offload, **self.settings)

    def batches(self) -> list[Batch]:
        return make_batches(self.layout, self.micro_batches * self.degrees.dp)


@dataclass
class Run:
    """What a rank saw: `norms` before clipping."""

    outcome: Outcome
    norms: list[float]


def strategy_of(case: Case, tiny: Tiny) -> tuple[Sharded, torch.optim.Optimizer]:
    mesh = build_mesh(case.degrees, "cpu")
    spread, module = Spread(mesh), tiny.train_module()
    if case.fsdp:
        apply_fsdp(module, tiny.causal_lm, spread, case.config, compute=case.compute)
    local = local_parameters(tiny.whole.named_parameters())
    optimizer = build_optimizer(local, OPTIMIZER, tuner_type=case.tuner)
    return Sharded(module, spread, local, Precision(case.compute, "cpu"), case.config), optimizer


def one_step(
    strategy: Sharded, batches: list[Batch], weight: float, scaler: torch.amp.GradScaler | None = None
) -> float:
    """Forward and backward of this rank's share; its part of the loss."""
    loss = 0.0

    def to_loss(loss_sum: torch.Tensor) -> torch.Tensor:
        return scaler.scale(loss_sum / weight) if scaler is not None else loss_sum / weight

    portions = strategy.prepare(batches)
    for number, portion in enumerate(portions):
        last = number == len(portions) - 1
        terms = strategy.forward(portion, to_loss, last)
        strategy.backward(terms, to_loss, last)
        loss += sum(term.loss_sum.item() for term in terms) / weight
    return loss


def train(case: Case, steps: int = 3) -> Run:
    """The same steps as `single_process`, micro-batches dealt out to the ranks along `dp`."""
    tiny = build(case.kind, case.tuner)
    strategy, optimizer = strategy_of(case, tiny)
    batches = case.batches()
    weight = sum(batch.weight for batch in batches)
    mesh = strategy.mesh
    run = Run(Outcome(), [])
    trained = {name: p for name, p in tiny.whole.named_parameters() if p.requires_grad}
    for step in range(steps):
        loss = one_step(strategy, batches[mesh["dp"].rank :: mesh["dp"].size], weight)
        if step == 0:
            run.outcome.gradients = {n: whole_tensor(p.grad).clone() for n, p in trained.items() if p.grad is not None}
        total = torch.tensor([loss], dtype=torch.float64)
        torch.distributed.all_reduce(total)
        run.outcome.losses.append(float(total))
        run.norms.append(strategy.clip(case.limit))
        strategy.step(optimizer, None)
        optimizer.zero_grad(set_to_none=True)
        assert all(p.grad is None for p in trained.values())
    run.outcome.weights = {name: whole_tensor(p.detach()).clone() for name, p in trained.items()}
    return run


def clipped_reference(case: Case, limit: float, steps: int = 3) -> tuple[Outcome, list[float]]:
    """`single_process` with clipping by torch."""
    tiny = build(case.kind, case.tuner)
    module, batches = tiny.train_module(), case.batches()
    trained = {name: p for name, p in tiny.whole.named_parameters() if p.requires_grad}
    optimizer = build_optimizer(tiny.whole, OPTIMIZER, tuner_type=case.tuner)
    weight = sum(batch.weight for batch in batches)
    outcome, norms = Outcome(), []
    for step in range(steps):
        loss = 0.0
        for batch in batches:
            terms = module(batch)
            (terms.loss_sum / weight).backward()
            loss += terms.loss_sum.item() / weight
        outcome.losses.append(loss)
        if step == 0:
            outcome.gradients = {name: p.grad.clone() for name, p in trained.items()}
        norms.append(float(nn.utils.clip_grad_norm_(trained.values(), limit or torch.inf)))
        optimizer.step()
        optimizer.zero_grad()
    outcome.weights = {name: p.detach().clone() for name, p in trained.items()}
    return outcome, norms


def check(case: Case) -> None:
    reference, norms = clipped_reference(case, case.limit)
    runs = on_ranks(case.degrees.world_size, train, case)
    for run in runs:
        assert_equal(run.outcome, reference)
        assert run.norms == pytest.approx(norms, rel=1e-5)
        assert run.norms == runs[0].norms


TWO, FOUR, HYBRID = Degrees(dp_shard=2), Degrees(dp_shard=4), Degrees(dp_replicate=2, dp_shard=2)
SAMPLED = {
    "stage 3": Case(TWO),
    "stage 2, clipped": Case(TWO, stage=2, limit=0.3, kind="tied"),
    "stage 1, lora": Case(TWO, stage=1, tuner="lora", kind="gqa", layout="padded"),
    "hsdp": Case(HYBRID, kind="untied", limit=0.3),
    "4 ranks, experts": Case(FOUR, kind="moe", layout="padded", micro_batches=1),
    "offload, lora": Case(TWO, offload=True, tuner="lora", kind="tied"),
    "copies": Case(Degrees(dp_replicate=2), fsdp=False, kind="moe", limit=0.3),
    "copies, lora": Case(Degrees(dp_replicate=2), fsdp=False, kind="tied", tuner="lora", layout="padded"),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_equal_to_one_process(name: str):
    check(SAMPLED[name])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("tuner", ["full", "lora"])
@pytest.mark.parametrize("kind", ["tied", "untied", "gqa", "qk_norm", "moe"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("degrees", [TWO, FOUR, HYBRID], ids=["2", "4", "2x2"])
def test_every_mix_is_equal_to_one_process(degrees: Degrees, stage: int, kind: str, tuner: str, layout: str):
    check(Case(degrees, stage, kind, tuner, layout, limit=0.3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "tuner"), itertools.product(["tied", "untied", "gqa", "qk_norm", "moe"], ["full", "lora"])
)
def test_every_offloaded_and_copied_model_is_equal_to_one_process(kind: str, tuner: str):
    check(Case(TWO, 3, kind, tuner, offload=True))
    check(Case(Degrees(dp_replicate=4), 3, kind, tuner, "padded", fsdp=False))


def test_the_reference_is_the_common_one():
    """The reference with clipping, unclipped and with the optimizer of `equality`, is `single_process`."""
    case = Case(TWO, kind="tied")
    ours, _ = clipped_reference(case, 0.0)
    common = single_process("tied", "full", "packed", count=4)
    assert ours.losses[0] == pytest.approx(common.losses[0], rel=1e-7)
    assert max(relative(ours.gradients[n], g) for n, g in common.gradients.items()) < 1e-6


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_follows_fp32(stage: int):
    low = Case(TWO, stage=stage, compute=torch.bfloat16, kind="tied", settings={})
    reference, _ = clipped_reference(low, 0.0)
    run = on_ranks(2, train, low)[0]
    for ours, theirs in zip(run.outcome.losses, reference.losses, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-2) and ours != theirs
    wrong = {n: relative(g, reference.gradients[n]) for n, g in run.outcome.gradients.items()}
    assert max(wrong.values()) < 0.1, wrong
    assert {g.dtype for g in run.outcome.gradients.values()} == {torch.float32}


def low_lora(case: Case) -> tuple[list[float], set[str]]:
    """A base in bf16 with adapters in fp32, as a run in bf16 loads it."""
    tiny = build(case.kind, "lora")
    for parameter in tiny.whole.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    strategy, optimizer = strategy_of(case, tiny)
    batches, losses = case.batches(), []
    weight = sum(batch.weight for batch in batches)
    for _ in range(2):
        loss = torch.tensor([one_step(strategy, batches[strategy.mesh["dp"].rank :: 2], weight)])
        torch.distributed.all_reduce(loss)
        losses.append(float(loss))
        strategy.clip(1.0)
        strategy.step(optimizer, None)
    return losses, {str(p.dtype) for p in tiny.whole.parameters() if p.requires_grad}


@pytest.mark.parametrize("stage", [1, 3])
def test_bf16_base_with_fp32_adapters(stage: int):
    case = Case(
        TWO, stage=stage, tuner="lora", kind="gqa", compute=torch.bfloat16, settings={"reduce_dtype": "float32"}
    )
    losses, dtypes = on_ranks(2, low_lora, case)[0]
    reference = single_process("gqa", "lora", "packed", count=4, steps=2).losses
    assert losses == pytest.approx(reference, rel=2e-2) and dtypes == {"torch.float32"}


def accidents(case: Case) -> dict[str, object]:
    """A step that is left out, an evaluation, and a step in which fp16 overflows on one rank."""
    tiny = build(case.kind, case.tuner)
    strategy, optimizer = strategy_of(case, tiny)
    batches = case.batches()
    weight, rank = sum(batch.weight for batch in batches), strategy.mesh["dp"].rank
    mine = batches[rank::2]
    result: dict[str, object] = {}
    one_step(strategy, mine, weight)
    optimizer.zero_grad(set_to_none=True)  # the trainer leaves out a step: no `step`, and the optimizer drops gradients
    one_step(strategy, mine, weight)
    result["norm"] = strategy.clip(0.0)
    strategy.step(optimizer, None)

    strategy.module.eval()
    result["evaluated"] = float(strategy.evaluate(batches[0]).loss_sum)
    result["gathered"] = [n for n, p in tiny.whole.named_parameters() if case.fsdp and not hasattr(p, "placements")]
    strategy.module.train()

    before = [whole_tensor(p.detach()).clone() for p in tiny.whole.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    one_step(strategy, mine, weight, scaler)
    if rank == 0:  # one rank's gradients overflow
        next(p for _, p in strategy._local.named() if p.numel()).grad.view(-1)[0] = torch.inf
    scaler.unscale_(optimizer)
    result["overflow"] = strategy.clip(1.0)
    strategy.step(optimizer, scaler)
    after = [whole_tensor(p.detach()) for p in tiny.whole.parameters()]
    result["kept"] = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    result["scale"] = scaler.get_scale()
    one_step(strategy, mine, weight, scaler)
    scaler.unscale_(optimizer)
    result["next norm"] = strategy.clip(1.0)
    strategy.step(optimizer, scaler)
    result["scale after"] = scaler.get_scale()
    result["moved"] = any(
        not torch.equal(a, whole_tensor(p)) for a, p in zip(before, tiny.whole.parameters(), strict=True)
    )
    return result


@pytest.mark.parametrize(
    "case",
    [Case(TWO), Case(TWO, stage=1), Case(Degrees(dp_replicate=2), fsdp=False)],
    ids=["stage 3", "stage 1", "copies"],
)
def test_steps_left_out_evaluations_and_overflows(case: Case):
    _, norms = clipped_reference(case, 0.0, steps=1)
    first, second = on_ranks(2, accidents, case)
    assert first["norm"] == pytest.approx(norms[0], rel=1e-5)  # nothing was left of the step before
    assert first["gathered"] == [] and first["evaluated"] == second["evaluated"] > 0
    for result in (first, second):
        assert result["overflow"] == torch.inf and result["kept"] and result["scale"] == 4.0
        assert 0 < result["next norm"] < torch.inf and result["moved"] and result["scale after"] == 8.0


class Towers(nn.Module):
    """Beside the model: weights that only rank 1 uses, and weights that nobody uses."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.some = nn.Linear(64, 64, bias=False)
        self.never = nn.Linear(64, 64, bias=False)

    def forward(self, hidden: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        hidden = self.layer(hidden, *args, **kwargs)
        return hidden + self.some(hidden) if torch.distributed.get_rank() == 1 else hidden


def conditional(case: Case) -> dict[str, object]:
    tiny = build("tied")
    torch.manual_seed(1)
    layers = tiny.decoder.layers
    layers[1] = Towers(layers[1])
    strategy, optimizer = strategy_of(case, tiny)
    batches = case.batches()
    weight, rank = sum(batch.weight for batch in batches), strategy.mesh["dp"].rank
    kept = whole_tensor(layers[1].never.weight.detach()).clone()
    for _ in range(2):
        one_step(strategy, batches[rank::2], weight)
        grads = {name: getattr(layers[1], name).weight.grad for name in ("some", "never")}
        strategy.clip(1.0)
        strategy.step(optimizer, None)
    now = whole_tensor(layers[1].never.weight.detach())
    return {
        "some": float(whole_tensor(grads["some"]).norm()),
        "never": grads["never"] is None,
        "kept": torch.equal(kept, now),
    }


@pytest.mark.parametrize(
    "case",
    [
        Case(TWO),
        Case(TWO, stage=1),
        Case(TWO, stage=3, compute=torch.bfloat16),
        Case(TWO, stage=1, compute=torch.bfloat16),
        Case(Degrees(dp_replicate=2), fsdp=False),
    ],
    ids=["stage 3", "stage 1", "stage 3, bf16", "stage 1, bf16", "copies"],
)
def test_weights_that_some_or_no_ranks_use(case: Case):
    for result in on_ranks(2, conditional, case):
        assert result["some"] > 0 and result["never"]
        assert result["kept"]  # no weight decay on what was not used


def units(case: Case) -> list[str]:
    tiny = build(case.kind, case.tuner)
    strategy, _ = strategy_of(case, tiny)
    names = {id(part): name for name, part in strategy.module.named_modules()}
    return [names[id(part)] for part in sharded_modules(strategy.module)]


def test_layers_are_units_and_the_rest_is_the_root():
    assert on_ranks(2, units, Case(TWO, kind="tied"))[0] == ["", *(f"model.model.layers.{i}" for i in range(4))]


def test_tuners_that_need_whole_matrices_are_refused():
    def check_of(degrees: Degrees, fsdp: bool = False, **settings: object) -> None:
        check_sharded_tuner(replace(TunerConfig(), **settings), degrees, fsdp=fsdp)

    two = Degrees(dp_replicate=2)
    for settings in ({"tuner_type": "adalora"}, {"init_weights": "pissa"}, {"use_dora": True}, {"tuner_type": "ia3"}):
        check_of(two, **settings)
    check_of(TWO, fsdp=True, init_weights="orthogonal")
    check_of(Degrees(tp=2), init_weights="True")
    for degrees, fsdp, settings, words in [
        (TWO, True, {"tuner_type": "adalora"}, "adalora starts"),
        (Degrees(ulysses=2), False, {"tuner_type": "ia3"}, "ia3 starts"),
        (Degrees(pp=2), False, {"tuner_type": "lokr"}, "lokr starts"),
        (TWO, True, {"init_weights": "pissa_niter_4"}, "start pissa_niter_4 comes"),
        (Degrees(ulysses=2), False, {"init_weights": "olora"}, "start olora comes"),
        (Degrees(tp=2), False, {"use_dora": True}, "DoRA"),
        (TWO, True, {"use_dora": True}, "DoRA"),
    ]:
        with pytest.raises(UsageError, match=words):
            check_of(degrees, fsdp, **settings)
