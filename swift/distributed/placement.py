"""Which rank takes which place in the grid: the axes that talk most inside a machine, then inside a switch. No torch.

The grid's innermost axis is tp, then ulysses, ring, dp_shard, dp_replicate and pp (`swift.distributed.mesh`). So it is
enough to number the ranks well: those of a machine one after the other, and so the machines of a switch. Launchers that
go machine by machine have done so already; where one deals the ranks out in turn (Slurm's cyclic distribution, MPI by
node), or switches are known, `rank_order` gives new numbers, which the ranks take when they have met. (A grid of ranks
out of order would not do: torch sorts the ranks of every group.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swift.config.cluster import Cluster
from swift.config.degrees import BASIC_AXES, Degrees
from swift.core.errors import UsageError

# axis -> what is sent along it, for the notes; those that should stay inside a machine come first
_CHATTY = {"tp": "every layer's activations", "ulysses": "every layer's heads", "ring": "every layer's keys and values"}
_SHOWN = 4  # groups of an axis in the table, if they fit on a line of so many characters:
_WIDTH = 90


@dataclass(frozen=True)
class Placement:
    """Where every rank goes.

    Attributes:
        hosts: the machine of each rank; switches: its switch, empty where unknown.
        notes: what could be better, for the user.
    """

    degrees: Degrees
    hosts: tuple[str, ...]
    switches: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def groups(self, *axes: str) -> list[list[int]]:
        """The groups of ranks that differ along these axes only."""
        sizes = [getattr(self.degrees, axis) for axis in BASIC_AXES]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(len(self.hosts)):
            rest, place = rank, []
            for size in reversed(sizes):
                rest, index = divmod(rest, size)
                place.append(index)
            others = [i for axis, i in zip(BASIC_AXES, reversed(place), strict=True) if axis not in axes]
            found.setdefault(tuple(others), []).append(rank)
        return list(found.values())

    def spanning(self, *axes: str) -> bool:
        """Whether a group along these axes has ranks on several machines."""
        return any(len({self.hosts[rank] for rank in group}) > 1 for group in self.groups(*axes))


def rank_order(hosts: Sequence[str], cluster: Cluster | None = None) -> tuple[int, ...]:
    """The ranks in the order in which they should be numbered: by switch, machine, and as they are.

    Args:
        hosts: the machine of each rank, in rank order, such as `handshake.node_names` gives.

    Raises:
        UsageError: a machine isn't in the cluster file or runs more processes than it has devices there.
    """
    switches = switches_of(hosts, cluster)
    hosts_seen = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    switches_seen = {switch: number for number, switch in enumerate(dict.fromkeys(switches))}
    return tuple(
        sorted(range(len(hosts)), key=lambda rank: (switches_seen[switches[rank]], hosts_seen[hosts[rank]], rank))
    )


def place_ranks(degrees: Degrees, hosts: Sequence[str], cluster: Cluster | None = None) -> Placement:
    """See where the groups of every axis lie.

    Args:
        degrees: their product must be the number of ranks.
        hosts: the machine of each rank, in rank order, as `rank_order` wants it.
        cluster: the switches of the machines, where known.

    Raises:
        UsageError: as `rank_order`; or a tensor-parallel group would lie across machines only because these have
            different numbers of processes.
    """
    assert len(hosts) == degrees.world_size
    placement = Placement(degrees, tuple(hosts), switches_of(hosts, cluster))
    counts = Counter(hosts)
    _refuse_torn_groups(placement, counts)
    return replace(placement, notes=tuple(_notes(placement, counts)))


def switches_of(hosts: Sequence[str], cluster: Cluster | None) -> tuple[str, ...]:
    """The switch of each rank; empty where it isn't known."""
    if cluster is None:
        return ("",) * len(hosts)
    table = {}
    for host, count in Counter(hosts).items():
        node = cluster.node(host.partition(" ")[0])
        if node is None:
            names = [node.host for node in cluster.nodes]
            raise UsageError(
                f"{host} takes part in the run and is not in the cluster file",
                where="--cluster_file",
                fix=f"add it; the file has {', '.join(names[:6])}{', …' if len(names) > 6 else ''}",
            )
        if count > node.devices:
            raise UsageError(
                f"{host} runs {count} processes and has {node.devices} device(s) in the cluster file",
                where="--cluster_file",
                fix=f"--nproc_per_node {node.devices}",
            )
        table[host] = node.switch or ""
    return tuple(table[host] for host in hosts)


