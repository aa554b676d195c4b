"""A backend that is a server: OpenAI's completions over HTTP, tokens in and tokens out.

One thread with an event loop holds all connections. A request that is cancelled is a connection that is closed, which
is how these servers learn of it. Before the first piece of an answer a broken connection is tried once more; after it
the request ends with the error, since what was said can't be taken back.

Only servers that give token ids back are driven (`return_token_ids`: vLLM, and our own): ids guessed from text would
not be the ones that were generated.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import json
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from swift.core.errors import SwiftError, UsageError
from swift.core.extras import require
from swift.inference.backends.base import EngineStats, ModelInfo
from swift.inference.backends.prompt import check_prompt
from swift.inference.choosing.checks import check_params
from swift.inference.requests import Request, SamplingParams, Sink, TokenLogprob, Update

if TYPE_CHECKING:
    import torch

_CONNECT_S = 10.0
_SILENCE_S = 600.0  # a long prompt before others may take its time
_ID = "token_id:"  # how tokens are named with `return_tokens_as_token_ids`


@dataclass(frozen=True)
class Endpoint:
    """Where a server is, and as what it knows the model.

    Attributes:
        url: up to `/v1`, without a slash at the end.
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
        info: of the model; its `stop_token_ids` are sent along.
        stop: what `close` does in the end.

    What such a server has no way to do is refused by name.
    """

    def __init__(
        self,
        name: str,
        endpoint: Callable[[], Endpoint],
        info: ModelInfo,
        *,
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self._make_endpoint = endpoint
        self._info = info
        self._stop = stop
        self._endpoint: Endpoint | None = None
        self._session: Any = None
        self._http: Any = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"{name} client", daemon=True)
        self._tasks: dict[str, asyncio.Task[None]] = {}
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
        if request.adapter is not None:
            self._refuse("adapters by request")
        if self._closed or not self._thread.is_alive():
            raise SwiftError("the engine is closed", fix="make a new one")

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
            task = self._loop.create_task(self._answer(request, tell))
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
        self._stats.num_running = len(self._tasks)
        return self._stats

    def load_adapter(self, name: str, folder: Path) -> None:
        self._refuse("adapters by request")

    def unload_adapter(self, name: str) -> None:
        self._refuse("adapters by request")

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._refuse("weights that change")

    def sleep(self, level: int = 1) -> None:
        self._refuse("sleep")

    def wake(self) -> None:
        self._refuse("sleep")

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"{self.name} is not driven with {what}", where=f"--infer_backend {self.name}", fix="--infer_backend swift"
        )

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _end(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _answer(self, request: Request, sink: Sink) -> None:
        """One request, whose last update comes whatever happens."""
        last = Update(request.id, finish_reason="error", num_prompt_tokens=len(request.prompt))
        begun = False
        try:
            for attempt in (1, 2):
                try:
                    async for update in self._updates(request):
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
        except SwiftError as error:
            last.error = error
        except Exception as error:  # a process boundary: whatever comes over the wire, the owner is told
            last.error = SwiftError(f"{self.name} broke off: {type(error).__name__}: {error}")
        self._stats.prompt_tokens += len(request.prompt)
        sink(last)

    async def _updates(self, request: Request) -> AsyncIterator[Update]:
        assert self._endpoint is not None
        body = completion_body(request, self._endpoint.model, self._info)
        async with self._session.post(f"{self._endpoint.url}/completions", json=body) as answer:
            if answer.status != 200:
                raise _refusal(self.name, answer.status, await answer.text())
            async for line in _lines(answer.content):
                if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                    continue
                chunk = json.loads(line[5:])
                if "error" in chunk:
                    raise _refusal(self.name, 200, line[5:].decode())
                for choice in chunk.get("choices", ()):
                    yield _update(request, choice)


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


def completion_body(request: Request, model: str, info: ModelInfo) -> dict[str, Any]:
    """The JSON of a request to `/v1/completions`, as vLLM and our own server read it."""
    params = request.params
    most = params.max_new_tokens
    if info.context_length is not None:
        left = info.context_length - len(request.prompt)
        most = left if most is None else min(most, left)
    ends = () if params.ignore_eos else info.stop_token_ids
    body: dict[str, Any] = {
        "model": model,
        "prompt": request.prompt,
        "stream": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "max_tokens": most,
        "min_tokens": params.min_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": list(params.stop),
        "stop_token_ids": [*ends, *params.stop_token_ids],
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": params.skip_special_tokens,
        "seed": int.from_bytes(hashlib.sha256(params.seed.encode()).digest()[:4], "big") >> 1,
    }
    if params.logprobs is not None:
        body["logprobs"] = params.logprobs
    if params.logit_bias:
        body["logit_bias"] = {str(token): value for token, value in params.logit_bias}
    if params.structure is not None:
        body["structured_outputs"] = _structured(params)
    return {key: value for key, value in body.items() if value is not None}


def _structured(params: SamplingParams) -> dict[str, Any]:
    assert params.structure is not None
    kind, value = params.structure.kind, params.structure.value
    if kind == "json":
        return {"json_object": True}
    if kind == "json_schema":
        return {"json": json.loads(value)}
    if kind == "choice":
        return {"choice": json.loads(value)}
    if kind in ("regex", "grammar"):
        return {kind: value}
    raise UsageError("a call can't be forced over HTTP", where="tool_choice", fix="--infer_backend swift")


def _update(request: Request, choice: dict[str, Any]) -> Update:
    tokens = choice.get("token_ids")
    if tokens is None:
        raise ValueError("it gives no token ids back (return_token_ids)")
    reason = choice.get("finish_reason")
    update = Update(request.id, tokens=list(tokens), text=choice.get("text") or "")
    update.num_prompt_tokens = len(request.prompt)
    if request.params.logprobs is not None and choice.get("logprobs"):
        update.logprobs = _logprobs(choice["logprobs"], request.params.logprobs)
    if reason is not None:
        update.finish_reason = "length" if reason == "length" else "cancelled" if reason == "abort" else "stop"
        stopped = choice.get("stop_reason")
        ours = isinstance(stopped, str) or stopped in request.params.stop_token_ids
        update.stop_reason = stopped if ours else None
    return update


def _logprobs(found: dict[str, Any], wanted: int) -> list[TokenLogprob]:
    tops = found.get("top_logprobs") or [{}] * len(found["tokens"])
    entries = []
    for token, value, top in zip(found["tokens"], found["token_logprobs"], tops, strict=True):
        ranked = sorted(((_token(name), each) for name, each in (top or {}).items()), key=lambda pair: -pair[1])
        entries.append(TokenLogprob(_token(token), value, tuple(ranked[:wanted])))
    return entries


def _token(name: str) -> int:
    if not name.startswith(_ID):
        raise ValueError("it names tokens by text (return_tokens_as_token_ids)")
    return int(name.removeprefix(_ID))


def _refusal(name: str, status: int, text: str) -> SwiftError:
    """What a server said in an error body."""
    try:
        body = json.loads(text)
        said = body["error"]["message"] if isinstance(body.get("error"), dict) else body["message"]
    except (ValueError, KeyError, TypeError, AttributeError):
        said = text.strip()[:300]
    return SwiftError(f"{name} answered {status}: {said}")
