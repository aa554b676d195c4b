"""A router's life: listening, having replicas started where they are its own, and an orderly end.

It ends as any server does (`lifecycle`): no new connections, time for what is running, and only then the replicas.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import uvicorn

from swift.config.serving import ServeConfig
from swift.core.logging import get_logger
from swift.serving.lifecycle import say_when_draining, uvicorn_settings, warn_if_open
from swift.serving.limits import read_keys
from swift.serving.router.app import make_router_app
from swift.serving.router.fleet import Fleet, Replica
from swift.serving.services import Services

log = get_logger("router")


class Keeper(Protocol):
    """What starts replicas and keeps them running."""

    async def keep(self, fleet: Fleet, stop: Callable[[BaseException], None]) -> None:
        """Start them and start them again, until cancelled; `stop` ends the router with an error."""

    async def restart(self, fleet: Fleet) -> None:
        """Each of them anew, one after the other."""

    def close(self) -> None:
        """End them. Blocks."""


class RouterServer:
    """One run of a router.

    Args:
        config: settings of the server.
        listener: a bound socket (`listen`).
        replicas: what it routes to.
        keeper: starts them; None where others do.
        check_s: seconds between two looks at a replica.
    """

    def __init__(
        self,
        config: ServeConfig,
        listener: socket.socket,
        replicas: Sequence[Replica],
        keeper: Keeper | None = None,
        check_s: float = 2.0,
    ) -> None:
        self.config = config
        self.keys = read_keys(config)
        self.fleet: Fleet | None = None
        self._listener = listener
        self._replicas = replicas
        self._keeper = keeper
        self._check_s = check_s
        self._failure: BaseException | None = None
        self._uvicorn: uvicorn.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        return f"http{'s' if self.config.ssl_certfile else ''}://{host}:{port}"

    def run(self) -> None:
        """Route until a signal or `stop`.

        Raises:
            SwiftError: the replicas can't be started.
        """
        warn_if_open(self.config, self.keys)
        log.info("listening at %s, in front of %d replicas", self.url, len(self._replicas))
        try:
            asyncio.run(self._serve())
        finally:
            if self._keeper is not None:
                self._keeper.close()
        log.info("stopped")
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End as after a signal. For any thread."""
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True

    async def _serve(self) -> None:
        services = Services(self.config, self.keys)
        self.fleet = fleet = Fleet(self._replicas, self._check_s)
        app = make_router_app(services, fleet)
        self._uvicorn = server = uvicorn.Server(uvicorn_settings(self.config, app))
        if threading.current_thread() is threading.main_thread():
            # uvicorn raises the signals that it got once more at its end, when the work is done
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: None)
            if self._keeper is not None:
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._restart)
        fleet.watch()
        if self._keeper is not None:
            self._start(self._keeper.keep(fleet, self._fail))
        self._start(self._say_ready(fleet))
        self._start(say_when_draining(server, services.metrics, self.config.drain_s))
        try:
            await server.serve(sockets=[self._listener])
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await fleet.close()
            services.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self.stop()

    def _restart(self) -> None:
        assert self._keeper is not None
        assert self.fleet is not None
        self._start(self._keeper.restart(self.fleet))

    async def _say_ready(self, fleet: Fleet) -> None:
        while not all(replica.state == "ready" for replica in fleet.replicas):
            await asyncio.sleep(0.05)
        log.info("ready: %d replicas at %s/v1", len(fleet.replicas), self.url)
