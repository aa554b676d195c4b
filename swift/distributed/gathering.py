"""Bring spread tensors to rank 0, one at a time: it holds one whole tensor, the others only what they have.

Knows nothing about what is done with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from swift.distributed.pieces import Piece, pieces_of
from swift.distributed.process_group import ProcessGroup
from swift.distributed.spread import local_tensor


@dataclass
class Found:
    """A tensor of which processes have told: its shape, and who sends which box."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: dict[tuple[int, ...], tuple[int, Piece]]


class Gathered(Protocol):
    """Tensors by name, which come to rank 0 as a whole: all processes call `whole` for the same names in turn."""

    @property
    def found(self) -> Mapping[str, Found]: ...

    def whole(self, name: str) -> torch.Tensor | None: ...


class Gathering:
    """All tensors that any process names, each as a whole on rank 0.

    Args:
        tensors: what this process holds; a tensor of one name is the same on all processes, or cut over them.
        group: all processes. Every one makes this object, then calls `whole` for the same names in the same order.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], group: ProcessGroup) -> None:
        self._tensors, self._group = dict(tensors), group
        own = {name: (tuple(t.shape), t.dtype, pieces_of(t)) for name, t in self._tensors.items()}
        self.found: dict[str, Found] = {}
        for rank, theirs in enumerate(group.gather(own)):
            for name, (shape, dtype, pieces) in theirs.items():
                entry = self.found.setdefault(name, Found(shape, dtype, {}))
                for piece in pieces:
                    entry.boxes.setdefault(piece.offsets, (rank, piece))

    @torch.no_grad()
    def whole(self, name: str) -> torch.Tensor | None:
        """The tensor in host memory on rank 0; None on other ranks, which send their part."""
        entry, group = self.found[name], self._group
        made = torch.empty(entry.shape, dtype=entry.dtype) if group.main else None
        for rank, piece in entry.boxes.values():
            if rank == group.rank:
                part = piece.view(local_tensor(self._tensors[name].detach()))
                if made is None:
                    dist.send(part.to(_device()).contiguous(), 0)
                    continue
            elif made is not None:
                part = torch.empty(piece.sizes, dtype=entry.dtype, device=_device())
                dist.recv(part, rank)
            else:
                continue
            made[tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))] = part.cpu()
        return made


def _device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"
