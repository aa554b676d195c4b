"""Several processes for one command, on this machine and together with the launchers of others.

We start the processes ourselves: `torch.distributed.run` costs seconds to import and turns a graceful stop into a
failure. Each process gets the usual variables (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR,
MASTER_PORT), so that the command can't tell who started it: this, torchrun, Slurm or MPI.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from swift.cli.nodes import Link, Place, free_port, join
from swift.config.nodes import LOOPBACK, adopted_variables, find_nodes
from swift.core.interfaces import check_interfaces

PROGRAM = (sys.executable, "-m", "swift.cli")

POLL_S = 0.05
PEER_GRACE_S = 3.0  # after a failure: time for the other processes to fail by themselves with their own message
STOP_GRACE_S = 15.0  # after a termination request: then they are killed

_AFTER_KILL = (
    "the system does that when memory runs out (`dmesg | tail` tells); a training run goes on from its last checkpoint "
    "with --resume_from_checkpoint latest"
)


def inside() -> bool:
    """Whether a launcher (this one, or torchrun) started this process."""
    return "RANK" in os.environ


def adopt(config: Any) -> None:
    """Take over the place that Slurm or MPI gave this process, where these have started all processes.

    Raises:
        UsageError: what they say doesn't fit the flags.
    """
    os.environ.update(adopted_variables(config, os.environ))


def launch(argv: Sequence[str], config: Any) -> int | None:
    """Run the command in as many processes as were asked for, on this machine and with others.

    Returns:
        The exit code; None where one process on one machine is enough, which is this one.

    Raises:
        SwiftError: the other machines can't be found.
    """
    if getattr(getattr(config, "parallelism", None), "dry_run", False):
        return None  # one process plays all
    nodes = find_nodes(config, os.environ)
    if nodes.count > 1:
        check_interfaces()
        return run(argv, nodes.processes, link=join(nodes))
    return run(argv, nodes.processes) if nodes.processes > 1 else None


def run(argv: Sequence[str], processes: int, *, link: Link | None = None, program: Sequence[str] = PROGRAM) -> int:
    """Run `program argv` in `processes` processes and wait for all.

    The first SIGINT or SIGTERM goes to every process once (they finish their step, save and exit); the second kills
    them. If one fails, the others get a short grace and are then terminated. If this process dies, Linux terminates
    them.

    Args:
        link: to the launchers of the other machines; a failure there ends the processes here too.

    Returns:
        0 if every process returned 0, else the highest exit code among those that ended by themselves (a process
        killed by a signal counts as 1); 130 after a second request to stop.
    """
    return _Group(argv, processes, link, program).wait()


class _Group:
    """The processes of one machine."""

    def __init__(self, argv: Sequence[str], processes: int, link: Link | None, program: Sequence[str]) -> None:
        self.link = link
        self.elsewhere = False  # whether another machine has failed
        self.told = False  # whether the other machines know of a failure here
        self.requests = 0  # signals received
        self.ended_by_us: set[int] = set()
        self.first_failure_s: float | None = None
        self.stop_deadline_s: float | None = None
        self.children: list[subprocess.Popen[bytes]] = []
        self.previous = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        place = link.place if link is not None else _alone(processes)
        self.first_rank = place.first_rank
        threads = max(1, (os.cpu_count() or 1) // processes)
        for rank in range(processes):
            env = {
                "OMP_NUM_THREADS": str(threads),
                **os.environ,
                "RANK": str(place.first_rank + rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(place.world_size),
                "LOCAL_WORLD_SIZE": str(processes),
                "GROUP_RANK": str(place.node),
                "MASTER_ADDR": place.master_addr,
                "MASTER_PORT": str(place.store_port),
            }
            child = subprocess.Popen(
                [*program, *argv],
                env=env,
                stdin=subprocess.DEVNULL,
                process_group=0,  # the terminal's Ctrl-C reaches us only; we pass it on, once
                preexec_fn=_die_with_parent(os.getpid()),
            )
            self.children.append(child)
        if self.requests:  # asked to stop before all had started: nothing is worth saving
            self._kill()

    def wait(self) -> int:
        try:
            while None in [child.poll() for child in self.children]:  # a list: every one is polled
                self._watch_others()
                self._end_stragglers(time.monotonic())
                time.sleep(POLL_S)
            self._finish_together()
        finally:
            self._kill()
            if self.link is not None:
                self.link.close()
            for number, handler in self.previous.items():
                signal.signal(number, handler)
        return self._exit_code()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requests += 1
        if self.requests == 1:
            self._send(number)
        else:
            self._kill()

    def _watch_others(self) -> None:
        """Notice failures on other machines, and tell them of those here."""
        if self.link is None:
            return
        for text in self.link.poll():
            self._failed_elsewhere(text)
        if not self.elsewhere and not self.told:
            for number, child in enumerate(self.children):
                if child.returncode and child.pid not in self.ended_by_us:
                    self.told = True
                    self.link.tell(f"rank {self.first_rank + number} on {socket.gethostname()} {_ended(child)}")

    def _failed_elsewhere(self, text: str) -> None:
        self.elsewhere = True
        print(f"error: {text}", file=sys.stderr, flush=True)
        if self.first_failure_s is None:
            self.first_failure_s = time.monotonic()

    def _finish_together(self) -> None:
        self._watch_others()
        if self.link is not None:
            for text in self.link.finish():
                self._failed_elsewhere(text)

    def _end_stragglers(self, now_s: float) -> None:
        """After a failure, end the processes that would wait for the failed one for ever."""
        if self.first_failure_s is None and any(child.returncode for child in self.children):
            self.first_failure_s = now_s
        if self.first_failure_s is None or now_s - self.first_failure_s < PEER_GRACE_S:
            return
        if self.stop_deadline_s is None:
            self.stop_deadline_s = now_s + STOP_GRACE_S
            self.ended_by_us |= {child.pid for child in self.children if child.poll() is None}
            self._send(signal.SIGTERM)
        elif now_s > self.stop_deadline_s:
            self._kill()

    def _send(self, number: int) -> None:
        for child in self.children:
            if child.poll() is None:
                child.send_signal(number)

    def _kill(self) -> None:
        """Kill every process left, with whatever it has started."""
        for child in self.children:
            if child.poll() is None:
                self.ended_by_us.add(child.pid)
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()

    def _exit_code(self) -> int:
        if self.requests > 1:
            return 130
        codes = [1] if self.elsewhere else []
        for number, child in enumerate(self.children):
            code = child.returncode
            if child.pid in self.ended_by_us:
                codes.append(0 if self.first_failure_s is not None else 1)
            elif code < 0:
                print(f"error: rank {self.first_rank + number} {_ended(child)}", file=sys.stderr)
                if code == -signal.SIGKILL:
                    print(f"  fix:   {_AFTER_KILL}", file=sys.stderr)
                codes.append(1)
            else:
                codes.append(code)
        return max(codes, default=0)


def _ended(child: subprocess.Popen[bytes]) -> str:
    code = child.returncode
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed (exit code {code})"


def _alone(processes: int) -> Place:
    """The place of a machine that has no others."""
    return Place(0, processes, LOOPBACK, int(os.environ.get("MASTER_PORT") or free_port()), 0)


def _die_with_parent(parent: int) -> Any:
    """Called in a new process: have Linux send it SIGTERM when the launcher dies. Nothing elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    libc = ctypes.CDLL(None)
    pr_set_pdeathsig = 1

    def arrange() -> None:
        libc.prctl(pr_set_pdeathsig, signal.SIGTERM)
        if os.getppid() != parent:  # it died in between
            os._exit(1)

    return arrange
