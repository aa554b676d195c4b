"""Judging models behind a server: texts of requests that come at the same time are judged in one forward pass.

A thread takes what waits, up to the scorer's batch, and answers each request by itself; what comes meanwhile waits for
the next pass. Nobody waits for a batch to fill up.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swift.core.logging import get_logger
from swift.data.rows import Row, RowProblem, RowRef
from swift.inference.scoring import ScoredRow, Scorer
from swift.serving.errors import ApiError
from swift.serving.limits import Queue

log = get_logger("serving")


@dataclass(frozen=True)
class _Job:
    row: ScoredRow
    loop: asyncio.AbstractEventLoop
    result: asyncio.Future[dict[str, Any]]


class ScoringQueue:
    """Rows to judge, from any number of requests.

    Args:
        scorer: judges them; its own thread calls it from now on.
        task: as `--task_type` has it, or `reward`.
        tokenizer: counts.
        places: of what may wait.
    """

    def __init__(self, scorer: Scorer, task: str, tokenizer: Any, places: Queue) -> None:
        self.task = task
        self.tokenizer = tokenizer
        self.places = places
        self.num_passes = 0
        self._scorer = scorer
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="scoring", daemon=True)
        self._thread.start()

    async def judge(self, rows: Sequence[Row]) -> tuple[list[dict[str, Any]], int]:
        """The result fields of each row, and how many tokens were read.

        Raises:
            ApiError: 400, a row that can't be judged; 429, too many wait.
        """
        loop = asyncio.get_running_loop()
        asked = await asyncio.to_thread(
            lambda: [self._scorer.asked(index, RowRef("input", index), row) for index, row in enumerate(rows)]
        )
        for each in asked:
            if each.problem is not None:
                raise ApiError(400, f"input[{each.index}]: {each.problem[1]}", param="input")
        self.places.enter(len(rows))
        began = loop.time()
        try:
            jobs = [_Job(each, loop, loop.create_future()) for each in asked]
            for job in jobs:
                self._jobs.put(job)
            results = await asyncio.gather(*[job.result for job in jobs])
        finally:
            self.places.leave(len(rows), loop.time() - began)
        tokens = sum(len(unit.input_ids) for each in asked if each.asked for unit in each.asked.units)
        return list(results), tokens

    def close(self) -> None:
        """Let the thread end after what it holds. Idempotent."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (first := self._jobs.get()) is not None:
            batch = [first]
            while len(batch) < self._scorer.max_batch_size:
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    break
                if job is None:
                    self._jobs.put(None)
                    break
                batch.append(job)
            wanted = [job for job in batch if not job.result.cancelled()]
            if wanted:
                self._answer(wanted)

    def _answer(self, batch: list[_Job]) -> None:
        self.num_passes += 1
        try:
            for place, result in self._scorer.answer([job.row for job in batch]):
                _settle(batch[place], result)
        except RowProblem as problem:
            error = ApiError(400, problem.message, param="input")
            for job in batch:
                _settle(job, error)
        except Exception as error:  # the process boundary: the thread has to live on
            log.exception("judging failed")
            failed = ApiError(500, f"the model failed: {error}", code="engine_failed")
            for job in batch:
                _settle(job, failed)
        self._scorer.judged.clear()


def _settle(job: _Job, outcome: dict[str, Any] | ApiError) -> None:
    def settle() -> None:
        if job.result.done():
            return
        if isinstance(outcome, ApiError):
            job.result.set_exception(outcome)
        else:
            job.result.set_result(outcome)

    if not job.loop.is_closed():
        job.loop.call_soon_threadsafe(settle)
