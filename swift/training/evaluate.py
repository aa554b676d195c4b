"""Measure the objective on rows that aren't trained on."""

from __future__ import annotations

import math

import torch

from swift.data.loading.batch import Examples, Layout
from swift.data.loading.loader import evaluation_batches
from swift.distributed import ProcessGroup
from swift.training.strategy import Strategy


@torch.no_grad()
def evaluate(
    strategy: Strategy,
    examples: Examples,
    layout: Layout,
    *,
    tokens_per_batch: int,
    group: ProcessGroup,
) -> dict[str, float]:
    """`eval_loss` (mean over target weights), `eval_perplexity`, `eval_token_accuracy`; the same on every rank.

    Draws nothing from the random generators, so a run with evaluations trains as one without.
    """
    module, data = strategy.module, strategy.mesh["dp"]
    was_training = module.training
    module.eval()
    totals = [0.0, 0.0, 0.0, 0.0]
    batches = evaluation_batches(
        examples, layout, tokens_per_batch=tokens_per_batch, rank=data.rank, world_size=data.size
    )
    for batch in batches:
        terms = strategy.evaluate(batch)
        totals[0] += float(terms.loss_sum)
        totals[1] += terms.weight
        totals[2] += float(terms.sums["token_accuracy"])
        totals[3] += terms.counts["token_accuracy"]
    module.train(was_training)
    loss, weight, correct, targets = (total / strategy.copies for total in group.sum(totals))
    mean = loss / weight
    return {
        "eval_loss": mean,
        "eval_perplexity": math.exp(min(mean, 700.0)),
        "eval_token_accuracy": correct / targets,
    }
