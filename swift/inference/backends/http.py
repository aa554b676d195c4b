"""A backend that is a server, spoken to in tokens over HTTP; what differs between servers is a `Dialect`.

One thread with an event loop holds all connections. A request that is cancelled is a connection that is closed, which
is how these servers learn of it. Before the first piece of an answer a broken connection is tried once more; after it
the request ends with the error, since what was said can't be taken back.

What touches all requests (weights, sleep) waits until those that run have ended, and those that come wait for it.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import tempfile
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.core.errors import ModelError, SwiftError, UsageError
from swift.core.extras import require
from swift.inference.backends.base import EngineStats, Feature, ModelInfo
from swift.inference.backends.dialect import Call, Dialect, Enough, refusal
from swift.inference.backends.prompt import check_prompt
from swift.inference.backends.weight_files import Shapes, write_weights
from swift.inference.choosing.checks import check_params
from swift.inference.requests import Request, Sink, Update

if TYPE_CHECKING:
    import torch

_CONNECT_S = 10.0
_SILENCE_S = 600.0  # a long prompt before others may take its time


@dataclass(frozen=True)
class Endpoint:
    """Where a server is, and as what it knows the model.

    Attributes:
        url: the server's root, without `/v1` and without a slash at the end.
        model: name of the model in requests.
        key: API key, or None.
    """

    url: str
    model: str
    key: str | None = None


class HttpBackend:
    """See `Backend`.

    Args:
        name: as in `--infer_backend`.
        endpoint: gives the server; called by `start`, which may take until it is up.
        info: of the model; its `stop_token_ids` are sent along, and its `features` are what the server is asked for.
        dialect: how the server is spoken to.
        stop: what `close` does in the end.
        shapes: of the model's parameters by name, to check new weights against; needed for `weight_update`.
        adapter: name and folder of an adapter that `start` loads and that requests go to unless they name another.
        most_adapters: how many the server may hold together; None: any number.

    What such a server has no way to do is refused by name.
    """

    def __init__(
        self,
        name: str,
        endpoint: Callable[[], Endpoint],
        info: ModelInfo,
        dialect: Dialect,
        *,
        stop: Callable[[], None] = lambda: None,
        shapes: Callable[[], Shapes] | None = None,
        adapter: tuple[str, Path] | None = None,
        most_adapters: int | None = None,
    ) -> None:
        self.name = name
        self._make_endpoint = endpoint
        self._info = info
        self._dialect = dialect
        self._stop = stop
        self._shapes = shapes
        self._usual_adapter = adapter
        self._most_adapters = most_adapters
        self._endpoint: Endpoint | None = None
        self._session: Any = None
        self._http: Any = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"{name} client", daemon=True)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._asked: dict[str, Request] = {}  # what the server holds
        self._open = asyncio.Event()  # new requests may go out
        self._open.set()
        self._one_order = threading.Lock()  # orders to the whole server come one after the other
        self._adapters: list[str] = []
        self._asleep = 0  # the level, 0 is awake
        self._forgotten = False  # after a sleep of level 2, until weights are given
        self._stats = EngineStats()
        self._closed = False
        _close_at_exit(self)

    @property
    def info(self) -> ModelInfo:
        return self._info

    def start(self) -> None:
        self._http = require("aiohttp", extra="serve", purpose="talk to a server")
        self._endpoint = self._make_endpoint()
        self._thread.start()

        async def connect() -> None:
            timeout = self._http.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
            assert self._endpoint is not None
            headers = {"Authorization": f"Bearer {self._endpoint.key}"} if self._endpoint.key else {}
            self._session = self._http.ClientSession(
                timeout=timeout, headers=headers, connector=self._http.TCPConnector(limit=0)
            )

        self._call(connect())
        if self._usual_adapter is not None:
            self.load_adapter(*self._usual_adapter)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._thread.is_alive():
            self._call(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()
        self._stop()

    def submit(self, request: Request, sink: Sink) -> None:
        check_prompt(request.prompt, self._info)
        check_params(request.params, self._info)
        if request.adapter is None and self._usual_adapter is not None:
            request = replace(request, adapter=self._usual_adapter[0])
        if request.adapter is not None:
            self._require("adapters")
            if request.adapter not in self._adapters:
                raise self._no_adapter(request.adapter)
        self._check_awake()
        if self._closed or self._endpoint is None or not self._thread.is_alive():
            raise SwiftError("the engine is closed", fix="make a new one")
        # what the server can't be asked is said here, not by an answer
        call = self._dialect.question(request, self._endpoint.model, self._info)

        ended = threading.Event()

        def tell(update: Update) -> None:
            if update.finish_reason is not None:
                ended.set()
            sink(update)

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.pop(request.id, None)
            if not ended.is_set():  # cancelled before it began
                sink(Update(request.id, finish_reason="cancelled", num_prompt_tokens=len(request.prompt)))

        def begin() -> None:
            task = self._loop.create_task(self._answer(request, call, tell))
            self._tasks[request.id] = task
            task.add_done_callback(done)

        try:
            self._loop.call_soon_threadsafe(begin)
        except RuntimeError as error:  # closed meanwhile
            raise SwiftError("the engine is closed", fix="make a new one") from error

    def cancel(self, request_id: str) -> None:
        def end() -> None:
            task = self._tasks.get(request_id)
            if task is not None:
                task.cancel()

        if not self._closed:
            self._loop.call_soon_threadsafe(end)

    def stats(self) -> EngineStats:
        return replace(
            self._stats, num_running=len(self._tasks), adapters=list(self._adapters), asleep=bool(self._asleep)
        )

    def load_adapter(self, name: str, folder: Path) -> None:
        self._require("adapters")
        if name in self._adapters:
            raise UsageError(f"there is an adapter {name} already", fix="unload it first, or take another name")
        if len(self._adapters) == self._most_adapters:
            raise UsageError(f"{self.name} holds {self._most_adapters} adapters here at most", fix="unload one first")
        try:
            self._call(self._tell(self._dialect.load_adapter(name, folder)))
        except SwiftError as error:
            fix = "an adapter that the server can't run can be merged: swift merge-lora"
            raise ModelError(error.message, where=str(folder), fix=fix) from error
        self._adapters.append(name)

    def unload_adapter(self, name: str) -> None:
        self._require("adapters")
        if name not in self._adapters:
            raise self._no_adapter(name)
        self._order(self._dialect.unload_adapter(name), of=name)
        self._adapters.remove(name)

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._require("weight_update")
        assert self._shapes is not None
        shapes = self._shapes()
        with tempfile.TemporaryDirectory(prefix="weights-", ignore_cleanup_errors=True) as folder:
            given = write_weights(tensors, Path(folder), shapes)
            if self._forgotten and (missing := sorted(shapes.keys() - given)):
                raise ModelError(
                    f"{len(missing)} weights were let go of and not given back, {missing[0]} among them",
                    fix="update_weights() with all of them",
                )
            try:
                self._order(self._dialect.update_weights(Path(folder)))
            except ModelError:  # nothing was replaced
                raise
            except SwiftError:  # nobody knows how far it came
                self._forgotten = True
                raise
        self._forgotten = False

    def sleep(self, level: int = 1) -> None:
        self._require("sleep")
        if level not in (1, 2):
            raise UsageError(f"there is no sleep of level {level}", fix="1 keeps the weights, 2 forgets them")
        if self._asleep:
            return
        self._order(self._dialect.sleep(level), then=lambda: self._fell_asleep(level))

    def wake(self) -> None:
        self._require("sleep")
        if self._asleep:
            self._order(self._dialect.wake(self._asleep))
            self._asleep = 0

    def _fell_asleep(self, level: int) -> None:
        self._asleep = level
        self._forgotten = self._forgotten or level == 2

    def _check_awake(self) -> None:
        if self._asleep:
            raise UsageError("the engine sleeps", fix="wake() it first")
        if self._forgotten:
            raise UsageError("weights were let go of and not given back", fix="update_weights() with all of them")

    def _no_adapter(self, name: str) -> UsageError:
        there = ", ".join(self._adapters) or "none is loaded"
        return UsageError(f"there is no adapter {name}", fix=f"load it first; there are: {there}")

    def _require(self, feature: Feature) -> None:
        if feature not in self._info.features:
            raise UsageError(
                f"{self.name} is not driven with {_WORDS.get(feature, feature)} here",
                where=f"--infer_backend {self.name}",
                fix="--infer_backend swift",
            )

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _order(self, calls: Sequence[Call], *, of: str | None = None, then: Callable[[], None] = lambda: None) -> None:
        """Say something that requests can't run beside: those that run end first, those that come wait.

        Args:
            of: only requests of this adapter have to end.
            then: done before requests go out again.
        """

        async def order() -> None:
            self._open.clear()
            try:
                while running := [
                    task
                    for id, task in self._tasks.items()
                    if id in self._asked and (of is None or self._asked[id].adapter == of)
                ]:
                    await asyncio.wait(running)
                await self._tell(calls)
                then()
            finally:
                self._open.set()

        with self._one_order:
            self._call(order())

    async def _tell(self, calls: Sequence[Call]) -> None:
        assert self._endpoint is not None
        for call in calls:
            try:
                async with self._session.post(
                    f"{self._endpoint.url}{call.path}", json=call.body, params=call.query
                ) as answer:
                    text = await answer.text()
            except self._http.ClientError as error:
                raise SwiftError(f"{self.name} doesn't answer: {type(error).__name__}: {error}") from error
            if answer.status != 200 or _says_no(text):
                raise refusal(self.name, answer.status, text)
            if said := _said_by_a_worker(text):
                raise ModelError(said)

    async def _end(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _answer(self, request: Request, call: Call, sink: Sink) -> None:
        """One request, whose last update comes whatever happens."""
        last = Update(request.id, finish_reason="error", num_prompt_tokens=len(request.prompt))
        begun = False
        try:
            await self._open.wait()
            self._check_awake()
            self._asked[request.id] = request
            for attempt in (1, 2):
                try:
                    async for update in self._updates(request, call):
                        begun = True
                        self._stats.generated_tokens += len(update.tokens)
                        if update.finish_reason is not None:
                            last = update
                        else:
                            sink(update)
                    break
                except self._http.ClientConnectionError:
                    if begun or attempt == 2:
                        raise
            if last.finish_reason == "error" and last.error is None:
                last.error = SwiftError(f"{self.name} ended an answer without saying why")
        except asyncio.CancelledError:
            last.finish_reason = "cancelled"
            if request.id in self._asked:
                with suppress(SwiftError):  # it may have ended by itself
                    await self._tell(self._dialect.cancel(request))
        except SwiftError as error:
            last.error = error
        except Exception as error:  # a process boundary: whatever comes over the wire, the owner is told
            last.error = SwiftError(f"{self.name} broke off: {type(error).__name__}: {error}")
        finally:
            self._asked.pop(request.id, None)
        self._stats.prompt_tokens += len(request.prompt)
        sink(last)

    async def _updates(self, request: Request, call: Call) -> AsyncIterator[Update]:
        assert self._endpoint is not None
        read = self._dialect.reader(request)
        async with self._session.post(f"{self._endpoint.url}{call.path}", json=call.body, params=call.query) as answer:
            if answer.status != 200:
                raise refusal(self.name, answer.status, await answer.text())
            async for event in _events(answer):
                chunk = json.loads(event)
                if "error" in chunk:
                    raise refusal(self.name, 200, event.decode())
                try:
                    for update in read(chunk):
                        yield update
                except Enough:
                    return


_WORDS: Mapping[Feature, str] = {"adapters": "adapters by request", "weight_update": "weights that change"}


def _says_no(text: str) -> bool:
    """Some servers say that they failed in the body of an answer with status 200."""
    try:
        return json.loads(text).get("success") is False
    except (ValueError, AttributeError):
        return False


def _said_by_a_worker(text: str) -> str | None:
    """Why a worker of the server refused an order, which is then as if it had not been given; None: it did it."""
    try:
        results = json.loads(text)["results"]
        return next((str(each["message"]) for each in results if each["success"] is False), None)
    except (ValueError, KeyError, TypeError):
        return None


async def _events(answer: Any) -> AsyncIterator[bytes]:
    """The JSON objects of an answer: its events, or the whole at once where it is no stream."""
    if answer.content_type == "application/json":
        yield await answer.read()
        return
    async for line in _lines(answer.content):
        if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
            yield line[5:]


async def _lines(content: Any) -> AsyncIterator[bytes]:
    """The lines of a stream, of any length: the first one of an answer may hold the whole prompt."""
    left = b""
    async for piece in content.iter_any():
        *whole, left = (left + piece).split(b"\n")
        for line in whole:
            yield line
    if left:
        yield left


def _close_at_exit(backend: HttpBackend) -> None:
    """End connections and servers when the program ends, without keeping the backend until then."""
    alive = weakref.ref(backend)

    def end() -> None:
        left = alive()
        if left is not None:
            left.close()

    atexit.register(end)
