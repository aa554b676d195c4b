"""What the objectives of tasks need of a whole optimizer step, worked out before its first gradient.

The divisors of means are counted over all micro-batches of all data-parallel ranks. A loss that couples texts (InfoNCE
takes those of all other rows as negatives) has their vectors measured without gradients first, gathers them, and leaves
each text the derivative of the whole step's loss by its vector.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from swift.core.errors import DataError
from swift.data.loading.batch import Batch, Sequences
from swift.distributed import ProcessGroup
from swift.objectives.classification import ClassificationObjective, TokenClassificationObjective, token_labels
from swift.objectives.embedding import Coupled, EmbeddingObjective, InfoNCE, couple, join_units, pool
from swift.objectives.pooled import MeanPooled
from swift.objectives.ranking import RerankerObjective
from swift.training.strategy import Strategy
from swift.training.trainer_parts import Callback, RankState

_COUNTS = ("labelled_tokens", "documents")


@dataclass
class TaskLookAhead:
    """See the head of the file.

    Attributes:
        data_ranks: the processes along the data-parallel axis.
        objective: for a whole row, whichever ranks share it.
    """

    data_ranks: ProcessGroup
    objective: (
        ClassificationObjective | TokenClassificationObjective | EmbeddingObjective | RerankerObjective | MeanPooled
    )
    coupled: bool = True
    callbacks: list[Callback] = field(default_factory=list)
    rank_states: dict[str, RankState] = field(default_factory=dict)

    def __call__(self, strategy: Strategy, batches: list[Batch], *, training: bool) -> None:
        """Fill the facts of one step's micro-batches on this rank."""
        step = self._counts(batches)
        for batch in batches:
            _sequences(batch).step.update(step)
            if isinstance(self.objective, TokenClassificationObjective):
                batch.facts["labels"] = token_labels(batch)
        if isinstance(self.objective, EmbeddingObjective):
            if isinstance(self.objective.loss, InfoNCE):
                _refuse_unlike(batches)
            if self.objective.loss.couples:
                self._couple(self.objective, strategy, batches)

    def _counts(self, batches: list[Batch]) -> dict[str, float]:
        totals = dict.fromkeys(("units", *_COUNTS), 0.0)
        for batch in batches:
            totals["units"] += _sequences(batch).num_units
            if not isinstance(self.objective, ClassificationObjective | EmbeddingObjective):
                for name, count in self.objective.step_counts(batch).items():
                    totals[name] += count
        return dict(zip(totals, self.data_ranks.sum(list(totals.values())), strict=True))

    def _couple(self, objective: EmbeddingObjective, strategy: Strategy, batches: list[Batch]) -> None:
        """The derivatives of the step's loss, over the texts of all ranks."""
        features = []
        for batch in batches:
            states = strategy.measure(batch, objective.probe)
            features.append(pool(states, _sequences(batch).to(states.device), objective.pooling).cpu())
        mine = join_units([_sequences(batch) for batch in batches])
        parts = self.data_ranks.gather((torch.cat(features), mine))
        coupled = couple(
            torch.cat([part for part, _ in parts]),
            join_units([units for _, units in parts]),
            objective.loss,
            objective.matryoshka,
        )
        before = parts[: self.data_ranks.rank]
        _hand_out(coupled, batches, sum(len(part) for part, _ in before), sum(units.num_units for _, units in before))


def _hand_out(coupled: Coupled, batches: list[Batch], text: int, unit: int) -> None:
    """Give each micro-batch its own: from this text and this unit of the whole step on."""
    for batch in batches:
        sequences = _sequences(batch)
        texts, units = slice(text, text + len(sequences)), slice(unit, unit + sequences.num_units)
        sequences.facts["cotangent"] = coupled.cotangent[texts]
        sequences.facts["value"] = coupled.value[units]
        if coupled.hits is not None:
            sequences.facts["hits"] = coupled.hits[units]
        text, unit = texts.stop, units.stop


def _refuse_unlike(batches: list[Batch]) -> None:
    for batch in batches:
        for values, ref in zip(_sequences(batch).values, batch.refs):
            if values and values[0] <= 0:
                raise DataError(
                    f"the pair has the similarity {values[0]:g}, and infonce takes the second text of every pair for "
                    "one like the first",
                    where=str(ref),
                    fix="--loss_type cosine_similarity, contrastive or cosent; or give it as negative_messages",
                )


def _sequences(batch: Batch) -> Sequences:
    assert batch.sequences is not None  # the layout makes batches of units
    return batch.sequences
