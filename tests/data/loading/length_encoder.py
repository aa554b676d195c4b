"""An encoder without a model. A file of its own, so that processes that use it start without torch."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from swift.data.rows import RowProblem


@dataclass
class Example:
    input_ids: np.ndarray
    loss_weights: np.ndarray
    truncated: int = 0
    notes: np.ndarray | None = None


@dataclass
class LengthEncoder:
    """A text "7 3" becomes examples of 7 and 3 tokens; "0" is refused, "long" is too long."""

    counts: Counter = field(default_factory=Counter)
    notices: list = field(default_factory=list)
    vocab_size: int = 1000

    def encode_batch(self, rows):
        return [self._encode(row) for row in rows]

    def fingerprint(self):
        return "lengths"

    def _encode(self, row):
        if row.text == "long":
            return RowProblem("too_long", "it is too long", tokens=999)
        if row.text == "die":
            os._exit(9)
        self.counts["rows"] += 1
        lengths = [int(word) for word in row.text.split()]
        if 0 in lengths:
            return RowProblem("no_tokens", "it has no tokens")
        return [
            Example(np.full(n, row.ref.line % 1000, np.int32), np.r_[0, np.ones(n - 1)].astype(np.float32))
            for n in lengths
        ]
