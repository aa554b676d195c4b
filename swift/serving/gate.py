"""The outermost layer of the server: who asks, how large and how slow a body may be, and what is written about it.

Plain ASGI around the routes, so that a request which is refused costs next to nothing. Knows nothing of models.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swift.core.logging import get_logger
from swift.serving.errors import ApiError
from swift.serving.exchange import Exchange, exchange_of
from swift.serving.services import Services

log = get_logger("serving")
access_log = get_logger("serving.access")

# answered to anyone: for load balancers and monitoring
OPEN = frozenset({"/health", "/ready", "/ping", "/metrics", "/version"})
_DRAIN_BYTES = 64 << 20  # read and thrown away after a refusal, so that the client gets to see it
_DRAIN_S = 5.0


class Gate:
    """Lets requests through to `app`.

    Args:
        app: the routes.
        routes: the known paths, the only ones that become labels of metrics.
    """

    def __init__(self, app: ASGIApp, services: Services, routes: frozenset[str]) -> None:
        self.app = app
        self.services = services
        self.routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = exchange_of(scope)
        metrics = self.services.metrics
        metrics.num_active += 1
        body = _Body(receive, self.services.config.max_request_bytes, self.services.config.body_timeout_s)
        answer = _Answer(send, exchange, body)
        try:
            await self._answer(scope, body, answer)
        except asyncio.CancelledError:  # by the end of the server, which this task is told of and ends with
            if not answer.started:
                error = ApiError(503, "the server is shutting down", code="cancelled", retry_after_s=10)
                await error.response()(scope, receive, answer.send)
        except Exception:  # the process boundary: whatever happens, the server stays up
            log.exception("request %s failed", exchange.id)
            if not answer.started:
                await ApiError(500, "an error inside of the server").response()(scope, receive, answer.send)
        finally:
            metrics.num_active -= 1
            self._record(scope, exchange)

    async def _answer(self, scope: Scope, body: _Body, answer: _Answer) -> None:
        exchange = exchange_of(scope)
        headers = dict(scope["headers"])
        entered = False
        try:
            if scope["path"] not in OPEN and scope["method"] != "OPTIONS":
                exchange.key = self.services.keys.find(headers.get(b"authorization", b"").decode("latin-1") or None)
                if scope["method"] == "POST":
                    exchange.key.enter()
                    entered = True
            length = headers.get(b"content-length", b"0")
            if length.isdigit() and int(length) > body.limit:
                raise body.too_large()
            await self.app(scope, body.receive, answer.send)
        except ApiError as error:
            await error.response()(scope, body.receive, answer.send)
        finally:
            if entered:
                assert exchange.key is not None
                exchange.key.leave(exchange.prompt_tokens + exchange.generated_tokens)

    def _record(self, scope: Scope, exchange: Exchange) -> None:
        seconds, metrics = exchange.elapsed_s(), self.services.metrics
        route = scope["path"] if scope["path"] in self.routes else "other"
        metrics.requests[route, exchange.status] += 1
        metrics.disconnects += exchange.disconnected
        if exchange.generated_tokens or exchange.prompt_tokens:
            metrics.observe("request_seconds", seconds)
            metrics.observe("request_prompt_tokens", exchange.prompt_tokens)
            metrics.observe("request_generated_tokens", exchange.generated_tokens)
            if exchange.first_token_s is not None:
                metrics.observe("first_token_seconds", exchange.first_token_s)
                if exchange.generated_tokens > 1:
                    gap = (seconds - exchange.first_token_s) / (exchange.generated_tokens - 1)
                    metrics.observe("token_seconds", gap)
        if self.services.config.access_log and scope["path"] not in OPEN:
            access_log.info("%s", _line(scope, route, exchange, seconds, self.services.config.log_contents))


def _line(scope: Scope, route: str, exchange: Exchange, seconds: float, contents: bool) -> str:
    """A line of the access log. A path that isn't a route is the client's text: it stays out, unless asked for."""
    facts: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "request": exchange.id,
        "client": (scope.get("client") or ("",))[0],
        "key": exchange.key.name if exchange.key else None,
        "method": scope["method"],
        "path": route,
        "status": exchange.status,
        "model": exchange.model,
        "prompt_tokens": exchange.prompt_tokens,
        "cached_tokens": exchange.cached_tokens,
        "generated_tokens": exchange.generated_tokens,
        "first_token_ms": None if exchange.first_token_s is None else round(exchange.first_token_s * 1000),
        "total_ms": round(seconds * 1000),
    }
    if exchange.disconnected:
        facts["disconnected"] = True
    if contents:
        facts |= exchange.contents
    return orjson.dumps(facts).decode()


class _Body:
    """A request's body: counted while it comes, and not waited for forever."""

    def __init__(self, receive: Receive, limit: int, timeout_s: float) -> None:
        self.limit = limit
        self.refused = False
        self._receive = receive
        self._timeout_s = timeout_s
        self._deadline: float | None = None
        self._num_bytes = 0
        self._complete = False

    def too_large(self) -> ApiError:
        self.refused = True
        return ApiError(413, f"the body is larger than {self.limit} bytes", code="request_too_large")

    async def receive(self) -> Message:
        if self._complete:  # from now on only the client's leaving can come
            return await self._receive()
        loop = asyncio.get_running_loop()
        self._deadline = self._deadline or loop.time() + self._timeout_s
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError as error:
            raise ApiError(408, f"the body didn't come within {self._timeout_s:g} s", code="timeout") from error
        self._num_bytes += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        if self._num_bytes > self.limit:
            raise self.too_large()
        return message

    async def drain(self) -> None:
        """Read what a refused client still sends: closing on it could take the answer away before it is read."""
        left = _DRAIN_BYTES
        try:
            async with asyncio.timeout(_DRAIN_S):
                while left > 0 and not self._complete:
                    message = await self._receive()
                    left -= len(message.get("body", b""))
                    self._complete = not message.get("more_body", False)
        except TimeoutError:
            pass


class _Answer:
    """The way out: marks the answer with the request's id, and keeps the connection open until a client was heard."""

    def __init__(self, send: Send, exchange: Exchange, body: _Body) -> None:
        self._send = send
        self._exchange = exchange
        self._body = body
        self.started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self._exchange.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", self._exchange.id.encode())]
        elif self._body.refused and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._body.drain()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)
