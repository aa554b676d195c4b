"""The chat page over HTTP: its files, and `/v1/*` handed on to an OpenAI endpoint with the key added here.

The browser never sees the key and calls no other address. A browser that leaves ends its call to the endpoint at once.
Knows nothing of models or of what an endpoint runs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import httpx2
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from swift.core.errors import UsageError

_FILES = {
    "index.html": "text/html",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "markdown.js": "text/javascript",
    "messages.js": "text/javascript",
    "talks.js": "text/javascript",
    "words.js": "text/javascript",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_ALLOWED = {("GET", "models"), ("POST", "chat/completions")}
_MAX_BODY = 8 << 20
_MAX_REFUSAL = 1 << 20
_TIMES = httpx2.Timeout(600.0, connect=10.0, pool=None)
_PROBE_S = 3.0


def is_local(host: str) -> bool:
    """Whether only this machine reaches an address or name."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def make_page(
    base_url: str,
    api_key: str | None,
    *,
    title: str = "swift",
    lang: str = "en",
    start: dict[str, Any] | None = None,
    local_only: bool = False,
) -> Starlette:
    """The page as an ASGI application.

    Args:
        base_url: the endpoint, up to /v1.
        api_key: its key; None sends none.
        title, lang: shown by the page.
        start: settings that the page begins with: `system`, `temperature`, `top_p`, `max_tokens`, `stop`, ...
        local_only: refuse requests that call this address by another name than localhost or a loopback address, as
            pages of other sites could (DNS rebinding).

    Raises:
        UsageError: `base_url` is no address.
    """
    address = _check_address(base_url)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with _client(address) as client:
            app.state.client = client
            yield

    async def asset(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in _FILES:
            return _error(404, "there is no such page")
        data = (files("swift.serving") / "page" / name).read_bytes()
        return Response(data, media_type=_FILES[name], headers=HEADERS)

    async def settings(_: Request) -> Response:
        return JSONResponse({"title": title, "lang": lang, "start": start or {}}, headers=HEADERS)

    async def hand_on(request: Request) -> Response:
        path = request.path_params["path"]
        if (request.method, path) not in _ALLOWED:
            return _error(404, f"the page has no use for {request.method} /v1/{path:.100}")
        if request.method == "POST" and request.headers.get("content-type", "").split(";")[0] != "application/json":
            return _error(415, "the body must be JSON")  # what a form of another site can't send
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > _MAX_BODY:
                return _error(413, f"the conversation is larger than {_MAX_BODY >> 20} MiB")
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"} | _authorization(api_key)
        client: httpx2.AsyncClient = request.app.state.client
        url = f"{base_url.rstrip('/')}/{path}"
        return _HandedOn(client, client.build_request(request.method, url, content=bytes(body), headers=headers))

    routes = [
        Route("/", asset),
        Route("/settings", settings),
        Route("/v1/{path:path}", hand_on, methods=["GET", "POST"]),
        Route("/{name}", asset),
    ]
    guards = [Middleware(_LocalNames)] if local_only else []
    return Starlette(routes=routes, middleware=guards, lifespan=lifespan)


def endpoint_trouble(base_url: str, api_key: str | None) -> str | None:
    """What an endpoint has against being asked, in words for a terminal; None if it answers.

    Raises:
        UsageError: `base_url` is no address.
    """
    with httpx2.Client(trust_env=not is_local(_check_address(base_url)), timeout=_PROBE_S) as client:
        try:
            answer = client.get(f"{base_url.rstrip('/')}/models", headers=_authorization(api_key))
        except (httpx2.HTTPError, OSError) as error:
            return f"it can't be reached now: {_words(error)}"
    if answer.status_code in (401, 403):
        return f"it refuses {'the' if api_key else 'to answer without a'} key (--api_key): HTTP {answer.status_code}"
    return None if answer.status_code in (200, 503) else f"{base_url}/models answers with HTTP {answer.status_code}"


def _check_address(base_url: str) -> str:
    """The host of an endpoint."""
    fix = "--base_url http://localhost:8000/v1"
    try:
        address = urlsplit(base_url)
        host, _ = address.hostname, address.port
    except ValueError as error:
        raise UsageError(f"{base_url!r} is no address: {error}", where="--base_url", fix=fix) from error
    if address.scheme not in ("http", "https") or not host:
        raise UsageError(f"{base_url!r} is no address", where="--base_url", fix=fix)
    return host


def _client(host: str) -> httpx2.AsyncClient:
    """Redirects aren't followed: that would send the key to whom they name."""
    return httpx2.AsyncClient(trust_env=not is_local(host), timeout=_TIMES, limits=httpx2.Limits(max_connections=None))


def _authorization(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


class _LocalNames:
    """Only requests to this machine by its own local names."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _named_locally(Request(scope).headers.get("host", "")):
            await _error(400, "this page is for this machine only")(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _named_locally(host: str) -> bool:
    try:
        return is_local(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


class _HandedOn(Response):
    """The endpoint's answer, sent as it comes; the call to the endpoint ends when the browser leaves."""

    def __init__(self, client: httpx2.AsyncClient, call: httpx2.Request) -> None:
        super().__init__()
        self._client, self._call = client, call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        passing = asyncio.ensure_future(self._pass_on(scope, receive, send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({passing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            both = (passing, leaving)
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
        if not passing.cancelled():
            passing.result()

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self._client.send(self._call, stream=True)
        except (httpx2.HTTPError, OSError) as error:
            await _error(502, f"the endpoint can't be reached: {_words(error)}")(scope, receive, send)
            return
        try:
            if answer.is_success:
                await self._stream(answer, send)
            else:
                await (await _refusal(answer))(scope, receive, send)
        finally:
            await answer.aclose()

    async def _stream(self, answer: httpx2.Response, send: Send) -> None:
        kind = answer.headers.get("content-type", "application/json")
        headers = [(k.lower().encode(), v.encode()) for k, v in {**HEADERS, "Content-Type": kind}.items()]
        await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
        last = b""
        try:
            async for piece in answer.aiter_bytes():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except (httpx2.HTTPError, OSError) as error:
            told = {"error": {"message": f"the endpoint broke off: {_words(error)}", "type": "server_error"}}
            last = b"\n\ndata: " + json.dumps(told).encode() + b"\n\n"
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refusal(answer: httpx2.Response) -> Response:
    """What an endpoint says against a request, for the page."""
    if answer.is_redirect:
        return _error(502, f"the endpoint is elsewhere: HTTP {answer.status_code} {answer.headers.get('location', '')}")
    data = bytearray()
    async for piece in answer.aiter_bytes():
        data += piece
        if len(data) > _MAX_REFUSAL:
            break
    more = {"Retry-After": answer.headers["Retry-After"]} if "Retry-After" in answer.headers else {}
    return Response(bytes(data), answer.status_code, HEADERS | more, media_type="application/json")


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status, headers=HEADERS)
