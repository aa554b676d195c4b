"""Which machine this is and how many there are: from flags, the usual variables, Slurm or MPI. Starts nothing.

Flags win over NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT and NPROC_PER_NODE, and these win over Slurm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swift.core.errors import UsageError

DEFAULT_PORT = 29500
SLURM_PORTS = (15000, 10000)  # the first, and how many: two jobs on one machine should not meet
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, as seen by one of them.

    Attributes:
        count: machines; rank: number of this one, from 0.
        processes: that this machine starts.
        master_addr, master_port: where machine 0 listens.
        join_timeout_s: how long to wait for the others.
    """

    count: int = 1
    rank: int = 0
    processes: int = 1
    master_addr: str = LOOPBACK
    master_port: int = DEFAULT_PORT
    join_timeout_s: int = 50

    @property
    def world_size(self) -> int:
        """Processes in all, as far as one machine knows: the others may start another number."""
        return self.count * self.processes


def find_nodes(config: Any, environ: Mapping[str, str]) -> Nodes:
    """What a command's configuration and the environment say.

    Args:
        config: any command's configuration; the flags of one that can't run on several machines are absent.

    Raises:
        UsageError: a variable is no number, or it isn't said which machine this is or where machine 0 is.
    """
    flags = getattr(config, "parallelism", None)
    slurm = environ if in_slurm_step(environ) else {}
    tasks_are_nodes = _slurm_tasks(slurm) <= _number(slurm, "SLURM_STEP_NUM_NODES", 1)
    slurm = slurm if tasks_are_nodes else {}

    def flag(name: str) -> Any:
        return getattr(flags, name, None)

    count = flag("nnodes") or _positive(environ, "NNODES") or _number(slurm, "SLURM_STEP_NUM_NODES", 1)
    processes = processes_wanted(config, environ)
    timeout = getattr(flags, "join_timeout_s", Nodes.join_timeout_s)
    if flag("dry_run"):  # nobody is met
        return Nodes(count, processes=processes)
    if count == 1:
        return Nodes(processes=processes, join_timeout_s=timeout)
    rank = _first(flag("node_rank"), _number(environ, "NODE_RANK"), _number(slurm, "SLURM_NODEID"))
    address = flag("master_addr") or environ.get("MASTER_ADDR") or first_host(slurm.get("SLURM_STEP_NODELIST", ""))
    port = _first(flag("master_port"), _positive(environ, "MASTER_PORT"), _slurm_port(slurm), DEFAULT_PORT)
    missing = [
        n
        for n, v in (("--node_rank (or NODE_RANK)", rank), ("--master_addr (or MASTER_ADDR)", address))
        if v in (None, "")
    ]
    if missing:
        raise UsageError(
            f"{count} machines: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
            where="--nnodes" if flag("nnodes") else "NNODES",
            fix=f"on every machine, with its own number: --nnodes {count} --node_rank 0..{count - 1} "
            "--master_addr HOST_OF_MACHINE_0",
        )
    if rank >= count:
        raise UsageError(
            f"machines are numbered from 0 to {count - 1}, and this one is number {rank}",
            where="--node_rank" if flag("node_rank") is not None else "NODE_RANK",
            fix=f"--node_rank 0 on the first machine, up to {count - 1} on the last",
        )
    return Nodes(count, rank, processes, address, port, timeout)


def processes_wanted(config: Any, environ: Mapping[str, str]) -> int:
    """Processes on this machine: the flag, else `NPROC_PER_NODE`, else the GPUs that Slurm gave this task, else 1."""
    if getattr(config, "serve", None) is not None:  # a server is one process, unless its model needs several
        return 1 if config.scale.routed else int(config.engine.tensor_parallel_size)
    group = getattr(config, "training", None) or getattr(config, "infer", None)
    flag = getattr(group, "nproc_per_node", None)
    if flag is not None:
        return int(flag)
    given = _positive(environ, "NPROC_PER_NODE")
    if given is not None:
        return given
    return _number(environ, "SLURM_GPUS_ON_NODE", 1) or 1 if in_slurm_step(environ) else 1


