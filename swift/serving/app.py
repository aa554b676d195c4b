"""The server's routes put together, and the description of them in OpenAPI.

Bodies are read with a strict parser: no NaN, no lone surrogates, no endless depth. All errors leave in one shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from swift.core.version import __version__
from swift.serving.admin import list_models, load_adapter, show_model, unload_adapter
from swift.serving.chat import chat_completions
from swift.serving.completions import completions
from swift.serving.errors import ApiError, JsonResponse, from_validation
from swift.serving.gate import Gate
from swift.serving.generation import Disconnected
from swift.serving.health import health, ready
from swift.serving.judging import classify, embeddings, rerank, score
from swift.serving.responses import responses
from swift.serving.services import Services, services_of
from swift.serving.tokens import detokenize, tokenize


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every error."""

    error: ErrorDetail


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": words}
    for status, words in {
        400: "the request can't be answered as it is", 401: "no valid API key", 403: "not allowed with this key",
        404: "no such model or path", 405: "not this method", 408: "the body came too slowly",
        413: "the body is too large", 429: "too many requests", 500: "the server failed",
        503: "not ready, or shutting down", 504: "the answer took too long",
    }.items()
}  # fmt: skip
_POST: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("/v1/chat/completions", chat_completions),
    ("/v1/completions", completions),
    ("/v1/responses", responses),
    ("/v1/embeddings", embeddings),
    ("/v1/rerank", rerank), ("/rerank", rerank),
    ("/v1/score", score), ("/score", score),
    ("/v1/classify", classify), ("/classify", classify),
    ("/tokenize", tokenize), ("/v1/tokenize", tokenize),
    ("/detokenize", detokenize), ("/v1/detokenize", detokenize),
    ("/v1/load_lora_adapter", load_adapter),
    ("/v1/unload_lora_adapter", unload_adapter),
)  # fmt: skip


class _StrictRequest(HttpRequest):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = orjson.loads(await self.body())
        return self._json


class _StrictRoute(APIRoute):
    """A route that reads JSON with orjson (FastAPI's way to another request class)."""

    def get_route_handler(self) -> Callable[[HttpRequest], Any]:
        handle = super().get_route_handler()

        async def handle_strictly(request: HttpRequest) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly


async def metrics(http: HttpRequest) -> Response:
    """Prometheus' text."""
    services = services_of(http)
    return PlainTextResponse(services.metrics.render(services.models.stats()), media_type="text/plain; version=0.0.4")


async def version(http: HttpRequest) -> Response:
    return JsonResponse({"version": __version__})


def make_app(services: Services) -> ASGIApp:
    """The whole server as an ASGI application."""
    app = FastAPI(
        title="swift deploy",
        version=__version__,
        docs_url=None,  # its page would come from elsewhere
        redoc_url=None,
        responses=_ERRORS,
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.router.route_class = _StrictRoute
    app.state.services = services
    for path, handler in _POST:
        streams: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
        streamed = handler in (chat_completions, completions, responses)
        app.post(path, name=path, response_class=JsonResponse, responses=streams if streamed else None)(handler)
    for path, handler in (
        ("/v1/models", list_models),
        ("/v1/models/{model:path}", show_model),
        ("/health", health),
        ("/ping", health),
        ("/ready", ready),
        ("/version", version),
    ):
        app.get(path, name=path, response_class=JsonResponse)(handler)
    app.get("/metrics", response_class=PlainTextResponse)(metrics)
    app.post("/ping", response_class=JsonResponse, include_in_schema=False)(health)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(Disconnected, _nobody)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    if services.config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=services.config.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    known = frozenset(route.path for route in app.routes if isinstance(route, APIRoute))
    return Gate(app, services, known)


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    if isinstance(error, ApiError):
        return error.response()
    assert isinstance(error, HTTPException)
    words = {404: f"there is no {http.method} {http.url.path:.200}", 405: f"{http.method} is not for this path"}
    code = {404: "unknown_url"}.get(error.status_code)
    answer = ApiError(error.status_code, words.get(error.status_code, str(error.detail)), code=code)
    answer.headers = error.headers
    return answer.response()


async def _validation_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return from_validation(error.errors()).response()


async def _nobody(http: HttpRequest, error: Exception) -> Response:
    return Response(status_code=499)  # as nginx logs it; the client has left


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's description, without the kind of error that this server doesn't have."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document.get("components", {}).get("schemas", {}).pop(name, None)
        app.openapi_schema = document
    return app.openapi_schema
