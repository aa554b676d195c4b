"""Server-sent events: the form in which answers are streamed.

Each chunk that is sent may hold several events: whatever an engine's step brought is written at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from swift.serving.errors import ApiError, error_body
from swift.serving.exchange import exchange_of
from swift.serving.generation import Disconnected, Generation

DONE = b"data: [DONE]\n\n"
USAGE_HEADER = "x-swift-usage"  # of a router: the stream tells how many tokens it took, in a comment before its end
_SLACK_S = 5.0  # after the answer's own time-out, which is said to the client


def event(body: dict[str, Any]) -> bytes:
    """One event with a JSON value."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


def named_event(body: dict[str, Any]) -> bytes:
    """An event whose name is the `type` of its value, as /v1/responses has them."""
    return f"event: {body['type']}\n".encode() + event(body)


class EventStream(Response):
    """An answer that is sent as it comes; closes its generation, however it ends.

    Args:
        chunks: encoded events. An `ApiError` that it raises becomes the last event.
        generation: what the events come from.
        done: ends the stream.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[bytes], generation: Generation, *, done: bytes = DONE) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks, self._generation, self._done = chunks, generation, done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit_s = self._generation.services.config.request_timeout_s - exchange_of(scope).elapsed_s() + _SLACK_S
        try:
            async with asyncio.timeout(max(limit_s, _SLACK_S)):  # a client may stop reading
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._send_events(send, (USAGE_HEADER.encode(), b"1") in scope["headers"])
        except (Disconnected, TimeoutError):
            pass
        finally:
            self._generation.close()

    async def _send_events(self, send: Send, with_usage: bool) -> None:
        end = self._done
        try:
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            if with_usage:
                usage = self._generation.usage
                end = f": usage {usage.prompt} {usage.cached} {usage.generated}\n\n".encode() + end
        except ApiError as error:
            end = event(error.body())
        except asyncio.CancelledError:
            words = error_body(503, "the server is shutting down", code="cancelled")
            await send({"type": "http.response.body", "body": event(words), "more_body": False})
            raise
        await send({"type": "http.response.body", "body": end, "more_body": False})
