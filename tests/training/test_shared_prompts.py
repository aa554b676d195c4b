"""Units whose prompt is laid down once have the loss and gradients of sequences written out, in modules and stages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from architectures import build
from equality import Tiny, relative
from pool import on_ranks
from test_pipeline_strategy import Case, make_pipeline, one_step, trained

from swift.config.degrees import Degrees
from swift.data.loading.batch import Batch, Layout, Tokens, make_batch
from swift.data.rows import RowRef
from swift.data.units import Kind, Unit
from swift.distributed.mesh import build_mesh
from swift.models.attention import VARLEN

# Prefix and parts of each unit, by micro-batch; the windows of the models are 8 tokens.
UNITS = [[(11, (5, 3)), (2, (9, 1, 6))], [(0, (4, 4)), (7, (2,))], [(5, (3, 12))]]
NAMES = ["llama", "mistral-window", "gemma2-softcap-window", "qwen3-moe"]


def batches(*, share: bool) -> list[Batch]:
    generator = np.random.default_rng(0)
    layout = Layout(units=True, share_prefix=share)
    made = []
    for units in UNITS:
        examples = []
        for prefix, parts in units:
            count = prefix + sum(parts)
            weights = np.ones(count, np.float32)
            weights[:prefix] = 0
            notes = Unit(prefix, parts, (int(Kind.PLAIN),) * len(parts), ()).notes()
            examples.append(Tokens(generator.integers(3, 97, count).astype(np.int32), weights, notes))
        made.append(make_batch(examples, [RowRef("rows.jsonl", 1)] * len(examples), layout))
    return made


def make(name: str) -> Tiny:
    model = build(name, torch.float64)
    model.set_attn_implementation(VARLEN)
    return Tiny(model.train(), model)


def whole(name: str, *, share: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss sum and gradients through the training module."""
    tiny, loss = make(name), 0.0
    module = tiny.train_module()
    for batch in batches(share=share):
        terms = module(batch)
        terms.loss_sum.backward()
        loss += terms.loss_sum.item()
    return loss, {key: p.grad for key, p in tiny.whole.named_parameters() if p.grad is not None}


def test_the_prompt_is_there_once():
    assert sum(batch.num_tokens for batch in batches(share=True)) == 74
    assert sum(batch.num_tokens for batch in batches(share=False)) == 94


@pytest.mark.parametrize("name", NAMES)
def test_modules(name):
    loss, gradients = whole(name, share=True)
    expected, reference = whole(name, share=False)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert gradients.keys() == reference.keys()
    assert max(relative(gradients[key], reference[key]) for key in reference) < 1e-5


def in_stages() -> dict[str, tuple[float, float]]:
    """Errors of the loss and of the gradients of each model in two stages that share, against whole ones that don't."""
    mesh, errors = build_mesh(Degrees(pp=2), "cpu"), {}
    for name in NAMES:
        pipeline = make_pipeline(Case(name), mesh, make=lambda name=name: make(name))
        loss = one_step(pipeline, batches(share=True), 1.0)
        expected, reference = whole(name, share=False)
        known = {key: reference[key] for key, p in trained(pipeline) if key in reference and p.grad is not None}
        assert known
        found = dict(trained(pipeline))
        worst = max(relative(found[key].grad, gradient) for key, gradient in known.items())
        errors[name] = abs(loss / expected - 1), worst
    return errors


def test_stages():
    for errors in on_ranks(2, in_stages):
        assert len(errors) == len(NAMES)
        assert max(max(pair) for pair in errors.values()) < 1e-5, errors
