"""Ways to add a tensor up over ranks: whole, in 16 bits, by its largest elements, or in two stages.

Each is an object with `add_up(tensor, key)`, which replaces a flat tensor by its sum over the ranks of an axis, or by
an approximation of it, the same bits on all of them. `key` names the tensor, so that a method can remember something of
it from one step to the next. They compose: the second of two stages is any other method. They know nothing of models.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

import torch
from torch.nn import functional

from swift.distributed.collectives import all_gather, all_reduce, reduce_scatter
from swift.distributed.compression.ring import own_share, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from swift.distributed.mesh import Axis


class Method(Protocol):
    """A way to add up.

    Attributes:
        residuals: what is still to be sent, by key; empty where nothing is left out.
    """

    residuals: dict[Hashable, torch.Tensor]

    def add_up(self, tensor: torch.Tensor, key: Hashable) -> None:
        """Replace a flat tensor by its sum over ranks."""
        ...


class Whole:
    """The library's all-reduce."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.residuals: dict[Hashable, torch.Tensor] = {}

    def add_up(self, tensor: torch.Tensor, key: Hashable) -> None:
        all_reduce(tensor, self.axis)


class Cast:
    """The library's all-reduce in a shorter type: half the bytes, and each sum rounded to that type."""

    def __init__(self, axis: Axis, dtype: torch.dtype) -> None:
        self.axis, self.dtype = axis, dtype
        self.residuals: dict[Hashable, torch.Tensor] = {}

    def add_up(self, tensor: torch.Tensor, key: Hashable) -> None:
        if self.axis:
            tensor.copy_(all_reduce(tensor.to(self.dtype), self.axis))


class TopK:
    """Each rank sends its elements of largest magnitude, with their places; the others count as zero.

    With error feedback a rank keeps what it didn't send and adds it to the next tensor of the same key, so that
    everything is sent in the end. (Stich et al., Sparsified SGD with memory, arXiv 1809.07599, algorithm 1.)

    Of k elements of b bytes each rank sends (w - 1) k (b + 4) bytes to w - 1 others.
    """

    def __init__(self, axis: Axis, ratio: float, *, error_feedback: bool = True) -> None:
        self.axis, self.ratio, self.error_feedback = axis, ratio, error_feedback
        self.residuals: dict[Hashable, torch.Tensor] = {}

    def add_up(self, tensor: torch.Tensor, key: Hashable) -> None:
        if not self.axis or not tensor.numel():
            return
        residual = self.residuals.get(key)
        if residual is not None:
            tensor += residual.to(tensor.device)
        places = tensor.abs().topk(num_sent(tensor.numel(), self.ratio), sorted=False).indices
        values = tensor[places]
        if self.error_feedback and bool(torch.isfinite(values).all()):  # NaN counts as the largest: it shows here
            rest = tensor.clone()
            rest[places] = 0
            self.residuals[key] = rest
        all_places = all_gather(places.to(torch.int32), self.axis, 0).view(self.axis.size, -1)
        all_values = all_gather(values, self.axis, 0).view(self.axis.size, -1)
        tensor.zero_()
        for their_places, their_values in zip(all_places, all_values, strict=True):
            tensor.index_add_(0, their_places.long(), their_values)


def num_sent(size: int, ratio: float) -> int:
    """Elements that top-k sends of so many."""
    return min(size, max(1, round(size * ratio)))


class TwoStage:
    """Reduce-scatter within a node, any method across nodes for the share that a rank got, all-gather within the node.

    Of n bytes each of s ranks in a node sends 2 (s - 1) / s n within the node, and n / s go into the method across: the
    links between nodes carry an s-th of what an all-reduce over all ranks would send over them.

    Args:
        inside: the ranks of this node; across: adds up over the ranks with the same place in other nodes.
        dtype: in which it travels within the node.
    """

    def __init__(self, inside: Axis, across: Method, dtype: torch.dtype | None = None) -> None:
        self.inside, self.across, self.dtype = inside, across, dtype

    @property
    def residuals(self) -> dict[Hashable, torch.Tensor]:
        return self.across.residuals

    @residuals.setter
    def residuals(self, value: dict[Hashable, torch.Tensor]) -> None:
        self.across.residuals = value

    def add_up(self, tensor: torch.Tensor, key: Hashable) -> None:
        size = tensor.numel()
        short = self.dtype or tensor.dtype
        padded = functional.pad(tensor.to(short), (0, -size % self.inside.size))
        share = reduce_scatter(padded, self.inside, 0).to(tensor.dtype)
        self.across.add_up(share, key)
        tensor.copy_(all_gather(share.to(short), self.inside, 0)[:size])


class Ring2D:
    """Our own rings: reduce-scatter along rows of ranks, all-reduce along columns, all-gather along rows.

    The same bytes as a ring over all ranks, in r + c instead of r c rounds for r rows and c columns.
    (Mikami et al., ImageNet/ResNet-50 training in 224 seconds, arXiv 1811.05233, section 3.)
    """

    def __init__(self, row: Axis, column: Axis) -> None:
        self.row, self.column = row, column
        self.residuals: dict[Hashable, torch.Tensor] = {}

    def add_up(self, tensor: torch.Tensor, key: Hashable) -> None:
        ring_reduce_scatter(tensor, self.row)
        ring_all_reduce(own_share(tensor, self.row), self.column)
        ring_all_gather(tensor, self.row)


def residual_state(method: Method) -> dict[str, Any]:
    """What a method remembers, for a checkpoint."""
    return {"keys": list(method.residuals), "residuals": list(method.residuals.values())}


def load_residuals(method: Method, state: dict[str, Any], device: torch.device) -> None:
    """Put back what `residual_state` gave."""
    pairs = zip(state["keys"], state["residuals"], strict=True)
    method.residuals = {key: tensor.to(device) for key, tensor in pairs}
