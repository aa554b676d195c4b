"""Gradients of a DistributedDataParallel module, exchanged bucket by bucket by one of the methods.

DistributedDataParallel hands a bucket over as soon as its gradients are there, while the backward pass goes on to
earlier layers. A thread of each rank takes the buckets in this order, which is the same on all ranks, and runs the
collectives of one after those of another; so methods can be written as plain sequences of collectives and still
overlap with the backward pass. (Chained callbacks instead of the thread could start the second collective of two
buckets in one order here and in another there.) On CPU, communication and computation then share the cores: what
overlaps is the waiting.

This file knows nothing of the trainer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from swift.config.communication import GradCompression
from swift.core.errors import UsageError
from swift.distributed.compression.methods import (
    Cast,
    Method,
    Ring2D,
    TopK,
    TwoStage,
    Whole,
    load_residuals,
    residual_state,
)
from swift.distributed.compression.powersgd import PowerSGD
from swift.distributed.mesh import Axis

DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Averaging(Protocol):
    """Replaces a bucket's gradients by their mean over ranks; `remembers` something from step to step, or doesn't."""

    remembers: bool

    def average(self, bucket: dist.GradBucket, key: Hashable) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None: ...


class Summed:
    """The mean by a method that adds up.

    The first step of a process goes whole: after it, DistributedDataParallel forms its buckets anew, in the order in
    which gradients came, so what a method remembered of the first ones would fit none of the later ones.
    """

    def __init__(self, method: Method, axis: Axis, *, remembers: bool) -> None:
        self.method, self.axis, self.remembers = method, axis, remembers
        self._whole = Whole(axis) if remembers else None

    def average(self, bucket: dist.GradBucket, key: Hashable) -> None:
        gradients = bucket.buffer().div_(self.axis.size)
        (self._whole or self.method).add_up(gradients, key)
        if bucket.is_last():
            self._whole = None

    def state_dict(self) -> dict[str, Any]:
        return residual_state(self.method)

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        load_residuals(self.method, state, device)


class GradientExchange:
    """The exchange of one run.

    Args:
        averaging: how a bucket is averaged.
        words: what is done, for the user.

    Attributes:
        timed: whether to measure `handed_over_s`.
        handed_over_s: `time.perf_counter()` when the last bucket of the latest backward pass was complete, which is
            when this rank was done computing.
    """

    without_it: str | None = "gradients that were still to be sent are lost"

    def __init__(self, averaging: Averaging, words: str) -> None:
        self.averaging = averaging
        self.words = words
        self.timed = False
        self.handed_over_s = 0.0
        self._names: dict[int, str] = {}
        self._thread = ThreadPoolExecutor(1, "gradients")
        self._stream: torch.cuda.Stream | None = None
        self._device = torch.device("cpu")

    def register(self, module: DistributedDataParallel) -> None:
        """Exchange the gradients of this module from now on."""
        self._names = {id(parameter): name for name, parameter in module.module.named_parameters()}
        self._device = next(module.module.parameters()).device
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)
        module.register_comm_hook(self, _hand_over)

    def take(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start to exchange a bucket whose gradients are complete."""
        if bucket.is_last() and self.timed:
            if self._device.type != "cpu":
                torch.accelerator.synchronize()
            self.handed_over_s = time.perf_counter()
        devices: list[int | str | torch.device] = [self._device] if self._stream is not None else []
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        ready = torch.cuda.current_stream(self._device).record_event() if self._stream is not None else None
        key = tuple(self._names[id(parameter)] for parameter in bucket.parameters())
        self._thread.submit(self._run, bucket, key, ready, future)
        return future

    def _run(
        self,
        bucket: dist.GradBucket,
        key: Hashable,
        ready: torch.cuda.Event | None,
        future: torch.futures.Future[torch.Tensor],
    ) -> None:
        context: AbstractContextManager = nullcontext()
        if self._stream is not None and ready is not None:
            self._stream.wait_event(ready)
            context = torch.cuda.stream(self._stream)
        try:
            with context, torch.no_grad():
                self.averaging.average(bucket, key)
                future.set_result(bucket.buffer())
        except BaseException as error:  # a thread's end: the backward pass, which waits, raises it
            future.set_exception(error)  # type: ignore[arg-type]  # any exception, unlike its annotation

    def state_dict(self) -> dict[str, Any]:
        """What this rank has to remember for the next step."""
        return self.averaging.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave on the same rank of as many."""
        self.averaging.load_state_dict(state, self._device)


def _hand_over(state, bucket):  # without annotations: deferred ones are strings, which it refuses
    """The hook: DistributedDataParallel wants a plain function whose second argument has this name."""
    return state.take(bucket)


def build_exchange(settings: GradCompression | None, axis: Axis, device_type: str) -> GradientExchange:
    """The exchange that the settings ask for. Every rank of the world calls it.

    Args:
        settings: None for the library's all-reduce by our own path.
        axis: all data-parallel ranks, which must be all ranks there are.

    Raises:
        UsageError: the ranks can't be laid out as asked.
    """
    size = axis.size
    if settings is None:
        return GradientExchange(Summed(Whole(axis), axis, remembers=False), f"all-reduce over {size} ranks")
    method, percent = settings.method, f"{100 * settings.ratio:g} %"
    feedback = "with" if settings.error_feedback else "without"
    if method in ("bf16", "fp16"):
        cast = Cast(axis, DTYPES[method] or torch.float32)
        return GradientExchange(Summed(cast, axis, remembers=False), f"all-reduce in {method} over {size} ranks")
    if method == "topk":
        top = TopK(axis, settings.ratio, error_feedback=settings.error_feedback)
        words = f"the largest {percent} of the gradients, {feedback} error feedback, over {size} ranks"
        return GradientExchange(Summed(top, axis, remembers=settings.error_feedback), words)
    if method == "powersgd":
        words = f"PowerSGD of rank {settings.rank} over {size} ranks from step {settings.start_step + 1} on"
        return GradientExchange(PowerSGD(settings, axis), words)
    if method == "ring2d":
        columns = settings.columns or _columns(size)
        row, column = _grid(axis, columns, ("row", "column"), device_type, '"columns"')
        words = f"rings over {size // columns} rows and {columns} columns of ranks"
        return GradientExchange(Summed(Ring2D(row, column), axis, remembers=False), words)
    node = settings.node_size or local_world_size(size)
    inside, across = _grid(axis, node, ("intra", "inter"), device_type, '"node_size"')
    second, words = across_nodes(settings, across)
    stages = TwoStage(inside, second, DTYPES[settings.intra])
    first = "" if settings.intra == "none" else f" in {settings.intra}"
    words = f"reduce-scatter and all-gather{first} within nodes of {node}, {words}"
    remembers = settings.inter == "topk" and settings.error_feedback
    return GradientExchange(Summed(stages, axis, remembers=remembers), words)


def across_nodes(settings: GradCompression, axis: Axis, things: str = "nodes") -> tuple[Method, str]:
    """The method for `inter` of two stages, and words for it."""
    if not axis:
        return Whole(axis), f"nothing across {things}: there is one"
    over = f"across {axis.size} {things}"
    if settings.inter == "topk":
        feedback = "with" if settings.error_feedback else "without"
        method = TopK(axis, settings.ratio, error_feedback=settings.error_feedback)
        return method, f"the largest {100 * settings.ratio:g} % {feedback} error feedback {over}"
    dtype = DTYPES[settings.inter]
    if dtype is None:
        return Whole(axis), f"all-reduce {over}"
    return Cast(axis, dtype), f"all-reduce in {settings.inter} {over}"


def local_world_size(world_size: int) -> int:
    """Ranks on this node, as the launcher says (LOCAL_WORLD_SIZE); all of them if it says nothing."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))


def _columns(size: int) -> int:
    """A node if there are several, else the divisor nearest below the square root."""
    node = local_world_size(size)
    if 1 < node < size:
        return node
    return max(d for d in range(1, int(size**0.5) + 1) if size % d == 0)


def _grid(axis: Axis, columns: int, names: tuple[str, str], device_type: str, option: str) -> tuple[Axis, Axis]:
    """The ranks as rows of neighbours: the axis along this rank's row, and the one along its column."""
    if axis.size % columns:
        near = max(d for d in range(1, columns) if axis.size % d == 0)
        raise UsageError(
            f"{axis.size} ranks can't be laid out in rows of {columns}",
            where="--grad_compression",
            fix=f"give {option} a divisor of {axis.size}, such as {near}",
        )
    assert axis.size == dist.get_world_size()
    inner, outer = names
    grid = init_device_mesh(device_type, (axis.size // columns, columns), mesh_dim_names=(outer, inner))

    def along(name: str) -> Axis:
        part = grid[name]
        if part.size() == 1:
            return Axis(name)
        return Axis(name, part.size(), part.get_local_rank(), part.get_group(), part)

    return along(inner), along(outer)
