"""A model in a pipeline learns what one process learns: losses, gradients and weights, for every schedule."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from distributed.equality import (
    KINDS,
    LAYOUTS,
    TUNERS,
    Outcome,
    Tiny,
    assert_equal,
    build,
    make_batches,
    make_optimizer,
    relative,
    single_process,
    whole_tensor,
)
from distributed.pool import on_ranks
from training.architectures import CONFIGS
from training.architectures import build as build_architecture

from swift.config.degrees import Degrees
from swift.config.parallel import ParallelConfig
from swift.config.training import ObjectiveConfig
from swift.core.errors import UsageError
from swift.data.loading.batch import Batch
from swift.distributed.context.attention import use_context_attention
from swift.distributed.mesh import Mesh, build_mesh
from swift.distributed.pipeline.schedules import stages_of_rank, stages_per_rank
from swift.distributed.pipeline.split import keep_stage, model_costs, stage_layers
from swift.distributed.sharding import apply_fsdp
from swift.distributed.spread import Spread
from swift.distributed.tensor import apply_tensor_parallel
from swift.models.attention import VARLEN
from swift.models.elementwise import enable_fast_elementwise
from swift.models.head import find_head
from swift.models.lora_kernel import FastLoRALinear, enable_fast_lora
from swift.models.prepare import compile_layers, enable_checkpointing
from swift.models.router import RouterLoss
from swift.models.trained_linear import TrainedLinear, enable_trained_linear
from swift.objectives import LossTerms, build_objective
from swift.optim.local import local_parameters
from swift.training.module import Objectives
from swift.training.pipeline import Pipeline, stage_parameters, tie_stages
from swift.training.stage import Chunk, StageModule

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zbv")
TWO = Degrees(pp=2)


@dataclass
class Case:
    """A model and how it is trained; `count` micro-batches a step in all."""

    kind: str
    tuner: str = "full"
    layout: str = "packed"
    schedule: str = "1f1b"
    count: int = 4
    steps: int = 3
    fsdp: bool = False
    layers: tuple[int, ...] = ()
    degrees: Degrees = TWO
    sequence_parallel: bool = False
    recompute: bool = False

    def __str__(self) -> str:
        sharded = " fsdp" if self.fsdp else ""
        return f"{self.kind} {self.tuner} {self.layout} {self.schedule} x{self.count} {self.degrees.words()}{sharded}"


def make_pipeline(
    case: Case, mesh: Mesh, *, make: Callable[[], Tiny] | None = None, autocast: Callable = nullcontext, **options: Any
) -> Pipeline:
    """The pipeline of this rank, over a fresh model of the test."""
    ranks = mesh["pp"].size
    fsdp = "fsdp2" if case.fsdp else "none"
    config = ParallelConfig(pipeline_schedule=case.schedule, pipeline_parallel_size=ranks, fsdp=fsdp)
    per_rank, spread = stages_per_rank(config), Spread(mesh)
    objective = build_objective(ObjectiveConfig())
    stages = []
    for stage in stages_of_rank(case.schedule, mesh["pp"].rank, ranks, per_rank):
        tiny = make() if make is not None else build(case.kind, case.tuner)
        plan = stage_layers(model_costs(tiny.causal_lm), ranks * per_rank, case.layers)
        keep_stage(tiny.whole, tiny.causal_lm, plan, stage)
        shares = case.sequence_parallel
        apply_tensor_parallel(tiny.whole, tiny.causal_lm, spread, sequence_parallel=shares)
        if mesh["cp"]:
            use_context_attention(tiny.causal_lm, spread)
        enable_fast_elementwise(tiny.whole)
        if tiny.whole is tiny.causal_lm:
            enable_trained_linear(tiny.decoder)
        enable_fast_lora(tiny.whole)
        if case.recompute:
            enable_checkpointing(tiny.causal_lm)
        head = find_head(tiny.causal_lm, axis=mesh["tp"])
        chunk = Chunk(stage, len(plan), tiny.whole, tiny.causal_lm, head)
        module = StageModule(
            chunk, objectives=Objectives(objective, objective.evaluation()), autocast=autocast, **options
        )
        stages.append(module)
    if case.fsdp:
        for module in stages:
            apply_fsdp(module, module.chunk.causal_lm, spread, config, compute=torch.float32)
    else:
        tie_stages(stages)
    local = local_parameters(stage_parameters(stages))
    multiple = mesh["tp"].size if case.sequence_parallel else 1
    return Pipeline(stages, spread, local, case.schedule, multiple=multiple)


def one_step(pipeline: Pipeline, batches: list[Batch], weight: float) -> float:
    """Forward and backward of a step; the mean loss over all ranks."""
    (portion,) = pipeline.prepare(batches)
    terms = pipeline.forward(portion, lambda loss_sum: loss_sum / weight, True)
    pipeline.backward(terms, lambda loss_sum: loss_sum / weight, True)
    total = torch.tensor([sum(float(term.loss_sum) for term in terms)], dtype=torch.float64)
    torch.distributed.all_reduce(total)
    return float(total) / pipeline.copies / weight


def train(case: Case) -> Outcome:
    mesh = build_mesh(case.degrees, "cpu")
    pipeline = make_pipeline(case, mesh)
    optimizer = make_optimizer([p for _, p in pipeline.local.named()])
    batches = make_batches(case.layout, case.count)
    weight = sum(batch.weight for batch in batches)
    mine = batches[mesh["dp"].rank :: mesh["dp"].size]
    outcome = Outcome()
    for step in range(case.steps):
        outcome.losses.append(one_step(pipeline, mine, weight))
        if step == 0:
            outcome.gradients = {n: whole_tensor(p.grad).clone() for n, p in trained(pipeline)}
        pipeline.step(optimizer, None)
        optimizer.zero_grad(set_to_none=True)
    outcome.weights = {n: whole_tensor(p).detach().clone() for n, p in trained(pipeline)}
    return outcome


def trained(pipeline):
    return [(n, p) for n, p in stage_parameters(pipeline.stages) if p.requires_grad]


def joined(outcomes: list[Outcome], tied: bool) -> Outcome:
    """The parts of all ranks as one outcome; what two of them hold must be the same, bit for bit."""
    whole = Outcome(outcomes[0].losses)
    for outcome in outcomes:
        assert outcome.losses == whole.losses
        for mine, all_of_them in ((outcome.gradients, whole.gradients), (outcome.weights, whole.weights)):
            for name, tensor in mine.items():
                name = "model.embed_tokens.weight" if tied and name == "lm_head.weight" else name
                if name in all_of_them:
                    assert torch.equal(tensor, all_of_them[name]), name
                all_of_them[name] = tensor
    return whole


def check(case: Case) -> None:
    outcomes = on_ranks(case.degrees.world_size, train, case)
    reference = single_process(case.kind, case.tuner, case.layout, count=case.count, steps=case.steps)
    assert_equal(joined(outcomes, case.kind == "tied"), reference)


FOUR, SHARDED, REPLICATED = Degrees(pp=4), Degrees(pp=2, dp_shard=2), Degrees(pp=2, dp_replicate=2)
FAST = [
    Case("tied", "full", "packed", "1f1b", layers=(1, 3)),
    Case("tied", "full", "padded", "zbv"),
    Case("tied", "lora", "packed", "interleaved"),
    Case("untied", "lora", "packed", "zbv"),
    Case("gqa", "full", "packed", "interleaved", count=5),
    Case("qk_norm", "lora", "padded", "gpipe"),
    Case("moe", "full", "padded", "zbv", count=3),
    Case("gqa", "full", "packed", "zbv", recompute=True),
    Case("tied", "full", "packed", "1f1b", count=2, degrees=FOUR),
    Case("tied", "full", "packed", "zbv", fsdp=True, degrees=SHARDED),
    Case("tied", "full", "padded", "1f1b", degrees=REPLICATED),
    Case("tied", "full", "packed", "zbv", degrees=Degrees(pp=2, tp=2), sequence_parallel=True),
]
SLOW = [
    Case("gqa", "lora", "padded", "1f1b", degrees=Degrees(pp=2, ring=2)),
    Case("moe", "full", "packed", "interleaved", degrees=Degrees(pp=2, tp=2)),
]
SLOW += [Case(*choice) for choice in itertools.product(KINDS, TUNERS, LAYOUTS, SCHEDULES)]
SLOW += [
    Case(kind, tuner, "packed", schedule, fsdp=True, degrees=SHARDED)
    for kind, tuner, schedule in itertools.product(KINDS, TUNERS, SCHEDULES)
]
SLOW += [
    Case(kind, "full", layout, schedule, count=count, degrees=FOUR)
    for kind, layout, schedule, count in itertools.product(("tied", "moe"), LAYOUTS, ("gpipe", "1f1b"), (3, 6))
]


@pytest.mark.parametrize("case", FAST, ids=str)
def test_stages_learn_what_one_process_learns(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_stages_learn_what_one_process_learns_in_any_combination(case):
    check(case)


def losses_by_count() -> dict[tuple[str, int], tuple[float, int]]:
    mesh = build_mesh(Degrees(pp=2), "cpu")
    found = {}
    for schedule in SCHEDULES:
        pipeline = make_pipeline(Case("untied", schedule=schedule), mesh)
        for count in (1, 2, 3, 5):
            batches = make_batches("packed", count)
            loss = one_step(pipeline, batches, sum(batch.weight for batch in batches))
            found[schedule, count] = loss, len(pipeline.prepare(batches)[0])
            pipeline.local.drop_gradients()
    return found


def test_every_schedule_runs_any_number_of_micro_batches():
    found, other = on_ranks(2, losses_by_count)
    assert found == other
    module = build("untied").train_module()
    for (schedule, count), (loss, ran) in found.items():
        batches = make_batches("packed", count)
        with torch.no_grad():
            expected = sum(module(batch).loss_sum.item() for batch in batches) / sum(b.weight for b in batches)
        assert loss == pytest.approx(expected, rel=1e-6), (schedule, count)
        assert ran == (count + count % max(1, count // 2) if schedule == "interleaved" else count)


def evaluated(schedule: str) -> list[LossTerms]:
    pipeline = make_pipeline(Case("tied", schedule=schedule), build_mesh(Degrees(pp=2), "cpu"))
    pipeline.module.eval()
    first = pipeline.evaluate(make_batches("padded", 1)[0])  # before any training
    pipeline.module.train()
    one_step(pipeline, make_batches("packed", 2), 1.0)
    assert all(p.grad is not None for _, p in trained(pipeline))
    pipeline.module.eval()
    return [first, *map(pipeline.evaluate, make_batches("packed", 3))]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_every_rank_learns_the_result_of_an_evaluation(schedule):
    results = on_ranks(2, evaluated, schedule)
    module = build("tied").train_module().eval()
    batches = [make_batches("padded", 1)[0], *make_batches("packed", 3)]
    for terms in results:
        for mine, batch in zip(terms, batches, strict=True):
            with torch.no_grad():
                expected = module(batch)
            assert float(mine.loss_sum) == pytest.approx(float(expected.loss_sum), rel=1e-6)
            assert mine.weight == expected.weight and mine.counts == expected.counts
            assert float(mine.sums["token_accuracy"]) == float(expected.sums["token_accuracy"])


def clipped(degrees: Degrees, fsdp: bool) -> float:
    mesh = build_mesh(degrees, "cpu")
    pipeline = make_pipeline(Case("tied", schedule="zbv", fsdp=fsdp), mesh)
    batches = make_batches("packed", 4)
    one_step(pipeline, batches[mesh["dp"].rank :: mesh["dp"].size], sum(b.weight for b in batches))
    return pipeline.clip(0.1)


@pytest.mark.parametrize(("degrees", "fsdp"), [(Degrees(pp=2), False), (SHARDED, True)])
def test_the_norm_counts_a_tied_matrix_once(degrees, fsdp):
    norms = on_ranks(degrees.world_size, clipped, degrees, fsdp)
    gradients = single_process("tied", "full", "packed", steps=1).gradients
    expected = torch.stack([grad.norm() for grad in gradients.values()]).norm()
    assert norms == pytest.approx([float(expected)] * len(norms), rel=1e-5)


def in_bfloat16(tuner: str) -> tuple[list[float], torch.dtype]:
    def make() -> Tiny:
        tiny = build("gqa", tuner, dtype=torch.bfloat16 if tuner == "lora" else torch.float32)
        for parameter in tiny.whole.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return tiny

    def autocast() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    batches = make_batches("packed", 4)
    weight = sum(batch.weight for batch in batches)
    pipeline = make_pipeline(Case("gqa"), build_mesh(Degrees(pp=2), "cpu"), make=make, autocast=autocast)
    loss = one_step(pipeline, batches, weight)
    whole = make()
    module = whole.train_module()
    for batch in batches:
        with autocast():
            terms = module(batch)
        (terms.loss_sum / weight).backward()
        loss -= float(terms.loss_sum) / weight
    reference = dict(whole.whole.named_parameters())
    errors = [relative(p.grad, reference[name].grad) for name, p in trained(pipeline)]
    return [abs(loss), max(errors)], pipeline.runner.borders[0].dtype


@pytest.mark.parametrize(("tuner", "travels"), [("full", torch.float32), ("lora", torch.bfloat16)])
def test_what_travels_has_the_type_of_the_residual_stream(tuner, travels):
    for (loss, error), dtype in on_ranks(2, in_bfloat16, tuner):
        assert dtype == travels
        assert loss < 1e-3 and error < 2e-2


def worst_errors() -> dict[str, float]:
    mesh, errors = build_mesh(Degrees(pp=2), "cpu"), {}
    batches = make_batches("packed", 3)
    weight = sum(batch.weight for batch in batches)
    for name in CONFIGS:

        def make(name: str = name) -> Tiny:
            model = build_architecture(name)
            model.set_attn_implementation(VARLEN)
            return Tiny(model.train(), model)

        pipeline = make_pipeline(Case(name), mesh, make=make)
        one_step(pipeline, batches, weight)
        whole = make()
        module = whole.train_module()
        for batch in batches:
            (module(batch).loss_sum / weight).backward()
        reference = dict(whole.whole.named_parameters())
        if "lm_head.weight" not in reference:
            reference["lm_head.weight"] = reference["model.embed_tokens.weight"]
        known = {name: p.grad for name, p in reference.items() if p.grad is not None}
        assert known.keys() >= {n for n, p in trained(pipeline) if p.grad is not None and p.grad.any()}
        errors[name] = max(relative(p.grad, known[n]) for n, p in trained(pipeline) if n in known)
    return errors


def test_other_architectures_learn_the_same_in_stages():
    for errors in on_ranks(2, worst_errors):
        assert len(errors) == len(CONFIGS) and max(errors.values()) < 1e-5, errors


def with_noise(alpha: float | None) -> float:
    torch.manual_seed(3)
    mesh = build_mesh(Degrees(pp=2), "cpu")
    pipeline = make_pipeline(Case("untied"), mesh, neftune_alpha=alpha)
    batches = make_batches("packed", 2)
    noisy = one_step(pipeline, batches, 1.0)
    pipeline.module.eval()
    assert sum(float(pipeline.evaluate(batch).loss_sum) for batch in batches) != noisy or alpha is None
    return noisy


def test_noise_on_embeddings_is_added_in_the_first_stage_only():
    (noisy, _), (plain, _) = on_ranks(2, with_noise, 20.0), on_ranks(2, with_noise, None)
    assert noisy != plain and noisy == pytest.approx(plain, rel=0.2)


def one_rank_fails() -> str:
    mesh = build_mesh(Degrees(pp=2), "cpu")
    pipeline = make_pipeline(Case("untied"), mesh)
    batches = make_batches("packed", 4)
    one_step(pipeline, batches, 1.0)
    if mesh["pp"].rank == 1:
        pipeline.stages[0].register_forward_hook(_fail)
    try:
        one_step(pipeline, batches, 1.0)
    except RuntimeError as error:
        if mesh["pp"].rank == 1:
            torch.distributed.destroy_process_group()  # what the end of its process does
            torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
        return str(error)
    return "nothing"


def _fail(*_: Any) -> None:
    raise RuntimeError("out of memory")


def test_a_rank_that_fails_in_a_step_does_not_leave_the_others_waiting():
    waiting, failing = on_ranks(2, one_rank_fails, timeout_s=60)
    assert "failed to run forward" in failing
    assert "nothing" not in waiting


def fast_layers(schedule: str) -> tuple[set[type], str]:
    mesh = build_mesh(Degrees(pp=2), "cpu")
    kinds = set()
    for tuner in TUNERS:
        pipeline = make_pipeline(Case("untied", tuner, schedule=schedule), mesh)
        kinds |= {type(module) for module in pipeline.module.modules()} & {TrainedLinear, FastLoRALinear}
    for stage in pipeline.stages:
        compile_layers(stage.chunk.causal_lm.base_model)
    try:
        Pipeline(pipeline.stages, Spread(mesh), pipeline.local, schedule)
    except UsageError as error:
        return kinds, error.message
    return kinds, ""


def test_no_function_runs_backward_twice_where_gradients_are_taken_apart():
    plain, apart = on_ranks(2, fast_layers, "1f1b")[0], on_ranks(2, fast_layers, "zbv")[0]
    assert plain == ({TrainedLinear, FastLoRALinear}, "")
    assert apart[0] == set() and "compiled layers give them at once" in apart[1]


def balanced() -> tuple[float, float]:
    mesh, batches = build_mesh(Degrees(pp=2), "cpu"), make_batches("padded", 3)
    weight = sum(batch.weight for batch in batches)
    pipeline = make_pipeline(Case("moe"), mesh)
    for stage in pipeline.stages:
        stage.router_loss = RouterLoss(stage.chunk.causal_lm, 0.5, mesh)
    (portion,) = pipeline.prepare(batches)
    terms = pipeline.forward(portion, lambda loss_sum: loss_sum / weight, True)
    pipeline.backward(terms, lambda loss_sum: loss_sum / weight, True)
    whole = build("moe")
    module = whole.train_module()
    module.router_loss = RouterLoss(whole.causal_lm, 0.5)
    shown = 0.0
    for batch, mine in zip(batches, terms, strict=True):
        expected = module(batch)
        (expected.loss_sum / weight).backward()
        shown = max(shown, abs(float(mine.sums["router_aux_loss"] / expected.sums["router_aux_loss"]) - 1))
        assert mine.counts["router_aux_loss"] == expected.counts["router_aux_loss"]
    reference = dict(whole.whole.named_parameters())
    return shown, max(relative(p.grad, reference[name].grad) for name, p in trained(pipeline))


def test_the_load_of_experts_on_all_stages_is_balanced():
    for shown, error in on_ranks(2, balanced):
        assert shown < 1e-5 and error < 1e-5
