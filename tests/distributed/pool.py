"""Run a function on several ranks that talk by gloo, without paying for imports each time.

A fork server imports torch and transformers once for the whole test run; every rank is a fork of it. The function must
be importable (defined at the top of a test module), and so must be its arguments.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch.distributed.tensor", "torch.distributed.fsdp", "transformers", "peft", "swift.objectives"]
)


def free_port() -> int:
    """A port that nobody listens on, below those that the system hands out, so that none of these takes it first."""
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", random.SystemRandom().randrange(15000, 32000)))
            except OSError:
                continue
            return int(probe.getsockname()[1])


def on_ranks(world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 180.0) -> list[Any]:
    """What `function(*args)` returned on each of `world` ranks, in rank order.

    Each rank has RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, one thread, and has
    joined the default gloo group. Results are pickled: return numbers or CPU tensors.

    Raises:
        AssertionError: with the traceback of the first rank that failed; or a rank hung.
    """
    port = free_port()
    ranks = []
    for rank in range(world):
        ours, theirs = _context.Pipe(duplex=False)
        process = _context.Process(target=_run, args=(theirs, rank, world, port, function, args), daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, ours))
    results: list[Any] = [None] * world
    failures: list[str] = []
    deadline = time.monotonic() + timeout_s
    waiting = dict(enumerate(ranks))
    try:
        while waiting and not failures:
            for rank, (process, pipe) in list(waiting.items()):
                if pipe.poll(0.01):
                    try:
                        good, value = pickle.loads(pipe.recv_bytes())
                    except EOFError:
                        good, value = False, "ended without a result"
                    waiting.pop(rank)
                    if good:
                        results[rank] = value
                    else:
                        failures.append(f"rank {rank}: {value}")
                elif not process.is_alive() and not pipe.poll(0):
                    failures.append(f"rank {rank} died with exit code {process.exitcode}")
                    waiting.pop(rank)
            if time.monotonic() > deadline:
                failures.append(f"ranks {sorted(waiting)} hung for {timeout_s:.0f} s")
    finally:
        for process, pipe in ranks:
            if failures:
                process.kill()
            process.join(30)
            pipe.close()
    assert not failures, "\n".join(failures)
    return results


def _run(pipe: Any, rank: int, world: int, port: int, function: Callable[..., Any], args: tuple) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world)
        value = function(*args)
        # by value: tensors in shared memory would be gone with this process before they are read
        pipe.send_bytes(pickle.dumps((True, value)))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
        os._exit(1)  # others may wait for this rank in a collective: they are killed
    finally:
        pipe.close()
    dist.destroy_process_group()
