"""Experts on several ranks, and the loss that balances them, in the stages of a pipeline."""

import pytest
import torch
from equality import Outcome, assert_equal, make_optimizer, whole_tensor
from expert_models import Case, micro_batch, one_process
from pool import on_ranks

from swift.config.degrees import Degrees
from swift.config.training import ObjectiveConfig
from swift.distributed.experts import apply_expert_parallel
from swift.distributed.mesh import build_mesh
from swift.distributed.pipeline.split import keep_stage, model_costs, stage_layers
from swift.distributed.spread import Spread
from swift.models.prepare import enable_checkpointing
from swift.models.router import build_router_loss
from swift.objectives import build_objective
from swift.optim.local import local_parameters
from swift.training.module import Objectives
from swift.training.pipeline import Pipeline, stage_parameters
from swift.training.stage import Chunk, StageModule


def pipeline_run(case: Case, degrees: Degrees) -> tuple[Outcome, list[float]]:
    """What `expert_models.spread_run` does, with this rank's layers."""
    mesh = build_mesh(degrees, "cpu")
    spread, tiny = Spread(mesh), case.build()
    plan = stage_layers(model_costs(tiny.causal_lm), degrees.pp, ())
    keep_stage(tiny.whole, tiny.causal_lm, plan, mesh["pp"].rank)
    apply_expert_parallel(tiny.whole, tiny.causal_lm, spread)
    if case.recompute:
        enable_checkpointing(tiny.causal_lm)
    objective = build_objective(ObjectiveConfig())
    stage = StageModule(
        Chunk(mesh["pp"].rank, degrees.pp, tiny.whole, tiny.causal_lm, tiny.head),
        objectives=Objectives(objective, objective.evaluation()),
        router_loss=build_router_loss(tiny.causal_lm, case.coefficient, mesh),
    ).train()
    pipeline = Pipeline([stage], spread, local_parameters(stage_parameters([stage])), "1f1b")
    optimizer = make_optimizer([p for _, p in pipeline.local.named()])
    batches = [micro_batch(turn, [mesh["dp"].rank], case.layout) for turn in range(2)]
    weight = total(sum(batch.weight for batch in batches)) / degrees.pp
    outcome, balance = Outcome(), []
    for step in range(3):
        (portion,) = pipeline.prepare(batches)
        terms = pipeline.forward(portion, lambda loss_sum: loss_sum / weight, True)
        pipeline.backward(terms, lambda loss_sum: loss_sum / weight, True)
        outcome.losses.append(total(sum(float(term.loss_sum) for term in terms)) / degrees.pp / weight)
        aux, count = (
            total(sum(float(getattr(term, kind)["router_aux_loss"]) for term in terms)) for kind in ("sums", "counts")
        )
        balance.append(aux / count)
        named = stage_parameters([stage])
        if step == 0:
            outcome.gradients = {name: whole_tensor(p.grad).clone() for name, p in named}
        pipeline.step(optimizer, None)
        optimizer.zero_grad(set_to_none=True)
    outcome.weights = {name: whole_tensor(p).detach().clone() for name, p in stage_parameters([stage])}
    return outcome, balance


def total(value: float) -> float:
    """The sum over all ranks."""
    tensor = torch.tensor(value, dtype=torch.float64)
    torch.distributed.all_reduce(tensor)
    return float(tensor)


@pytest.mark.parametrize(
    ("case", "degrees"),
    [
        (Case(layout="padded", coefficient=0.5), Degrees(pp=2)),
        pytest.param(Case(coefficient=0.5, recompute=True), Degrees(pp=2), marks=pytest.mark.slow),
        pytest.param(Case(coefficient=0.5), Degrees(pp=2, dp_shard=2, ep=2), marks=pytest.mark.slow),
        # its first layer is dense: the first stage has no routers
        pytest.param(Case("deepseek_v3", layout="padded", coefficient=0.5), Degrees(pp=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_stages_equal_one_process(case, degrees):
    results = on_ranks(degrees.world_size, pipeline_run, case, degrees)
    reference, balance = one_process(case, degrees.dp)
    whole = Outcome(results[0][0].losses)
    for outcome, seen in results:
        whole.gradients |= outcome.gradients
        whole.weights |= outcome.weights
        assert seen == pytest.approx(balance, rel=1e-6)
    assert_equal(whole, reference)
