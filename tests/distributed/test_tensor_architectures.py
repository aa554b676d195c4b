"""Every architecture that the invariance tests know is cut over two ranks exactly, or refused by name."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from architectures import CONFIGS, build
from equality import fill, make_batches, relative, whole_tensor
from pool import on_ranks

from swift.config.degrees import Degrees
from swift.config.training import ObjectiveConfig
from swift.core.errors import SwiftError
from swift.data.loading.loader import Batch
from swift.distributed.context.batches import cut_batch
from swift.distributed.mesh import Axis, Mesh, build_mesh
from swift.distributed.spread import Spread, finish_gradients
from swift.distributed.tensor import apply_tensor_parallel
from swift.models.attention import VARLEN
from swift.models.head import find_decoder, find_head
from swift.objectives import build_objective
from swift.training.module import TrainModule


def batches() -> list[Batch]:
    return [cut_batch(batch, Mesh(), pad_token_id=0, multiple=4) for batch in make_batches("packed", 2)]


def measure(name: str, spread: Spread | None, sequence_parallel: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss, and gradients by name, of a model of architecture `name`."""
    model = build(name, torch.float64)
    model.set_attn_implementation(VARLEN)
    fill(model)
    axis: Axis | None = None
    if spread is not None:
        apply_tensor_parallel(model, model, spread, sequence_parallel=sequence_parallel)
        axis = spread.mesh["tp"]
    objective = build_objective(ObjectiveConfig())
    head = find_head(model, axis=axis)
    module = TrainModule(model, decoder=find_decoder(model), head=head, objective=objective, evaluation=objective)
    loss = 0.0
    for batch in batches():
        terms = module(batch)
        (terms.loss_sum / 50).backward()
        loss += terms.loss_sum.item() / 50
    if spread is not None:
        finish_gradients(model.named_parameters(), spread)
    return loss, {name: whole_tensor(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def on_two(names: list[str], sequence_parallel: bool) -> dict:
    found: dict = {}
    for name in names:
        spread = Spread(build_mesh(Degrees(tp=2), "cpu"))
        try:
            found[name] = measure(name, spread, sequence_parallel)
        except SwiftError as error:
            found[name] = str(error)
    return found


@cache
def cut(sequence_parallel: bool) -> list[dict]:
    return on_ranks(2, on_two, list(CONFIGS), sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_one_process(name, sequence_parallel):
    loss, gradients = measure(name, None, False)
    for rank in cut(sequence_parallel):
        assert not isinstance(rank[name], str), rank[name]
        ours, found = rank[name]
        assert abs(ours - loss) <= 1e-6 * abs(loss)
        assert set(found) == set(gradients)
        wrong = {key: error for key in found if not (error := relative(found[key], gradients[key])) <= 1e-5}
        assert not wrong, wrong
