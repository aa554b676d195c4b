"""Keys and values of all requests, in blocks of a few tokens, as many as the memory budget allows.

The tensors only; who owns which block is `blocks`' business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerShape:
    """Heads of keys and values of one layer, and how wide they are."""

    heads: int
    key_dim: int
    value_dim: int


class KVCache:
    """Storage of keys and values.

    Args:
        layers: one for each attention layer.
        num_blocks: blocks that requests can have; one more is made for what is written and never read.
        block_size: tokens of a block.
        dtype, device: of the tensors.

    Attributes:
        keys: of each layer, [blocks, heads, key_dim, block_size]: transposed, so that the scores of one block are a sum
            over key_dim of vectors of block_size numbers.
        values: of each layer, [blocks, heads, block_size, value_dim].
    """

    def __init__(
        self, layers: Sequence[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        options = {"dtype": dtype, "device": device}
        blocks = num_blocks + 1
        # zeros: what no token was written to yet is multiplied by weights of zero, which must not be NaN
        self.keys = [torch.zeros(blocks, s.heads, s.key_dim, block_size, **options) for s in layers]
        self.values = [torch.zeros(blocks, s.heads, block_size, s.value_dim, **options) for s in layers]

    @property
    def filler_slot(self) -> int:
        """Where tokens go that only fill a row up."""
        return self.num_blocks * self.block_size

    def copy_block(self, source: int, target: int) -> None:
        """Make `target` hold what `source` holds, in all layers."""
        for stored in (*self.keys, *self.values):
            stored[target].copy_(stored[source])

    @staticmethod
    def block_bytes(layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block in all layers."""
        return sum(s.heads * (s.key_dim + s.value_dim) for s in layers) * block_size * dtype.itemsize
