"""How the processes of a run meet: all arrive within a time limit and agree with one another, or all are told why not.

It happens over torch's key-value store, which rank 0 (or torchrun's agent) serves, before any group is made: so it
works between different versions of torch, and a rank that never comes is named instead of waited for.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from importlib import metadata
from typing import Any

import torch.distributed as dist

from swift.core.errors import SwiftError
from swift.core.interfaces import check_interfaces, interfaces, unreachable_cause
from swift.core.logging import get_logger, local_rank, rank, world_size
from swift.core.version import __version__

log = get_logger("distributed")

JOIN_TIMEOUT_S = 50.0  # so that an error is there within a minute
REMIND_S = 10.0
_FAREWELL_S = 5.0  # after a fault: time for the others to read about it, before rank 0 takes the store away
_PACKAGES = ("torch", "transformers", "peft")
# settings that describe one machine or one terminal, not the run
_OF_ONE_PROCESS = frozenset(
    (
        "node_rank",
        "nproc_per_node",
        "nnodes",
        "master_addr",
        "master_port",
        "join_timeout_s",
        "log_level",
        "disable_tqdm",
    )
)


@dataclass(frozen=True)
class Member:
    """What a process tells the others of itself.

    Attributes:
        host: name of its machine; node: the machine's number, as the launcher said.
        address: at which it will be reached, where that is known.
        device: kind of its devices; settings: a checksum of what must be the same everywhere.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    node: str
    device: str
    address: str | None = None
    settings: str = ""
    versions: dict[str, str] = field(default_factory=dict)


