"""The processes of a data-parallel run: joining, small reductions, waiting for one another.

A run of one process uses the same object with everything a no-op, so no caller asks how many there are.
"""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from swift.config.cluster import Cluster
from swift.core.errors import SwiftError, first_line
from swift.core.interfaces import interface_towards
from swift.core.logging import get_logger, local_rank, rank, world_size
from swift.distributed.handshake import JOIN_TIMEOUT_S, Member, describe_self, meet, node_names, reach_store
from swift.distributed.mesh import Axis
from swift.distributed.placement import rank_order

T = TypeVar("T")

_TIMEOUT = timedelta(minutes=30)
_WATCH_EVERY_S = 1.0
_joins = itertools.count()  # of start_process_group; the store may outlive a group
_calls = itertools.count()  # of from_main; equal on all ranks, since all make the same calls


@dataclass(frozen=True)
class ProcessGroup:
    """This process's place among the others.

    Attributes:
        rank: number of this process, from 0; world_size: number of processes.
        local_rank: number within this node.
        members: what every process said of itself when they met; empty for one process or a part of them.
        handle: the group in torch's terms; None for all processes.
    """

    rank: int
    world_size: int
    local_rank: int
    handle: Any = None
    members: tuple[Member, ...] = ()

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
        dist.all_reduce(tensor, group=self.handle)
        return tensor.tolist()

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world_size > 1:
            dist.barrier(group=self.handle)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.handle)
        return values

    def from_main(self, make: Callable[[], T], *, watch: Callable[[], None] | None = None) -> T:
        """Run `make` on rank 0 and give its result, or raise its exception, on every rank.

        Rank 0 may take as long as it needs (to encode a large data set, to write a large checkpoint): the others ask
        the store whether it is done instead of waiting in a collective, which would time out.

        Args:
            make: what rank 0 does.
            watch: called now and then by those who wait; raises when it finds rank 0 gone.
        """
        if self.world_size == 1:
            return make()
        store, key = dist.distributed_c10d._get_default_store(), f"from_main/{next(_calls)}"
        box: list[Any] = [None, None]
        error: BaseException | None = None
        if self.main:
            try:
                box[0] = make()
            except BaseException as caught:  # the others must not wait for a result that never comes
                error, box[1] = caught, _portable(caught)
            store.set(key, "done")
        else:
            pause_s = 0.001
            looked_s = time.monotonic()
            while not _is_set(store, key):  # should rank 0 die, the launcher ends the others
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.2)
                if watch is not None and time.monotonic() - looked_s > _WATCH_EVERY_S:
                    watch()
                    looked_s = time.monotonic()
        dist.broadcast_object_list(box, src=0)
        if error is not None or box[1] is not None:
            raise error or box[1]
        return box[0]

    def along(self, axis: Axis) -> ProcessGroup:
        """The processes along one axis of the mesh; `from_main` and `close` are for all processes only."""
        return ProcessGroup(axis.rank, axis.size, self.local_rank, axis.group)

    def close(self) -> None:
        """Leave the group."""
        if self.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _is_set(store: Any, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RuntimeError as error:  # the store lives in rank 0 or its launcher
        raise SwiftError(
            f"rank 0, or its launcher, is gone: {error}", where="rank 0", fix="look at rank 0's own messages"
        ) from error


def _portable(error: BaseException) -> BaseException:
    """`error` if it survives the way to another process, else an error that tells the same."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:  # a process boundary: whatever an exception's own pickling code raises
        pass
    return SwiftError(f"{type(error).__name__}: {error}", where="rank 0")


def start_process_group(
    device_type: str,
    *,
    timeout: timedelta = _TIMEOUT,
    join_timeout_s: float = JOIN_TIMEOUT_S,
    settings: Mapping[str, Any] | None = None,
    cluster: Cluster | None = None,
) -> ProcessGroup:
    """Join the group that the launcher's environment describes (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    Args:
        device_type: `cuda` communicates by NCCL, anything else by gloo.
        timeout: how long a collective may wait for the slowest rank; `from_main` is not bound by it.
        join_timeout_s: how long to wait until all ranks are there.
        settings: what must be the same on every rank, by name.
        cluster: the machines' switches; ranks that aren't numbered by switch and machine are numbered anew (in RANK
            too), since neighbours in number talk most.

    Raises:
        SwiftError: ranks are missing, can't be reached, or differ in settings or versions; on every rank.
    """
    group = ProcessGroup(rank(), world_size(), local_rank())
    if group.world_size == 1 or dist.is_initialized():
        return group
    if device_type == "cuda":
        torch.cuda.set_device(group.local_rank)
    else:
        _choose_gloo_interface()
    # fully_shard itself calls what torch has given new names; a user can't do anything about it
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"join/{attempt}/{next(_joins)}", reach_store(join_timeout_s))
    shared = settings or {}
    own = describe_self(device_type, shared)
    members = _renumbered(meet(store, own, shared, join_timeout_s), cluster)
    group = replace(group, rank=rank(), members=members)
    try:
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            store=store,
            rank=group.rank,
            world_size=group.world_size,
            timeout=timedelta(seconds=join_timeout_s),
        )
    except RuntimeError as error:
        raise SwiftError(
            f"rank {group.rank} ({own.host}) can't be connected with the others: {first_line(error)}",
            where=f"{own.address or 'the address of the host name'}, port chosen by the system",
            fix="set GLOO_SOCKET_IFNAME (GPUs: NCCL_SOCKET_IFNAME) to the interface on which the machines see each "
            "other, and let the firewall pass all ports between them",
        ) from error
    dist.distributed_c10d._set_pg_timeout(timeout)
    return group


def _renumbered(members: tuple[Member, ...], cluster: Cluster | None) -> tuple[Member, ...]:
    """The members in their places; this process's RANK becomes its new number."""
    order = rank_order(node_names(members), cluster)
    old = rank()
    os.environ["RANK"] = str(order.index(old))
    if old == 0 and list(order) != sorted(order):
        get_logger().info("ranks are numbered anew, by switch and machine; the launcher's numbers: %s", _listed(order))
    return tuple(replace(members[number], rank=place) for place, number in enumerate(order))


def _listed(order: tuple[int, ...]) -> str:
    return " ".join(map(str, order[:32])) + (" …" if len(order) > 32 else "")


def _choose_gloo_interface() -> None:
    """The one over which the others are reached: gloo would look up the host's name, which often means the loopback.

    Within one machine it is the loopback interface; `lo` is Linux's name for it.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or sys.platform != "linux":
        return
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "29500")
    alone = os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE", "1")
    if alone or host in ("127.0.0.1", "localhost"):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        return
    name = interface_towards(host, int(port))
    if name == "lo":  # rank 0's own name may be written down as a loopback address: then the way to elsewhere
        name = interface_towards("192.0.2.1", 9)
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name
