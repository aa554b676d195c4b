"""Watches what a training step does on one process: collectives along each axis, memory by purpose, operations.

A `Trace` sees every operation while it is active, on real tensors and on fake ones (which have shapes and no numbers),
so a step of a thousand processes can be watched in one that plays one of them (`swift.distributed.trace_world`).

- Collectives are counted where PyTorch's own operators for them run, each once, whoever called them; bytes are those
  that this process sends, by the formulas of `swift.distributed.traffic`.
- Memory is that of live storages, by what they are for: an exact sum of tensors, not what an allocator reserves.
- Operations are multiplications and additions of matrix products and attention.

This file knows nothing of models; it is told which tensors are weights, gradients and optimizer state.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from swift.distributed.mesh import Mesh
from swift.distributed.trace_values import KnownValues
from swift.distributed.traffic import TRAFFIC

WEIGHTS, GATHERED, GRADIENTS, OPTIMIZER = "weights", "gathered weights", "gradients", "optimizer"
ACTIVATIONS = "activations and buffers"
CATEGORIES = (WEIGHTS, GATHERED, GRADIENTS, OPTIMIZER, ACTIVATIONS)

aten, c10d = torch.ops.aten, torch.ops.c10d
_WAITING = ("barrier", "monitored_barrier_", "wait_tensor", "recv_", "recv_any_source_", "irecv")


@dataclass
class Peak:
    """The most memory that was live at once, in bytes, and what it was for."""

    total: int = 0
    parts: dict[str, int] = field(default_factory=dict)


@dataclass
class Counts:
    """What happened in one part of a step.

    Attributes:
        calls: (axis, kind) -> collectives; bytes: (axis, kind) -> bytes this process sent.
        flops: additions and multiplications.
    """

    calls: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    bytes: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    flops: float = 0.0


@dataclass
class _Live:
    size: int
    category: str
    storage: weakref.ref


class Trace(TorchDispatchMode):
    """Counts while it is active; enter it after `FakeTensorMode`, if there is one.

    Args:
        mesh: its axes give collectives their names; others are called by `world`.
        fake: whether tensors have no numbers. What the host asks of one is then answered from what is known of it
            (`KnownValues`), and by 1 where nothing is.

    Attributes:
        part: the name of what runs now; set it as you go.
        counts: part -> what happened; peaks: part -> memory.
        unknown: collectives that were not counted, as nobody here knows what they send.
    """

    def __init__(self, mesh: Mesh, *, fake: bool) -> None:
        super().__init__()
        self.part = ""
        self.counts: dict[str, Counts] = defaultdict(Counts)
        self.peaks: dict[str, Peak] = defaultdict(Peak)
        self.unknown: set[str] = set()
        self._names: dict[str, list[str]] = defaultdict(list)
        for axis in mesh.axes.values():
            self._names[axis.group.group_name].append(axis.name)
        self._known = KnownValues() if fake else None
        self._fake = fake
        self._live: dict[int, _Live] = {}
        self._by_category: Counter[str] = Counter()
        self._total = 0
        self._resizable: set[int] = set()

    def reset(self) -> None:
        """Forget counts and peaks; what is live stays known."""
        self.counts.clear()
        self.peaks.clear()

    def hold(self, tensors: Iterable[torch.Tensor | None], category: str) -> None:
        """Tensors that are live, and what for."""
        for tensor in tensors:
            if tensor is None:
                continue
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            self._see(local.detach(), category)
            self._change(local, category)

    def _change(self, tensor: torch.Tensor, category: str) -> None:
        live = self._live.get(tensor.untyped_storage()._cdata)
        if live is not None and live.category != category:
            self._by_category[live.category] -= live.size
            self._by_category[category] += live.size
            live.category = category

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own operations on local tensors come here one by one
        if self._known is not None and func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return self._known.scalar(args[0])
        if self._fake and func is aten._grouped_mm.default:  # PyTorch knows its shapes for bfloat16 only
            result = _grouped_mm(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        if self._known is not None:
            self._known.follow(func, args, kwargs, result)
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"):
            self._count(func, args)
        elif func.namespace == "fsdp":
            self._watch_gathering(func, args, kwargs)
        counted = _FLOPS.get(func._overloadpacket)
        if counted is not None:
            self.counts[self.part].flops += counted(*args, **kwargs, out_val=result)
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, ACTIVATIONS)
        return result

    # --- memory ---

    def _see(self, tensor: torch.Tensor, category: str) -> None:
        if isinstance(tensor, FakeTensor) != self._fake or isinstance(tensor, DTensor) or tensor.device.type == "meta":
            return  # fake tensors in a real run belong to PyTorch's own look at shapes
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._live.get(key)
        if known is not None and known.storage() is storage:
            return
        size = storage.nbytes()
        self._live[key] = _Live(size, category, weakref.ref(storage, lambda gone: self._drop(key, gone)))
        self._by_category[category] += size
        self._total += size
        self._measure()

    def _drop(self, key: int, gone: weakref.ref) -> None:
        live = self._live.get(key)
        if live is not None and live.storage is gone:
            del self._live[key]
            self._resizable.discard(key)
            self._by_category[live.category] -= live.size
            self._total -= live.size

    def _measure(self) -> None:
        self._resize()
        peak = self.peaks[self.part]
        if self._total > peak.total:
            peak.total, peak.parts = self._total, dict(self._by_category)

    def _resize(self) -> None:
        """Gathered weights are freed and brought back by changing their storages' sizes, which is no operation."""
        for key in self._resizable:
            live = self._live[key]
            storage = live.storage()
            change = (storage.nbytes() if storage is not None else 0) - live.size
            if change:
                live.size += change
                self._by_category[live.category] += change
                self._total += change

    def _watch_gathering(self, func: Any, args: tuple, kwargs: dict) -> None:
        """`fully_shard` fills weights from what it gathered, and copies gradients to what it adds up."""
        category = GATHERED if func._overloadpacket is torch.ops.fsdp.split_with_sizes_copy else None
        written = kwargs.get("out", ()) if category else ()
        for tensor in tree_iter(written):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, GATHERED)
                self._change(tensor, GATHERED)
                self._resizable.add(tensor.untyped_storage()._cdata)
        self._measure()

    # --- collectives ---

    def _count(self, func: Any, args: tuple) -> None:
        name = func._overloadpacket.__name__
        if name in _WAITING:
            return
        sent = _SENT.get(name)
        if sent is None:
            self.unknown.add(name)
            return
        kind, group_place, bytes_of = sent
        given = args[group_place]
        functional = isinstance(given, str)
        group = dist.distributed_c10d._resolve_process_group(given) if functional else dist.ProcessGroup.unbox(given)
        if group.size() == 1:
            return
        axis = self._axis(group, kind)
        counts = self.counts[self.part]
        counts.calls[axis, kind] += 1
        counts.bytes[axis, kind] += bytes_of(args, group)
        if kind == "reduce_scatter" and axis in ("fsdp", "efsdp") and not functional:
            self._change(args[0], GRADIENTS)

    def _axis(self, group: dist.ProcessGroup, kind: str) -> str:
        """The name of the axis; where axes have the same ranks, the one that our own count has just named."""
        names = [*self._names[group.group_name]]
        world = dist.group.WORLD
        if world is not None and group.group_name == world.group_name:
            names.append("world")
        latest, TRAFFIC.latest = TRAFFIC.latest, None
        if latest is not None and latest[1] == kind and latest[0] in names:
            return latest[0]
        return names[0] if names else "?"


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_iter(tensors) if isinstance(t, torch.Tensor))


