"""The chat page over HTTP: its files, and `/v1/*` handed on to an OpenAI endpoint with the key added here.

The browser never sees the key and calls no other address. Knows nothing of models or of what an endpoint runs.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from swift.core.errors import UsageError

_FILES = {
    "index.html": "text/html",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "markdown.js": "text/javascript",
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
_TIMEOUT_S = 600.0


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Following one would send the key to whom it names."""

    def redirect_request(self, *_: Any) -> None:
        return None


def make_page(
    base_url: str, api_key: str | None, *, title: str = "swift", lang: str = "en", hosts: tuple[str, ...] = ("*",)
) -> Starlette:
    """The page as an ASGI application.

    Args:
        base_url: the endpoint, up to /v1.
        api_key: its key; None sends none.
        title, lang: shown by the page.
        hosts: names by which the page may be called; other sites' names for this address are refused.

    Raises:
        UsageError: `base_url` is no address.
    """
    address = urlsplit(base_url)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise UsageError(f"{base_url!r} is no address", where="--base_url", fix="--base_url http://localhost:8000/v1")
    opener = urllib.request.build_opener(_NoRedirects)

    async def asset(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in _FILES:
            return _error(404, "there is no such page")
        data = (files("swift.serving") / "page" / name).read_bytes()
        return Response(data, media_type=_FILES[name], headers=HEADERS)

    async def settings(_: Request) -> Response:
        return JSONResponse({"title": title, "lang": lang}, headers=HEADERS)

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
        return await run_in_threadpool(ask, request.method, path, bytes(body) or None)

    def ask(method: str, path: str, body: bytes | None) -> Response:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        call = urllib.request.Request(f"{base_url.rstrip('/')}/{path}", body, headers, method=method)
        try:
            answer = opener.open(call, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            more = {"Retry-After": error.headers["Retry-After"]} if "Retry-After" in error.headers else {}
            data = error.read(1 << 20)
            return Response(data, error.code, HEADERS | more, media_type="application/json")
        except (OSError, http.client.HTTPException) as error:
            return _error(502, f"the endpoint can't be reached: {getattr(error, 'reason', '') or error}")
        kind = answer.headers.get_content_type()
        return StreamingResponse(
            _pieces(answer), answer.status, HEADERS, media_type=kind, background=BackgroundTask(answer.close)
        )

    routes = [
        Route("/", asset),
        Route("/settings", settings),
        Route("/v1/{path:path}", hand_on, methods=["GET", "POST"]),
        Route("/{name}", asset),
    ]
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))])


def _pieces(answer: Any) -> Iterator[bytes]:
    """What comes, as it comes; the connection to the endpoint ends with the browser's."""
    try:
        while piece := answer.read1(65536):
            yield piece
    except (OSError, http.client.HTTPException) as error:
        told = {"error": {"message": f"the endpoint broke off: {error}", "type": "server_error"}}
        yield b"data: " + json.dumps(told).encode() + b"\n\n"
    finally:
        answer.close()


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status, headers=HEADERS)