def world_size_expected(config: Any, environ: Mapping[str, str]) -> int:
    """Processes of the run: as the launcher said, or as it will say."""
    if "WORLD_SIZE" in environ:
        return _positive(environ, "WORLD_SIZE") or 1
    return find_nodes(config, environ).world_size


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether `srun` started this process; a batch script itself has some of its variables, but not these."""
    return "SLURM_STEP_NODELIST" in environ and "SLURM_PROCID" in environ


def adopted_variables(config: Any, environ: Mapping[str, str]) -> dict[str, str]:
    """RANK and its like, where Slurm or MPI has started every process itself (one for each device); else nothing.

    Raises:
        UsageError: processes are to be started by us as well, or an MPI run doesn't say where rank 0 is.
    """
    if "RANK" in environ:
        return {}
    flags = getattr(config, "parallelism", None)
    if in_slurm_step(environ) and not environ.get("NNODES") and getattr(flags, "nnodes", None) is None:
        tasks, nodes = _slurm_tasks(environ), _number(environ, "SLURM_STEP_NUM_NODES", 1) or 1
        if tasks <= nodes:
            return {}
        _refuse_starting_more(config, environ, f"srun has started {tasks} tasks on {nodes} machine(s)")
        here = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        node = _number(environ, "SLURM_NODEID", 0) or 0
        return {
            "RANK": environ["SLURM_PROCID"],
            "WORLD_SIZE": str(tasks),
            "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
            "LOCAL_WORLD_SIZE": str(here[node] if node < len(here) else tasks // nodes),
            "GROUP_RANK": str(node),
            "MASTER_ADDR": _master(flags, environ) or first_host(environ["SLURM_STEP_NODELIST"]),
            "MASTER_PORT": str(_port(flags, environ)),
        }
    if "OMPI_COMM_WORLD_RANK" in environ and int(environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        _refuse_starting_more(config, environ, "mpirun has started the processes")
        address = _master(flags, environ)
        local = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
        if not address and local != environ["OMPI_COMM_WORLD_SIZE"]:
            raise UsageError(
                "mpirun doesn't say which host rank 0 is on", where="MASTER_ADDR", fix="--master_addr HOST_OF_RANK_0"
            )
        return {
            "RANK": environ["OMPI_COMM_WORLD_RANK"],
            "WORLD_SIZE": environ["OMPI_COMM_WORLD_SIZE"],
            "LOCAL_RANK": environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
            "LOCAL_WORLD_SIZE": local,
            "MASTER_ADDR": address or LOOPBACK,
            "MASTER_PORT": str(_port(flags, environ)),
        }
    return {}


def _refuse_starting_more(config: Any, environ: Mapping[str, str], what: str) -> None:
    group = getattr(config, "training", None) or getattr(config, "infer", None)
    asked = getattr(group, "nproc_per_node", None) or _positive(environ, "NPROC_PER_NODE") or 1
    if asked > 1:
        raise UsageError(
            f"{what}, and nproc_per_node {asked} asks each of them to start more",
            where="--nproc_per_node (or NPROC_PER_NODE)",
            fix="leave it out; or start one task a machine: srun --ntasks-per-node=1",
        )


def _master(flags: Any, environ: Mapping[str, str]) -> str:
    return getattr(flags, "master_addr", None) or environ.get("MASTER_ADDR") or ""


def _port(flags: Any, environ: Mapping[str, str]) -> int:
    given = _first(getattr(flags, "master_port", None), _positive(environ, "MASTER_PORT"), _slurm_port(environ))
    return DEFAULT_PORT if given is None else int(given)


def first_host(nodelist: str) -> str:
    """The first host of a Slurm list: `gpu[07-09,12],login1` -> `gpu07`."""
    depth, end = 0, len(nodelist)
    for position, letter in enumerate(nodelist):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            end = position
            break
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodelist[:end])


def tasks_per_node(text: str) -> list[int]:
    """Slurm's `4(x2),3` -> [4, 4, 3]."""
    found: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        found += [int(count)] * int(times or 1)
    return found


def _slurm_tasks(environ: Mapping[str, str]) -> int:
    return _number(environ, "SLURM_STEP_NUM_TASKS", _number(environ, "SLURM_NTASKS", 1)) or 1


def _slurm_port(environ: Mapping[str, str]) -> int | None:
    job = _number(environ, "SLURM_JOB_ID")
    if job is None or not in_slurm_step(environ):
        return None
    first, count = SLURM_PORTS
    return first + (job * 7 + (_number(environ, "SLURM_STEP_ID", 0) or 0)) % count


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _number(environ: Mapping[str, str], variable: str, default: int | None = None) -> Any:
    text = environ.get(variable, "")
    if not text:
        return default
    if not text.isdigit():
        raise UsageError(f"the environment variable {variable} is {text!r}", fix=f"export {variable}=0, or unset it")
    return int(text)


def _positive(environ: Mapping[str, str], variable: str) -> int | None:
    value: int | None = _number(environ, variable)
    if value is not None and value < 1:
        raise UsageError(f"the environment variable {variable} is {value}", fix=f"export {variable}=2, or unset it")
    return value
