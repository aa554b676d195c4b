"""Helpers for tests of streamed and mixed data: an encoder without a model, and ranks as threads of one process."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from length_encoder import LengthEncoder

from swift.core.errors import DataError
from swift.data.files import DataFile, stamp_of
from swift.data.loading.batch import Layout
from swift.data.loading.flow import FileFlow, Reading, StoredFlow
from swift.data.loading.loader import Outlook
from swift.data.loading.mixer import ShareSchedule
from swift.data.loading.mixture import ONCE, Documents, Mixture
from swift.data.loading.stream_intake import FileIntake, StoredIntake
from swift.data.loading.stream_ledger import StreamLedger
from swift.data.loading.stream_loader import StreamLoader
from swift.data.loading.stream_task import StreamTask
from swift.data.pipeline import Workers
from swift.data.rows import RowRef
from swift.data.shapes import RowOptions
from swift.data.units import NO_NOTES

UNKNOWN = Outlook(None, False, None, None, None)


def write_shards(folder: Path, name: str, counts: list[int], *, seed: int = 0, texts: dict[int, str] | None = None):
    """Shards of jsonl with `counts` rows each; row i of all has text `texts[i]`, or a random length."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    paths, number = [], 0
    for shard, count in enumerate(counts):
        path = folder / f"{name}-{shard:03d}.jsonl"
        lines = []
        for _ in range(count):
            text = (texts or {}).get(number, str(int(rng.integers(2, 30))))
            lines.append(json.dumps({"text": text, "id": number}))
            number += 1
        path.write_text("\n".join(lines) + "\n")
        paths.append(path)
    return paths


class Ranks:
    """`world_size` threads that exchange values as processes would."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._barrier = threading.Barrier(world_size)
        self._values: list = [None] * world_size

    def exchange(self, rank: int):
        def gather(value):
            self._values[rank] = value
            self._barrier.wait(30)
            values = list(self._values)
            self._barrier.wait(30)
            return values

        return gather

    def run(self, work) -> list:
        """`work(rank)` on every rank; its results, or the first error."""
        results: list = [None] * self.world_size
        errors: list = []

        def task(rank):
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=task, args=(rank,)) for rank in range(self.world_size)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)  # threads that wait for each other all the time
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        sys.setswitchinterval(interval)
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        if errors:
            raise errors[0]
        return results


@dataclass
class Setup:
    """How a stream loader is built; `sources` are lists of shards, or of example lengths when `stored`."""

    sources: list
    layout: Layout
    mixture: Mixture | None = None
    stored: bool = False
    workers: int = 0
    seed: int = 3
    block: int = 16
    skip_bad: bool = False
    strict: bool = True
    limits: list | None = None
    ledger: Path | None = None
    stamps: dict | None = None

    def loader(self, rank: int = 0, world_size: int = 1, exchange=lambda value: [value]) -> StreamLoader:
        count = len(self.sources)
        mixture = self.mixture or Mixture.of(ShareSchedule.constant([1.0] * count), ONCE)
        shuffle = self.layout.shuffle
        if self.stored:
            first, flows = 0, []
            for number, lengths in enumerate(self.sources):
                flows.append(StoredFlow(number, len(lengths), first=first, seed=self.seed, shuffle=shuffle))
                first += len(lengths)
            intake = StoredIntake(Documents(flows, mixture), Prepared(np.concatenate(self.sources)))
        else:
            stamps = self.stamps or {str(p): stamp_of(str(p)) for shards in self.sources for p in shards}
            reading = Reading(self.seed, shuffle, self.block, self.skip_bad, stamps)
            limits = self.limits or [None] * count
            flows = [
                FileFlow(n, [DataFile(str(p)) for p in shards], reading, limit=limits[n], size=None)
                for n, shards in enumerate(self.sources)
            ]
            names = [f"source-{n}" for n in range(count)]
            path = self.ledger if rank == 0 else None
            ledger = StreamLedger(path, names, strict=self.strict, max_bad_rows=0.5)
            task = StreamTask(RowOptions((), True, False), LengthEncoder())
            intake = FileIntake(
                Documents(flows, mixture),
                Workers(task, self.workers, "--dataloader_num_workers"),
                ledger,
                lambda: DataError("no row is left"),
                rank=rank,
                world_size=world_size,
                exchange=exchange,
                ahead=max(1, 2 * self.workers),
            )
        return StreamLoader(
            intake,
            self.layout,
            identity=(),
            longest=30,
            outlook=UNKNOWN,
            rank=rank,
            world_size=world_size,
            open_rows=5,
        )


class Prepared:
    """Examples of given lengths; example i is row i + 1."""

    def __init__(self, lengths):
        self.lengths = np.asarray(lengths, np.int32)

    def __len__(self):
        return len(self.lengths)

    def notes(self, index: int) -> np.ndarray:
        return NO_NOTES

    def tokens(self, index):
        n = int(self.lengths[index])
        return np.full(n, index % 1000, np.int32), np.r_[0, np.ones(n - 1)].astype(np.float32)

    def ref(self, index):
        return RowRef("prepared", index + 1)


def steps_of(setup: Setup, world_size: int, steps: int, state: dict | None = None):
    """Run `steps` steps on `world_size` ranks.

    Returns:
        For each step (epoch of the step, refs of its rows over all ranks), and the state behind the last.
    """
    ranks = Ranks(world_size)

    def work(rank):
        loader = setup.loader(rank, world_size, ranks.exchange(rank))
        try:
            if state is not None:
                loader.load_state(json.loads(json.dumps(state)))
            found = []
            for _ in range(steps):
                epoch = loader.epoch
                batches = loader.next_step()
                found.append((epoch, [[str(ref) for ref in batch.refs] for batch in batches]))
            return found, loader.state()
        finally:
            loader.close()

    results = ranks.run(work)
    states = [{**result[1], "intake": {**result[1]["intake"], "ledger": None}} for result in results]
    assert all(one == states[0] for one in states)
    merged = []
    for step in range(steps):
        assert len({len(result[0][step][1]) for result in results}) == 1, "ranks run unequally many micro-batches"
        turns = zip(*(result[0][step][1] for result in results))
        merged.append((results[0][0][step][0], [ref for turn in turns for batch in turn for ref in batch]))
    return merged, results[0][1]
