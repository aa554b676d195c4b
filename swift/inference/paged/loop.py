"""The thread that runs an engine: takes requests and orders, computes step after step, sends what is new.

Everything that changes an engine's state happens in this thread, between steps. Callers leave orders in a queue and are
told through sinks and futures; each order is carried out or dropped with a reason, so nobody waits for ever.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from swift.core.errors import SwiftError
from swift.core.logging import get_logger
from swift.inference.paged.core import tell
from swift.inference.requests import Request, Sink, Update

log = get_logger("inference")

T = TypeVar("T")


class Steps(Protocol):
    """An engine without its thread: `EngineCore`, or one of another library."""

    @property
    def has_work(self) -> bool: ...

    def has(self, request_id: str) -> bool: ...

    def add(self, request: Request, sink: Sink) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def step(self) -> None: ...

    def end_all(self, error: SwiftError | None = None) -> None: ...


@dataclass(frozen=True)
class _Order:
    """Something to do between two steps.

    Attributes:
        run: does it.
        drop: says why it won't be done.
        cancels: the request that it ends, if that is what it does.
    """

    run: Callable[[], None]
    drop: Callable[[SwiftError | None], None]
    cancels: str | None = None


class EngineLoop:
    """Runs an engine's steps in a thread of its own.

    Args:
        core: what to run. Nobody else may touch it once the loop has started.

    Attributes:
        failure: what ended the engine, if it failed.
    """

    def __init__(self, core: Steps) -> None:
        self._core = core
        self._orders: deque[_Order] = deque()
        self._changed = threading.Condition()
        self._started = self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.failure: SwiftError | None = None

    def start(self) -> None:
        """Begin to take orders."""
        self._started = True
        self._thread.start()

    def submit(self, request: Request, sink: Sink, check: Callable[[], None] = lambda: None) -> None:
        """Take a request that was checked.

        Args:
            check: raises what speaks against it when its turn comes: orders before it may have changed the engine.

        Raises:
            SwiftError: the engine has failed, isn't started or is closed.
        """

        def drop(error: SwiftError | None) -> None:
            reason: Any = "cancelled" if error is None else "error"
            tell(sink, Update(request.id, finish_reason=reason, error=error, num_prompt_tokens=len(request.prompt)))

        def run() -> None:
            try:
                check()
            except SwiftError as error:
                drop(error)
            else:
                self._core.add(request, sink)

        self._order(_Order(run, drop))

    def cancel(self, request_id: str) -> None:
        """End a request at the next step."""
        try:
            self._order(_Order(lambda: self._core.cancel(request_id), lambda error: None, cancels=request_id))
        except SwiftError:
            return  # the engine has ended, and the request with it

    def call(self, function: Callable[[], T], *, idle: bool = False) -> T:
        """Run `function` between two steps and return what it returns, errors included.

        Args:
            idle: let the requests that are there finish first; new ones wait.
        """
        if threading.current_thread() is self._thread:
            return function()
        future: Future[T] = Future()

        def run() -> None:
            if idle:
                self._finish_running()
            try:
                future.set_result(function())
            except Exception as error:  # the thread's boundary: the caller's fault, and nobody else's
                future.set_exception(error)

        def drop(error: SwiftError | None) -> None:
            if not future.done():
                future.set_exception(error or SwiftError("the engine was closed"))

        self._order(_Order(run, drop))
        return future.result()

    def _finish_running(self) -> None:
        """Step until nobody runs; who leaves meanwhile is let go.

        Raises:
            _Closed: the engine is to end.
        """
        while self._core.has_work:
            with self._changed:
                if self._closing:
                    raise _Closed
                leaving = [
                    order for order in self._orders if order.cancels is not None and self._core.has(order.cancels)
                ]
                for order in leaving:
                    self._orders.remove(order)
            for order in leaving:
                order.run()
            if self._core.has_work:
                self._core.step()

    def close(self) -> None:
        """End all requests as cancelled, and the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _order(self, order: _Order) -> None:
        with self._changed:
            if self.failure is not None:
                raise self.failure
            if self._closing:
                raise SwiftError("the engine is closed", fix="make a new one")
            if not self._started:
                raise SwiftError("the engine isn't started", fix="start() it first")
            self._orders.append(order)
            self._changed.notify()

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        try:
            while not self._closing:
                with self._changed:
                    while not (self._orders or self._closing or self._core.has_work):
                        self._changed.wait()
                    order = self._orders.popleft() if self._orders else None
                if order is None:
                    if self._core.has_work:
                        self._core.step()
                    continue
                try:
                    order.run()
                except BaseException:
                    with self._changed:  # dropped with the rest, and the reason
                        self._orders.appendleft(order)
                    raise
        except _Closed:
            pass
        except BaseException as error:  # the thread's boundary: everyone who waits is told
            with self._changed:
                self.failure = _failure(error)
            if not isinstance(error, SwiftError):
                log.error("the engine failed", exc_info=error)
        with self._changed:
            self._closing = True
            left = list(self._orders)
            self._orders.clear()
        self._core.end_all(self.failure)
        for order in left:
            order.drop(self.failure)


class _Closed(Exception):
    """The engine is to end while it waits for requests to end."""


def _failure(error: BaseException) -> SwiftError:
    """What to tell those who wait."""
    if isinstance(error, SwiftError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return SwiftError(
            f"out of memory: {str(error).splitlines()[0]}",
            fix="lower --max_batch_tokens, --max_batch_size or --kv_cache_gib",
        )
    return SwiftError(f"the engine failed: {type(error).__name__}: {error}")
