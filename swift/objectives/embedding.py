"""Vectors of texts: the losses that draw like texts together, and their objective.

A loss is a pure function of the vectors of units: anchors, positives, negatives. Some couple units: InfoNCE takes the
other units of the step as negatives. These can't be worked out micro-batch by micro-batch, so a step has two passes,
as in GradCache (arXiv 2101.06983): the vectors of all units are measured without gradients, `couple` gives each unit's
loss and the gradient with respect to each vector, and the objective carries that gradient on. So the loss is one of the
whole step, whatever the micro-batches, and each text's gradient is the full one, as anchor and as everybody's negative.

Knows nothing of models or loops; vectors are worked out in fp32 (fp64 for fp64 states).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
from torch.nn import functional as F

from swift.core.errors import DataError, UsageError
from swift.data.loading.batch import Batch, Sequences
from swift.data.units import Kind
from swift.distributed.mesh import Axis
from swift.models.head import OutputHead
from swift.objectives.causal_lm import LossTerms
from swift.objectives.sequences import sequence_sums

Pooling = Literal["last", "mean", "cls"]


@dataclass(frozen=True)
class Units:
    """What a loss knows of vectors beside themselves; a batch's `Sequences` say the same of one micro-batch.

    Attributes:
        unit: int64 [texts], from 0; kind: int64 [texts], `Kind`.
        values: of each unit: (similarity,), or nothing where kinds say which texts are alike.
    """

    unit: torch.Tensor
    kind: torch.Tensor
    values: list[tuple[float, ...]]

    @property
    def num_units(self) -> int:
        return len(self.values)


class Grouped(Protocol):
    """`Units`, or the `Sequences` of a batch."""

    @property
    def unit(self) -> torch.Tensor: ...
    @property
    def kind(self) -> torch.Tensor: ...
    @property
    def values(self) -> list[tuple[float, ...]]: ...


class UnitLosses(NamedTuple):
    """[units] each: the loss with a gradient; the share of a unit's positives that come before all other candidates
    (None where a loss has no candidates)."""

    value: torch.Tensor
    hits: torch.Tensor | None


class EmbeddingLoss(Protocol):
    """Unit vectors [texts, size] and what they are -> the units' losses."""

    @property
    def couples(self) -> bool:
        """Whether a unit's loss depends on other units."""
        ...

    def __call__(self, vectors: torch.Tensor, units: Grouped) -> UnitLosses: ...


