"""A client that costs little: `swift deploy` in a process of its own, and streams read from plain sockets.

A client library would take more CPU time than what is measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from meter import cpu_seconds


@dataclass
class Server:
    """A running `swift deploy`."""

    process: subprocess.Popen[bytes]
    port: int
    ready_cpu_s: float
    ready_wall_s: float

    @property
    def cpu_s(self) -> float:
        return cpu_seconds(self.process.pid)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return str(answer.read().decode())


@contextmanager
def deployed(*flags: str, environment: dict[str, str] | None = None) -> Iterator[Server]:
    """A server that is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "swift.cli", "deploy", "--port", str(port), "--log_interval", "0", *flags]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(environment or {})}
    started = time.monotonic()
    process = subprocess.Popen([*command, "--access_log", "false"], env=settings, stdout=subprocess.DEVNULL)
    try:
        server = Server(process, port, 0.0, 0.0)
        while not _is_ready(server):
            if process.poll() is not None:
                sys.exit(f"the server ended with {process.returncode}")
            time.sleep(0.02)
        server.ready_cpu_s, server.ready_wall_s = server.cpu_s, time.monotonic() - started
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _is_ready(server: Server) -> bool:
    try:
        server.get("/ready")
    except (urllib.error.URLError, ConnectionError):
        return False
    return True


class Connection:
    """One kept-alive connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def stream(self, path: str, body: dict[str, Any]) -> tuple[int, float, str]:
        """Ask for a stream and read it to its end.

        Returns:
            status, seconds to the first piece of text, and what came (of an error: its body).
        """
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        content = json.dumps({**body, "stream": True}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
        started = time.monotonic()
        self._writer.write(f"{head}{len(content)}\r\n\r\n".encode() + content)
        status = int((await self._reader.readline()).split()[1])
        length = None
        while (line := await self._reader.readline()) != b"\r\n":
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        if length is not None:
            return status, 0.0, (await self._reader.readexactly(length)).decode()
        first, parts = 0.0, []
        while size := int(await self._reader.readline(), 16):
            parts.append(await self._reader.readexactly(size))
            await self._reader.readexactly(2)
            if not first and (b'"content":"' in parts[-1] or b'"text":"' in parts[-1]):
                first = time.monotonic() - started
        await self._reader.readexactly(2)
        return status, first, b"".join(parts).decode()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


async def ask_together(port: int, path: str, bodies: list[dict[str, Any]]) -> list[tuple[int, float, str]]:
    """All at once, each on a connection of its own."""
    connections = [Connection(port) for _ in bodies]
    pairs = zip(connections, bodies, strict=True)
    answers = await asyncio.gather(*(connection.stream(path, body) for connection, body in pairs))
    for connection in connections:
        connection.close()
    return answers


def percentile(values: list[float], share: float) -> float:
    """The value that this share of all doesn't exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
