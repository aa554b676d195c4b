"""One request on its way through the router: to a replica, to another one if that fails, and its answer back.

Answers aren't parsed. A whole one is sent on when it is complete, so a replica that dies isn't noticed; a stream goes
on event by event as it comes, and where it breaks, another replica takes it up (`continuing`) or it ends with an error.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import aiohttp
from starlette.types import Message, Receive, Scope, Send

from swift.core.logging import get_logger
from swift.serving.errors import ApiError
from swift.serving.exchange import Exchange, exchange_of
from swift.serving.router.asked import Asked
from swift.serving.router.continuing import Continuation, Diverged
from swift.serving.router.fleet import RETRY_AFTER_S, Fleet, Replica
from swift.serving.sse import USAGE_HEADER, event

log = get_logger("router")

_SENT_ON = ("content-type", "cache-control", "x-accel-buffering", "retry-after")
_ELSEWHERE = frozenset({429, 502, 503})  # another replica may have room
_MOST_LOST = 2  # replicas that may fail with a request: one that makes servers crash mustn't go through all
_MOST_KEPT = 16 << 20  # bytes of a stream kept for taking it up; longer ones can't be
_SLACK_S = 5.0  # after a replica's own time-out, which has better words
_ENDS = (b"\n\n", b"\r\n\r\n")
_CANCELLED = re.compile(rb'(?:\A|\n\n)data: \{"error":\{[^\n]*"code":"cancelled"\}\}\n\n')
_COMMENT = re.compile(rb"(?:\A|(?<=\n\n)): usage (\d+) (\d+) (\d+)\n\n")
_USAGE = re.compile(rb'"(prompt_tokens|input_tokens|completion_tokens|output_tokens|cached_tokens)":\s*(\d+)')
_TAIL = 2048


class _Lost(Exception):
    """The replica failed."""


@dataclass
class _Busy(Exception):
    """It answered that another one should."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


