"""Measure the objective on rows that aren't trained on."""

from __future__ import annotations

import math

import torch
from torch import nn

from swift.data.loading.loader import Examples, Layout, evaluation_batches
from swift.distributed import ProcessGroup
from swift.training.precision import Precision


@torch.no_grad()
def evaluate(
    module: nn.Module,
    examples: Examples,
    layout: Layout,
    *,
    tokens_per_batch: int,
    group: ProcessGroup,
    precision: Precision,
) -> dict[str, float]:
    """`eval_loss` (mean over target weights), `eval_perplexity`, `eval_token_accuracy`; the same on every rank.

    Draws nothing from the random generators, so a run with evaluations trains as one without.
    """
    device = next(module.parameters()).device
    was_training = module.training
    module.eval()
    totals = [0.0, 0.0, 0.0, 0.0]
    batches = evaluation_batches(
        examples, layout, tokens_per_batch=tokens_per_batch, rank=group.rank, world_size=group.world_size
    )
    for batch in batches:
        with precision.autocast():
            terms = module(batch.to(device))
        totals[0] += terms.loss_sum.item()
        totals[1] += terms.weight
        totals[2] += terms.sums["token_accuracy"].item()
        totals[3] += terms.counts["token_accuracy"]
    module.train(was_training)
    loss, weight, correct, targets = group.sum(totals)
    mean = loss / weight
    return {
        "eval_loss": mean,
        "eval_perplexity": math.exp(min(mean, 700.0)),
        "eval_token_accuracy": correct / targets,
    }
