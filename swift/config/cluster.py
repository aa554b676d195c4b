"""The file that describes a cluster: its machines, their devices, and the switches they hang on.

nodes:
  - {host: gpu01, devices: 8, switch: rack-a}
  - {host: gpu02, devices: 8, switch: rack-a}
  - {host: "gpu[03-04]", devices: 8, switch: rack-b}
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift.core.errors import UsageError

_KEYS = ("host", "devices", "switch")


@dataclass(frozen=True)
class ClusterNode:
    """One machine: its host name, its devices, the switch it hangs on (None: not said)."""

    host: str
    devices: int
    switch: str | None = None


@dataclass(frozen=True)
class Cluster:
    """All machines that a run may use."""

    nodes: tuple[ClusterNode, ...]

    def node(self, host: str) -> ClusterNode | None:
        """The machine of this name; a full name (`gpu01.cluster`) and its first part mean the same."""
        short = host.partition(".")[0]
        exact = next((node for node in self.nodes if node.host == host), None)
        return exact or next((node for node in self.nodes if node.host.partition(".")[0] == short), None)


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster file.

    Raises:
        UsageError: naming what is wrong with it.
    """
    import yaml

    file = Path(path).expanduser()
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise _fault(file, f"can't be read: {error}") from error
    entries = data.get("nodes") if isinstance(data, dict) else None
    if not isinstance(entries, list) or not entries:
        raise _fault(file, "has no list `nodes`")
    nodes = tuple(node for number, entry in enumerate(entries) for node in _nodes(file, number, entry))
    hosts = [node.host for node in nodes]
    twice = sorted({host for host in hosts if hosts.count(host) > 1})
    if twice:
        raise _fault(file, f"names {', '.join(twice)} twice")
    return Cluster(nodes)


def _nodes(file: Path, number: int, entry: Any) -> Iterator[ClusterNode]:
    where = f"nodes[{number}]"
    if not isinstance(entry, dict) or not isinstance(entry.get("host"), str):
        raise _fault(file, f"{where} has no `host`")
    unknown = [key for key in entry if key not in _KEYS]
    if unknown:
        raise _fault(file, f"{where} has an unknown key {unknown[0]!r}; known are {', '.join(_KEYS)}")
    devices = entry.get("devices", 1)
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise _fault(file, f"{where}: devices is {devices!r}, not a number above 0")
    switch = entry.get("switch")
    for host in expand_hosts(entry["host"]):
        yield ClusterNode(host, devices, None if switch is None else str(switch))


def expand_hosts(pattern: str) -> list[str]:
    """`gpu[01-03,7]` -> gpu01, gpu02, gpu03, gpu7."""
    found = re.match(r"(.*?)\[([\d,-]+)\](.*)\Z", pattern)
    if found is None:
        return [pattern]
    head, ranges, tail = found.groups()
    hosts = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        for value in range(int(first), int(last or first) + 1):
            hosts += [f"{head}{value:0{len(first)}d}{rest}" for rest in expand_hosts(tail)]
    return hosts


def _fault(file: Path, what: str) -> UsageError:
    return UsageError(
        f"the cluster file {what}",
        where=f"--cluster_file {file}",
        fix="its form: `nodes:` and below it `- {host: gpu01, devices: 8, switch: rack-a}` for each machine",
    )
