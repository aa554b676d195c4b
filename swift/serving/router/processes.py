"""Replicas as processes of this machine: started, started again when they end, and never left behind.

Linux ends each one with the thread that started it, so whoever calls `keep` has to live as long as they may. Knows
nothing of what a replica serves: it is a command, and says at its address when it is ready.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from swift.core.errors import ModelError
from swift.core.logging import get_logger
from swift.inference.backends.process import ServerProcess, free_port
from swift.serving.router.fleet import Fleet, Replica

log = get_logger("router")

_POLL_S = 0.05
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0  # before one that ended is started again
_WELL_S = 60.0  # after that long a life the next end counts as the first
_HUNG_S = 30.0  # one that was ready and hasn't been for that long is ended
_LAST_LINES = 3


@dataclass(frozen=True)
class Launch:
    """How replicas are started.

    Attributes:
        command: the program and its arguments for a port; the port is one of 127.0.0.1.
        environments: variables of each replica; as many as there are replicas.
        key, admin_key: that they want to see.
        folder: for their logs.
        drain_s: seconds that running answers have before a replica is restarted.
    """

    command: Callable[[int], Sequence[str]]
    environments: Sequence[Mapping[str, str]]
    key: str
    admin_key: str
    folder: Path
    drain_s: float


class LocalReplicas:
    """Processes and the router's view of them."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        names = [str(number) for number in range(len(launch.environments))]
        self.replicas = [Replica(name, "", launch.key, launch.admin_key) for name in names]
        self._processes: dict[str, ServerProcess] = {}
        self._restarting = asyncio.Lock()

    async def keep(self, fleet: Fleet, stop: Callable[[BaseException], None]) -> None:
        """Start them, and start them again when they end; until cancelled.

        Args:
            stop: ends the router when a replica can't be started even once.
        """
        try:
            await asyncio.gather(*(self._keep_one(fleet, number) for number in range(len(self.replicas))))
        except ModelError as error:
            stop(error)

    async def restart(self, fleet: Fleet) -> None:
        """Each of them anew, one after the other: the next one when the one before is ready."""
        if self._restarting.locked():
            log.warning("the replicas are being restarted already")
            return
        async with self._restarting:
            for replica in self.replicas:
                log.info("replica %s is restarted", replica.name)
                replica.state = "leaving"
                await self._drained(fleet, replica)
                starts = replica.num_starts
                _send(self._processes.get(replica.name), signal.SIGTERM)
                while replica.num_starts == starts or replica.state != "ready":
                    await asyncio.sleep(_POLL_S)
            log.info("all replicas were restarted")

    def close(self) -> None:
        """End all of them. Blocks until they are gone."""
        for process in self._processes.values():
            _send(process, signal.SIGTERM)  # all at once, so that they end together
        for process in self._processes.values():
            process.close()

    async def _keep_one(self, fleet: Fleet, number: int) -> None:
        replica, failures, was_ready = self.replicas[number], 0, False
        while True:
            process = self._start(number)
            fleet.balancer.forget(replica.name)
            began = time.monotonic()
            was_ready = await self._ended(replica, process) or was_ready
            leaving = replica.state == "leaving"
            replica.state, replica.url = "starting", ""
            words = "\n".join(process.last_words().splitlines()[-_LAST_LINES:])
            process.close()
            if not was_ready:
                raise ModelError(f"replica {replica.name} ended before it was ready; it said last:\n{words}")
            if leaving:
                continue
            failures = 1 if time.monotonic() - began > _WELL_S else failures + 1
            wait_s = min(_FIRST_WAIT_S * 2 ** min(failures - 1, 10), _LONGEST_WAIT_S)
            log.warning(
                "replica %s has ended; a new one comes in %.1f s. It said last:\n%s", replica.name, wait_s, words
            )
            await asyncio.sleep(wait_s)

    def _start(self, number: int) -> ServerProcess:
        replica, port = self.replicas[number], free_port()
        process = ServerProcess(
            self._launch.command(port),
            self._launch.folder / f"replica-{replica.name}.log",
            self._launch.environments[number],
        )
        self._processes[replica.name] = process
        replica.moved(f"http://127.0.0.1:{port}")
        return process

    async def _ended(self, replica: Replica, process: ServerProcess) -> bool:
        """Wait for a process' end; whether it was ever ready."""
        was_ready, well_at = False, time.monotonic()
        while process.running:
            if replica.state == "ready":
                was_ready, well_at = True, time.monotonic()
            elif was_ready and replica.state == "down" and time.monotonic() - well_at > _HUNG_S:
                log.warning("replica %s hasn't been well for %.0f s and is ended", replica.name, _HUNG_S)
                _send(process, signal.SIGKILL)
            await asyncio.sleep(_POLL_S)
        return was_ready

    async def _drained(self, fleet: Fleet, replica: Replica) -> None:
        end = time.monotonic() + self._launch.drain_s
        while fleet.balancer.active(replica.name) and time.monotonic() < end:
            await asyncio.sleep(_POLL_S)


def _send(process: ServerProcess | None, number: int) -> None:
    if process is not None and process.running:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
