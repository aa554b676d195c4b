"""Several processes for one command.

On one node we start the processes ourselves: `torch.distributed.run` costs seconds to import and turns a graceful
stop into a failure. Over several nodes it is used, because there a rendezvous is needed. Each process gets the usual
variables (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), so that the command can't tell
who started it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

from swift.core.errors import UsageError

PROGRAM = (sys.executable, "-m", "swift.cli")

POLL_S = 0.05
PEER_GRACE_S = 3.0  # after a failure: time for the other processes to fail by themselves with their own message
STOP_GRACE_S = 15.0  # after a termination request: then they are killed


def inside() -> bool:
    """Whether a launcher (this one or torchrun) started this process."""
    return "RANK" in os.environ


def processes_wanted(config: Any) -> int:
    """Processes on this node: the flag, else `NPROC_PER_NODE`, else 1."""
    group = getattr(config, "training", None) or getattr(config, "infer", None)
    flag = getattr(group, "nproc_per_node", None)
    return flag if flag is not None else _positive("NPROC_PER_NODE", 1)


def nodes_wanted() -> int:
    """`NNODES`, else 1."""
    return _positive("NNODES", 1)


def _positive(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    if not text:
        return default
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"the environment variable {variable} is {text!r}", fix=f"export {variable}=2, or unset it")
    return int(text)


def torchrun_command(argv: Sequence[str], processes: int, env: Mapping[str, str]) -> list[str]:
    """The command that starts this node's share of a run over several nodes.

    Raises:
        UsageError: if the environment doesn't say which node this is or where node 0 is.
    """
    missing = [name for name in ("NODE_RANK", "MASTER_ADDR") if not env.get(name)]
    if missing:
        raise UsageError(
            f"NNODES={env.get('NNODES')} needs {' and '.join(missing)} in the environment",
            fix="on every node: NNODES=2 NODE_RANK=0..1 MASTER_ADDR=<host of node 0> MASTER_PORT=29500 swift ...",
        )
    return [
        sys.executable, "-m", "torch.distributed.run",
        f"--nnodes={env['NNODES']}", f"--node_rank={env['NODE_RANK']}", f"--nproc_per_node={processes}",
        f"--master_addr={env['MASTER_ADDR']}", f"--master_port={env.get('MASTER_PORT') or '29500'}",
        "-m", "swift.cli", *argv,
    ]  # fmt: skip


def replace_by_torchrun(argv: Sequence[str], processes: int) -> NoReturn:
    """Become torchrun."""
    command = torchrun_command(argv, processes, os.environ)
    sys.stdout.flush()
    os.execvp(command[0], command)


def run(argv: Sequence[str], processes: int, *, program: Sequence[str] = PROGRAM) -> int:
    """Run `program argv` in `processes` processes and wait for all.

    The first SIGINT or SIGTERM goes to every process once (they finish their step, save and exit); the second kills
    them. If one fails, the others get a short grace and are then terminated. If this process dies, Linux terminates
    them.

    Returns:
        0 if every process returned 0, else the highest exit code among those that ended by themselves (a process
        killed by a signal counts as 1); 130 after a second request to stop.
    """
    return _Group(argv, processes, program).wait()


class _Group:
    """The processes of one node."""

    def __init__(self, argv: Sequence[str], processes: int, program: Sequence[str]) -> None:
        self.requests = 0  # signals received
        self.ended_by_us: set[int] = set()
        self.first_failure_s: float | None = None
        self.stop_deadline_s: float | None = None
        self.children: list[subprocess.Popen[bytes]] = []
        self.previous = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        port = os.environ.get("MASTER_PORT") or str(_free_port())
        threads = max(1, (os.cpu_count() or 1) // processes)
        for rank in range(processes):
            env = {
                "OMP_NUM_THREADS": str(threads),
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "LOCAL_WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
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
                self._end_stragglers(time.monotonic())
                time.sleep(POLL_S)
        finally:
            self._kill()
            for number, handler in self.previous.items():
                signal.signal(number, handler)
        return self._exit_code()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requests += 1
        if self.requests == 1:
            self._send(number)
        else:
            self._kill()

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
        codes = []
        for rank, child in enumerate(self.children):
            code = child.returncode
            if child.pid in self.ended_by_us:
                codes.append(0 if self.first_failure_s is not None else 1)
            elif code < 0:
                print(f"error: rank {rank} was ended by {signal.Signals(-code).name}", file=sys.stderr)
                codes.append(1)
            else:
                codes.append(code)
        return max(codes, default=0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
