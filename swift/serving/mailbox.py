"""The way of updates from the engine's thread to the event loop: one wake-up of the loop for all that a step brings.

An engine calls a sink for every sequence and step. Waking the loop costs a system call, so the first update of a burst
wakes it, and the others find it woken.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from swift.inference.requests import Sink, Update


class Mailbox:
    """What one HTTP request waits for. Belongs to the event loop's thread."""

    __slots__ = ("_failure", "_items", "_loop", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: list[tuple[int, Update]] = []
        self._failure: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, index: int, update: Update) -> None:
        self._items.append((index, update))
        self._wake()

    def fail(self, failure: BaseException) -> None:
        """Let the next `take` raise; the first failure counts."""
        self._failure = self._failure or failure
        self._wake()

    async def take(self) -> list[tuple[int, Update]]:
        """(number of the sequence, update): all that has come since the last call, at least one."""
        while not self._items and self._failure is None:
            self._waiter = self._loop.create_future()
            await self._waiter
        if self._failure is not None:
            raise self._failure
        items, self._items = self._items, []
        return items

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Bridge:
    """Carries updates into mailboxes.

    Args:
        loop: the event loop that all mailboxes belong to.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: deque[tuple[Mailbox, int, Update]] = deque()
        self._woken = False
        self.num_wakeups = 0

    def sink(self, mailbox: Mailbox, index: int) -> Sink:
        """A sink, for any thread, of sequence `index` of a request."""

        def take(update: Update) -> None:
            self._pending.append((mailbox, index, update))
            if not self._woken:
                self._woken = True
                self._call(self._deliver)

        return take

    def _call(self, function: Callable[[], None]) -> None:
        if not self._loop.is_closed():  # an engine may end after the server
            self._loop.call_soon_threadsafe(function)

    def _deliver(self) -> None:
        self._woken = False  # before reading: what comes meanwhile is read now or wakes the loop again
        self.num_wakeups += 1
        while self._pending:
            mailbox, index, update = self._pending.popleft()
            mailbox.put(index, update)
