"""Which examples a step trains on, and the tensors they become.

The order of an epoch is a function of (seed, epoch) alone. A position in it is one number, `consumed`: how many units
(examples, or packed rows) of this epoch were used. So the state of the loader is two integers, any step can be reached
without reading what came before, and neither world size, micro-batch size nor accumulation changes which examples share
an optimizer step.

This file knows nothing of models or devices: it deals in NumPy arrays and CPU tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from swift.data.packing import pack, packing_efficiency
from swift.data.rows import RowRef

# Examples are sorted by length inside windows of this many steps when they are grouped by length.
GROUPING_WINDOW_STEPS = 50


class Examples(Protocol):
    """A dataset of encoded examples (`TokenDataset`)."""

    lengths: np.ndarray

    def __len__(self) -> int: ...
    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]: ...
    def ref(self, index: int) -> RowRef: ...


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
    """

    units_per_micro_batch: int = 1
    micro_batches: int = 1
    padding_free: bool = True
    packing_length: int = 0
    group_by_length: bool = False
    shuffle: bool = True
    pad_token_id: int = 0


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

    @property
    def weight(self) -> float:
        """Sum of the target weights."""
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
        return Batch(**{**vars(self), **moved})


def collate(examples: Examples, indices: Sequence[int], layout: Layout) -> Batch:
    """Make the tensors of one micro-batch; an empty list gives a one-token batch without targets.

    The empty batch lets a rank that ran out of examples take part in the step's collectives with weight zero.
    """
    parts = [examples.tokens(i) for i in indices] or [
        (np.array([layout.pad_token_id], dtype=np.int32), np.zeros(1, dtype=np.float32))
    ]
    refs = [examples.ref(i) for i in indices]
    lengths = [len(ids) for ids, _ in parts]
    if layout.padding_free:
        width = sum(lengths)
        starts = np.cumsum([0, *lengths])[:-1].tolist()
        rows = 1
    else:
        width = max(lengths)
        starts = [i * width for i in range(len(parts))]
        rows = len(parts)
    total = rows * width
    flat_ids = np.full(total, layout.pad_token_id, dtype=np.int64)
    positions = np.zeros(total, dtype=np.int64)
    mask = np.zeros(total, dtype=bool)
    index, target_ids, target_weights = [], [], []
    for start, (ids, weights) in zip(starts, parts, strict=True):
        end = start + len(ids)
        flat_ids[start:end] = ids
        positions[start:end] = np.arange(len(ids))
        mask[start:end] = True
        trained = np.flatnonzero(weights[1:])  # token i is predicted by the state at i - 1
        index.append(start + trained)
        target_ids.append(ids[trained + 1])
        target_weights.append(weights[trained + 1])
    borders = [*starts, total] if layout.padding_free else None
    return Batch(
        input_ids=torch.from_numpy(flat_ids).view(rows, width),
        position_ids=torch.from_numpy(positions).view(rows, width),
        borders=borders,
        attention_mask=None if layout.padding_free else torch.from_numpy(mask).view(rows, width),
        target_index=torch.from_numpy(np.concatenate(index).astype(np.int64)),
        target_ids=torch.from_numpy(np.concatenate(target_ids).astype(np.int64)),
        target_weights=torch.from_numpy(np.concatenate(target_weights).astype(np.float32)),
        refs=refs,
        num_tokens=sum(lengths) if indices else 0,
    )


