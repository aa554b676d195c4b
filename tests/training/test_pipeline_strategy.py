"""A model in a pipeline learns what one process learns: losses, gradients and weights, for every schedule."""

from __future__ import annotations

import pytest
import torch
from distributed.equality import (
    Outcome,
    assert_equal,
    build,
    make_batches,
    make_optimizer,
    single_process,
    whole_tensor,
)
from distributed.pool import on_ranks

from swift.config.degrees import Degrees
from swift.config.parallel import ParallelConfig
from swift.config.training import ObjectiveConfig
from swift.distributed.mesh import Mesh, build_mesh
from swift.distributed.pipeline.schedules import stages_of_rank, stages_per_rank
from swift.distributed.pipeline.split import keep_stage, model_costs, stage_layers
from swift.distributed.sharding import apply_fsdp
from swift.distributed.spread import Spread
from swift.objectives import build_objective
from swift.optim.local import local_parameters
from swift.training.pipeline import Pipeline, stage_parameters, tie_stages
from swift.training.stage import Chunk, StageModule

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zbv")


def make_pipeline(kind: str, tuner: str, schedule: str, mesh: Mesh, fsdp: bool = False, layers: tuple = ()) -> Pipeline:
    """The pipeline of this rank, over a fresh model of the test."""
    config = ParallelConfig(
        pipeline_schedule=schedule, pipeline_parallel_size=mesh["pp"].size, fsdp="fsdp2" if fsdp else "none"
    )
    per_rank, spread = stages_per_rank(config), Spread(mesh)
    objective = build_objective(ObjectiveConfig())
    stages = []
    for stage in stages_of_rank(schedule, mesh["pp"].rank, mesh["pp"].size, per_rank):
        tiny = build(kind, tuner)
        plan = stage_layers(model_costs(tiny.causal_lm), mesh["pp"].size * per_rank, layers)
        keep_stage(tiny.whole, tiny.causal_lm, plan, stage)
        chunk = Chunk(stage, len(plan), tiny.whole, tiny.causal_lm, tiny.head)
        stages.append(StageModule(chunk, objective=objective, evaluation=objective.evaluation()))
    if fsdp:
        for stage in stages:
            apply_fsdp(stage, stage.chunk.causal_lm, spread, config, compute=torch.float32)
    else:
        tie_stages(stages)
    local = local_parameters(stage_parameters(stages))
    return Pipeline(stages, spread, local, schedule)


def train(kind, tuner, layout, schedule, degrees, options) -> Outcome:
    count, steps = options.get("count", 4), options.get("steps", 3)
    mesh = build_mesh(degrees, "cpu")
    pipeline = make_pipeline(kind, tuner, schedule, mesh, options.get("fsdp", False), options.get("layers", ()))
    optimizer = make_optimizer([p for _, p in pipeline._local.named()])
    batches = make_batches(layout, count)
    weight = sum(batch.weight for batch in batches)
    mine = batches[mesh["dp"].rank :: mesh["dp"].size]
    outcome = Outcome()
    for step in range(steps):
        (portion,) = pipeline.prepare(mine)
        terms = pipeline.forward(portion, lambda loss_sum: loss_sum / weight, True)
        pipeline.backward(terms, lambda loss_sum: loss_sum / weight, True)
        total = torch.tensor([sum(float(term.loss_sum) for term in terms)], dtype=torch.float64)
        torch.distributed.all_reduce(total)
        outcome.losses.append(float(total) / pipeline.copies / weight)
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


def check(kind, tuner, layout, schedule, degrees=None, **options) -> None:
    degrees = degrees or Degrees(pp=2)
    outcomes = on_ranks(degrees.world_size, train, kind, tuner, layout, schedule, degrees, options)
    reference = single_process(kind, tuner, layout, count=options.get("count", 4), steps=options.get("steps", 3))
    assert_equal(joined(outcomes, kind == "tied"), reference)


FAST = [
    ("tied", "full", "packed", "1f1b"),
    ("tied", "full", "padded", "zbv"),
    ("untied", "lora", "packed", "zbv"),
    ("gqa", "full", "packed", "interleaved"),
    ("qk_norm", "lora", "padded", "gpipe"),
    ("moe", "full", "padded", "zbv"),
]


@pytest.mark.parametrize(("kind", "tuner", "layout", "schedule"), FAST)
def test_two_stages_learn_what_one_process_learns(kind, tuner, layout, schedule):
    check(kind, tuner, layout, schedule)
