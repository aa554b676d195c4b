"""What all routes of a server share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request as HttpRequest

from swift.config.serving import ServeConfig
from swift.serving.limits import Keys
from swift.serving.mailbox import Bridge
from swift.serving.metrics import Metrics
from swift.serving.served import Models

T = TypeVar("T")


class Services:
    """One for each server; made in its event loop.

    Args:
        config: settings of the server.
        keys: who may ask.
    """

    def __init__(self, config: ServeConfig, keys: Keys) -> None:
        self.config = config
        self.keys = keys
        self.models = Models()
        self.metrics = Metrics()
        self.bridge = Bridge(asyncio.get_running_loop())
        # rendering and tokenising a long prompt would hold up everybody's tokens
        self._workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="encode")

    async def run(self, function: Callable[[], T]) -> T:
        """What takes longer than a moment, in a thread of its own."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, function)

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)


def services_of(http: HttpRequest) -> Services:
    """The services of the server that got a request."""
    return http.app.state.services
