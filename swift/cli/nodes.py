"""How the launchers of several machines find one another, and learn when one of them has failed. No torch.

Machine 0 listens on the master port; the others connect, and say which machine they are and how many processes they
start. When all are there, everybody is told its first rank, the number of processes and the port at which these meet.
The connections stay: a failure is told to all, and a machine that falls silent is missed after `SILENCE_S`. So a
failure on one machine ends the run on all of them, with a message that names the rank.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from swift.config.nodes import Nodes
from swift.core.errors import SwiftError
from swift.core.interfaces import unreachable_cause
from swift.core.version import __version__

REMIND_S = 10.0  # how often it is said who is missing
BEAT_S = 3.0
SILENCE_S = 30.0
_MOST_BYTES = 1 << 16  # of one message


@dataclass(frozen=True)
class Place:
    """Where this machine's processes stand among all.

    Attributes:
        first_rank: of this machine; world_size: processes of all.
        master_addr, store_port: where the processes meet.
        node: number of this machine.
    """

    first_rank: int
    world_size: int
    master_addr: str
    store_port: int
    node: int


@dataclass
class _Peer:
    """A connection to another launcher."""

    node: int
    host: str
    connection: socket.socket
    received: bytes = b""
    heard_s: float = field(default_factory=time.monotonic)
    done: bool = False
    lost: bool = False

    def send(self, **message: Any) -> None:
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.lost = True

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived; sets `lost` when the other end has gone."""
        while not self.lost:
            try:
                data = self.connection.recv(_MOST_BYTES)
            except (BlockingIOError, TimeoutError):
                break
            except OSError:
                data = b""
            self.lost = not data
            self.received += data
            self.heard_s = time.monotonic() if data else self.heard_s
        *lines, self.received = self.received.split(b"\n")
        if len(self.received) > _MOST_BYTES:
            self.lost = True
        messages = [_parse(line) for line in lines]
        return [message for message in messages if message is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


class Link:
    """The connections between the launchers of a run; use `join` to make one."""

    def __init__(self, nodes: Nodes, place: Place, peers: list[_Peer], listener: socket.socket | None = None) -> None:
        self.nodes, self.place, self._peers, self._listener = nodes, place, peers, listener
        self._beat_s = time.monotonic()
        self._told: set[str] = set()
        for peer in peers:
            peer.connection.setblocking(False)
            peer.heard_s = time.monotonic()

    def poll(self) -> list[str]:
        """What has gone wrong on other machines since the last call, in words. Call it often: it is a sign of life."""
        now_s = time.monotonic()
        if now_s - self._beat_s > BEAT_S:
            self._beat_s = now_s
            self._send(beat=1)
        news = []
        for peer in self._peers:
            if peer.done:
                continue
            for message in peer.receive():
                peer.done = peer.done or "done" in message
                if "failed" in message:
                    news.append(str(message["failed"]))
            if peer.lost and not peer.done:
                peer.done = True
                news.append(f"machine {peer.node} ({peer.host}) has gone: its launcher ended or lost the connection")
            elif not peer.done and now_s - peer.heard_s > SILENCE_S:
                peer.done = True
                news.append(f"machine {peer.node} ({peer.host}) has not been heard of for {SILENCE_S:.0f} s")
        news = [text for text in dict.fromkeys(news) if text not in self._told]
        if self._listener is not None:  # machine 0 passes it on
            for text in news:
                self.tell(text)
        self._told.update(news)
        return news

    def tell(self, failure: str) -> None:
        """Tell the other machines of a failure."""
        self._told.add(failure)
        self._send(failed=failure)

    def finish(self) -> list[str]:
        """This machine's processes have ended: say so; machine 0 waits for the others, and gives their failures."""
        self._send(done=1)
        failures: list[str] = []
        while self._listener is not None and not failures and not all(peer.done for peer in self._peers):
            failures += self.poll()
            time.sleep(0.05)
        return failures

    def close(self) -> None:
        for peer in self._peers:
            peer.connection.close()
        if self._listener is not None:
            self._listener.close()

    def _send(self, **message: Any) -> None:
        for peer in self._peers:
            if not peer.lost:
                peer.send(**message)


def join(nodes: Nodes) -> Link:
    """Find the other machines' launchers.

    Raises:
        SwiftError: within `join_timeout_s`, naming the machines that are missing, or why machine 0 can't be reached.
    """
    return _lead(nodes) if nodes.rank == 0 else _follow(nodes)


def _lead(nodes: Nodes) -> Link:
    listener = _listen(nodes)
    store_port = free_port()
    deadline_s = time.monotonic() + nodes.join_timeout_s
    reminder_s = time.monotonic() + REMIND_S
    peers: dict[int, _Peer] = {}
    processes = {0: nodes.processes}
    try:
        while len(peers) < nodes.count - 1:
            now_s = time.monotonic()
            missing = [node for node in range(1, nodes.count) if node not in peers]
            if now_s > deadline_s:
                raise SwiftError(
                    f"{_machines(missing)} of {nodes.count} didn't come within {nodes.join_timeout_s} s",
                    where=f"machine 0 ({socket.gethostname()}), port {nodes.master_port}",
                    fix="look at their own messages; each needs its --node_rank, and "
                    f"--master_addr {nodes.master_addr} --master_port {nodes.master_port}; "
                    "--join_timeout_s 600 waits longer",
                )
            if now_s > reminder_s:
                reminder_s = now_s + REMIND_S
                _say(f"waiting for {_machines(missing)} of {nodes.count} ({deadline_s - now_s:.0f} s more)")
            listener.settimeout(0.2)
            try:
                connection, _ = listener.accept()
            except (TimeoutError, BlockingIOError):
                peers = {node: peer for node, peer in peers.items() if not _hung_up(peer)}
                continue
            hello = _hello(connection)
            if hello is None:
                connection.close()
                continue
            peer = _Peer(int(hello["node"]), str(hello["host"]), connection)
            fault = _hello_fault(hello, nodes, peers)
            if fault is not None:
                peer.send(error=fault[0], fix=fault[1])
                raise SwiftError(fault[0], where=f"machine 0 ({socket.gethostname()})", fix=fault[1])
            peers[peer.node] = peer
            processes[peer.node] = int(hello["processes"])
    except SwiftError as error:
        for peer in peers.values():
            peer.send(error=error.message, fix=error.fix)
            peer.connection.close()
        listener.close()
        raise
    first, world = 0, sum(processes.values())
    for node in range(nodes.count):
        if node:
            peers[node].send(go=1, first_rank=first, world_size=world, store_port=store_port)
        first += processes[node]
    place = Place(0, world, nodes.master_addr, store_port, 0)
    return Link(nodes, place, [peers[node] for node in sorted(peers)], listener)


def _listen(nodes: Nodes) -> socket.socket:
    try:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        backlog = max(16, nodes.count)
        return socket.create_server(("", nodes.master_port), family=family, backlog=backlog, dualstack_ipv6=both)
    except OSError as error:
        raise SwiftError(
            f"port {nodes.master_port} can't be opened: {error.strerror}",
            where=f"machine 0 ({socket.gethostname()})",
            fix=f"another run may use it: --master_port {nodes.master_port + 1} on every machine",
        ) from error


def _hello(connection: socket.socket) -> dict[str, Any] | None:
    """What a launcher that has just connected says; None for anything else that knocks."""
    connection.settimeout(5.0)
    try:
        line = connection.makefile("rb").readline(_MOST_BYTES)
    except OSError:
        return None
    message = _parse(line)
    return message if message is not None and {"node", "host", "processes", "nodes"} <= message.keys() else None


def _hello_fault(hello: dict[str, Any], nodes: Nodes, peers: dict[int, _Peer]) -> tuple[str, str] | None:
    node, host = int(hello["node"]), hello["host"]
    if int(hello["nodes"]) != nodes.count:
        return (
            f"machine {node} ({host}) was started for {hello['nodes']} machines, machine 0 for {nodes.count}",
            "give the same --nnodes everywhere",
        )
    if node in peers or node == 0:
        other = peers[node].host if node in peers else socket.gethostname()
        return f"two machines call themselves number {node}: {other} and {host}", "give each its own --node_rank"
    if hello.get("version") != __version__:
        return (
            f"machine {node} ({host}) has swift {hello.get('version')}, machine 0 has {__version__}",
            "install the same version everywhere",
        )
    return None


def _hung_up(peer: _Peer) -> bool:
    """Whether a launcher that waits for the others has ended meanwhile."""
    peer.connection.setblocking(False)
    peer.receive()
    if peer.lost:
        peer.connection.close()
        _say(f"machine {peer.node} ({peer.host}) has gone again")
    return peer.lost


def _follow(nodes: Nodes) -> Link:
    where = f"machine {nodes.rank} ({socket.gethostname()})"
    master = f"{nodes.master_addr}:{nodes.master_port}"
    deadline_s = time.monotonic() + nodes.join_timeout_s
    connection = _connect(nodes, master, where, deadline_s)
    peer = _Peer(0, nodes.master_addr, connection)
    peer.send(
        node=nodes.rank, host=socket.gethostname(), nodes=nodes.count, processes=nodes.processes, version=__version__
    )
    connection.settimeout(0.5)
    reminder_s = time.monotonic() + REMIND_S
    while True:
        for message in peer.receive():
            if "error" in message:
                raise SwiftError(str(message["error"]), where=where, fix=message.get("fix"))
            if "go" in message:
                first, world, port = (int(message[name]) for name in ("first_rank", "world_size", "store_port"))
                return Link(nodes, Place(first, world, nodes.master_addr, port, nodes.rank), [peer])
        now_s = time.monotonic()
        if peer.lost or now_s > deadline_s + 5:  # machine 0 knows better why, and says so
            why = "hung up" if peer.lost else f"didn't bring all machines together within {nodes.join_timeout_s} s"
            raise SwiftError(
                f"machine 0 ({master}) {why}", where=where, fix="look at the messages of machine 0, and start again"
            )
        if now_s > reminder_s:
            reminder_s = now_s + REMIND_S
            _say(f"machine 0 ({master}) waits for other machines")


def _connect(nodes: Nodes, master: str, where: str, deadline_s: float) -> socket.socket:
    reminder_s = time.monotonic() + REMIND_S
    while True:
        try:
            return socket.create_connection((nodes.master_addr, nodes.master_port), timeout=5.0)
        except OSError as error:
            cause, fix = unreachable_cause(error, nodes.master_addr)
        now_s = time.monotonic()
        if now_s > deadline_s:
            raise SwiftError(
                f"machine 0 can't be reached at {master} after {nodes.join_timeout_s} s: {cause}",
                where=where,
                fix=f"{fix}; --join_timeout_s 600 waits longer",
            )
        if now_s > reminder_s:
            reminder_s = now_s + REMIND_S
            _say(f"waiting for machine 0 at {master}: {cause} ({deadline_s - now_s:.0f} s more)")
        time.sleep(0.3)


def _machines(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"machine{'s' if len(numbers) > 1 else ''} {shown}"


def free_port() -> int:
    """A port on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
