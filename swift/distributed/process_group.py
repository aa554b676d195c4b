"""The processes of a data-parallel run: joining, small reductions, waiting for one another.

A run of one process uses the same object with everything a no-op, so no caller asks how many there are.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from swift.core.logging import local_rank, rank, world_size

T = TypeVar("T")

_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class ProcessGroup:
    """This process's place among the others.

    Attributes:
        rank: number of this process, from 0; world_size: number of processes.
        local_rank: number within this node.
    """

    rank: int
    world_size: int
    local_rank: int

    @property
    def main(self) -> bool:
        """Whether this process writes files and speaks for the run."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise sum over ranks, in fp64."""
        if self.world_size == 1:
            return values
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        tensor = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world_size > 1:
            dist.barrier()

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def from_main(self, make: Callable[[], T]) -> T:
        """Run `make` on rank 0 and give its result, or raise its exception, on every rank."""
        if self.world_size == 1:
            return make()
        box: list[Any] = [None, None]
        if self.main:
            try:
                box[0] = make()
            except BaseException as error:  # the others must not wait for a result that never comes
                box[1] = error
        dist.broadcast_object_list(box, src=0)
        if box[1] is not None:
            raise box[1]
        return box[0]

    def close(self) -> None:
        """Leave the group."""
        if self.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def start_process_group(device_type: str) -> ProcessGroup:
    """Join the group that the launcher's environment describes (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    Args:
        device_type: `cuda` communicates by NCCL, anything else by gloo.
    """
    group = ProcessGroup(rank(), world_size(), local_rank())
    if group.world_size > 1 and not dist.is_initialized():
        if device_type == "cuda":
            torch.cuda.set_device(group.local_rank)
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo") if _single_node() else None
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=_TIMEOUT)
    return group


def _single_node() -> bool:
    return os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost")
