"""Classes and scores of texts from the mean of their states, in place of one state that stands for a text.

The mean goes through the head once for a text. Where ranks share a row each has some of a text's states, and the head's
own gradient has to be that of all of them once; a head that is one matrix gives it by going first: the mean of the
logits is then the logit of the mean.

Knows nothing of what is made of the logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from peft.utils.other import ModulesToSaveWrapper
from torch import nn

from swift.core.errors import UsageError
from swift.data.loading.batch import Batch
from swift.distributed.mesh import Axis
from swift.models.head import OutputHead
from swift.objectives.causal_lm import LossTerms
from swift.objectives.classification import ClassificationObjective
from swift.objectives.embedding import pool
from swift.objectives.ranking import RerankerObjective

_GIVEN = OutputHead(nn.Identity())  # of logits that are there already


@dataclass(frozen=True)
class MeanPooled:
    """An objective of texts that is given the mean of each text's states.

    Attributes:
        inner: takes one state per text, and knows of no ranks that share one.
        axis: ranks that share a row (`cp`).
    """

    inner: ClassificationObjective | RerankerObjective
    axis: Axis | None = None

    def __call__(self, hidden: torch.Tensor, head: OutputHead, batch: Batch) -> LossTerms:
        """hidden: [targets of this rank, hidden], every token of a text being a target."""
        sequences = batch.sequences
        assert sequences is not None  # what the method's layout asks for
        logits = self._logits(hidden, head, batch)
        target = torch.arange(len(sequences), device=hidden.device)
        terms = self.inner(logits, _GIVEN, replace(batch, sequences=replace(sequences, target=target)))
        if sequences.counted:
            return terms
        # the logits are complete on all ranks: their gradient is each rank's own, their loss the first one's
        sums = {name: torch.zeros_like(value) for name, value in terms.sums.items()}
        return LossTerms(terms.loss_sum - terms.loss_sum.detach(), batch.weight, sums, dict.fromkeys(sums, 0.0))

    def probe(self, hidden: torch.Tensor, head: OutputHead, batch: Batch) -> torch.Tensor:
        """[targets, ...]: what the inner objective's probe makes of a text, at each of its targets; of shared rows,
        what it makes of each state, whose mean it is."""
        sequences = batch.sequences
        assert sequences is not None
        if self.axis:
            return self.inner.probe(head.logits(hidden), _GIVEN, batch)
        return self.inner.probe(self._logits(hidden, head, batch), _GIVEN, batch)[sequences.target]

    def _logits(self, hidden: torch.Tensor, head: OutputHead, batch: Batch) -> torch.Tensor:
        """[sequences, labels], complete on all ranks."""
        assert batch.sequences is not None
        if not self.axis:
            return head.logits(pool(hidden, batch.sequences, "mean").to(hidden.dtype))
        if not _is_matrix(head.module):
            raise UsageError(
                "the head is more than a matrix, and takes the mean of a whole text, which the ranks share",
                where="--pooling",
                fix="--pooling last, or --sequence_parallel_size 1",
            )
        return pool(head.logits(hidden), batch.sequences, "mean", self.axis)

    def step_counts(self, batch: Batch) -> dict[str, float]:
        """What of a whole micro-batch goes into the step's divisors."""
        return self.inner.step_counts(batch) if isinstance(self.inner, RerankerObjective) else {}

    def evaluation(self) -> MeanPooled:
        """The plain loss, whatever is trained."""
        return replace(self, inner=self.inner.evaluation())


def _is_matrix(module: nn.Module) -> bool:
    if isinstance(module, ModulesToSaveWrapper):
        module = module.modules_to_save[module.active_adapters[0]] if module.active_adapters else module.original_module
    return isinstance(module, nn.Linear)
