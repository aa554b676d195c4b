"""Scores of documents for a query: the losses of rerankers and their objective.

A document's score comes from a head with one row, or is the log-odds of two words of the vocabulary, "yes" against
"no", at the end of its prompt. Only the head's two rows are multiplied for that, wherever in a vocabulary cut over
ranks they are. A loss takes each document by itself (pointwise), or against those of the same query (listwise).

Knows nothing of models or loops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from swift.core.errors import DataError, UsageError
from swift.data.loading.batch import Batch, Sequences
from swift.data.units import Kind
from swift.distributed.collectives import sum_backward, sum_forward
from swift.distributed.mesh import Axis
from swift.distributed.spread import local_tensor
from swift.models.head import OutputHead
from swift.objectives.causal_lm import LossTerms
from swift.objectives.classification import check_head
from swift.objectives.embedding import wide
from swift.objectives.sequences import sequence_sums
from swift.objectives.vocab_parallel import first_row, require_matrix


def word_log_odds(hidden: torch.Tensor, head: OutputHead, words: tuple[int, int]) -> torch.Tensor:
    """log p(first word) - log p(second word), from two rows of the head.

    Args:
        hidden: [targets, hidden]; the same on all ranks of `head.axis`.
        words: their numbers in the whole vocabulary.

    Returns:
        fp32 or fp64 [targets], the same on all ranks, with gradients to the states and the head.

    Raises:
        ModelError: the head is cut over ranks, and more than a matrix and a bias.
    """
    if not head.plain:
        if head.axis:
            require_matrix(head)
        logits = head.logits(hidden)[:, list(words)]
        return logits[:, 0] - logits[:, 1]
    module, axis = head.module, head.axis or Axis("tp")
    assert isinstance(module, nn.Linear)  # what `plain` means
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    with torch.autocast(hidden.device.type, enabled=False):
        places = torch.tensor(words, device=hidden.device) - first_row(module.weight.shape[0], axis)
        weight, bias = local_tensor(module.weight), None if module.bias is None else local_tensor(module.bias)
        rows = _own_rows(weight, places).to(hidden.dtype)
        logits = sum_backward(hidden, axis) @ rows.T
        if bias is not None:
            logits = logits + _own_rows(bias, places).to(hidden.dtype)
        logits = head.transform(wide(sum_forward(logits, axis)))
    return logits[:, 0] - logits[:, 1]


def _own_rows(tensor: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The rows at these places, zeros for those of other ranks."""
    own = torch.nonzero((places >= 0) & (places < len(tensor)))[:, 0]
    return tensor.new_zeros(len(places), *tensor.shape[1:]).index_copy(0, own, tensor[places[own]])


def listwise_losses(
    scores: torch.Tensor, sequences: Sequences, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """ListNet with one right document at a time (Cao et al., ICML 2007): of each positive, -log softmax(score / t)
    among itself and the negatives of its query; a query has the mean over its positives. Without negatives it is 0.

    Args:
        scores: [sequences], complete.

    Returns:
        [units] losses with a gradient, and the share of positives that score above all negatives.

    Raises:
        DataError: a query has no positive.
    """
    positive = torch.nonzero(sequences.kind == Kind.POSITIVE)[:, 0]
    unit = sequences.unit[positive]
    counted = torch.bincount(unit, minlength=sequences.num_units)
    if bool((counted == 0).any()):
        raise DataError("a query has no document that fits", fix="give every row positive_messages")
    negative = (unit[:, None] == sequences.unit[None]) & (sequences.kind == Kind.NEGATIVE)[None]
    others = scores[None].expand(len(positive), -1).masked_fill(~negative, float("-inf"))
    own = scores[positive]
    losses = torch.cat([own[:, None], others], 1).div(temperature).logsumexp(1) - own / temperature
    before = F.pad(others.detach(), (0, 1), value=float("-inf")).amax(1) < own.detach()
    share = (1.0 / counted.to(scores))[unit]
    zeros = scores.new_zeros(sequences.num_units)
    return zeros.index_add(0, unit, losses * share), zeros.index_add(0, unit, before * share)


@dataclass(frozen=True)
class RerankerObjective:
    """Documents scored for a query, each by the state of its last token.

    Attributes:
        loss: `pointwise`, binary cross-entropy of each document, a mean over the documents of the step; or `listwise`,
            a mean over its queries.
        temperature: divides the scores of `listwise`.
        words: "yes" and "no" in the vocabulary, where their log-odds are the score; None: the head gives it.
        axis: ranks that share a row (`cp`).
    """

    loss: Literal["pointwise", "listwise"] = "pointwise"
    temperature: float = 1.0
    words: tuple[int, int] | None = None
    axis: Axis | None = None

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise UsageError(
                f"scores can't be divided by a temperature of {self.temperature:g}", fix="a temperature above 0"
            )

    def __call__(self, hidden: torch.Tensor, head: OutputHead, batch: Batch) -> LossTerms:
        """hidden: [documents of this rank, hidden]. `pointwise` reads the step's `units` and `documents`."""
        sequences = batch.sequences
        assert sequences is not None  # what the method's layout asks for
        scores = self.probe(hidden, head, batch)
        if self.loss == "listwise":
            scores = sequence_sums(scores, sequences, self.axis)
            losses, hits = listwise_losses(scores, sequences, self.temperature)
            counted, total = float(sequences.counted), losses.sum()
            total = total - (1 - counted) * total.detach()
            return LossTerms(total, batch.weight, {"accuracy": hits.sum() * counted}, {"accuracy": batch.weight})
        fits = sequences.kind[sequences.target] == Kind.POSITIVE
        total = F.binary_cross_entropy_with_logits(scores, fits.to(scores), reduction="sum")
        scale = sequences.step["units"] / sequences.step["documents"] if len(fits) else 0.0
        right = ((scores > 0) == fits).sum()
        return LossTerms(total * scale, batch.weight, {"accuracy": right}, {"accuracy": float(len(fits))})

    def step_counts(self, batch: Batch) -> dict[str, float]:
        """What of a whole micro-batch goes into the step's divisors."""
        return {"documents": float(0 if batch.sequences is None else len(batch.sequences))}

    def probe(self, hidden: torch.Tensor, head: OutputHead, batch: Batch) -> torch.Tensor:
        """Scores [targets]."""
        if self.words is not None:
            return word_log_odds(hidden, head, self.words)
        logits = head.logits(hidden)
        check_head(logits, 1, "a reranker")
        return logits[:, 0]

    def evaluation(self) -> RerankerObjective:
        """The same."""
        return self