def _all_reduce(args: tuple, group: dist.ProcessGroup) -> float:
    return 2 * (group.size() - 1) / group.size() * _bytes(args[0])


def _all_gather_base(args: tuple, group: dist.ProcessGroup) -> float:
    return (group.size() - 1) * _bytes(args[1])


def _gather_functional(args: tuple, group: dist.ProcessGroup) -> float:
    return (group.size() - 1) * _bytes(args[0])


def _reduce_scatter_base(args: tuple, group: dist.ProcessGroup) -> float:
    return (group.size() - 1) * _bytes(args[0])


def _scatter_functional(args: tuple, group: dist.ProcessGroup) -> float:
    return (group.size() - 1) / group.size() * _bytes(args[0])


def _all_to_all(args: tuple, group: dist.ProcessGroup) -> float:
    rows, splits = args[1], args[4]
    if not splits:
        return (group.size() - 1) / group.size() * _bytes(rows)
    away = sum(splits) - splits[group.rank()]
    return away * (_bytes(rows) / max(1, len(rows)))


def _send(args: tuple, group: dist.ProcessGroup) -> float:
    return float(_bytes(args[0]))


# operator -> kind, which argument is the group, bytes this process sends
_SENT: dict[str, tuple[str, int, Any]] = {
    "allreduce_": ("all_reduce", 1, _all_reduce),
    "_allgather_base_": ("all_gather", 2, _all_gather_base),
    "allgather_": ("all_gather", 2, _all_gather_base),
    "_reduce_scatter_base_": ("reduce_scatter", 2, _reduce_scatter_base),
    "alltoall_base_": ("all_to_all", 2, _all_to_all),
    "send": ("send", 1, _send),
    "broadcast_": ("broadcast", 1, _scatter_functional),
    "all_reduce": ("all_reduce", 2, _all_reduce),
    "all_reduce_": ("all_reduce", 2, _all_reduce),
    "all_gather_into_tensor": ("all_gather", 2, _gather_functional),
    "reduce_scatter_tensor": ("reduce_scatter", 3, _scatter_functional),
    "all_to_all_single": ("all_to_all", 3, _scatter_functional),
}


def _grouped_mm(
    left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None = None, *_: Any, **__: Any
) -> torch.Tensor:
    """An empty result: [rows, columns], and one for each group where a group has its own."""
    groups: tuple[int, ...] = (left.shape[0],) if left.dim() == right.dim() == 3 else ()
    if left.dim() == right.dim() == 2:
        assert offs is not None
        groups = (offs.shape[0],)
    return left.new_empty(*groups, left.shape[-2], right.shape[-1])


def _grouped_mm_flops(left: Any, right: Any, *_: Any, out_val: Any, **__: Any) -> float:
    groups = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return 2.0 * groups * left.shape[-2] * left.shape[-1] * right.shape[-1]


def _flash_flops(query: Any, key: Any, *rest: Any, out_val: Any, **_: Any) -> float:
    rows, heads, tokens, size = query.shape
    causal = bool(rest[2]) if len(rest) > 2 else False
    return 4.0 * rows * heads * tokens * key.shape[2] * size / (2 if causal else 1)


def _flash_backward_flops(grad: Any, query: Any, key: Any, *rest: Any, out_val: Any, **_: Any) -> float:
    rows, heads, tokens, size = query.shape
    return 10.0 * rows * heads * tokens * key.shape[2] * size / (2 if rest[4] else 1)


_FLOPS = {
    **flop_registry,
    aten._grouped_mm: _grouped_mm_flops,
    aten._scaled_dot_product_flash_attention_for_cpu: _flash_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward_flops,
}
