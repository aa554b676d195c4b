"""Many short requests against a server, most of them good: who asks, what each must get, and what is left at the end.

Plain sockets, so that a client can do what no library does: leave in the midst of anything. Used by a test and by
`benchmarks/inference/soak.py`; knows the server by its port only.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from typing import Any

KEY = "soak-key"
PATH = "/v1/completions"
_GOOD = 40  # known answers
_WORDS = ("red", "green", "blue", "one", "two", "three")
_FAULTS = {  # what a bad request is, and the status that it must get (0: the client doesn't wait for one)
    "left": 0,
    "vanished": 0,
    "oversize": 413,
    "no json": 400,
    "impossible": 400,
    "too long": 400,
    "wrong key": 401,
}


class Soak:
    """The requests of one run.

    Args:
        port: of a server that needs `KEY`, answers greedily and refuses bodies above 64 KiB.
        draw: where chance comes from.
        bad: share of the requests that are bad.

    Attributes:
        counts: requests by what they were.
        wrong: what came where something else should have.
    """

    def __init__(self, port: int, draw: random.Random, *, bad: float = 0.4) -> None:
        self.port, self.draw, self.bad = port, draw, bad
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._known: list[tuple[dict[str, Any], str]] = []

    async def learn(self) -> None:
        """Ask each good request once, alone."""
        for number in range(_GOOD):
            words = " ".join(self.draw.choice(_WORDS) for _ in range(number % 13 + 1))
            body = {"prompt": f"{number}: {words}", "max_tokens": 1 + number % 8, "temperature": 0, "ignore_eos": True}
            status, text = await self._ask(json.dumps(body).encode())
            assert status == 200, text
            self._known.append((body, _text(text)))

    async def run(self, requests: int, clients: int) -> None:
        """So many requests, by so many clients at a time."""
        left = iter(range(requests))

        async def client() -> None:
            for _ in left:
                await self._one()

        await asyncio.gather(*(client() for _ in range(clients)))

    async def _one(self) -> None:
        if self.draw.random() >= self.bad:
            body, expected = self.draw.choice(self._known)
            stream = self.draw.random() < 0.5
            kind = "streamed" if stream else "whole"
            status, text = await self._ask(json.dumps({**body, "stream": stream}).encode())
            if (status, _text(text)) != (200, expected):
                self.wrong.append(f"{kind}: {status} {text[:300]!r} for {body}, not {expected!r}")
        else:
            kind = self.draw.choice(list(_FAULTS))
            status, text = await self._fault(kind)
            if status != _FAULTS[kind] or (status and "error" not in json.loads(text)):
                self.wrong.append(f"{kind}: {status} {text[:300]!r}")
        self.counts[kind] += 1

    async def _fault(self, kind: str) -> tuple[int, str]:
        body: dict[str, Any] = {"prompt": "one two", "max_tokens": 5}
        if kind == "left":
            content = {**body, "max_tokens": 400, "ignore_eos": True, "stream": self.draw.random() < 0.5}
            return await self._ask(json.dumps(content).encode(), leave_after_s=self.draw.random() * 0.1)
        if kind == "vanished":
            return await self._ask(json.dumps(body).encode(), missing=9, leave_after_s=0.01)
        if kind == "oversize":
            return await self._ask(b"", missing=100_000)
        if kind == "no json":
            return await self._ask(self.draw.choice([b"{", b"[]", b'{"prompt": "\xff"}', b'{"prompt": NaN}', b"\x00"]))
        if kind == "impossible":
            field = self.draw.choice([{"temperature": -1}, {"max_tokens": -5}, {"top_p": 7}, {"logit_bias": {"a": 1}}])
            return await self._ask(json.dumps({**body, **field}).encode())
        if kind == "too long":
            return await self._ask(json.dumps({**body, "prompt": "word " * 5000}).encode())
        return await self._ask(json.dumps(body).encode(), key="another-key")

    async def _ask(
        self, content: bytes, *, key: str = KEY, missing: int = 0, leave_after_s: float | None = None
    ) -> tuple[int, str]:
        """One request on a connection of its own: status and body, or 0 where the client has left.

        Args:
            missing: bytes that are announced and never sent.
        """
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content) + missing}\r\n\r\n"
        )
        try:
            writer.write(head.encode() + content)
            if leave_after_s is not None:
                await asyncio.sleep(leave_after_s)
                writer.transport.abort()
                return 0, ""
            answer = await reader.read()
        finally:
            writer.close()
        front, _, rest = answer.partition(b"\r\n\r\n")
        whole = _unchunked(rest) if b"transfer-encoding: chunked" in front.lower() else rest
        return int(front.split()[1]), whole.decode()

    async def blocks_left(self) -> int:
        """Blocks in use once nobody runs or waits; waits half a minute for that."""
        for _ in range(300):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            text = (await reader.read()).decode()
            writer.close()
            names = ("num_running", "num_waiting", "blocks_used")
            running, waiting, blocks = (
                int(float(re.findall(rf"^swift_engine_{name}{{.*}} (\S+)", text, re.MULTILINE)[0])) for name in names
            )
            if running == waiting == 0:
                return blocks
            await asyncio.sleep(0.1)
        raise AssertionError("requests that nobody waits for never end")


def _unchunked(content: bytes) -> bytes:
    """A body that came in pieces."""
    parts = []
    while content:
        size, _, content = content.partition(b"\r\n")
        parts.append(content[: int(size, 16)])
        content = content[int(size, 16) + 2 :]
    return b"".join(parts)


def _text(answer: str) -> str:
    """What an answer says, streamed or whole."""
    if not answer.startswith("data: "):
        return str(json.loads(answer)["choices"][0]["text"]) if '"choices"' in answer else answer
    lines = [line.removeprefix("data: ") for line in answer.split("\n") if line.startswith("data: ")]
    if lines.pop() != "[DONE]":
        return answer
    return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])
