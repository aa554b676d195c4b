"""Connections that don't last forever: a client that is slow with its headers is cut off.

uvicorn limits how long an idle connection is kept, but waits for the headers of a request without end. Its protocol
class is replaceable; this one adds a clock and a limit of size. Bodies have limits of their own (`gate`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MAX_HEADER_BYTES = 512 << 10  # what comes before the headers are complete; a read may hold 256 KiB


class TimedProtocol(HttpToolsProtocol):
    """HTTP/1.1 of uvicorn, with an end to waiting for headers.

    Args:
        header_timeout_s: seconds from the connection, or the first byte of a later request, to the end of the headers.
        others: as uvicorn passes them.
    """

    def __init__(self, header_timeout_s: float, **others: Any) -> None:
        super().__init__(**others)
        self._header_timeout_s = header_timeout_s
        self._header_bytes = 0
        self._clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.cycle is None or self.cycle.response_complete:  # a request begins
            self._start_clock()
        if self._clock is not None:
            self._header_bytes += len(data)
            if self._header_bytes > _MAX_HEADER_BYTES:
                self._cut()
                return
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._stop_clock()
        super().on_headers_complete()

    def _start_clock(self) -> None:
        if self._clock is None:
            self._header_bytes = 0
            self._clock = self.loop.call_later(self._header_timeout_s, self._cut)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _cut(self) -> None:
        self._stop_clock()
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_clock()  # an earlier request of this connection is being answered
            return
        self.transport.abort()


def timed_protocol(header_timeout_s: float) -> Callable[..., TimedProtocol]:
    """What uvicorn calls for each connection."""

    def make(**arguments: Any) -> TimedProtocol:
        return TimedProtocol(header_timeout_s, **arguments)

    return make