def describe_self(device: str, settings: Mapping[str, Any]) -> Member:
    """This process."""
    variable = "NCCL_SOCKET_IFNAME" if device == "cuda" else "GLOO_SOCKET_IFNAME"
    versions = {"python": ".".join(platform.python_version_tuple()[:2]), "swift": __version__}
    versions |= {name: metadata.version(name) for name in _PACKAGES}
    return Member(
        rank=rank(),
        world_size=world_size(),
        local_rank=local_rank(),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "0")),
        host=socket.gethostname(),
        node=next((os.environ[v] for v in ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID") if os.environ.get(v)), ""),
        device=device,
        address=interfaces().get(os.environ.get(variable, "")),
        settings=hashlib.sha256(_canonical(settings).encode()).hexdigest()[:16],
        versions=versions,
    )


def shared_settings(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Of all settings by name, those that must be the same on every rank."""
    return {name: value for name, value in flat.items() if name not in _OF_ONE_PROCESS}


def _canonical(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True, default=str)


def reach_store(timeout_s: float) -> Any:
    """Connect to the store that the launcher's environment names; rank 0 serves it, unless torchrun does.

    Raises:
        SwiftError: an interface is wrong, the port is taken, or nothing answers within `timeout_s`.
    """
    check_interfaces()
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdigit():
        raise SwiftError(
            f"rank {rank()} of {world_size()} isn't told where rank 0 is",
            where="MASTER_ADDR and MASTER_PORT",
            fix="start with swift's own --nproc_per_node and --nnodes, with torchrun or srun, or set both",
        )
    serves = rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not serves:
        _wait_for_listener(host, int(port), timeout_s)
    try:
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
    except (RuntimeError, ValueError) as error:
        taken = "EADDRINUSE" in str(error) or "in use" in str(error)
        raise SwiftError(
            f"port {port} can't be opened: another program uses it" if taken else f"rank 0 can't be joined: {error}",
            where=f"rank {rank()} ({socket.gethostname()}), {host}:{port}",
            fix="choose another: --master_port (or MASTER_PORT)" if taken else "compare address, port and firewall",
        ) from error
    return store


def _wait_for_listener(host: str, port: int, timeout_s: float) -> None:
    """Until something listens there: then torch's own client, which can't say what is wrong, finds it at once."""
    deadline_s = time.monotonic() + timeout_s
    reminder_s = time.monotonic() + REMIND_S
    pause_s = 0.02
    while True:
        try:
            socket.create_connection((host, port), timeout=5.0).close()
            return
        except OSError as error:
            cause, fix = unreachable_cause(error, host)
        now_s = time.monotonic()
        if now_s > deadline_s:
            raise SwiftError(
                f"rank 0 can't be reached at {host}:{port} after {timeout_s:.0f} s: {cause}",
                where=f"rank {rank()} ({socket.gethostname()})",
                fix=f"{fix}; if rank 0 did start, look at its messages; --join_timeout_s 600 waits longer",
            )
        if now_s > reminder_s:
            reminder_s = now_s + REMIND_S
            log.warning("waiting for rank 0 at %s:%d: %s (%.0f s more)", host, port, cause, deadline_s - now_s)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.5)


def meet(store: Any, own: Member, settings: Mapping[str, Any], timeout_s: float) -> tuple[Member, ...]:
    """Wait for every rank and compare notes.

    Args:
        store: common to all ranks, empty of other meetings.
        settings: what must be the same on every rank.

    Returns:
        All members, in rank order, the same on every rank.

    Raises:
        SwiftError: on every rank that has come, naming the ranks that are missing or differ, how, and the remedy.
    """
    if store.add(f"claim/{own.rank}", 1) > 1:
        other = Member(**json.loads(store.get(f"member/{own.rank}")))
        raise SwiftError(
            f"two processes call themselves rank {own.rank}: one on {other.host}, one on {own.host}",
            where=f"rank {own.rank} ({own.host})",
            fix="give each machine its own --node_rank, and each run its own --master_port",
        )
    store.set(f"settings/{own.rank}", _canonical(settings))
    store.set(f"member/{own.rank}", json.dumps(asdict(own)))
    store.add("arrived", 1)
    if own.rank == 0:
        return _preside(store, own, timeout_s)
    try:
        store.wait(["verdict"], timedelta(seconds=timeout_s + 2 * _FAREWELL_S))
        verdict = json.loads(store.get("verdict"))
        store.add("read", 1)
    except RuntimeError as error:
        gone = "rank 0 has gone" if not isinstance(error, dist.DistStoreError) else "rank 0 didn't come"
        raise SwiftError(
            f"{gone} while the ranks were meeting",
            where=f"rank {own.rank} ({own.host}), at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}",
            fix="look at rank 0's own messages",
        ) from error
    if "error" in verdict:
        raise SwiftError(verdict["error"], where=verdict["where"], fix=verdict["fix"])
    return tuple(Member(**member) for member in verdict["members"])


def _preside(store: Any, own: Member, timeout_s: float) -> tuple[Member, ...]:
    """Rank 0: wait for the others, compare, and tell."""
    try:
        members = _assemble(store, own, timeout_s)
        for problem in (_contradiction(members), _unreachable(members), _difference(store, members)):
            if problem is not None:
                raise problem
    except SwiftError as error:
        store.set("verdict", json.dumps({"error": error.message, "where": error.where, "fix": error.fix}))
        others, deadline_s = store.add("arrived", 0) - 1, time.monotonic() + _FAREWELL_S
        while store.add("read", 0) < others and time.monotonic() < deadline_s:
            time.sleep(0.02)
        raise
    store.set("verdict", json.dumps({"members": [asdict(member) for member in members]}))
    return members


def _assemble(store: Any, own: Member, timeout_s: float) -> tuple[Member, ...]:
    deadline_s = time.monotonic() + timeout_s
    reminder_s = time.monotonic() + REMIND_S
    pause_s = 0.005
    while (arrived := store.add("arrived", 0)) < own.world_size:
        now_s = time.monotonic()
        if now_s > min(deadline_s, reminder_s):
            missing = [r for r in range(own.world_size) if not store.check([f"member/{r}"])]
            if now_s > deadline_s:
                raise SwiftError(
                    f"{arrived} of {own.world_size} ranks came within {timeout_s:.0f} s; missing: {_ranks(missing)}",
                    where=f"rank 0 ({own.host}), at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}",
                    fix="look at the missing ranks' own messages: they did not start, ended, or can't reach this "
                    "address; --join_timeout_s 600 waits longer",
                )
            reminder_s = now_s + REMIND_S
            log.warning("waiting for %s of %d (%.0f s more)", _ranks(missing), own.world_size, deadline_s - now_s)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.2)
    return tuple(Member(**json.loads(store.get(f"member/{r}"))) for r in range(own.world_size))


def _contradiction(members: Sequence[Member]) -> SwiftError | None:
    """The ranks don't even agree on how many they are."""
    sizes = [str(member.world_size) for member in members]
    return _deviation(
        members, sizes, "was started for", "ranks", "start all with the same --nnodes and --nproc_per_node"
    )


def _unreachable(members: Sequence[Member]) -> SwiftError | None:
    """A rank that would tell the others an address at which only its own machine can reach it."""
    master = os.environ.get("MASTER_ADDR", "")
    if len(set(node_names(members))) == 1 or master == "localhost" or master.startswith("127."):  # all are here
        return None
    wrong = [member for member in members if (member.address or "").startswith("127.")]
    if not wrong:
        return None
    variable = "NCCL_SOCKET_IFNAME" if wrong[0].device == "cuda" else "GLOO_SOCKET_IFNAME"
    return SwiftError(
        f"{_who(wrong)} would be reached at {wrong[0].address}, which is inside its own machine only",
        where=variable,
        fix=f"set {variable} to the interface on which the machines see each other (`ip -brief address` lists them), "
        "or unset it",
    )


def _difference(store: Any, members: Sequence[Member]) -> SwiftError | None:
    for name in members[0].versions:
        values = [member.versions.get(name, "none") for member in members]
        fix = f"install the same {name} on every machine (`swift doctor` shows what is there)"
        if (problem := _deviation(members, values, f"has {name}", "", fix)) is not None:
            return problem
    devices = [member.device for member in members]
    fix = "`swift doctor` on that machine says why it sees no such device; CUDA_VISIBLE_DEVICES may hide it"
    if (problem := _deviation(members, devices, "computes on", "", fix)) is not None:
        return problem
    sums = [member.settings for member in members]
    problem = _deviation(members, sums, "has other settings, checksum", "", "")
    if problem is None:
        return None
    usual = Counter(sums).most_common(1)[0][0]
    wrong = [member for member in members if member.settings != usual]
    right = next(member for member in members if member.settings == usual)
    theirs, ours = (json.loads(store.get(f"settings/{member.rank}")) for member in (wrong[0], right))
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    shown = "; ".join(
        f"{n} is {_short(theirs.get(n))} there and {_short(ours.get(n))} on rank {right.rank}" for n in names[:4]
    )
    more = f"; and {len(names) - 4} more" if len(names) > 4 else ""
    return SwiftError(
        f"{_who(wrong)} {'has' if len(wrong) == 1 else 'have'} other settings: {shown}{more}",
        where=" and ".join(f"--{name}" for name in names[:4]),
        fix="start every machine with the same command and the same files; only --node_rank differs",
    )


def _deviation(members: Sequence[Member], values: Sequence[str], verb: str, noun: str, fix: str) -> SwiftError | None:
    """An error about those whose value isn't the most frequent one (of several, rank 0's or the lowest rank's)."""
    counts = Counter(values)
    if len(counts) == 1:
        return None
    usual = counts.most_common(1)[0][0]
    wrong = [member for member, value in zip(members, values, strict=True) if value != usual]
    value = values[wrong[0].rank]
    noun = f" {noun}" if noun else ""
    return SwiftError(
        f"{_who(wrong)} {verb} {value}{noun}, {counts[usual]} other(s) {verb} {usual}{noun}",
        where=f"rank {wrong[0].rank} ({wrong[0].host})",
        fix=fix,
    )


def node_names(members: Sequence[Member]) -> list[str]:
    """The machine of each member: its host name, with the machine's number where two machines have one name."""
    numbers: dict[str, set[str]] = {}
    for member in members:
        numbers.setdefault(member.host, set()).add(member.node)
    return [f"{m.host} (machine {m.node})" if len(numbers[m.host]) > 1 else m.host for m in members]


def _who(members: Sequence[Member]) -> str:
    hosts = list(dict.fromkeys(member.host for member in members))
    shown = ", ".join(hosts[:3]) + (f" and {len(hosts) - 3} more" if len(hosts) > 3 else "")
    return f"{_ranks([member.rank for member in members])} ({shown})"


def _ranks(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
