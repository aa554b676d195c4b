"""Runs an unmodified Hugging Face decoder over the pieces of a step, and gives the logits that are wanted.

All tokens of a step lie in one row: [1, rows]. The model sees token ids and positions; attention and linear layers find
the rest in the step (`running`). Knows nothing of requests beyond their pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from swift.inference.paged.cache import KVCache
from swift.inference.paged.sequence import Piece, table_of
from swift.inference.paged.step import Step, running
from swift.models.head import find_decoder, find_head
from swift.models.prepare import first_position

# oneDNN multiplies fewer rows than this by other kernels; filled up, a row's result doesn't depend on their number
MIN_ROWS = 4


class ModelRunner:
    """One model and its cache.

    Args:
        model: a causal language model whose attention implementation is `paged`.

    Attributes:
        cache: of keys and values; to be set before anything runs.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache: KVCache | None = None
        self._decoder = find_decoder(model)
        self._head = find_head(model)
        self._device = model.get_input_embeddings().weight.device
        self._first_position = first_position(self._decoder)

    @torch.inference_mode()
    def run(self, pieces: Sequence[Piece[Any]]) -> torch.Tensor:
        """Compute the pieces.

        Returns:
            fp32 [wanted rows, vocab], in the order of `pieces` and of `Piece.wants`.
        """
        step, ids, positions, wanted = self._step(pieces)
        rows = self._compute(step, ids, positions, wanted)
        if not len(rows):
            return torch.empty(0, 0, device=rows.device)
        step.adapter_rows = _wanted_rows(pieces)
        with running(step):
            return self._head.logits(rows)

    @torch.inference_mode()
    def hidden(self, pieces: Sequence[Piece[Any]]) -> torch.Tensor:
        """Hidden states instead: [wanted rows, hidden]."""
        return self._compute(*self._step(pieces))

    def copy_block(self, source: int, target: int) -> None:
        """Make a block of the cache hold what another one holds."""
        assert self.cache is not None
        self.cache.copy_block(source, target)

    def _compute(self, step: Step, ids: np.ndarray, positions: np.ndarray, wanted: list[int]) -> torch.Tensor:
        """Hidden states of the wanted rows."""
        with running(step):
            hidden = self._decoder(
                input_ids=torch.from_numpy(ids)[None].to(self._device),
                position_ids=torch.from_numpy(positions)[None].to(self._device),
                use_cache=False,
            ).last_hidden_state[0]
        return hidden[torch.tensor(wanted, dtype=torch.int64, device=hidden.device)]

    def _step(self, pieces: Sequence[Piece[Any]]) -> tuple[Step, np.ndarray, np.ndarray, list[int]]:
        """The step, ids and positions [rows], and the rows that are wanted."""
        assert self.cache is not None, "the engine sleeps"
        size = self.cache.block_size
        order = sorted(range(len(pieces)), key=lambda k: pieces[k].sequence.adapter)
        num_tokens = sum(len(piece.tokens) for piece in pieces)
        rows = max(MIN_ROWS, num_tokens)
        ids = np.zeros(rows, dtype=np.int64)
        positions = np.zeros(rows, dtype=np.int64)
        slots = np.full(rows, self.cache.filler_slot, dtype=np.int64)
        spans = np.empty((len(pieces), 3), dtype=np.int32)
        width = max(len(piece.sequence.blocks) for piece in pieces)
        tables = np.empty((len(pieces), width), dtype=np.int32)
        offsets = [0] * len(pieces)
        adapter_rows: list[tuple[int, int, int]] = []
        row = 0
        for place, k in enumerate(order):
            piece = pieces[k]
            count = len(piece.tokens)
            offsets[k] = row
            spans[place] = row, count, piece.start
            tables[place] = table = table_of(piece.sequence.blocks, width)
            at = np.arange(piece.start, piece.start + count)
            ids[row : row + count] = piece.tokens
            positions[row : row + count] = at
            slots[row : row + count] = table[at // size].astype(np.int64) * size + at % size
            _extend(adapter_rows, piece.sequence.adapter, row, count)
            row += count
        step = Step(self.cache, rows, slots, spans, tables, adapter_rows)
        wanted = [offsets[k] + row for k, piece in enumerate(pieces) for row in piece.wants]
        return step, ids, positions + self._first_position, wanted


def _wanted_rows(pieces: Sequence[Piece[Any]]) -> list[tuple[int, int, int]]:
    """Adapters of the rows that the head gets."""
    entries: list[tuple[int, int, int]] = []
    row = 0
    for piece in pieces:
        _extend(entries, piece.sequence.adapter, row, len(piece.wants))
        row += len(piece.wants)
    return entries


def _extend(entries: list[tuple[int, int, int]], adapter: int, row: int, count: int) -> None:
    """Add rows to the last entry if they are the same adapter's, else a new one."""
    if not adapter or not count:
        return
    if entries and entries[-1][0] == adapter and entries[-1][1] + entries[-1][2] == row:
        entries[-1] = (adapter, entries[-1][1], entries[-1][2] + count)
    else:
        entries.append((adapter, row, count))