@dataclass(frozen=True)
class InfoNCE:
    """-log of the positive's share among the candidates of its anchor (arXiv 1807.03748), after the objective of Qwen3
    Embedding (arXiv 2506.05176, equation 1), whose last terms are options.

    With similarities s, an anchor q and its positive p, summed over the candidates that are left:

        -log [ e^{s(q,p)/t} / (e^{s(q,p)/t} + Σ_d e^{s(q,d)/t} + Σ_q' e^{s(q,q')/t} + Σ_d e^{s(p,d)/t}) ]

    A unit with several positives has the mean of their losses, none being a candidate for another.

    Attributes:
        temperature: t.
        use_batch: the texts of the step's other units are candidates too.
        hard_negatives: negatives of a unit that count: its first ones, or, if it has fewer, all of them over again
            until there are so many. None: all, once.
        mask_false_negatives: a candidate more similar to the anchor than the positive by more than `margin` is left
            out, a document from all terms.
        include_qq, include_dd: the third and the fourth term.
    """

    temperature: float = 0.1
    use_batch: bool = True
    hard_negatives: int | None = None
    mask_false_negatives: bool = False
    margin: float = 0.1
    include_qq: bool = False
    include_dd: bool = False

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise UsageError(
                f"InfoNCE divides by its temperature, {self.temperature:g}",
                where="--infonce_temperature",
                fix="a number above 0",
            )
        if self.include_qq and not self.use_batch:
            raise UsageError(
                "other anchors can't be candidates when the rest of the batch is left out",
                where="--infonce_include_qq",
                fix="--infonce_use_batch true",
            )
        if self.hard_negatives is not None and self.hard_negatives < 0:
            raise UsageError(
                "a unit can't have fewer than no negatives", where="--infonce_hard_negatives", fix="0, or more"
            )

    @property
    def couples(self) -> bool:
        return self.use_batch

    def __call__(self, vectors: torch.Tensor, units: Grouped) -> UnitLosses:
        anchors = anchor_of_units(units)
        positive = torch.nonzero(units.kind == Kind.POSITIVE)[:, 0]  # a row of the matrices below for each
        documents = torch.nonzero(units.kind != Kind.ANCHOR)[:, 0]
        unit, owner = units.unit[positive], units.unit[documents]
        counted = torch.bincount(unit, minlength=len(anchors))
        if bool((counted == 0).any()):
            raise DataError("a row of InfoNCE has no positive", fix="give every row positive_messages")
        same_unit = unit[:, None] == owner[None]
        negative = units.kind[documents] == Kind.NEGATIVE
        allowed = same_unit & negative[None]
        if self.use_batch:
            allowed |= ~same_unit
        similarity = vectors[anchors][unit] @ vectors[documents].T
        own = (vectors[anchors][unit] * vectors[positive]).sum(1)
        limit = (own.detach() + self.margin)[:, None]
        if self.mask_false_negatives:
            allowed &= similarity.detach() <= limit
        closed = torch.where(allowed, 0.0, float("-inf")) + self._repeats(owner, negative).to(vectors).log()[None]
        terms = [own[:, None] / self.temperature, similarity / self.temperature + closed]
        if self.include_qq:
            between = vectors[anchors][unit] @ vectors[anchors].T
            others = unit[:, None] != torch.arange(len(anchors), device=unit.device)[None]
            if self.mask_false_negatives:
                others &= between.detach() <= limit
            terms.append((between / self.temperature).masked_fill(~others, float("-inf")))
        if self.include_dd:
            terms.append(vectors[positive] @ vectors[documents].T / self.temperature + closed)
        losses = torch.cat(terms, 1).logsumexp(1) - terms[0][:, 0]
        share = (1.0 / counted.to(vectors))[unit]
        nearest = similarity.detach().masked_fill(torch.isinf(closed), float("-inf"))
        before = F.pad(nearest, (0, 1), value=float("-inf")).amax(1) < own.detach()
        zeros = vectors.new_zeros(len(anchors))
        return UnitLosses(zeros.index_add(0, unit, losses * share), zeros.index_add(0, unit, before * share))

    def _repeats(self, owner: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
        """[documents]: how often each counts as a candidate."""
        repeats = torch.ones_like(owner)
        if self.hard_negatives is None:
            return repeats
        for unit in owner[negative].unique().tolist():
            own = torch.nonzero(negative & (owner == unit))[:, 0]
            whole, rest = divmod(self.hard_negatives, len(own))
            repeats[own] = whole
            repeats[own[:rest]] += 1
        return repeats


class Pairs(NamedTuple):
    """Each text that isn't an anchor with its anchor: cosine, wanted similarity, unit, and 1 / pairs of the unit."""

    cosine: torch.Tensor
    label: torch.Tensor
    unit: torch.Tensor
    share: torch.Tensor

    def to_units(self, losses: torch.Tensor, num_units: int) -> UnitLosses:
        """The mean of a unit's pairs."""
        return UnitLosses(losses.new_zeros(num_units).index_add(0, self.unit, losses * self.share), None)


def pairs_of(vectors: torch.Tensor, units: Grouped) -> Pairs:
    """A unit's value is the similarity that its pair should have; without one, positives should have 1, negatives 0."""
    anchors = anchor_of_units(units)
    other = torch.nonzero(units.kind != Kind.ANCHOR)[:, 0]
    unit = units.unit[other]
    kinds = (units.kind[other] == Kind.POSITIVE).tolist()
    labels = [
        float(units.values[u][0]) if units.values[u] else float(kind)
        for u, kind in zip(unit.tolist(), kinds, strict=True)
    ]
    share = 1.0 / torch.bincount(unit, minlength=len(anchors)).to(vectors)
    return Pairs((vectors[anchors][unit] * vectors[other]).sum(1), vectors.new_tensor(labels), unit, share[unit])


@dataclass(frozen=True)
class CosineSimilarity:
    """(cos - wanted similarity)² of each pair."""

    couples: bool = field(default=False, init=False)

    def __call__(self, vectors: torch.Tensor, units: Grouped) -> UnitLosses:
        pairs = pairs_of(vectors, units)
        return pairs.to_units((pairs.cosine - pairs.label).square(), len(units.values))


@dataclass(frozen=True)
class Contrastive:
    """½ [y d² + (1 - y) max(0, m - d)²] with d = 1 - cos (Hadsell et al., CVPR 2006, equation 4).

    Attributes:
        margin: m.
        hard_only: of the step, only pairs count that are on the wrong side of the other kind: alike ones farther apart
            than the nearest unlike pair, unlike ones nearer than the farthest alike pair; without the ½. Where the
            step has no pair of the other kind all of them count.
    """

    margin: float = 0.5
    hard_only: bool = False

    @property
    def couples(self) -> bool:
        return self.hard_only

    def __call__(self, vectors: torch.Tensor, units: Grouped) -> UnitLosses:
        pairs = pairs_of(vectors, units)
        distance, label = 1 - pairs.cosine, pairs.label
        apart = (self.margin - distance).clamp_min(0).square()
        losses = label * distance.square() + (1 - label) * apart
        if not self.hard_only:
            return pairs.to_units(0.5 * losses, len(units.values))
        alike, at = label > 0.5, distance.detach()
        hard = torch.ones_like(alike)
        if bool(alike.any()) and not bool(alike.all()):
            hard = torch.where(alike, at > at[~alike].min(), at < at[alike].max())
        return pairs.to_units(losses * hard, len(units.values))


@dataclass(frozen=True)
class CoSENT:
    """log(1 + Σ e^{k (cos_j - cos_i)}) over all couples of pairs i, j of the step where i should be more similar than j
    (Su, "CoSENT", 2022; Huang et al., TASLP 2024). One number for the step, which each unit is given.

    Attributes:
        scale: k.
    """

    scale: float = 20.0
    couples: bool = field(default=True, init=False)

    def __call__(self, vectors: torch.Tensor, units: Grouped) -> UnitLosses:
        pairs = pairs_of(vectors, units)
        differences = self.scale * (pairs.cosine[None] - pairs.cosine[:, None])  # [i, j]
        wrong = differences.masked_fill(pairs.label[:, None] <= pairs.label[None], float("-inf"))
        whole = F.pad(wrong.flatten(), (1, 0)).logsumexp(0)
        return UnitLosses(whole.expand(len(units.values)), None)


@dataclass(frozen=True)
class Matryoshka:
    """The first `dims` numbers of a vector are trained as vectors too (arXiv 2205.13147, equation 1): the loss is that
    of the whole vectors plus `weights` (default: 1 each) times those of their heads."""

    dims: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.weights and len(self.weights) != len(self.dims):
            raise UsageError(
                f"{len(self.weights)} weights for {len(self.dims)} sizes of vectors",
                where="--mrl_dims",
                fix="a weight for each",
            )

    def heads(self, size: int) -> list[tuple[int, float]]:
        """Sizes below the whole one, and their weights.

        Raises:
            UsageError: a size is none that a vector of `size` numbers has.
        """
        for dim in self.dims:
            if not 0 < dim <= size:
                raise UsageError(
                    f"a vector of {size} numbers has no first {dim}", where="--mrl_dims", fix=f"sizes from 1 to {size}"
                )
        return [(d, w) for d, w in zip(self.dims, self.weights or (1.0,) * len(self.dims), strict=True) if d < size]


def anchor_of_units(units: Grouped) -> torch.Tensor:
    """int64 [units]: where each unit's anchor is.

    Raises:
        DataError: a unit has none, or several, or nothing beside it.
    """
    place = torch.nonzero(units.kind == Kind.ANCHOR)[:, 0]
    number = len(units.values)
    found = torch.bincount(units.unit[place], minlength=number)
    texts = torch.bincount(units.unit, minlength=number)
    if bool((found != 1).any()) or bool((texts < 2).any()):
        raise DataError(
            "a row for vectors needs one text and at least one to compare it with",
            fix="give every row positive_messages",
        )
    return torch.empty_like(found).scatter(0, units.unit[place], place)


def unit_losses(
    features: torch.Tensor, units: Grouped, loss: EmbeddingLoss, matryoshka: Matryoshka = Matryoshka()
) -> UnitLosses:
    """The units' losses as a function of pooled states [texts, hidden], which are normalised here."""
    whole = loss(F.normalize(features, dim=1), units)
    value = whole.value
    for dim, weight in matryoshka.heads(features.shape[1]):
        value = value + weight * loss(F.normalize(features[:, :dim], dim=1), units).value
    return UnitLosses(value, whole.hits)


class Coupled(NamedTuple):
    """Of a whole step, without gradients: the losses [units], the gradient of their sum with respect to each pooled
    state [texts, hidden], and hits [units] (None where the loss has none)."""

    value: torch.Tensor
    cotangent: torch.Tensor
    hits: torch.Tensor | None


def couple(
    features: torch.Tensor, units: Grouped, loss: EmbeddingLoss, matryoshka: Matryoshka = Matryoshka()
) -> Coupled:
    """The losses of a step and what the second pass carries on, from the pooled states of all of its texts.

    Args:
        features: [texts, hidden]; fp64 stays, all else is worked out in fp32.
    """
    leaf = wide(features.detach()).clone().requires_grad_()
    with torch.enable_grad(), torch.autocast(leaf.device.type, enabled=False):
        losses = unit_losses(leaf, units, loss, matryoshka)
        (cotangent,) = torch.autograd.grad(losses.value.sum(), leaf)
    return Coupled(losses.value.detach(), cotangent, losses.hits)


def join_units(parts: Sequence[Grouped]) -> Units:
    """The units of several micro-batches, or ranks, one after another."""
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + len(part.values))
    return Units(
        torch.cat([part.unit + start for part, start in zip(parts, starts[:-1], strict=True)]),
        torch.cat([part.kind for part in parts]),
        [values for part in parts for values in part.values],
    )


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """In fp64 if it is, else in fp32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def pool(hidden: torch.Tensor, sequences: Sequences, how: Pooling, axis: Axis | None = None) -> torch.Tensor:
    """States of targets [targets, hidden] -> of sequences [sequences, hidden], in fp32 or fp64.

    Args:
        how: `mean` over a sequence's targets; `last` and `cls` say that it has one.
        axis: ranks that share the row. All get all sequences; each has the gradient of its own targets.
    """
    sums = sequence_sums(wide(hidden), sequences, axis)
    if how != "mean":
        return sums
    ones = torch.ones(len(hidden), dtype=sums.dtype, device=sums.device)
    return sums / sequence_sums(ones, sequences, axis).clamp_min(1)[:, None]


@dataclass(frozen=True)
class EmbeddingObjective:
    """Vectors of texts by one of the losses above.

    Where the loss couples units it reads what `couple` gave for the batch's own sequences and units:
    `sequences.facts["cotangent"]` [sequences, hidden], `["value"]` [units], and `["hits"]` [units] if there are any.

    Attributes:
        axis: ranks that share a row (`cp`).
    """

    loss: EmbeddingLoss
    pooling: Pooling = "last"
    matryoshka: Matryoshka = Matryoshka()
    axis: Axis | None = None

    def __call__(self, hidden: torch.Tensor, head: OutputHead, batch: Batch) -> LossTerms:
        """hidden: [targets, hidden]; the head isn't used. Adds up the units' losses."""
        sequences = batch.sequences
        assert sequences is not None  # what the method's layout asks for
        with torch.autocast(hidden.device.type, enabled=False):
            features = pool(hidden, sequences, self.pooling, self.axis)
            if self.loss.couples:
                facts = sequences.facts
                carried = (facts["cotangent"].to(features) * features).sum()
                total, value, hits = carried, facts["value"].sum(), facts.get("hits")
            else:
                losses = unit_losses(features, sequences, self.loss, self.matryoshka)
                total, value, hits = losses.value.sum(), losses.value.detach().sum(), losses.hits
        counted = float(sequences.counted)
        terms = LossTerms(total - total.detach() + value.to(total) * counted, batch.weight)
        if hits is not None:
            terms.sums["accuracy"], terms.counts["accuracy"] = hits.sum() * counted, batch.weight
        return terms

    def probe(self, hidden: torch.Tensor, head: OutputHead, batch: Batch) -> torch.Tensor:
        """What is measured before the step and at evaluation: states of targets [targets, hidden]; `pool` follows."""
        return wide(hidden)

    def evaluation(self) -> EmbeddingObjective:
        """The same."""
        return self
