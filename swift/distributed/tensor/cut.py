"""Put a share of a parameter in the parameter's place. Knows nothing of models.

What can be said as a DTensor becomes one: equal consecutive shares, and equal shares of equal parts. Anything else
(query, key and value rows of different sizes in one matrix; a key-value head that several ranks need) is kept whole on
each rank, and a view of it is computed with. Values are never read, so tensors may be on meta.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from swift.distributed.mesh import Axis
from swift.distributed.spread import view_local
from swift.distributed.tensor.plan import Part


def own_ranges(parts: Sequence[Part], size: int, rank: int) -> list[tuple[int, int]]:
    """First and last (exclusive) index of this rank's share of each part; a unit that ranks share is whole on each."""
    ranges, start = [], 0
    for part in parts:
        unit = part.size // part.units
        if part.units % size == 0:
            share = part.size // size
            begin = start + rank * share
            ranges.append((begin, begin + share))
        else:
            begin = start + (rank * part.units // size) * unit
            ranges.append((begin, begin + unit))
        start += part.size
    return ranges


def take_ranges(tensor: torch.Tensor, dim: int, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Those parts of a tensor, end to end."""
    pieces = [tensor.narrow(dim, begin, end - begin) for begin, end in ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def fsdp_placement(parameter: nn.Parameter) -> Shard | None:
    """For `fully_shard`'s `shard_placement_fn`: another dimension than the one that parts of a matrix are cut along.

    Sharded along the same one, the weights that run would be right, and the whole tensor that a checkpoint is made of
    would have its rows in another order (torch 2.13).
    """
    if not isinstance(parameter, DTensor):
        return None
    taken = {placement.dim for placement in parameter.placements if isinstance(placement, _StridedShard)}
    return Shard(1) if 0 in taken else None


@dataclass
class Cutter:
    """Cuts parameters along one axis, each once, however many modules share it.

    Attributes:
        axis: along which.
        plain: put plain tensors in place instead of DTensors, for a look at one rank's part without the others.
        partial: ids of the parameters whose gradients are summands, each rank's its own.
    """

    axis: Axis
    plain: bool = False
    partial: set[int] = field(default_factory=set)
    # id -> the parameter as it was and as it is; the old one stays alive so that no id comes twice
    done: dict[int, tuple[nn.Parameter, nn.Parameter]] = field(default_factory=dict)

    def cut(self, module: nn.Module, name: str, dim: int, parts: Sequence[Part]) -> None:
        """Give `module` its share, along `dim`, of its parameter `name`; None stays None."""
        parameter = module._parameters.get(name)
        if parameter is None:
            return
        dim %= parameter.ndim
        ranges = own_ranges(parts, self.axis.size, self.axis.rank)
        placement = self._placement(parameter, dim, parts)
        if placement is None:
            self.whole(module, name)
            view_local(module, name, lambda tensor: take_ranges(tensor, dim, ranges))
        else:
            self._replace(module, name, take_ranges(parameter.detach(), dim, ranges), placement)

    def shard(self, module: nn.Module, name: str, start: int, stop: int) -> None:
        """Give `module` the rows from `start` to `stop` of its parameter `name`, as `torch.chunk` would cut it."""
        parameter = module._parameters.get(name)
        if parameter is not None:
            self._replace(module, name, parameter.detach()[start:stop], Shard(0))

    def once(self, module: nn.Module, name: str) -> None:
        """A bias of a sum over ranks: the first rank adds it."""
        if module._parameters.get(name) is None:
            return
        self.whole(module, name)
        share = float(self.axis.rank == 0)
        view_local(module, name, lambda tensor: tensor * share)

    def whole(self, module: nn.Module, name: str) -> None:
        """Each rank uses all of it, for its own share of the block's output."""
        parameter = module._parameters.get(name)
        if parameter is not None:
            self.partial.add(id(parameter))

    def _placement(self, parameter: nn.Parameter, dim: int, parts: Sequence[Part]) -> Placement | None:
        if any(part.units % self.axis.size for part in parts):
            return None
        if len(parts) == 1:
            return Shard(dim)
        equal = len({part.size for part in parts}) == 1
        # `fully_shard` needs another dimension to shard along, see `fsdp_placement`
        return _StridedShard(dim, split_factor=len(parts)) if equal and parameter.ndim > 1 else None

    def _replace(self, module: nn.Module, name: str, local: torch.Tensor, placement: Placement) -> None:
        parameter = module._parameters[name]
        assert parameter is not None
        if self.plain:
            module._parameters[name] = nn.Parameter(local.clone(), requires_grad=False)
            return
        assert self.axis.device_mesh is not None
        if id(parameter) not in self.done:
            stride = torch.empty(parameter.shape, device="meta").stride()
            spread = DTensor.from_local(
                local.clone(memory_format=torch.contiguous_format),
                self.axis.device_mesh,
                [placement],
                run_check=False,
                shape=parameter.shape,
                stride=stride,
            )
            new = nn.Parameter(spread, requires_grad=parameter.requires_grad)
            self.done[id(parameter)] = parameter, new
        module._parameters[name] = self.done[id(parameter)][1]
