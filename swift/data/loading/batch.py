"""Encoded examples to the tensors of one micro-batch.

An example is a sequence in which the next token is predicted, or a unit of several sequences (`swift.data.units`) with
a prompt in common. The prompt of a unit is laid down once and seen by all of its sequences where attention can do that
(`Layout.share_prefix`); else each sequence has its own copy.

This file knows nothing of models or devices: it deals in NumPy arrays and CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from swift.data.rows import RowRef
from swift.data.units import NO_NOTES, Unit, written_out_lengths

T = TypeVar("T")
# Adds facts to a batch of the examples with these numbers.
Annotate = Callable[["Batch", Sequence[int]], None]


class Examples(Protocol):
    """A dataset of encoded examples (`TokenDataset`)."""

    @property
    def lengths(self) -> np.ndarray: ...
    def __len__(self) -> int: ...
    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]: ...
    def notes(self, index: int) -> np.ndarray: ...
    def ref(self, index: int) -> RowRef: ...


class Tokens(NamedTuple):
    """An example: ids int32 [n], loss weights float32 [n], and the notes of a unit, float64 (none for a sequence)."""

    ids: np.ndarray
    weights: np.ndarray
    notes: np.ndarray = NO_NOTES


def tokens_of(examples: Examples, index: int) -> Tokens:
    """One example with its notes."""
    return Tokens(*examples.tokens(index), examples.notes(index))


class WrittenOut:
    """The same examples, with the lengths that units have when no sequence shares its prompt."""

    def __init__(self, examples: Examples) -> None:
        self._examples = examples
        self.lengths = written_out_lengths(examples.lengths, [examples.notes(i) for i in range(len(examples))])

    def __len__(self) -> int:
        return len(self._examples)

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self._examples.tokens(index)

    def notes(self, index: int) -> np.ndarray:
        return self._examples.notes(index)

    def ref(self, index: int) -> RowRef:
        return self._examples.ref(index)


def longest_sequence(examples: Examples) -> int:
    """Tokens of the longest sequence: of the longest example, but where examples are units of several."""
    if not len(examples.notes(0)):
        return int(examples.lengths.max())
    return max(Unit.read(examples.notes(number)).longest for number in range(len(examples)))


@dataclass(frozen=True)
class Layout:
    """How examples share a micro-batch.

    Attributes:
        units_per_micro_batch: examples (or packed rows) in a micro-batch on one rank.
        micro_batches: micro-batches a rank runs in a step.
        padding_free: lay examples end to end; False pads to the longest.
        packing_length: tokens per packed row; 0 when examples are the units.
        group_by_length: put examples of like length into the same micro-batch.
        shuffle: new order every epoch.
        pad_token_id: what fills padding; never trained on.
        units: whether examples are units of sequences; batches then have `sequences`.
        targets: whose state a target is given: `next`, the token before it, which predicts it; `last`, a sequence's
            last token, one target each; `each`, every token that weighs something.
        share_prefix: lay the prompt of a unit down once. Padding-free rows only.
        companions: give each batch the same prompts with the completions of other units.
        max_length: tokens of a sequence at most, which companions are cut to; 0: no limit.
    """

    units_per_micro_batch: int = 1
    micro_batches: int = 1
    padding_free: bool = True
    packing_length: int = 0
    group_by_length: bool = False
    shuffle: bool = True
    pad_token_id: int = 0
    units: bool = False
    targets: Literal["next", "last", "each"] = "next"
    share_prefix: bool = False
    companions: bool = False
    max_length: int = 0


@dataclass
class Sequences:
    """The sequences of a micro-batch's units.

    Attributes:
        target: int64 [targets], which sequence each target belongs to.
        unit: int64 [sequences], which unit of the micro-batch; kind: int64 [sequences], its part's `Kind`.
        values: of each unit.
        counted: whether this rank counts the units; of the ranks that share a row only the first does.
        facts: [sequences, ...] or [units, ...], worked out before the step's first gradient.
        step: numbers of the whole optimizer step, such as the divisors of means over it.
    """

    target: torch.Tensor
    unit: torch.Tensor
    kind: torch.Tensor
    values: list[tuple[float, ...]]
    counted: bool = True
    facts: dict[str, torch.Tensor] = field(default_factory=dict)
    step: dict[str, float] = field(default_factory=dict)

    @property
    def num_units(self) -> int:
        return len(self.values)

    def __len__(self) -> int:
        return len(self.unit)

    def emptied(self) -> Sequences:
        """No sequences, with all that is known of the step."""
        facts = {name: fact[:0] for name, fact in self.facts.items()}
        return replace(self, target=self.target[:0], unit=self.unit[:0], kind=self.kind[:0], values=[], facts=facts)

    def to(self, device: torch.device) -> Sequences:
        """The sequences with their tensors on `device`."""
        return replace(
            self,
            target=self.target.to(device, non_blocking=True),
            unit=self.unit.to(device, non_blocking=True),
            kind=self.kind.to(device, non_blocking=True),
            facts={name: fact.to(device, non_blocking=True) for name, fact in self.facts.items()},
        )


@dataclass
class Batch:
    """One micro-batch on one rank.

    Attributes:
        input_ids, position_ids: int64 [rows, tokens]; one row when padding-free.
        borders: segment borders in the row, from 0 to tokens; None for a padded batch.
        attention_mask: bool [rows, tokens]; None for a padding-free batch.
        target_index: int64 [targets], positions in the flattened rows whose hidden states predict.
        target_ids: int64 [targets]; target_weights: fp32 [targets].
        refs: where its rows came from.
        num_tokens: real tokens, padding not counted.
        prefixes: for each segment the stretch [start, end) of the row that its tokens see before their own, empty for
            most; None when no segment has one.
        sequences: of units; None where examples are sequences whose next tokens are predicted.
        facts: [targets, ...], worked out before the step's first gradient.
        companion: the batch's prompts with other completions (`Layout.companions`).
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    borders: list[int] | None
    attention_mask: torch.Tensor | None
    target_index: torch.Tensor
    target_ids: torch.Tensor
    target_weights: torch.Tensor
    refs: list[RowRef]
    num_tokens: int
    prefixes: list[tuple[int, int]] | None = None
    sequences: Sequences | None = None
    facts: dict[str, torch.Tensor] = field(default_factory=dict)
    companion: Batch | None = None

    @property
    def weight(self) -> float:
        """What the loss sum is divided by in all: units, or the sum of the target weights."""
        if self.sequences is not None:
            return float(self.sequences.num_units if self.sequences.counted else 0)
        return float(self.target_weights.sum(dtype=torch.float64))

    def to(self, device: torch.device) -> Batch:
        """The batch with its tensors on `device`."""
        if device.type == "cpu":
            return self
        moved = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        facts = {name: fact.to(device, non_blocking=True) for name, fact in self.facts.items()}
        sequences = None if self.sequences is None else self.sequences.to(device)
        return Batch(**{**vars(self), **moved, "facts": facts, "sequences": sequences})


