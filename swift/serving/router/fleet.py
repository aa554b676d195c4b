"""The replicas behind a router: which of them are well, what they offer, and which one gets a request.

Each is looked at all the time; one that fails a request is looked at again at once, and nobody is sent there until it
answers. Knows nothing of the requests' contents, nor of how replicas are started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import orjson

from swift.core.logging import get_logger
from swift.serving.errors import ApiError
from swift.serving.router.balance import Balancer

log = get_logger("router")

State = Literal["starting", "ready", "down", "leaving"]
_PROBE_S = 5.0  # for an answer to "are you ready?"
_MISSES = 3  # unanswered questions in a row after which a replica that still takes connections is given up
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0  # between two looks at one that isn't well
_IDLE_S = 2.0  # connections are kept: less than any server keeps them
RETRY_AFTER_S = 3.0
UNREACHABLE = (aiohttp.ClientError, OSError, TimeoutError)


@dataclass(eq=False)
class Replica:
    """One server.

    Attributes:
        name: for log, metrics and the balancer.
        url: without a path.
        key, admin_key: what it wants to see.
        own: it is this program's, so its answers can be made again elsewhere.
        models: its list of models, by name.
        attempts: the clocks of requests that it is answering; running out when it is given up.
    """

    name: str
    url: str
    key: str | None = None
    admin_key: str | None = None
    state: State = "starting"
    own: bool = False
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    attempts: set[asyncio.Timeout] = field(default_factory=set)
    num_requests: int = 0
    num_failures: int = 0
    num_starts: int = 0
    doubted: asyncio.Event = field(default_factory=asyncio.Event)

    def headers(self, *, admin: bool = False) -> dict[str, str]:
        """What every request to it carries."""
        key = self.admin_key or self.key if admin else self.key
        return {"Authorization": f"Bearer {key}"} if key else {}

    def moved(self, url: str) -> None:
        """It was started anew, somewhere else."""
        self.url, self.state = url, "starting"
        self.num_starts += 1
        self.models = {}
        self.doubted.set()

    def give_up(self) -> None:
        """End what it is answering: it won't."""
        now = asyncio.get_running_loop().time()
        for clock in self.attempts:
            if not clock.expired():
                clock.reschedule(now)