def _refuse_torn_groups(placement: Placement, counts: Counter[str]) -> None:
    tp, smallest = placement.degrees.tp, min(counts.values())
    if tp == 1 or len(set(counts.values())) == 1:
        return
    if placement.spanning("tp"):
        shown = ", ".join(f"{host} {count}" for host, count in list(counts.items())[:6])
        raise UsageError(
            f"tensor parallel groups of {tp} would lie across machines: they have different numbers of processes "
            f"({shown})",
            where="--tensor_parallel_size",
            fix=f"--tensor_parallel_size {math.gcd(*counts.values())}, or the same --nproc_per_node "
            f"({smallest}) on every machine",
        )


def _notes(placement: Placement, counts: Counter[str]) -> list[str]:
    notes: list[str] = []
    if len(counts) == 1:
        return notes
    if len(set(counts.values())) > 1:
        fewest, most = min(counts, key=lambda h: counts[h]), max(counts, key=lambda h: counts[h])
        notes.append(
            f"machines have different numbers of processes: {counts[fewest]} on {fewest}, {counts[most]} on {most}"
        )
    for axis, what in _CHATTY.items():
        if placement.spanning(axis):
            notes.append(
                f"{axis} {getattr(placement.degrees, axis)} lies across machines ({min(counts.values())} processes on "
                f"each): {what} go through the network; a smaller size would stay inside"
            )
    return notes


def placement_table(placement: Placement) -> str:
    """For each axis of more than one rank: its size, what its groups span, and the first groups.

    Such as::

        axis      size  spans            groups of ranks (machine)
        dp_shard  2     2 machines       0 (a) 2 (b) | 1 (a) 3 (b)
        tp        2     one machine      0 1 (a) | 2 3 (b)
    """
    degrees = placement.degrees
    axes = [axis for axis in BASIC_AXES if getattr(degrees, axis) > 1]
    if not axes:
        return "one process: there are no axes"
    rows = [("axis", "size", "spans", "groups of ranks (machine)")]
    rows += [
        (axis, str(getattr(degrees, axis)), _span(placement, groups), _groups_words(placement, groups))
        for axis in axes
        for groups in [placement.groups(axis)]
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows
    )


def _span(placement: Placement, groups: list[list[int]]) -> str:
    """What the widest group covers."""
    machines = max(len({placement.hosts[rank] for rank in group}) for group in groups)
    switches = max(len({placement.switches[rank] for rank in group}) for group in groups)
    if machines == 1:
        return "one machine"
    if any(placement.switches):
        return f"{machines} machines, {'one switch' if switches == 1 else f'{switches} switches'}"
    return f"{machines} machines"


def _groups_words(placement: Placement, groups: list[list[int]]) -> str:
    """The first groups, as many as fit on a line, and how many there are."""
    shown: list[str] = []
    for group in groups[:_SHOWN]:
        words = _group_words(placement, group)
        if shown and len(" | ".join([*shown, words])) > _WIDTH:
            break
        shown.append(words)
    more = [f"… {len(groups)} in all"] if len(groups) > len(shown) else []
    return " | ".join([*shown, *more])


def _group_words(placement: Placement, group: list[int]) -> str:
    words: list[str] = []
    for place, rank in enumerate(group[:8]):
        words.append(str(rank))
        last = place + 1 == len(group[:8])
        if last or placement.hosts[group[place + 1]] != placement.hosts[rank]:
            words.append(f"({placement.hosts[rank]})")
    return " ".join(words + (["…"] if len(group) > 8 else []))
