"""Keys and values of all requests, in blocks of a few tokens, as many as the memory budget allows.

The tensors only; who owns which block is `blocks`' business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
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
        layers: of each attention layer, by its number.
        num_blocks: blocks that requests can have; one more is made for what is written and never read.
        block_size: tokens of a block.
        dtype, device: of the tensors.

    Attributes:
        keys: of each layer, [blocks, heads, key_dim, block_size]: transposed, so that the scores of one block are a sum
            over key_dim of vectors of block_size numbers.
        values: of each layer, [blocks, heads, block_size, value_dim].
        arrays: of each layer, for compiled loops (`kernels`): both as numpy arrays that share their memory, bfloat16 as
            uint16. Empty where they can't.
        place: layer number as the model counts -> which of them.
    """

    def __init__(
        self,
        layers: Mapping[int, LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        blocks = num_blocks + 1
        shapes = list(layers.values())
        self.place = {number: at for at, number in enumerate(layers)}
        self.keys = [_storage((blocks, s.heads, s.key_dim, block_size), dtype, device) for s in shapes]
        self.values = [_storage((blocks, s.heads, block_size, s.value_dim), dtype, device) for s in shapes]
        self.arrays = []
        if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
            self.arrays = [(array_of(k), array_of(v)) for k, v in zip(self.keys, self.values, strict=True)]

    @property
    def filler_slot(self) -> int:
        """Where tokens go that only fill a row up."""
        return self.num_blocks * self.block_size

    def copy_block(self, source: int, target: int) -> None:
        """Make `target` hold what `source` holds, in all layers."""
        for stored in (*self.keys, *self.values):
            stored[target].copy_(stored[source])

    @staticmethod
    def block_bytes(layers: Mapping[int, LayerShape], block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block in all layers."""
        return sum(s.heads * (s.key_dim + s.value_dim) for s in layers.values()) * block_size * dtype.itemsize


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """A tensor on a CPU as an array that shares its memory; bfloat16, which numpy doesn't know, as uint16."""
    array: np.ndarray = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def _storage(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for a tensor; on a CPU the system gives it page by page, as it is first written to."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
