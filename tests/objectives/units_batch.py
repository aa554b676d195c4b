"""Batches of units with made-up states: what an objective gets, without a model."""

from __future__ import annotations

import torch

from swift.data.loading.batch import Batch, Sequences
from swift.data.rows import RowRef


def batch_of(
    units: list[tuple[list[int], tuple[float, ...]]], targets: list[int] | None = None, step: dict | None = None
) -> Batch:
    """A batch of units (kinds of their sequences, values); `targets` of each sequence, 1 by default."""
    kinds = [kind for unit, _ in units for kind in unit]
    counts = targets or [1] * len(kinds)
    sequences = Sequences(
        target=torch.repeat_interleave(torch.arange(len(kinds)), torch.tensor(counts, dtype=torch.int64)),
        unit=torch.tensor([number for number, (unit, _) in enumerate(units) for _ in unit], dtype=torch.int64),
        kind=torch.tensor(kinds, dtype=torch.int64),
        values=[values for _, values in units],
        step=step or {},
    )
    number = sum(counts)
    index = torch.arange(number)
    return Batch(
        input_ids=torch.zeros(1, max(number, 1), dtype=torch.int64),
        position_ids=torch.zeros(1, max(number, 1), dtype=torch.int64),
        borders=None,
        attention_mask=None,
        target_index=index,
        target_ids=torch.zeros(number, dtype=torch.int64),
        target_weights=torch.ones(number),
        refs=[RowRef("rows.jsonl", line + 1) for line in range(len(units))],
        num_tokens=number,
        sequences=sequences,
    )
