"""The axes of a run: who is with whom."""

import torch.distributed as dist
from pool import on_ranks

from swift.config.degrees import Degrees
from swift.distributed.mesh import Axis, Mesh, build_mesh


def members(degrees: Degrees, names: tuple[str, ...]) -> dict[str, list[int]]:
    mesh = build_mesh(degrees, "cpu")
    return {name: dist.get_process_group_ranks(mesh[name].group) if mesh[name] else [] for name in names}


def test_views_join_the_right_ranks():
    degrees = Degrees(pp=2, dp_replicate=1, dp_shard=1, ring=2, ulysses=1, tp=2, ep=2)
    groups = on_ranks(8, members, degrees, ("pp", "tp", "cp", "fsdp", "loss", "ep", "efsdp", "dp"))
    # ranks by (pp, cp, tp): 0..3 are stage 0
    alone: list[int] = []
    shared = {"cp": [0, 2], "fsdp": [0, 2], "loss": [0, 2], "ep": [0, 2]}
    assert groups[0] == {"pp": [0, 4], "tp": [0, 1], **shared, "efsdp": alone, "dp": alone}
    assert groups[7]["ep"] == [5, 7] and groups[7]["pp"] == [3, 7]


def hybrid(degrees: Degrees) -> list:
    mesh = build_mesh(degrees, "cpu")
    return [mesh.fsdp_mesh().mesh.tolist(), mesh.expert_fsdp_mesh().mesh.tolist(), mesh["ep"].rank]


def test_replicas_are_outside_of_shards():
    shapes = on_ranks(8, hybrid, Degrees(dp_replicate=2, dp_shard=4, ep=2))
    assert shapes[0] == [[[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 2], [4, 6]], 0]
    assert shapes[5] == [[[0, 1, 2, 3], [4, 5, 6, 7]], [[1, 3], [5, 7]], 1]


def test_one_process_needs_no_groups():
    mesh = build_mesh(Degrees(), "cpu")
    assert isinstance(mesh, Mesh) and mesh["tp"] == Axis("tp") and not mesh["cp"]
