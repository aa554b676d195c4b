"""A router in a thread, and what goes wrong between it and its replicas: relays that break, servers of another kind."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx2
from live_server import wait_for

from swift.config.serving import ServeConfig
from swift.serving.lifecycle import listen
from swift.serving.router.fleet import Replica
from swift.serving.router.server import RouterServer

Connection = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Routed:
    """A running router and ways to ask it."""

    def __init__(self, server: RouterServer) -> None:
        self.server, self.url = server, server.url

    def post(self, path: str, body: Any, **more: Any) -> httpx2.Response:
        return httpx2.post(self.url + path, json=body, timeout=60, **more)

    def get(self, path: str, **more: Any) -> httpx2.Response:
        return httpx2.get(self.url + path, timeout=60, **more)

    def metric(self, name: str) -> float:
        lines = self.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(name + " ")).rpartition(" ")[2])

    def state(self, number: int) -> str:
        assert self.server.fleet is not None
        return self.server.fleet.replicas[number].state


@contextmanager
def routed(
    *urls: str, ready: int | None = None, check_s: float = 0.2, keys: Any = (None, None), **settings: Any
) -> Iterator[Routed]:
    """A router in front of servers, once `ready` of them (default: all) are.

    Args:
        keys: what the servers want to see: a key and an admin's key.
    """
    config = ServeConfig(**{"port": 0, "access_log": False, "drain_s": 5, **settings})
    replicas = [Replica(f"r{number}", url, *keys) for number, url in enumerate(urls)]
    server = RouterServer(config, listen(config), replicas, check_s=check_s)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wanted = len(urls) if ready is None else ready
    wait_for(lambda: server.fleet is not None and len(server.fleet.ready()) == wanted)
    try:
        yield Routed(server)
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive()


class Served:
    """A TCP server in a thread of its own; `handle` takes each connection."""

    def __init__(self, handle: Connection) -> None:
        self._handle = handle
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._connected, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._handle(reader, writer)
        finally:
            writer.close()

    def close(self) -> None:
        def stop() -> None:
            self._server.close()
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.call_later(0.05, self._loop.stop)

        self._loop.call_soon_threadsafe(stop)
        self._thread.join(10)


class Relay(Served):
    """Passes on what comes, and breaks streams off.

    Attributes:
        cut_after: bytes of an answer to a POST that come through; None: all.
        deaf: takes connections and never answers.
    """

    def __init__(self, url: str) -> None:
        self._target = int(url.rpartition(":")[2])
        self.cut_after: int | None = None
        self.deaf = False
        self.num_cut = 0
        super().__init__(self._relay)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._target)
        left: list[int | None] = [None]  # bytes of the answer that still come through

        async def there() -> None:
            with suppress(ConnectionError):
                while part := await reader.read(1 << 16):
                    while self.deaf:
                        await asyncio.sleep(0.05)
                    left[0] = self.cut_after if part.startswith(b"POST") else None
                    to_writer.write(part)
            to_writer.close()

        asking = asyncio.create_task(there())
        with suppress(ConnectionError):
            while part := await to_reader.read(1 << 16):
                if left[0] is not None and len(part) > left[0]:
                    writer.write(part[: left[0]])
                    await writer.drain()
                    self.num_cut += 1
                    break
                if left[0] is not None:
                    left[0] -= len(part)
                writer.write(part)
                await writer.drain()
        asking.cancel()
        writer.close()
        to_writer.close()


class Foreign(Served):
    """A server of another program: /health and /v1/models, and what `answer` does with a POST (headers, body)."""

    def __init__(
        self, answer: Callable[[str, bytes, asyncio.StreamWriter], Awaitable[None]], model: str = "other"
    ) -> None:
        self._answer, self._model = answer, model
        self.seen: list[tuple[str, bytes]] = []
        super().__init__(self._serve)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(
                    (int(line[15:]) for line in head.lower().split("\r\n") if line.startswith("content-length:")), 0
                )
                body = await reader.readexactly(length)
                method, path, _ = head.split(" ", 2)
                if method == "POST":
                    self.seen.append((head, body))
                    await self._answer(head, body, writer)
                elif path == "/v1/models":
                    write_json(writer, 200, {"object": "list", "data": [{"id": self._model, "object": "model"}]})
                else:
                    write_json(writer, 200 if path == "/health" else 404, {})
                await writer.drain()
        writer.close()


def write_json(writer: asyncio.StreamWriter, status: int, value: Any) -> None:
    """A whole answer."""
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


def begin_stream(writer: asyncio.StreamWriter) -> None:
    """The head of a stream."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")


def write_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    """A part of a stream; an empty one ends it."""
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
