"""Objectives of preference optimisation: hidden states and a batch of units in, loss terms out.

Each takes the targets' log-probabilities, adds them up to sequences, and hands these to the pure losses of
`pair_losses`. What a loss needs of the whole optimizer step is known before its first gradient, in `sequences.step` and
the facts, so no result depends on how the step was cut into micro-batches or spread over processes:

    step["units"], step["chosen_tokens"]    units, and the sum of target weights of chosen sequences: likelihood terms
    step["kto_z0"], step["bco_delta"]       KTO's reference point, BCO's mean of rewards
    sequences.facts["cotangent"] [sequences], ["value"] [units]    of the losses that sort (`pair_losses.couple`)
    batch.facts["ref_logps"] [targets]      log-probabilities under the reference
    batch.facts["place"] [targets]          place of a target in its sequence (`sequences.places`), for ld_alpha where
                                            ranks share sequences

An answer's tokens are those with a weight, wherever they stand: `loss_scale` decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swift.data.loading.batch import Batch, Sequences
from swift.data.units import Kind
from swift.distributed.mesh import Axis
from swift.models.head import OutputHead
from swift.objectives.causal_lm import LossTerms
from swift.objectives.logprobs import LOG_COLLISION, TokenLogprobs, token_logprobs
from swift.objectives.pair_losses import ROW_LOSSES, Pairs, Side, combine, couple, reward_model
from swift.objectives.preference_options import PreferenceOptions
from swift.objectives.sequences import pair_indices, places, sequence_sums

__all__ = ["KtoObjective", "PreferenceObjective", "PreferenceOptions", "RewardObjective", "batch_pairs"]


@dataclass(frozen=True)
class PreferenceObjective:
    """DPO and its relatives, ORPO, CPO, SimPO, AlphaPO: losses of pairs.

    Attributes:
        options: which losses; chunk: tokens of the head at a time, 0 chooses.
        axis: the ranks that share sequences (`cp`), if there are some.
    """

    options: PreferenceOptions
    chunk: int = 0
    axis: Axis | None = None

    def __call__(self, hidden: torch.Tensor, head: OutputHead, batch: Batch) -> LossTerms:
        """hidden: [targets, hidden], the states that predict `batch.target_ids`."""
        extras = (LOG_COLLISION,) if self.options.wpo else ()
        tokens = token_logprobs(hidden, head, batch.target_ids, chunk=self.chunk, extras=extras)
        sequences = _sequences(batch)
        pairs = batch_pairs(tokens.logprobs, batch, self.options, self.axis)
        weights = self._pair_weights(tokens, batch) if self.options.wpo else None
        losses = combine(pairs, self.options, weights)
        if self.options.sorts:
            losses = losses + self._sorted(pairs, sequences)
        terms = _terms(losses.sum(), batch)
        _record_pairs(terms, pairs, self.options, sequences)
        return terms

    def _sorted(self, pairs: Pairs, sequences: Sequences) -> torch.Tensor:
        """The losses that sort: their true value, and the gradient by the derivatives that were taken beforehand.

        Other tools sort each micro-batch by itself.
        """
        if self.options.compat == "ours":
            chosen, rejected = (sequences.facts["cotangent"][index] for index in pair_indices(sequences))
            value = sequences.facts["value"]
        else:
            value, chosen, rejected = couple(pairs, self.options)
        linear = chosen * pairs.chosen.logps + rejected * pairs.rejected.logps
        return linear - linear.detach() + value

    def _pair_weights(self, tokens: TokenLogprobs, batch: Batch) -> torch.Tensor:
        """WPO, arXiv 2406.11827, section 3: exp of the mean over tokens of log p - log Σ_v p_v², of both answers."""
        assert tokens.log_collision is not None
        weights = batch.target_weights.to(tokens.logprobs.dtype)
        excess = (tokens.logprobs.detach() - tokens.log_collision) * weights
        sums = sequence_sums(torch.stack([excess, weights], 1), _sequences(batch), self.axis)
        chosen, rejected = pair_indices(_sequences(batch))
        average = sums[:, 0] / sums[:, 1]
        return torch.exp(average[chosen] + average[rejected])


@dataclass(frozen=True)
class KtoObjective:
    """KTO and unpaired APO: every unit is one sequence, chosen (desirable) or rejected."""

    options: PreferenceOptions
    chunk: int = 0
    axis: Axis | None = None

    def __call__(self, hidden: torch.Tensor, head: OutputHead, batch: Batch) -> LossTerms:
        """hidden: [targets, hidden], the states that predict `batch.target_ids`."""
        sequences, options = _sequences(batch), self.options
        logprobs = token_logprobs(hidden, head, batch.target_ids, chunk=self.chunk).logprobs
        weights = batch.target_weights.to(logprobs.dtype)
        logps = sequence_sums(logprobs * weights, sequences, self.axis)
        reference = torch.zeros_like(logps)
        if options.needs_reference:
            reference = sequence_sums(batch.facts["ref_logps"].to(logps.dtype) * weights, sequences, self.axis)
        desirable = sequences.kind == Kind.CHOSEN
        z0 = sequences.step["kto_z0"] if "kto" in options.loss_types else 0.0
        losses = torch.zeros_like(logps)
        for name, weight in options.terms:
            losses = losses + weight * ROW_LOSSES[name](logps - reference, desirable, z0, options)
        terms = _terms(losses.sum(), batch)
        ratio = (logps - reference).detach()
        record = _Record(terms, sequences.counted)
        for name, those in (("chosen", desirable), ("rejected", ~desirable)):
            count = float(those.sum())
            record(f"rewards/{name}", options.beta * ratio[those], count)
            record(f"logps/{name}", logps[those], count)
            record(f"logps/ref_{name}", reference[those], count)
        record("kl", ratio, len(ratio))
        if "kto" in options.loss_types:
            record("kto_z0", torch.full_like(ratio, z0), len(ratio))
        return terms


@dataclass(frozen=True)
class RewardObjective:
    """A reward model of pairs: the head gives one number for the last token of every sequence."""

    options: PreferenceOptions
    axis: Axis | None = None

    def __call__(self, hidden: torch.Tensor, head: OutputHead, batch: Batch) -> LossTerms:
        """hidden: [targets, hidden], the state of each sequence's last token; a unit's first value is its margin."""
        sequences = _sequences(batch)
        rewards = sequence_sums(head.logits(hidden)[:, 0], sequences, self.axis)
        chosen, rejected = (rewards[index] for index in pair_indices(sequences))
        margin = rewards.new_tensor([values[0] if values else 0.0 for values in sequences.values])
        terms = _terms(reward_model(chosen, rejected, margin, self.options.center).sum(), batch)
        record, units = _Record(terms, sequences.counted), sequences.num_units
        record("rewards/chosen", chosen, units)
        record("rewards/rejected", rejected, units)
        record("rewards/margins", chosen - rejected, units)
        record("rewards/accuracies", chosen > rejected, units)
        record("rewards/mean", rewards, len(rewards))
        return terms


def batch_pairs(logprobs: torch.Tensor, batch: Batch, options: PreferenceOptions, axis: Axis | None = None) -> Pairs:
    """The pairs of a batch, from the log-probabilities of its targets [targets], which may carry a gradient."""
    sequences = _sequences(batch)
    weights = batch.target_weights.to(logprobs.dtype)
    chosen, rejected = pair_indices(sequences)
    policy_weights = reference_weights = weights
    if options.ld_alpha is not None and options.kind == "dpo":
        beyond = _beyond_shorter(batch, axis)
        policy_weights = torch.where(beyond, options.ld_alpha * weights, weights)
        reference_weights = weights if options.compat == "ms-swift" else policy_weights
    columns = [logprobs * policy_weights, weights, logprobs * weights]
    if options.needs_reference:
        columns.append(batch.facts["ref_logps"].to(logprobs.dtype) * reference_weights)
    logps, lengths, likelihood, *rest = sequence_sums(torch.stack(columns, 1), sequences, axis).unbind(1)
    reference = rest[0].detach() if rest else None
    lengths = lengths.detach()

    def side(index: torch.Tensor) -> Side:
        return Side(logps[index], None if reference is None else reference[index], lengths[index])

    scale = sequences.step["units"] / sequences.step["chosen_tokens"] if options.uses_likelihood else 0.0
    delta = 0.0
    if "bco_pair" in options.loss_types and options.compat != "trl":
        delta = sequences.step["bco_delta"]
    return Pairs(side(chosen), side(rejected), -likelihood[chosen], scale, delta)


def _beyond_shorter(batch: Batch, axis: Axis | None) -> torch.Tensor:
    """Bool [targets]: which come after as many as the shorter answer of the pair has (LD-DPO, arXiv 2409.06411)."""
    sequences = _sequences(batch)
    place = batch.facts["place"] if axis else places(sequences.target)
    counts = sequence_sums(torch.ones_like(place), sequences, axis)
    chosen, rejected = pair_indices(sequences)
    shorter = torch.minimum(counts[chosen], counts[rejected])
    return place >= shorter[sequences.unit][sequences.target]


def _sequences(batch: Batch) -> Sequences:
    assert batch.sequences is not None  # the loader of these methods makes batches of units
    return batch.sequences


def _terms(loss: torch.Tensor, batch: Batch) -> LossTerms:
    """The loss counts once among ranks that share sequences; its gradient is on each."""
    return LossTerms(loss if _sequences(batch).counted else loss - loss.detach(), batch.weight)


class _Record:
    """Sums to log: those of ranks that don't count are 0."""

    def __init__(self, terms: LossTerms, counted: bool) -> None:
        self._terms, self._counted = terms, counted

    def __call__(self, name: str, values: torch.Tensor, count: float) -> None:
        total = values.detach().to(self._terms.loss_sum.dtype).sum()
        self._terms.sums[name] = total if self._counted else torch.zeros_like(total)
        self._terms.counts[name] = float(count) if self._counted else 0.0


def _record_pairs(terms: LossTerms, pairs: Pairs, options: PreferenceOptions, sequences: Sequences) -> None:
    """Rewards are beta times what the method compares: h, or without a reference S (cpo) or S per token (others)."""
    record, units = _Record(terms, sequences.counted), sequences.num_units
    sides = {"chosen": pairs.chosen, "rejected": pairs.rejected}
    averaged = options.kind in ("orpo", "simpo")
    rewards = {n: (side.average if averaged else side.ratio).detach() * options.beta for n, side in sides.items()}
    for name, side in sides.items():
        record(f"rewards/{name}", rewards[name], units)
        record(f"logps/{name}", side.logps, units)
        if side.reference is not None:
            record(f"logps/ref_{name}", side.reference, units)
    record("rewards/margins", rewards["chosen"] - rewards["rejected"], units)
    record("rewards/accuracies", rewards["chosen"] > rewards["rejected"], units)
    if pairs.chosen.reference is not None:
        record("kl", pairs.chosen.ratio + pairs.rejected.ratio, 2 * units)
    if options.uses_likelihood:
        # the scale makes the sum over the step a mean over tokens times the units; so the count is of units
        record("nll", pairs.nll * pairs.nll_scale, units)
