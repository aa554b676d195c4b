"""Ranks take places so that the axes that talk most stay inside a machine; host names are made up."""

from __future__ import annotations

import dataclasses
import os

import pytest
from pool import on_ranks
from ranks import on_two_ranks

from swift.config.cluster import Cluster, ClusterNode
from swift.config.degrees import Degrees
from swift.core.errors import UsageError
from swift.distributed import process_group
from swift.distributed.handshake import Member
from swift.distributed.placement import place_ranks, placement_table, rank_order

FOUR = ["a"] * 4 + ["b"] * 4


def renumbered(hosts: list[str], cluster: Cluster | None = None) -> list[str]:
    return [hosts[rank] for rank in rank_order(hosts, cluster)]


def test_ranks_by_machine_stay_as_they_are():
    assert rank_order(FOUR) == tuple(range(8))


def test_interleaved_ranks_are_brought_together():
    """Slurm's cyclic distribution: without it, every tensor-parallel pair would lie across machines."""
    dealt = ["a", "b"] * 4
    assert rank_order(dealt) == (0, 2, 4, 6, 1, 3, 5, 7)
    degrees = Degrees(dp_shard=4, tp=2)
    assert place_ranks(degrees, dealt).spanning("tp")
    assert not place_ranks(degrees, renumbered(dealt)).spanning("tp")


def test_any_order_of_any_machines_keeps_rank_0():
    hosts = ["c", "a", "c", "b", "a", "a", "b", "c"]
    order = rank_order(hosts)
    assert order[0] == 0 and sorted(order) == list(range(8))
    assert [hosts[rank] for rank in order] == ["c"] * 3 + ["a"] * 3 + ["b"] * 2


def test_machines_of_a_switch_are_neighbours():
    """A stage's data-parallel ranks are then on one switch; only the stages talk across."""
    hosts = [host for host in "pqrs" for _ in range(2)]
    cluster = Cluster(tuple(ClusterNode(h, 2, s) for h, s in zip("pqrs", ("x", "y", "x", "y"), strict=True)))
    assert renumbered(hosts, cluster) == ["p", "p", "r", "r", "q", "q", "s", "s"]
    placement = place_ranks(Degrees(pp=2, dp_shard=2, tp=2), renumbered(hosts, cluster), cluster)
    for group in placement.groups("dp_shard"):
        assert len({placement.switches[rank] for rank in group}) == 1
    assert placement_table(placement).splitlines() == [
        "axis      size  spans                   groups of ranks (machine)",
        "pp        2     2 machines, 2 switches  0 (p) 4 (q) | 1 (p) 5 (q) | 2 (r) 6 (s) | 3 (r) 7 (s)",
        "dp_shard  2     2 machines, one switch  0 (p) 2 (r) | 1 (p) 3 (r) | 4 (q) 6 (s) | 5 (q) 7 (s)",
        "tp        2     one machine             0 1 (p) | 2 3 (r) | 4 5 (q) | 6 7 (s)",
    ]


def test_axes_inside_and_across():
    placement = place_ranks(Degrees(pp=2, ulysses=2, tp=2), FOUR)
    assert not placement.notes and not placement.spanning("tp", "ulysses") and placement.spanning("pp")
    assert placement.groups("ulysses") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert placement.groups("ulysses", "tp") == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_large_axis_across_machines_is_said():
    (note,) = place_ranks(Degrees(tp=8), FOUR).notes
    assert "tp 8 lies across machines (4 processes on each)" in note
    (note,) = place_ranks(Degrees(ring=4, tp=2), FOUR).notes
    assert note.startswith("ring 4 lies across machines")


def test_machines_of_different_size():
    hosts = ["a"] * 3 + ["b"] * 5
    with pytest.raises(UsageError, match=r"groups of 2 would lie across machines.*\(a 3, b 5\)") as caught:
        place_ranks(Degrees(dp_replicate=4, tp=2), hosts)
    assert "--tensor_parallel_size 1" in caught.value.fix
    placement = place_ranks(Degrees(dp_replicate=8), hosts)
    assert placement.notes == ("machines have different numbers of processes: 3 on a, 5 on b",)
    assert not place_ranks(Degrees(dp_shard=3, tp=2), ["a"] * 2 + ["b"] * 4).spanning("tp")


def test_cluster_file_and_run_must_agree():
    with pytest.raises(UsageError, match="b takes part in the run and is not in the cluster file"):
        rank_order(["a", "b"], Cluster((ClusterNode("a", 1),)))
    with pytest.raises(UsageError, match=r"a runs 2 processes and has 1 device"):
        rank_order(["a", "a"], Cluster((ClusterNode("a", 1),)))
    two = Cluster((ClusterNode("box", 1, "x"),))
    assert rank_order(["box (machine 0)", "box (machine 1)"], two) == (0, 1)


def test_a_large_table_is_cut():
    hosts = [f"n{rank // 8}" for rank in range(128)]
    rows = placement_table(place_ranks(Degrees(dp_shard=16, tp=8), hosts)).splitlines()
    assert "… 8 in all" in rows[1] and "… 16 in all" in rows[2] and all(len(row) < 180 for row in rows)
    assert placement_table(place_ranks(Degrees(), ["a"])).startswith("one process")


def test_members_take_their_new_numbers(monkeypatch):
    members = tuple(Member(r, 4, r // 2, 2, "ab"[r % 2], str(r % 2), "cpu") for r in range(4))
    monkeypatch.setattr(process_group.os, "environ", {**os.environ, "RANK": "1"})
    found = process_group._renumbered(members, None)
    assert process_group.os.environ["RANK"] == "2"
    assert [(m.rank, m.host) for m in found] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    assert found[2] == dataclasses.replace(members[1], rank=2)


ALONG = """
import socket
socket.gethostname = lambda: "ab"[rank]
os.environ["GROUP_RANK"] = str(rank)
group = start_process_group("cpu")
print(json.dumps([group.rank, [m.host for m in group.members], group.gather(rank)]))
group.close()
"""


def test_a_run_knows_its_machines(tmp_path):
    assert on_two_ranks(ALONG, tmp_path, GLOO_SOCKET_IFNAME="") == [[0, ["a", "b"], [0, 1]], [1, ["a", "b"], [0, 1]]]


DEALT = Degrees(dp_replicate=2, tp=2)


def groups_of_fake_machines() -> list:
    """A launcher dealt four ranks to two machines in turn: tp pairs must be of one machine."""
    import torch.distributed as dist

    from swift.distributed.mesh import build_mesh

    launched = int(os.environ["RANK"])
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    os.environ["GROUP_RANK"] = str(launched % 2)
    process_group.start_process_group("cpu", join_timeout_s=60)
    mesh = build_mesh(DEALT, "cpu")
    together: list = [None] * 2
    dist.all_gather_object(together, launched, group=mesh["tp"].group)
    return together


def test_interleaved_ranks_in_a_real_group():
    assert on_ranks(4, groups_of_fake_machines) == [[0, 2], [1, 3], [0, 2], [1, 3]]
