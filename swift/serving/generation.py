"""Answers in the making: the sequences that one HTTP request asked of a backend, from submitting to the last update.

They end together: when the client leaves, when time is up, when one of them fails, all of them are cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from starlette.requests import Request as HttpRequest

from swift.core.errors import SwiftError
from swift.inference.requests import Request, SamplingParams, Update
from swift.serving.errors import ApiError, from_swift
from swift.serving.exchange import Exchange, exchange_of
from swift.serving.mailbox import Mailbox
from swift.serving.served import Models, ServedModel, Talker
from swift.serving.services import Services


class Disconnected(Exception):
    """The client has left; there is nobody to answer."""


@dataclass(frozen=True)
class Wanted:
    """One sequence to generate.

    Attributes:
        group: sequences of one group have the same prompt.
    """

    prompt: list[int]
    params: SamplingParams
    group: int = 0


@dataclass
class Usage:
    """Tokens of a request."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0

    def body(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached, "audio_tokens": 0},
        }


@dataclass
class Generation:
    """Sequences of one request. `begin` it, read `updates` to the end, and `close` it in any case.

    Attributes:
        usage: so far. A prompt that several sequences share counts once.
    """

    services: Services
    model: ServedModel
    talker: Talker
    wanted: Sequence[Wanted]
    http: HttpRequest
    priority: int = 0
    usage: Usage = field(default_factory=Usage)
    _ids: list[str] = field(default_factory=list)
    _open: set[int] = field(default_factory=set)
    _groups_seen: set[int] = field(default_factory=set)
    _mailbox: Mailbox | None = None
    _watcher: asyncio.Task[None] | None = None
    _timer: asyncio.TimerHandle | None = None
    _entered: bool = False
    _closed: bool = False
    _ahead: list[tuple[int, Update]] | None = None

    async def begin(self) -> None:
        """Submit everything and wait for the first update, so that what fails at once has a status of its own.

        Raises:
            ApiError: refused, or failed.
            Disconnected: the client left.
        """
        loop = asyncio.get_running_loop()
        self._mailbox = Mailbox(loop)
        self.talker.queue.enter(len(self.wanted))
        self._entered = True
        limit_s = self.services.config.request_timeout_s
        self._timer = loop.call_later(max(0.0, limit_s - self._exchange.elapsed_s()), self._too_late, limit_s)
        self._watcher = loop.create_task(self._watch())
        for index, wanted in enumerate(self.wanted):
            request = Request(
                id=f"{self._exchange.id}-{index}",
                prompt=wanted.prompt,
                params=wanted.params,
                adapter=self.model.adapter,
                group=f"{self._exchange.id}-{wanted.group}" if len(self.wanted) > 1 else None,
                priority=self.priority,
            )
            if wanted.params.structure is None:
                self._submit(request, index)
            else:  # a schema takes a while to compile
                await self.services.run(partial(self._submit, request, index))
        self._ahead = await self._take()

    def _submit(self, request: Request, index: int) -> None:
        assert self._mailbox is not None
        try:
            self.talker.backend.submit(request, self.services.bridge.sink(self._mailbox, index))
        except SwiftError as error:
            refused = from_swift(error)
            if refused.status_code >= 500:
                self._models.went_wrong(error.message)
            raise refused from error
        self._ids.append(request.id)
        self._open.add(index)
        if self._closed:
            self.talker.backend.cancel(request.id)

    @property
    def _models(self) -> Models:
        return self.services.models

    @property
    def _exchange(self) -> Exchange:
        return exchange_of(self.http.scope)

    def _too_late(self, limit_s: float) -> None:
        assert self._mailbox is not None
        self._mailbox.fail(ApiError(504, f"the answer took longer than {limit_s:g} s", code="timeout"))

    async def _watch(self) -> None:
        """Wait until the client leaves."""
        assert self._mailbox is not None
        while (await self.http.receive())["type"] != "http.disconnect":
            pass
        self._exchange.disconnected = True
        self._mailbox.fail(Disconnected())

    async def updates(self) -> AsyncIterator[list[tuple[int, Update]]]:
        """(number of the sequence, update), all that are there at a time, until every sequence has ended."""
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            yield ahead
        while self._open:
            yield await self._take()
        self._models.went_well()

    async def _take(self) -> list[tuple[int, Update]]:
        assert self._mailbox is not None
        items = await self._mailbox.take()
        exchange = self._exchange
        if exchange.first_token_s is None:
            exchange.first_token_s = exchange.elapsed_s()
        for index, update in items:
            self._count(index, update)
            if update.finish_reason is None:
                continue
            self._open.discard(index)
            if update.finish_reason == "error":
                raise self._failed(update.error or SwiftError("the engine failed"))
            if update.finish_reason == "cancelled":
                raise ApiError(503, "the server is shutting down", code="cancelled", retry_after_s=10)
        return items

    def _failed(self, error: SwiftError) -> ApiError:
        """An answer that ended with an error: the request's fault, or the engine's."""
        refused = from_swift(error)
        if refused.status_code < 500:
            return refused
        self._models.went_wrong(error.message)
        return ApiError(500, f"the engine failed: {error.message}", code="engine_failed")

    def _count(self, index: int, update: Update) -> None:
        usage, group = self.usage, self.wanted[index].group
        usage.generated += len(update.tokens)
        if group not in self._groups_seen:
            self._groups_seen.add(group)
            usage.prompt += len(self.wanted[index].prompt)
            usage.cached += update.num_cached_tokens

    def close(self) -> None:
        """Cancel what still runs, and give the places back. Idempotent."""
        self._closed = True
        if self._watcher is not None:
            self._watcher.cancel()
        if self._timer is not None:
            self._timer.cancel()
        for index in self._open:
            self.talker.backend.cancel(self._ids[index])
        self._open.clear()
        exchange = self._exchange
        if self._entered:
            self._entered = False
            self.talker.queue.leave(len(self.wanted), time.monotonic() - exchange.started_s)
            exchange.prompt_tokens += self.usage.prompt
            exchange.cached_tokens += self.usage.cached
            exchange.generated_tokens += self.usage.generated
