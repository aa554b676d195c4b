"""Running the tasks of a stage on a Ray cluster, whose machines all see the output folder.

Only stateless tasks are used, each of which claims at most one core and less where more tasks than cores are wanted: so
nothing waits for a reservation that can't be had. Everything else is as in `pool`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from swift.core.errors import SwiftError
from swift.core.extras import require
from swift.data.engine.pool import Call, Done, StopRequest
from swift.data.engine.task import Job, Worker

_POLL_S = 0.5
_worker: Worker | None = None  # of this process of the cluster


class RayExecutor:
    """Tasks on the cluster at `address`; without one, the cluster of RAY_ADDRESS, or a new one on this machine."""

    def __init__(self, job: Job, num_proc: int | None, address: str | None, stop: StopRequest) -> None:
        self._ray: Any = require("ray", extra="ray", purpose="run a recipe on a Ray cluster")
        self._stop = stop
        self._started = not self._ray.is_initialized()
        if self._started:
            try:
                self._ray.init(
                    address=address,
                    include_dashboard=None if address else False,
                    log_to_driver=False,
                    configure_logging=False,
                )
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise SwiftError(
                    f"the Ray cluster can't be reached: {error}",
                    where=f"address {address}" if address else None,
                    fix="ray start --head, then --address auto; or --executor local",
                ) from error
        cores = max(1.0, self._ray.cluster_resources().get("CPU", 1.0))
        self._in_flight = num_proc or int(cores)
        self._job = self._ray.put(job)
        share = min(1.0, cores / self._in_flight)
        self._task = self._ray.remote(num_cpus=share, max_retries=2)(_run)

    def run(self, calls: Sequence[Call], done: Done) -> None:
        """See `Executor`."""
        waiting = deque(calls)
        running: dict[Any, Call] = {}
        try:
            while waiting or running:
                self._stop.check()
                while waiting and len(running) < self._in_flight:
                    call = waiting.popleft()
                    running[self._task.remote(self._job, call)] = call
                ready, _ = self._ray.wait(list(running), num_returns=1, timeout=_POLL_S)
                for reference in ready:
                    call = running.pop(reference)
                    done(call, self._answer(reference, call))
        finally:
            for reference in running:
                self._ray.cancel(reference, force=True)

    def _answer(self, reference: Any, call: Call) -> dict[str, Any]:
        try:
            error, marker = self._ray.get(reference)
        except self._ray.exceptions.RayError as failure:
            raise SwiftError(
                f"a task failed on the cluster: {str(failure).strip().splitlines()[-1]}",
                where=f"task {call.index} of {call.stage}",
                fix="run it again: tasks that are done stay done; with fewer at a time (--num_proc) if memory ran out",
            ) from failure
        if error is not None:
            raise error
        return marker

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        if self._started:
            self._ray.shutdown()


def _run(job: Job, call: Call) -> tuple[SwiftError | None, dict[str, Any]]:
    """In a process of the cluster: run a task; a refusal comes back as it is."""
    global _worker
    if _worker is None or _worker.job != job:
        _worker = Worker(job)
    try:
        return None, _worker.run(call.stage, call.index, call.pieces)
    except SwiftError as error:
        return error, {}