class Fleet:
    """All replicas of a router; made in its event loop.

    Args:
        check_s: seconds between two looks at a replica that is well.
    """

    def __init__(self, replicas: Sequence[Replica], check_s: float) -> None:
        self.replicas = list(replicas)
        self.balancer = Balancer()
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_PROBE_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            read_bufsize=1 << 16,
        )
        # adapters loaded since the start, by name with the request that did it: replicas that come back get them too
        self.adapters: dict[str, bytes] = {}
        self.gone: set[str] = set()
        self.changing = asyncio.Lock()
        self.num_retries = 0
        self.num_continued = 0
        self._check_s = check_s
        self._watchers: list[asyncio.Task[None]] = []

    def watch(self) -> None:
        """Begin to look at the replicas."""
        self._watchers = [asyncio.create_task(self._watch(replica)) for replica in self.replicas]

    async def close(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await self.session.close()

    def ready(self) -> list[Replica]:
        """Those that take requests."""
        return [replica for replica in self.replicas if replica.state == "ready"]

    # --- choosing ---

    def choose(self, model: str | None, chain: Sequence[int], tried: Collection[Replica]) -> Replica:
        """The replica for a request.

        Args:
            model: its name; None: whatever a replica offers.
            chain: of the prompt.
            tried: not these.

        Raises:
            ApiError: 404 where nobody has the model, 503 where nobody can answer now.
        """
        ready = self.ready()
        having = [replica for replica in ready if model is None or model in replica.models]
        left = {replica.name: replica for replica in having if replica not in tried}
        if left:
            return left[self.balancer.choose(chain, left)]
        if model is not None and ready and not having and len(ready) == len(self.replicas):
            names = dict.fromkeys(name for replica in ready for name in replica.models)
            raise ApiError(
                404,
                f"there is no model {model!r:.200}; there are: {', '.join(names)}",
                param="model",
                code="model_not_found",
            )
        if all(replica.state == "starting" for replica in self.replicas):
            raise ApiError(503, "the replicas are being started", code="loading", retry_after_s=RETRY_AFTER_S)
        words = "no replica can answer now" if not tried else "the replicas that were asked have failed"
        raise ApiError(503, words, code="no_replica", retry_after_s=RETRY_AFTER_S)

    @contextmanager
    def answering(self, replica: Replica, chain: Sequence[int], clock: asyncio.Timeout) -> Iterator[None]:
        """Counts a request while a replica has it.

        Args:
            clock: runs out when the replica is given up.
        """
        replica.num_requests += 1
        replica.attempts.add(clock)
        self.balancer.begin(replica.name, chain)
        try:
            yield
        finally:
            self.balancer.end(replica.name)
            replica.attempts.discard(clock)

    def doubt(self, replica: Replica) -> None:
        """A request failed there: nobody else is sent before it has answered a question."""
        replica.num_failures += 1
        if replica.state == "ready":
            replica.state = "down"
            replica.doubted.set()

    # --- health ---

    async def _watch(self, replica: Replica) -> None:
        failures = misses = 0
        while True:
            before, url = replica.state, replica.url
            found, answered = await self._look(replica) if url else ("starting", True)
            misses = 0 if answered else misses + 1
            if not answered and before == "ready" and misses < _MISSES:
                found = "ready"  # it may be busy
            if (replica.state, replica.url) == (before, url) and before != "leaving":  # nothing happened meanwhile
                self._enter(replica, found)
                if misses == _MISSES:
                    replica.give_up()
            failures = 0 if replica.state == "ready" else failures + 1
            wait_s = min(_FIRST_WAIT_S * 2 ** min(failures, 10), _LONGEST_WAIT_S)
            if replica.state == "ready":
                wait_s = self._check_s
            elif replica.state == "starting":
                wait_s = _FIRST_WAIT_S
            with suppress(TimeoutError):
                await asyncio.wait_for(replica.doubted.wait(), wait_s)
            replica.doubted.clear()

    def _enter(self, replica: Replica, state: State) -> None:
        if state == replica.state or (state == "down" and replica.state == "starting"):
            return  # one that was never there is still on its way
        replica.state = state
        if state == "ready":
            log.info("replica %s is ready: %s", replica.name, ", ".join(replica.models))
        else:
            log.warning("replica %s doesn't answer", replica.name)

    async def _look(self, replica: Replica) -> tuple[State, bool]:
        """(how a replica is, whether it said so)."""
        try:
            async with asyncio.timeout(_PROBE_S):
                status, body = await self._get(replica, "/ready")
                if status == 404:
                    status, _ = await self._get(replica, "/health")
                elif status == 200:
                    replica.own = _is_own(body)
                if status != 200:
                    return "down", True
                status, body = await self._get(replica, "/v1/models")
                if status != 200:
                    log.warning("replica %s refuses to list its models: status %d", replica.name, status)
                    return "down", True
                replica.models = {entry["id"]: entry for entry in orjson.loads(body)["data"]}
        except TimeoutError:
            return "down", False
        except (*UNREACHABLE, ValueError, KeyError, TypeError):
            return "down", True
        return ("ready" if replica.state == "ready" or await self._catch_up(replica) else "down"), True

    async def _get(self, replica: Replica, path: str) -> tuple[int, bytes]:
        async with self.session.get(replica.url + path, headers=replica.headers()) as response:
            return response.status, await response.read()

    async def _catch_up(self, replica: Replica) -> bool:
        """Load and unload what was while the replica was away; whether that went well."""
        async with self.changing:
            wanted = [("load", name, body) for name, body in self.adapters.items() if name not in replica.models]
            wanted += [
                ("unload", name, orjson.dumps({"lora_name": name})) for name in self.gone if name in replica.models
            ]
            for verb, name, body in wanted:
                status, answer = await self.change(replica, f"/v1/{verb}_lora_adapter", body)
                if status != 200:
                    log.warning("replica %s can't %s the adapter %s: %.300s", replica.name, verb, name, answer.decode())
                    return False
            if wanted:
                with suppress(*UNREACHABLE):
                    _, listed = await self._get(replica, "/v1/models")
                    replica.models = {entry["id"]: entry for entry in orjson.loads(listed)["data"]}
        return True

    async def change(self, replica: Replica, path: str, body: bytes) -> tuple[int, bytes]:
        """Have a replica load or unload an adapter: (status, answer); 503 where it can't be reached."""
        headers = {"Content-Type": "application/json", **replica.headers(admin=True)}
        try:
            async with self.session.post(replica.url + path, data=body, headers=headers) as response:
                return response.status, await response.read()
        except UNREACHABLE as error:
            self.doubt(replica)
            return 503, str(error).encode()


def _is_own(body: bytes) -> bool:
    """Whether /ready was answered by this program."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(value, dict) and value.get("status") == "ready" and "models" in value
