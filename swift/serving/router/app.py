"""The router's paths: those that a replica answers, and the few that it answers: lists, health, metrics, adapters.

Keys, limits and the log are those of any server (`gate`), once for all replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

import orjson
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from swift.core.version import __version__
from swift.serving.errors import ApiError, JsonResponse
from swift.serving.exchange import exchange_of
from swift.serving.gate import Gate
from swift.serving.router.asked import Asked, read_request
from swift.serving.router.fleet import RETRY_AFTER_S, UNREACHABLE, Fleet, Replica
from swift.serving.router.forward import Forwarding
from swift.serving.services import Services

FORWARDED = frozenset({
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/rerank", "/rerank", "/v1/score",
    "/score", "/v1/classify", "/classify", "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize",
})  # fmt: skip
ADAPTERS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
_MODELS = "/v1/models"
_METRICS_S = 2.0
_PER_REPLICA = {
    "up": "whether it takes requests", "active": "requests that it is answering",
    "requests_total": "requests sent to it", "failures_total": "of them failed by it", "starts_total": "times started",
}  # fmt: skip

Route = Callable[[Scope, Receive, Send], Awaitable[None]]


def make_router_app(services: Services, fleet: Fleet) -> ASGIApp:
    """The router as an ASGI application."""
    app: ASGIApp = _Routes(services, fleet)
    if services.config.allowed_origins:
        app = CORSMiddleware(
            app, allow_origins=services.config.allowed_origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    own = {_MODELS, "/health", "/ready", "/ping", "/version", "/metrics", "/openapi.json"}
    return Gate(app, services, FORWARDED | ADAPTERS | own)


class _Routes:
    def __init__(self, services: Services, fleet: Fleet) -> None:
        self.services, self.fleet = services, fleet
        self._own: dict[str, Callable[[], Awaitable[Response]]] = {
            "/health": self._health, "/ping": self._health, "/ready": self._ready, "/version": self._version,
            "/metrics": self._metrics, _MODELS: self._models,
        }  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if method == "POST" and path in FORWARDED:
            query = scope.get("query_string", b"").decode("latin-1")
            body, kind = await _read(receive), _content_type(scope)
            asked = read_request(method, f"{path}?{query}" if query else path, body, kind)
            await self._forward(asked, scope, receive, send)
        elif method == "POST" and path in ADAPTERS:
            response = await self._change_adapters(scope, path, await _read(receive))
            await response(scope, receive, send)
        elif path in self._own and (method == "GET" or (path == "/ping" and method == "POST")):
            await (await self._own[path]())(scope, receive, send)
        elif method == "GET" and path.startswith(_MODELS + "/"):
            await self._model(unquote(path.removeprefix(_MODELS + "/")))(scope, receive, send)
        elif method == "GET" and path == "/openapi.json":
            await self._forward(Asked(method, path, b"", ""), scope, receive, send)
        elif path in FORWARDED | ADAPTERS | self._own.keys():
            raise ApiError(405, f"{method} is not for this path")
        else:
            raise ApiError(404, f"there is no {method} {path:.200}", code="unknown_url")

    async def _forward(self, asked: Asked, scope: Scope, receive: Receive, send: Send) -> None:
        limit_s = self.services.config.request_timeout_s
        await Forwarding(self.fleet, asked, scope, receive, send, limit_s).run()

    # --- what is there ---

    def _merged(self) -> dict[str, dict[str, Any]]:
        """All models that ready replicas offer; of one that several offer, the first one's entry."""
        found: dict[str, dict[str, Any]] = {}
        for replica in self.fleet.ready():
            found |= {name: entry for name, entry in replica.models.items() if name not in found}
        return found

    async def _models(self) -> Response:
        return JsonResponse({"object": "list", "data": list(self._merged().values())})

    def _model(self, name: str) -> Response:
        found = self._merged()
        if name not in found:
            words = f"there is no model {name!r:.200}; there are: {', '.join(found)}"
            raise ApiError(404, words, param="model", code="model_not_found")
        return JsonResponse(found[name])

    async def _health(self) -> Response:
        """The router itself; whether replicas are there is what /ready says."""
        return JsonResponse({"status": "ok"})

    async def _ready(self) -> Response:
        states = {replica.name: replica.state for replica in self.fleet.replicas}
        if not self.fleet.ready():
            return JsonResponse({"status": "no replica is ready", "replicas": states}, 503)
        return JsonResponse({"status": "ready", "models": list(self._merged()), "replicas": states})

    async def _version(self) -> Response:
        return JsonResponse({"version": __version__})

    async def _metrics(self) -> Response:
        fleet = self.fleet
        own = self.services.metrics.render({}).splitlines()
        lines = [line for line in own if " swift_engine_" not in line]  # those are the replicas'
        balancer = fleet.balancer
        for name, help_text, value in (
            ("retries_total", "requests that a second replica was asked for", fleet.num_retries),
            ("continued_total", "streams that another replica took up", fleet.num_continued),
            ("prefix_blocks_total", "blocks of prompts", balancer.blocks_asked),
            ("prefix_blocks_matched_total", "of them sent to a replica that had seen them", balancer.blocks_matched),
        ):
            lines += [f"# HELP swift_router_{name} {help_text}", f"# TYPE swift_router_{name} counter"]
            lines.append(f"swift_router_{name} {value}")
        for name, help_text in _PER_REPLICA.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP swift_replica_{name} {help_text}", f"# TYPE swift_replica_{name} {kind}"]
            lines += [f'swift_replica_{name}{{replica="{r.name}"}} {self._count(r, name)}' for r in fleet.replicas]
        lines += await self._engines()
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    def _count(self, replica: Replica, name: str) -> int:
        return {
            "up": int(replica.state == "ready"), "active": self.fleet.balancer.active(replica.name),
            "requests_total": replica.num_requests, "failures_total": replica.num_failures,
            "starts_total": replica.num_starts,
        }[name]  # fmt: skip

    async def _engines(self) -> list[str]:
        """What the replicas' engines count, with the replica's name."""
        own = [replica for replica in self.fleet.ready() if replica.own]
        texts = await asyncio.gather(*(self._read_metrics(replica) for replica in own))
        families: dict[str, list[str]] = {}
        for replica, text in zip(own, texts):
            for line in text.splitlines():
                if line.startswith(("# HELP swift_engine_", "# TYPE swift_engine_")):
                    known = families.setdefault(line.split(" ", 3)[2], [])
                    if line not in known:
                        known.append(line)
                elif line.startswith("swift_engine_"):
                    name, _, rest = line.partition("{")
                    families.setdefault(name, []).append(f'{name}{{replica="{replica.name}",{rest}')
        return [line for family in families.values() for line in family]

    async def _read_metrics(self, replica: Replica) -> str:
        with suppress(*UNREACHABLE):
            async with asyncio.timeout(_METRICS_S), self.fleet.session.get(replica.url + "/metrics") as response:
                return await response.text()
        return ""

    # --- adapters ---

    async def _change_adapters(self, scope: Scope, path: str, body: bytes) -> Response:
        """Load or unload an adapter on all replicas, or on none."""
        key = exchange_of(scope).key
        assert key is not None  # the gate found one
        self.services.keys.require_admin(key)
        try:
            name = orjson.loads(body)["lora_name"]
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise ApiError(400, "lora_name is missing", param="lora_name") from error
        async with self.fleet.changing:
            replicas = self.fleet.ready()
            if not replicas:
                raise ApiError(503, "no replica is ready", code="no_replica", retry_after_s=RETRY_AFTER_S)
            answers = await asyncio.gather(*(self.fleet.change(replica, path, body) for replica in replicas))
            failed = [answer for answer in answers if answer[0] != 200]
            loading = path == "/v1/load_lora_adapter"
            if failed:
                done = [replica for replica, answer in zip(replicas, answers) if answer[0] == 200]
                await self._undo(done, str(name), loading)
                return Response(failed[0][1], failed[0][0], media_type="application/json")
            self._remember(replicas, str(name), body if loading else None)
        return Response(answers[0][1], 200, media_type="application/json")

    async def _undo(self, done: list[Replica], name: str, loading: bool) -> None:
        if loading:
            body, path = orjson.dumps({"lora_name": name}), "/v1/unload_lora_adapter"
        elif name in self.fleet.adapters:
            body, path = self.fleet.adapters[name], "/v1/load_lora_adapter"
        else:
            return  # given at the start; the replicas that still have it differ until it is unloaded there too
        await asyncio.gather(*(self.fleet.change(replica, path, body) for replica in done))

    def _remember(self, replicas: list[Replica], name: str, loaded: bytes | None) -> None:
        fleet = self.fleet
        if loaded is not None:
            fleet.adapters[name] = loaded
            fleet.gone.discard(name)
        else:
            fleet.adapters.pop(name, None)
            fleet.gone.add(name)
        for replica in replicas:
            if loaded is not None:
                replica.models.setdefault(name, {"id": name, "object": "model"})
            else:
                replica.models.pop(name, None)
            replica.doubted.set()  # so that the list is read anew


async def _read(receive: Receive) -> bytes:
    """A request's whole body."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b""
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _content_type(scope: Scope) -> str:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == b"content-type"), "")