@dataclass
class Forwarding:
    """One request and its answer."""

    fleet: Fleet
    asked: Asked
    scope: Scope
    receive: Receive
    send: Send
    limit_s: float
    started: bool = False
    _sent: list[bytes] | None = None
    _num_sent: int = 0
    _num_events: int = 0
    _tail: bytes = b""
    _counted: bool = False
    _exchange: Exchange = field(init=False)

    async def run(self) -> None:
        """Answer.

        Raises:
            ApiError: nobody could, and nothing was sent.
        """
        self._exchange = exchange_of(self.scope)
        self._exchange.model = self.asked.model or ""
        watcher: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(max(0.0, self.limit_s - self._exchange.elapsed_s()) + _SLACK_S) as clock:
                watcher = asyncio.create_task(self._watch(clock))
                await self._answer()
        except TimeoutError:
            if not self._exchange.disconnected:
                await self._fail(ApiError(504, f"the answer took longer than {self.limit_s:g} s", code="timeout"))
        except asyncio.CancelledError:
            if self.started:
                await self._fail(ApiError(503, "the server is shutting down", code="cancelled"))
            raise
        except ApiError as error:
            await self._fail(error)
        finally:
            if watcher is not None:
                watcher.cancel()
            self._count()

    async def _watch(self, clock: asyncio.Timeout) -> None:
        """Stop everything when the client leaves."""
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self._exchange.disconnected = True
        if not clock.expired():
            clock.reschedule(asyncio.get_running_loop().time())

    async def _fail(self, error: ApiError) -> None:
        if not self.started:
            raise error
        await self._part(event(error.body()), more=False)

    # --- one replica after the other ---

    async def _answer(self) -> None:
        tried: set[Replica] = set()
        num_lost = 0
        busy: _Busy | None = None
        while True:
            try:
                replica = self.fleet.choose(self.asked.model, self.asked.chain, tried)
            except ApiError:
                if busy is None or self.started:
                    raise
                await self._whole(busy.status, busy.headers, busy.body)
                return
            if tried:
                self.fleet.num_retries += 1
            tried.add(replica)
            try:
                await self._try(replica)
                return
            except _Busy as said:
                busy = said
                if said.status != 429:
                    self.fleet.doubt(replica)
            except aiohttp.ClientConnectorError:  # it never got the request
                self.fleet.doubt(replica)
            except _Lost as lost:
                self.fleet.doubt(replica)
                log.warning("replica %s failed with request %s: %s", replica.name, self._exchange.id, lost)
                num_lost += 1
                if self.started and self._sent is None:
                    raise _broken("the replica that was answering has gone") from lost
                if num_lost >= _MOST_LOST:
                    raise _broken(f"{num_lost} replicas failed with this request") from lost
            except Diverged as error:
                raise _broken(
                    f"the replica that was answering has gone, and its answer can't go on: {error}"
                ) from error

    async def _try(self, replica: Replica) -> None:
        clock = asyncio.timeout(None)
        try:
            async with clock:
                with self.fleet.answering(replica, self.asked.chain, clock):
                    await self._ask(replica)
        except aiohttp.ClientConnectorError:
            raise
        except aiohttp.ClientError as error:
            raise _Lost(str(error) or type(error).__name__) from error
        except TimeoutError as error:
            if clock.expired():
                raise _Lost("it was given up") from error
            raise
        except OSError as error:
            raise _Lost(str(error)) from error

    async def _ask(self, replica: Replica) -> None:
        asked = self.asked
        headers = replica.headers()
        if asked.content_type:
            headers["Content-Type"] = asked.content_type
        if replica.own:
            headers[USAGE_HEADER] = "1"
        if self.started and not replica.own:
            raise Diverged("no other replica is of this program")
        body = asked.seeded_body if replica.own else asked.body
        if not self.started:
            self._sent = [] if asked.continuable and replica.own else None
        data = body if asked.method == "POST" else None
        async with self.fleet.session.request(
            asked.method, replica.url + asked.path, data=data, headers=headers, allow_redirects=False
        ) as response:
            kept = _headers(response.headers.items())
            streams = response.content_type == "text/event-stream" and response.status == 200
            if streams:
                await self._stream(response, kept)
                return
            whole = await response.read()
            if response.status in _ELSEWHERE:
                raise _Busy(response.status, kept, whole)
            if self.started:
                raise Diverged(f"it answered with status {response.status}")
            await self._whole(response.status, kept, whole)

    async def _whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self._tail = body[-_TAIL:]
        self._num_events = 0
        await self._start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self._part(body, more=False)

    async def _stream(self, response: aiohttp.ClientResponse, headers: list[tuple[bytes, bytes]]) -> None:
        rest = Continuation(b"".join(self._sent or ())) if self.started else None
        if rest is not None:
            self.fleet.num_continued += 1
        begun = b""
        async for part in response.content.iter_any():
            begun += part
            end = max(begun.rfind(mark) + len(mark) if mark in begun else 0 for mark in _ENDS)
            if end:  # events are sent whole, so that one which breaks off was never there
                await self._events(begun[:end], headers, rest)
                begun = begun[end:]
        if begun:
            await self._events(begun, headers, rest)
        if not self.started:
            await self._start(200, headers)
        await self._part(b"", more=False)

    async def _events(self, data: bytes, headers: list[tuple[bytes, bytes]], rest: Continuation | None) -> None:
        if self._sent is not None and b'"code":"cancelled"' in data and (found := _CANCELLED.search(data)):
            data = data[: found.start()] + (b"\n\n" if found.start() else b"")  # it is being stopped
            if data:
                await self._pass(data, headers, rest)
            raise _Lost("it is being stopped")
        await self._pass(data, headers, rest)

    async def _pass(self, data: bytes, headers: list[tuple[bytes, bytes]], rest: Continuation | None) -> None:
        if rest is not None:
            data = rest.rest(data)
        if b": usage " in data and (found := _COMMENT.search(data)):
            prompt, cached, generated = map(int, found.groups())
            self._note(prompt, cached, generated)
            data = data[: found.start()] + data[found.end() :]
        if not data:
            return
        if not self.started:
            self._exchange.first_token_s = self._exchange.elapsed_s()
            await self._start(200, headers)
        self._num_events += data.count(b"data: {")
        self._tail = (self._tail + data)[-_TAIL:]
        if self._sent is not None:
            self._sent.append(data)
            self._num_sent += len(data)
            if self._num_sent > _MOST_KEPT:
                self._sent = None
        await self._part(data, more=True)

    # --- to the client ---

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def _part(self, body: bytes, *, more: bool) -> None:
        message: Message = {"type": "http.response.body", "body": body, "more_body": more}
        await self.send(message)

    # --- what it cost ---

    def _count(self) -> None:
        """Tokens, for limits and metrics: as the replica says, else (a stream without usage) as its events tell."""
        if self._counted:
            return
        found = {name: int(number) for name, number in _USAGE.findall(self._tail)}
        prompt = found.get(b"prompt_tokens", found.get(b"input_tokens"))
        if prompt is not None:
            generated = found.get(b"completion_tokens", found.get(b"output_tokens", 0))
            self._note(prompt, found.get(b"cached_tokens", 0), generated)
        elif self._num_events:
            self._note(len(self.asked.body) // 4, 0, self._num_events)

    def _note(self, prompt: int, cached: int, generated: int) -> None:
        exchange = self._exchange
        exchange.prompt_tokens, exchange.cached_tokens, exchange.generated_tokens = prompt, cached, generated
        self._counted = True


def _headers(items: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    kept = ((name.lower(), value) for name, value in items)
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in kept if name in _SENT_ON]


def _broken(message: str) -> ApiError:
    return ApiError(502, message, code="replica_lost", retry_after_s=RETRY_AFTER_S)
