"""Plays one process of a run of any size in this process alone: groups in which nobody else is.

Collectives return at once and move nothing, so nothing that a step computes means anything; its shapes do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def pretend(rank: int, world_size: int) -> Iterator[None]:
    """Be process `rank` of `world_size` within the context; no process group may exist before."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
