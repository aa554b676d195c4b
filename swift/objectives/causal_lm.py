"""Next-token prediction, the objective of `sft` and `pt`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from swift.config.training import LossConfig, ObjectiveConfig
from swift.models.head import OutputHead
from swift.objectives.linear_cross_entropy import PLAIN, TokenLoss, linear_cross_entropy


class Targets(Protocol):
    """What the objective needs of a batch."""

    target_ids: torch.Tensor  # int64 [targets]
    target_weights: torch.Tensor  # fp32 [targets]


@dataclass
class LossTerms:
    """An objective's answer for one micro-batch.

    The trainer adds these up over micro-batches and ranks and divides by the global weight, so no result depends on how
    the examples were spread.

    Attributes:
        loss_sum: weighted sum with a gradient, fp32 scalar.
        weight: sum of the weights, a Python float known before the forward pass.
        sums: further detached sums to log; each is divided by `counts[name]`.
        counts: the divisors of `sums`.
        measured: where something else than a loss was asked for: what was measured of each target, [targets, ...].
    """

    loss_sum: torch.Tensor
    weight: float
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    measured: torch.Tensor | None = None


@dataclass(frozen=True)
class CausalLM:
    """Cross-entropy of the next token, weighted per token; label smoothing and DFT are options."""

    options: TokenLoss = PLAIN
    chunk: int = 0

    def __call__(self, hidden: torch.Tensor, head: OutputHead, batch: Targets) -> LossTerms:
        """hidden: [targets, hidden], the states that predict `batch.target_ids`."""
        sums = linear_cross_entropy(
            hidden, head, batch.target_ids, batch.target_weights, self.options, chunk=self.chunk
        )
        weight = float(batch.target_weights.sum())
        terms = LossTerms(sums.loss, weight)
        terms.sums["token_accuracy"] = sums.num_correct
        terms.counts["token_accuracy"] = float(len(batch.target_ids))
        if self.options.smoothing or self.options.dft:  # the plain likelihood stays comparable between settings
            terms.sums["nll"] = sums.nll
            terms.counts["nll"] = weight
        return terms

    def evaluation(self) -> CausalLM:
        """The plain likelihood, for evaluation whatever is trained."""
        return CausalLM(PLAIN, self.chunk)


def build_objective(config: LossConfig) -> CausalLM:
    """The objective that the settings ask for."""
    options = PLAIN
    if isinstance(config, ObjectiveConfig):
        options = TokenLoss(config.label_smoothing_factor, config.enable_dft_loss)
    return CausalLM(options, config.loss_chunk_size)