class TrainLoader:
    """Deals an epoch's units out to steps, micro-batches and ranks.

    A step takes the next `global_units` units of the epoch; the last step of an epoch takes what is left, so every
    example is seen exactly once. Micro-batches go to ranks in turn, and all ranks run the same number of them.
    """

    def __init__(self, examples: Examples, layout: Layout, *, seed: int, rank: int = 0, world_size: int = 1) -> None:
        self.examples = examples
        self.layout = layout
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self._epoch: int | None = None
        self._units: list[list[int]] = []

    @property
    def global_units(self) -> int:
        """Units in one optimizer step over all ranks and micro-batches."""
        return self.layout.units_per_micro_batch * self.layout.micro_batches * self.world_size

    def units(self, epoch: int) -> list[list[int]]:
        """The epoch's units in order; each is a list of examples (one, unless packed)."""
        if self._epoch != epoch:
            self._units = self._build(epoch)
            self._epoch = epoch
        return self._units

    def _build(self, epoch: int) -> list[list[int]]:
        generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
        order = np.arange(len(self.examples))
        if self.layout.shuffle:
            order = generator.permutation(order)
        lengths = self.examples.lengths
        if self.layout.packing_length:
            rows = pack(lengths, order, self.layout.packing_length)
            return [rows[i] for i in generator.permutation(len(rows))] if self.layout.shuffle else rows
        if self.layout.group_by_length:
            order = self._grouped(order, generator)
        return [[i] for i in order.tolist()]

    def _grouped(self, order: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Sort windows of the order by length, then shuffle the windows' steps, longest step of the epoch first.

        The longest first shows a lack of memory at once rather than after hours.
        """
        step = self.global_units
        lengths = self.examples.lengths
        steps: list[np.ndarray] = []
        for start in range(0, len(order), GROUPING_WINDOW_STEPS * step):
            window = order[start : start + GROUPING_WINDOW_STEPS * step]
            window = window[np.argsort(-lengths[window], kind="stable")]
            steps += [window[i : i + step] for i in range(0, len(window), step)]
        whole = [s for s in steps if len(s) == step]
        rest = [s for s in steps if len(s) != step]  # only the last window can leave a short step
        if self.layout.shuffle:
            whole = [whole[i] for i in generator.permutation(len(whole))]
        if whole:
            longest = max(range(len(whole)), key=lambda i: int(lengths[whole[i]].max()))
            whole.insert(0, whole.pop(longest))
        return np.concatenate([*whole, *rest]) if steps else order

    def num_units(self, epoch: int) -> int:
        """Units in an epoch; only packed rows have to be worked out for it."""
        return len(self.units(epoch)) if self.layout.packing_length else len(self.examples)

    def steps_in_epoch(self, epoch: int) -> int:
        """Optimizer steps of one whole epoch."""
        return -(-self.num_units(epoch) // self.global_units)

    def step(self, epoch: int, consumed: int) -> list[list[int]]:
        """This rank's micro-batches of the step that starts after `consumed` units: lists of example numbers."""
        units = self.units(epoch)[consumed : consumed + self.global_units]
        size = self.layout.units_per_micro_batch
        chunks = [units[i : i + size] for i in range(0, len(units), size)]
        rounds = -(-len(chunks) // self.world_size)
        mine = []
        for turn in range(rounds):
            number = turn * self.world_size + self.rank
            chunk = chunks[number] if number < len(chunks) else []
            mine.append([example for unit in chunk for example in unit])
        return mine

    def batches(self, epoch: int, consumed: int) -> list[Batch]:
        """The tensors of `step`."""
        return [collate(self.examples, indices, self.layout) for indices in self.step(epoch, consumed)]

    def efficiency(self, epoch: int = 0) -> float:
        """Share of slots that hold tokens: of packed rows, or of padded micro-batches; 1 for padding-free ones."""
        lengths = self.examples.lengths
        if self.layout.packing_length:
            return packing_efficiency(self.units(epoch), lengths, self.layout.packing_length)
        if self.layout.padding_free:
            return 1.0
        order = [unit[0] for unit in self.units(epoch)]
        size = self.layout.units_per_micro_batch
        slots = sum(len(c) * int(lengths[c].max()) for c in (order[i : i + size] for i in range(0, len(order), size)))
        return float(lengths.sum()) / slots


def evaluation_batches(
    examples: Examples, layout: Layout, *, tokens_per_batch: int, rank: int = 0, world_size: int = 1
) -> Iterator[Batch]:
    """Every example once, in batches of like length; ranks take turns and all yield the same number of batches."""
    order = np.argsort(-examples.lengths, kind="stable").tolist()
    chunks: list[list[int]] = []
    for index in order:
        size = int(examples.lengths[index])
        full = not chunks or (len(chunks[-1]) + 1) * max(size, int(examples.lengths[chunks[-1][0]])) > tokens_per_batch
        if full:
            chunks.append([])
        chunks[-1].append(index)
    for turn in range(-(-len(chunks) // world_size)):
        number = turn * world_size + rank
        yield collate(examples, chunks[number] if number < len(chunks) else [], layout)
