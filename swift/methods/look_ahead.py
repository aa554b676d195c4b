"""What preference losses need of a whole optimizer step, worked out before its first gradient.

The divisors of means, the reference's log-probabilities, KTO's reference point, BCO's mean of rewards, the places of
pairs in AOT's order: all of it is over all micro-batches of all data-parallel ranks, so that nothing depends on how a
step was cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from swift.data.loading.batch import Batch, Sequences
from swift.data.units import Kind
from swift.distributed import ProcessGroup
from swift.methods.reference import FACT, target_logprobs
from swift.objectives.pair_losses import Pairs, Side, couple
from swift.objectives.preference import batch_pairs
from swift.objectives.preference_options import PreferenceOptions
from swift.objectives.sequences import places
from swift.training.strategy import Strategy
from swift.training.trainer_parts import Callback, RankState


class RunningMean:
    """BCO's delta: the mean of all rewards so far, chosen and rejected alike (arXiv 2404.04656, section 4.2)."""

    without_it: str | None = "BCO's running mean of rewards begins anew"

    def __init__(self) -> None:
        self.mean, self.count = 0.0, 0.0

    def add(self, total: float, count: float) -> None:
        """Take in `count` values that add up to `total`."""
        self.count += count
        self.mean += (total - count * self.mean) / self.count

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.count = state["mean"], state["count"]


@dataclass
class PreferenceLookAhead:
    """See the head of the file.

    Attributes:
        data_ranks: the processes along the data-parallel axis.
        shared: whether ranks share sequences (`cp`).
        reference: the context in which the model is the reference; None where its log-probabilities are there already,
            or aren't needed.
    """

    options: PreferenceOptions
    data_ranks: ProcessGroup
    shared: bool = False
    reference: Callable[[], AbstractContextManager[None]] | None = None
    coupled: bool = True
    callbacks: list[Callback] = field(default_factory=list)
    rank_states: dict[str, RankState] = field(default_factory=dict)
    rewards: RunningMean = field(default_factory=RunningMean)

    def __post_init__(self) -> None:
        if self._centres:
            self.rank_states["bco_delta"] = self.rewards

    @property
    def _centres(self) -> bool:
        return "bco_pair" in self.options.loss_types and self.options.compat != "trl"

    @property
    def _compares_strangers(self) -> bool:
        return "kto" in self.options.loss_types

    def __call__(self, strategy: Strategy, batches: list[Batch], *, training: bool) -> None:
        """Fill the facts of one step's micro-batches on this rank."""
        step = self._counts(batches)
        if self.options.needs_reference and self.reference is not None:
            with self.reference():
                for batch in _with_companions(batches):
                    batch.facts[FACT] = strategy.measure(batch, target_logprobs)
        for batch in batches:
            sequences = _sequences(batch)
            sequences.step.update(step)
            if self.options.ld_alpha is not None and self.shared:
                batch.facts["place"] = places(sequences.target)
        if self._compares_strangers:
            z0 = self._reference_point(strategy, batches)
            for batch in batches:
                _sequences(batch).step["kto_z0"] = z0
        if self._centres or (self.options.sorts and self.options.compat == "ours"):
            self._whole_step(strategy, batches, training)

    def _counts(self, batches: list[Batch]) -> dict[str, float]:
        units = tokens = 0.0
        for batch in batches:
            sequences = _sequences(batch)
            units += sequences.num_units
            chosen = sequences.kind[sequences.target] == Kind.CHOSEN
            tokens += float(batch.target_weights[chosen].sum(dtype=torch.float64))
        units, tokens = self.data_ranks.sum([units, tokens])
        return {"units": units, "chosen_tokens": tokens}

    def _reference_point(self, strategy: Strategy, batches: list[Batch]) -> float:
        """KTO, arXiv 2402.01306, equation 8: the KL of the policy from the reference, at least 0, as the mean over the
        step of log-ratios of completions that belong to other prompts."""
        total = count = 0.0
        for batch in batches:
            companion = batch.companion
            assert companion is not None  # the layout asks for them
            logps = strategy.measure(companion, target_logprobs).double()
            reference = companion.facts[FACT].to(logps) if self.options.needs_reference else torch.zeros_like(logps)
            total += float(((logps - reference) * companion.target_weights.to(logps)).sum())
            count += _sequences(companion).num_units
        total, count = self.data_ranks.sum([total, count])
        z0 = total / count if count else 0.0
        return 0.0 if z0 < 0 else z0  # what isn't finite stays so, and is found in the loss

    def _whole_step(self, strategy: Strategy, batches: list[Batch], training: bool) -> None:
        """What needs the model's own log-probabilities of all pairs: one more forward pass."""
        for batch in batches:
            _sequences(batch).step.setdefault("bco_delta", 0.0)
        measured = [
            batch_pairs(strategy.measure(batch, target_logprobs).double(), batch, self.options) for batch in batches
        ]
        mine = _joined(measured)
        if self._centres:
            ratios = torch.cat([mine.chosen.ratio, mine.rejected.ratio]) * self.options.beta
            total, count = self.data_ranks.sum([float(ratios.sum()), float(len(ratios))])
            if training and count and math.isfinite(total):  # a mean with such a step in it would never recover
                self.rewards.add(total, count)
            for batch in batches:
                _sequences(batch).step["bco_delta"] = self.rewards.mean
        if self.options.sorts and self.options.compat == "ours":
            self._sort(batches, measured, mine)

    def _sort(self, batches: list[Batch], measured: list[Pairs], mine: Pairs) -> None:
        """The derivatives of losses that sort, over the pairs of all ranks."""
        rank = self.data_ranks.rank
        parts = self.data_ranks.gather(mine)
        coupling = couple(_joined(parts), self.options)
        at = sum(len(part.nll) for part in parts[:rank])
        for batch, pairs in zip(batches, measured, strict=True):
            here, sequences = slice(at, at + len(pairs.nll)), _sequences(batch)
            at += len(pairs.nll)
            cotangent = torch.zeros(len(sequences), dtype=torch.float64)
            for kind, values in ((Kind.CHOSEN, coupling.chosen), (Kind.REJECTED, coupling.rejected)):
                of_kind = (sequences.kind == kind).nonzero()[:, 0]
                cotangent[of_kind] = values[here][sequences.unit[of_kind]].to(cotangent)
            sequences.facts["cotangent"] = cotangent.float()
            sequences.facts["value"] = coupling.value[here].float()


def _joined(parts: list[Pairs]) -> Pairs:
    """The pairs of several micro-batches or ranks, on the CPU."""

    def side(sides: list[Side]) -> Side:
        references = [one.reference for one in sides if one.reference is not None]
        return Side(
            torch.cat([one.logps.cpu() for one in sides]),
            torch.cat([reference.cpu() for reference in references]) if references else None,
            torch.cat([one.lengths.cpu() for one in sides]),
        )

    nll = torch.cat([part.nll.cpu() for part in parts])
    return Pairs(side([part.chosen for part in parts]), side([part.rejected for part in parts]), nll)


def _with_companions(batches: list[Batch]) -> list[Batch]:
    return [*batches, *(batch.companion for batch in batches if batch.companion is not None)]


def _sequences(batch: Batch) -> Sequences:
    assert batch.sequences is not None  # the layout makes batches of units
    return batch.sequences
