"""What a process that encodes ahead does with the rows it is sent.

A file of its own, since such a process should start in a moment: nothing here imports torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from swift.data.pipeline import Chunk, ChunkResult, RowResult, Task
from swift.data.rows import Row, RowProblem
from swift.data.selfcog import Identity


@dataclass
class StreamTask(Task):
    """Reads and encodes rows of several files and sources at once.

    Attributes:
        identities: by source, the names to fill in when its rows are self-cognition rows.
    """

    identities: dict[int, Identity] = field(default_factory=dict)

    def run(self, chunk: Any) -> ChunkResult:
        """Parse, normalise and encode documents; `chunk` is a list of (source, ref, raw row)."""
        result = ChunkResult([], np.empty(0, np.int32), np.empty(0, np.float32), Counter(), set(), Counter(), [])
        rows: list[Row] = []
        good: list[RowResult] = []
        for source, ref, raw in chunk:
            fate = RowResult(ref.line)
            result.rows.append(fate)
            try:
                rows.append(self._read(Chunk(ref.file, [], self.identities.get(source)), ref.line, raw, fate, result))
                good.append(fate)
            except RowProblem as problem:
                fate.problem = problem
        if self.encoder:
            self._encode(self.encoder, rows, good, result)
        if np.array_equal(result.loss_weights, result.loss_weights.astype(bool)):
            result.loss_weights = result.loss_weights.astype(np.uint8)  # a quarter of the bytes to send
        return result
