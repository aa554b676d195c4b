"""Which process holds what: the axes of a run and the groups of processes along them.

A run's processes form a grid with six basic axes, outermost first:

    pp            consecutive layers
    dp_replicate  whole replicas (of the sharded model)
    dp_shard      other data; with fsdp, another share of the weights
    ring          a share of every sequence, keys and values travelling round
    ulysses       a share of every sequence, heads exchanged for tokens
    tp            a share of every matrix

The outer an axis, the less it says per step: so ranks of one node, which are neighbours, get the chatty axes. Further
axes are views of these:

    cp     ring x ulysses: the ranks that share a sequence
    dp     dp_replicate x dp_shard: the ranks with other examples
    fsdp   dp_shard x cp: the ranks a weight is sharded over
    loss   dp x cp: the ranks whose losses add up (ranks along tp compute the same loss)
    ep     the innermost part of fsdp, of the size asked for: the ranks that share the experts
    efsdp  what is left of fsdp: the ranks an expert's weights are sharded over
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from swift.config.degrees import BASIC_AXES, Degrees

EXPERT_AXES = ("pp", "dp_replicate", "efsdp", "ep", "tp")
VIEWS = {
    "cp": ("ring", "ulysses"),
    "dp": ("dp_replicate", "dp_shard"),
    "fsdp": ("dp_shard", "ring", "ulysses"),
    "loss": ("dp_replicate", "dp_shard", "ring", "ulysses"),
}


@dataclass(frozen=True)
class Axis:
    """This process's place along one axis.

    Attributes:
        size: processes along it; rank: number of this one among them, from 0.
        group: how they talk; None where there is only this one.
        device_mesh: the same as a one-dimensional DeviceMesh; None where size is 1.
    """

    name: str
    size: int = 1
    rank: int = 0
    group: Any = None
    device_mesh: DeviceMesh | None = None

    def __bool__(self) -> bool:
        """Whether there is anybody else."""
        return self.size > 1


@dataclass(frozen=True)
class Mesh:
    """The grid of a run, as seen by this process.

    Attributes:
        degrees: its sizes.
        device_mesh: all basic axes as one DeviceMesh, or None for a single process.
    """

    degrees: Degrees = field(default_factory=Degrees)
    device_mesh: DeviceMesh | None = None
    axes: dict[str, Axis] = field(default_factory=dict)
    submeshes: dict[str, DeviceMesh] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Axis:
        """The axis `name`: a basic one, a view, `ep` or `efsdp`; of size 1 where there is no such mesh."""
        return self.axes.get(name) or Axis(name)

    def fsdp_mesh(self) -> DeviceMesh | None:
        """What `fully_shard` takes: ("dp_replicate", "fsdp"), or ("fsdp",) without replicas."""
        return self.submeshes.get("fsdp")

    def expert_fsdp_mesh(self) -> DeviceMesh | None:
        """The same for expert weights: ("dp_replicate", "efsdp") or ("efsdp",)."""
        return self.submeshes.get("efsdp")

    def expert_mesh(self, *names: str) -> DeviceMesh:
        """A part of the grid as experts see it (`EXPERT_AXES`), to shard them over: ("ep",) or ("ep", "tp").

        It has the same root as `expert_fsdp_mesh`, as `fully_shard` wants it.
        """
        return self.submeshes["experts"][names]


def build_mesh(degrees: Degrees, device_type: str) -> Mesh:
    """Make the groups of all axes; every process of the world calls it, in the same order.

    Args:
        degrees: their product must be the world size.
        device_type: `cuda` or `cpu`.
    """
    if degrees.world_size == 1:
        return Mesh(degrees)
    assert degrees.world_size == dist.get_world_size()
    sizes = tuple(getattr(degrees, axis) for axis in BASIC_AXES)
    grid = init_device_mesh(device_type, sizes, mesh_dim_names=BASIC_AXES)
    views = {name: grid[parts]._flatten(name) for name, parts in VIEWS.items()}
    shape = (degrees.pp, degrees.dp_replicate, degrees.efsdp, degrees.ep, degrees.tp)
    experts = DeviceMesh(device_type, grid.mesh.reshape(shape), mesh_dim_names=EXPERT_AXES)
    meshes = {axis: grid[axis] for axis in BASIC_AXES} | views | {"efsdp": experts["efsdp"], "ep": experts["ep"]}
    axes = {
        name: Axis(name, mesh.size(), mesh.get_local_rank(), mesh.get_group(), mesh)
        for name, mesh in meshes.items()
        if mesh.size() > 1
    }
    shards, replicated = {"fsdp": views["fsdp"], "efsdp": experts["efsdp"]}, degrees.dp_replicate > 1
    if replicated:  # a flattened view can't be sliced from its root together with another axis
        shards["fsdp"] = DeviceMesh._concatenate([grid["dp_replicate"], views["fsdp"]])
        shards["efsdp"] = experts[("dp_replicate", "efsdp")]
    submeshes = shards | {"experts": experts}
    return Mesh(degrees, grid, axes, submeshes)
