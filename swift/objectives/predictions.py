"""What a model said of units: the outputs of a probe by units and their sequences, for metrics over all of them.

Knows nothing of models or loops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from swift.data.loading.batch import Batch


@dataclass(frozen=True)
class Prediction:
    """What a model said of one unit.

    Attributes:
        values: the unit's; kinds: of its sequences.
        outputs: of each sequence, [its targets, ...], as the probe gave them; [1, ...] where their mean is wanted.
    """

    values: tuple[float, ...]
    kinds: tuple[int, ...]
    outputs: tuple[np.ndarray, ...]


class Report(NamedTuple):
    """Metrics by name, and words for the user beside them (a table), if there are any."""

    numbers: dict[str, float]
    words: str = ""


def predictions(batch: Batch, outputs: torch.Tensor, *, means: bool = False) -> list[Prediction]:
    """Outputs of targets, [targets, ...], by units and their sequences; as means over the targets of a sequence if
    that is wanted."""
    sequences = batch.sequences
    assert sequences is not None
    found = outputs.float().cpu().numpy()
    owners, units, kinds = (t.cpu().numpy() for t in (sequences.target, sequences.unit, sequences.kind))
    result = []
    for number, values in enumerate(sequences.values):
        members = np.flatnonzero(units == number)
        said = tuple(found[owners == member] for member in members)
        if means:
            said = tuple(each if len(each) == 1 else _mean(each) for each in said)
        result.append(Prediction(values, tuple(kinds[members].tolist()), said))
    return result


def _mean(outputs: np.ndarray) -> np.ndarray:
    return outputs.mean(0, dtype=np.float64, keepdims=True).astype(outputs.dtype)
