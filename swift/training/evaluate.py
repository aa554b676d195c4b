"""Measure the objective on rows that aren't trained on, and what a model says of them."""

from __future__ import annotations

import math
from typing import Any

import torch

from swift.data.loading.batch import Annotate, Examples, Layout
from swift.data.loading.loader import evaluation_batches
from swift.distributed import ProcessGroup
from swift.objectives.predictions import Report, predictions
from swift.training.method import LookAhead
from swift.training.strategy import Strategy, as_in_evaluation
from swift.training.trainer_parts import TrainerParts


@torch.no_grad()
def evaluate(
    strategy: Strategy,
    examples: Examples,
    layout: Layout,
    *,
    tokens_per_batch: int,
    group: ProcessGroup,
    look_ahead: LookAhead | None = None,
    annotate: Annotate | None = None,
) -> dict[str, float]:
    """`eval_loss` and the means of what the objective sums up beside it; the same on every rank.

    For sequences of tokens these are means over target weights, and `eval_perplexity` is there too. Draws nothing from
    the random generators, so a run with evaluations trains as one without.

    Args:
        look_ahead: takes the whole evaluation for one step, if it couples micro-batches.
        annotate: adds facts to batches.
    """
    data = strategy.mesh["dp"]
    places: dict[str, Any] = {"tokens_per_batch": tokens_per_batch, "rank": data.rank, "world_size": data.size}
    totals: dict[str, list[float]] = {}
    with as_in_evaluation(strategy.module):
        batches = evaluation_batches(examples, layout, **places, annotate=annotate)
        if look_ahead is not None and look_ahead.coupled:
            batches = iter(known := list(batches))
            look_ahead(strategy, known, training=False)
        for batch in batches:
            if look_ahead is not None and not look_ahead.coupled:
                look_ahead(strategy, one := [batch], training=False)
                batch = one[0]
            terms = strategy.evaluate(batch)
            found = {"loss": (float(terms.loss_sum), terms.weight)}
            found |= {name: (float(value), terms.counts[name]) for name, value in terms.sums.items()}
            for name, pair in found.items():
                total = totals.setdefault(name, [0.0, 0.0])
                total[0] += pair[0]
                total[1] += pair[1]
    names = sorted(totals)
    summed = group.sum([number for name in names for number in totals[name]])
    pairs = zip(names, summed[::2], summed[1::2], strict=True)
    values = {f"eval_{name}": total / count for name, total, count in pairs if count}
    if not layout.units:
        values["eval_perplexity"] = math.exp(min(values["eval_loss"], 700.0))
    return values


@torch.no_grad()
def predict(parts: TrainerParts, strategy: Strategy) -> Report:
    """What the metrics say of the model's answers to all evaluation units; the same on every rank."""
    assert parts.metrics is not None and parts.eval_examples is not None
    data, probe = strategy.mesh["dp"], parts.metrics.probe
    places: dict[str, Any] = {
        "tokens_per_batch": parts.eval_tokens_per_batch,
        "rank": data.rank,
        "world_size": data.size,
    }
    mine = [
        prediction
        for batch in evaluation_batches(parts.eval_examples, parts.loader.layout, **places)
        for prediction in predictions(batch, strategy.measure(batch, probe), means=parts.metrics.means)
    ]
    gathered = parts.group.along(data).gather(mine)
    return parts.metrics.report([prediction for some in gathered for prediction in some])