def collate(examples: Examples, indices: Sequence[int], layout: Layout, annotate: Annotate | None = None) -> Batch:
    """The tensors of one micro-batch of these examples, with its companion where the layout asks for one."""
    batch = make_batch([tokens_of(examples, i) for i in indices], [examples.ref(i) for i in indices], layout)
    if layout.companions:
        others = [stranger(index, len(examples)) for index in indices]
        pairs = [(tokens_of(examples, i), tokens_of(examples, j)) for i, j in zip(indices, others, strict=True)]
        mixed = [mismatch(example, other, layout.max_length) for example, other in pairs]
        batch.companion = make_batch(mixed, batch.refs, layout)
    if annotate is not None:
        annotate(batch, indices)
    return batch


def stranger(index: int, count: int) -> int:
    """The example whose completion goes with the prompt of example `index` in a companion.

    Half of the data away: neighbours in a file often answer the same prompt. A function of the data alone, so that no
    way of cutting steps changes it.
    """
    return (index + count // 2) % count


def mismatch(example: Tokens, other: Tokens, limit: int = 0) -> Tokens:
    """The prompt of one unit with the completion of another; both have one part.

    Args:
        limit: tokens of the whole at most, at the cost of the completion; 0: as many as there are. Both units keep to
            it, so there is room for one token of a completion at least.
    """
    unit, stranger = Unit.read(example.notes), Unit.read(other.notes)
    size = min(stranger.lengths[0], limit - unit.prefix) if limit else stranger.lengths[0]
    taken = slice(stranger.prefix, stranger.prefix + size)
    ids = np.concatenate([example.ids[: unit.prefix], other.ids[taken]])
    weights = np.concatenate([example.weights[: unit.prefix], other.weights[taken]])
    return Tokens(ids, weights, Unit(unit.prefix, (size,), unit.kinds, unit.values).notes())


def with_previous(units: Sequence[Sequence[T]]) -> list[list[tuple[T, T]]]:
    """Each item with the one before it in the whole step, the first with the last: companions of examples that come
    one after another."""
    flat = [item for unit in units for item in unit]
    pairs = iter(zip(flat, flat[-1:] + flat[:-1], strict=True))
    return [[next(pairs) for _ in unit] for unit in units]


@dataclass
class _Segment:
    """A stretch of a row that attends to itself, and to the segment of number `before` if there is one."""

    ids: np.ndarray
    first_position: int = 0
    before: int | None = None


@dataclass
class _Sequence:
    """A sequence whose tokens lie in one or two segments, in their order."""

    ids: np.ndarray
    weights: np.ndarray
    segments: tuple[int, ...]
    unit: int = 0
    kind: int = 0


def make_batch(examples: Sequence[tuple[np.ndarray, ...]], refs: list[RowRef], layout: Layout) -> Batch:
    """Make the tensors of one micro-batch; no examples give a one-token batch without targets.

    The empty batch lets a rank that ran out of examples take part in the step's collectives with weight zero.

    Args:
        examples: `Tokens`, or ids and weights alone.
    """
    nothing = Tokens(np.array([layout.pad_token_id], dtype=np.int32), np.zeros(1, dtype=np.float32))
    units: list[tuple[float, ...]] = []
    segments: list[_Segment] = []
    sequences: list[_Sequence] = []
    for example in (Tokens(*parts) for parts in examples or [nothing]):
        if not (layout.units and examples):
            sequences.append(_Sequence(example.ids, example.weights, (len(segments),)))
            segments.append(_Segment(example.ids))
            continue
        unit = Unit.read(example.notes)
        _lay_out(example, unit, len(units), layout, (segments, sequences))
        units.append(unit.values)
    lengths = [len(segment.ids) for segment in segments]
    if layout.padding_free:
        width = sum(lengths)
        starts = np.cumsum([0, *lengths])[:-1].tolist()
        rows = 1
    else:
        width = max(lengths)
        starts = [i * width for i in range(len(segments))]
        rows = len(segments)
    total = rows * width
    flat_ids = np.full(total, layout.pad_token_id, dtype=np.int64)
    positions = np.zeros(total, dtype=np.int64)
    mask = np.zeros(total, dtype=bool)
    for start, segment in zip(starts, segments, strict=True):
        end = start + len(segment.ids)
        flat_ids[start:end] = segment.ids
        positions[start:end] = segment.first_position + np.arange(len(segment.ids))
        mask[start:end] = True
    index, target_ids, target_weights, counts = [], [], [], []
    for sequence in sequences:
        places = np.concatenate([starts[number] + np.arange(lengths[number]) for number in sequence.segments])
        states, targets, weights = _targets(sequence, layout.targets if examples else "next")
        index.append(places[states])
        target_ids.append(sequence.ids[targets])
        target_weights.append(weights)
        counts.append(len(states))
    heads = [segment.before for segment in segments]
    spans = [(0, 0) if head is None else (starts[head], starts[head] + lengths[head]) for head in heads]
    return Batch(
        input_ids=torch.from_numpy(flat_ids).view(rows, width),
        position_ids=torch.from_numpy(positions).view(rows, width),
        borders=[*starts, total] if layout.padding_free else None,
        attention_mask=None if layout.padding_free else torch.from_numpy(mask).view(rows, width),
        target_index=torch.from_numpy(np.concatenate(index).astype(np.int64)),
        target_ids=torch.from_numpy(np.concatenate(target_ids).astype(np.int64)),
        target_weights=torch.from_numpy(np.concatenate(target_weights).astype(np.float32)),
        refs=refs,
        num_tokens=sum(lengths) if examples else 0,
        prefixes=spans if any(end for _, end in spans) else None,
        sequences=_sequences(sequences if examples else [], counts, units) if layout.units else None,
    )


def _lay_out(
    example: Tokens, unit: Unit, number: int, layout: Layout, into: tuple[list[_Segment], list[_Sequence]]
) -> None:
    """Append the segments and the sequences of a unit."""
    segments, sequences = into
    head = example.ids[: unit.prefix]
    share = layout.share_prefix and unit.prefix > 0
    first = len(segments)
    if share:
        segments.append(_Segment(head))
    for kind, part in zip(unit.kinds, unit.parts(), strict=True):
        whole = np.concatenate([head, example.ids[part]])
        weights = np.concatenate([example.weights[: unit.prefix], example.weights[part]])
        here = (first, len(segments)) if share else (len(segments),)
        sequences.append(_Sequence(whole, weights, here, number, kind))
        segments.append(_Segment(example.ids[part], unit.prefix, first) if share else _Segment(whole))


def _targets(sequence: _Sequence, which: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places in a sequence of the states, places of the tokens that they are for, and the tokens' weights."""
    if which == "next":
        states = np.flatnonzero(sequence.weights[1:])  # token i is predicted by the state at i - 1
        return states, states + 1, sequence.weights[states + 1]
    if which == "last":
        states = np.array([len(sequence.ids) - 1])
        return states, states, np.ones(1, np.float32)
    states = np.flatnonzero(sequence.weights)
    return states, states, sequence.weights[states]


def _sequences(sequences: list[_Sequence], counts: list[int], units: list[tuple[float, ...]]) -> Sequences:
    targets = np.repeat(np.arange(len(sequences)), counts[: len(sequences)])
    return Sequences(
        target=torch.from_numpy(targets.astype(np.int64)),
        unit=torch.tensor([sequence.unit for sequence in sequences], dtype=torch.int64),
        kind=torch.tensor([sequence.kind for sequence in sequences], dtype=torch.int64),
        values=units,
    )
