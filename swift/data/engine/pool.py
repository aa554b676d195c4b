"""Running the tasks of a stage on this machine: in this process, or in several that end with it.

A process that dies is named with the task it had and with what most likely killed it. A request to stop lets running
tasks end for a while and then abandons them; nothing of an abandoned task counts. Knows nothing of stages.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from swift.core.errors import SwiftError
from swift.data.engine.task import Job, Pieces, Worker
from swift.data.handover import UNGUARDED, Handover, handed_over

GRACE_S = 10.0
_POLL_S = 0.2


@dataclass(frozen=True)
class Call:
    """One task to be run."""

    stage: str
    index: int
    pieces: Pieces = ()


Done = Callable[[Call, dict[str, Any]], None]


class Stopped(BaseException):
    """The run was asked to stop by a signal; the tasks that are done stay done."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.signal = number


class Executor(Protocol):
    """Runs tasks."""

    def run(self, calls: Sequence[Call], done: Done) -> None:
        """Run all of them; `done` is called here with each one's marker, in the order in which they end.

        Raises:
            SwiftError: a task failed. Others that were running then may have ended.
            Stopped: asked to.
        """
        ...

    def close(self) -> None:
        """End everything it has started."""
        ...


class StopRequest:
    """SIGINT and SIGTERM while a run goes on: remembered, or raised at once where a task runs in this process."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.times = 0
        self.at_once = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[StopRequest]:
        """Catch the signals during the block (only the main thread can)."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._caught) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise it at once during the block, which leaves nothing half done."""
        self.at_once = True
        try:
            self.check()
            yield
        finally:
            self.at_once = False

    def _caught(self, number: int, frame: object) -> None:
        self.number = number
        self.times += 1
        if self.at_once:
            self.at_once = False  # once: cleaning up must not be interrupted by a second signal
            raise Stopped(number)

    def check(self) -> None:
        """Raise what was asked for."""
        if self.number is not None:
            raise Stopped(self.number)


class InProcess:
    """One task after the other, here."""

    def __init__(self, job: Job, stop: StopRequest) -> None:
        self._job, self._stop = job, stop
        self._worker: Worker | None = None

    def run(self, calls: Sequence[Call], done: Done) -> None:
        """See `Executor`."""
        self._worker = self._worker or Worker(self._job)
        for call in calls:
            with self._stop.interrupting():
                marker = self._worker.run(call.stage, call.index, call.pieces)
            done(call, marker)

    def close(self) -> None:
        """Nothing was started."""


@dataclass
class _Process:
    process: BaseProcess
    pipe: Connection
    call: Call | None = None
    has_answered: bool = False


class LocalPool:
    """Several processes of this machine."""

    def __init__(self, job: Job, num_proc: int, stop: StopRequest) -> None:
        self._job, self._num_proc, self._stop = job, num_proc, stop
        self._processes: list[_Process] = []
        self._handover: Handover | None = None

    def run(self, calls: Sequence[Call], done: Done) -> None:
        """See `Executor`."""
        waiting = deque(calls)
        failure: SwiftError | None = None
        stopping_since: float | None = None
        while True:
            if self._stop.number is not None and stopping_since is None:
                stopping_since = time.monotonic()
            open_for_more = failure is None and stopping_since is None
            if open_for_more:
                self._hand_out(waiting)
            busy = [item for item in self._processes if item.call is not None]
            if not busy and not (open_for_more and waiting):
                break
            late = stopping_since is not None and time.monotonic() - stopping_since > GRACE_S
            if late or self._stop.times > 1:
                break
            handles: list[Any] = [item.pipe for item in busy] + [item.process.sentinel for item in busy]
            ready = connection.wait(handles, timeout=_POLL_S)
            for item in busy:
                if item.pipe in ready or item.process.sentinel in ready:
                    try:
                        self._take(item, done)
                    except SwiftError as error:
                        failure = failure or error
        if failure is not None:
            raise failure
        self._stop.check()

    def _hand_out(self, waiting: deque[Call]) -> None:
        idle = [item for item in self._processes if item.call is None]
        while waiting:
            if not idle:
                if len(self._processes) >= self._num_proc:
                    return
                idle.append(self._start())
            item = idle.pop()
            item.call = waiting.popleft()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is dead, as `_take` will find
                item.pipe.send(item.call)

    def _start(self) -> _Process:
        context = get_context("spawn")  # forked children would inherit threads' locks and this process's memory
        here, there = context.Pipe()
        self._handover = self._handover or Handover(self._job)
        process = context.Process(target=_serve, args=(there, self._handover.path), daemon=True)
        process.start()
        there.close()
        item = _Process(process, here)
        self._processes.append(item)
        return item

    def _take(self, item: _Process, done: Done) -> None:
        """A process has answered, or died."""
        call = item.call
        assert call is not None
        try:
            kind, value = item.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._processes.remove(item)
            item.process.join(5)
            if item.process.exitcode == 128 + signal.SIGTERM:  # a scheduler's request reaches all processes at once
                raise Stopped(signal.SIGTERM) from None
            raise _death(item.process.exitcode, call, item.has_answered) from None
        item.call, item.has_answered = None, True
        if kind == "done":
            done(call, value)
            return
        if kind == "refused":
            raise value
        raise SwiftError(f"task {call.index} of {call.stage} failed in an unforeseen way:\n{value}")

    def close(self) -> None:
        """End the processes; what a busy one was at counts for nothing."""
        for item in self._processes:
            item.process.terminate()
        for item in self._processes:
            item.process.join(5)
            if item.process.is_alive():
                item.process.kill()
                item.process.join()
            item.pipe.close()
        self._processes = []
        if self._handover:
            self._handover.close()
            self._handover = None


def _death(code: int | None, call: Call, has_answered: bool) -> SwiftError:
    if code is not None and code < 0:
        try:
            how = f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            how = f"was ended by signal {-code}"
    else:
        how = f"ended with code {code}"
    killed = code == -signal.SIGKILL
    return SwiftError(
        f"a worker process {how}" + (", as the system does when memory runs out" if killed else ""),
        where=f"task {call.index} of {call.stage}",
        fix=(
            "run it again with fewer processes (--num_proc): tasks that are done stay done"
            if killed
            else "run it again: tasks that are done stay done" + ("" if has_answered or code != 1 else f"; {UNGUARDED}")
        ),
    )


def _serve(pipe: Connection, job_path: str) -> None:
    """A worker process: tasks come through the pipe, markers go back."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the parent decides
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    job: Job = handed_over(job_path)
    worker: Worker | None = None
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            return
        try:
            worker = worker or Worker(job)
            answer: tuple[str, Any] = ("done", worker.run(call.stage, call.index, call.pieces))
        except SwiftError as error:
            answer = ("refused", error)
        except Exception:  # the process boundary: the parent prints the trace
            answer = ("failed", traceback.format_exc())
        pipe.send(answer)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)  # so that the unfinished folder is removed


def _end_with_parent() -> None:
    """A worker must not outlive a parent that was killed."""
    parent = parent_process()
    if parent:
        parent.join()
        os._exit(1)
