"""Throughput of the loader: order, mixing, packing as examples come, streaming with its state.

    python benchmarks/data/loader.py [--rows 400000]

Prints millions (or thousands) a second of this process's CPU time, on one core, and the bytes and seconds of a state.
A corpus of `rows` lines of jsonl in 16 files (about 60 MB at the default) is generated in a temporary folder. The
encoder is replaced by one that cuts each text into as many tokens as it has words, so that what is measured is the
loader and not the tokenizer.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from swift.core.errors import DataError
from swift.data.files import DataFile, stamp_of
from swift.data.loading.flow import FileFlow, Reading, StoredFlow
from swift.data.loading.loader import Layout, Outlook, TrainLoader
from swift.data.loading.mixer import Mixer, ShareSchedule
from swift.data.loading.mixture import ONCE, Documents, Mixture
from swift.data.loading.order import FeistelOrder
from swift.data.loading.packing import OpenRows, pack, packing_efficiency
from swift.data.loading.stream_intake import FileIntake
from swift.data.loading.stream_ledger import StreamLedger
from swift.data.loading.stream_loader import StreamLoader
from swift.data.loading.stream_task import StreamTask
from swift.data.pipeline import Workers
from swift.data.rows import RowRef
from swift.data.shapes import RowOptions


@dataclass
class _Example:
    input_ids: np.ndarray
    loss_weights: np.ndarray
    truncated: int = 0


@dataclass
class _Words:
    """An encoder that costs next to nothing."""

    counts: Counter[str] = field(default_factory=Counter)
    notices: list[str] = field(default_factory=list)
    vocab_size: int = 1000
    _weights: np.ndarray = field(default_factory=lambda: np.r_[0, np.ones(4095)].astype(np.float32))

    def encode_batch(self, rows):
        lengths = [row.text.count(" ") + 1 for row in rows]
        return [[_Example(np.zeros(n, np.int32), self._weights[:n])] for n in lengths]

    def fingerprint(self):
        return ""


class _Stored:
    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def tokens(self, index):
        n = int(self.lengths[index])
        return np.zeros(n, np.int32), np.ones(n, np.float32)

    def ref(self, index):
        return RowRef("", index)


def lengths_like_chats(count: int) -> np.ndarray:
    """Log-normal lengths, 8 to 4096."""
    return np.clip(np.random.default_rng(0).lognormal(5.5, 1.1, count), 8, 4096).astype(np.int32)


def report(name: str, count: float, seconds: float, note: str = "") -> None:
    """A line: thousands a CPU-second."""
    print(f"{name:52s} {count / seconds / 1000:10,.0f} k/CPU-s   {note}")


def order_and_mixer() -> None:
    start = time.process_time()
    order = FeistelOrder(10**9, 42, 0)
    for at in range(0, 10_000_000, 1 << 16):
        order[at : at + (1 << 16)]
    report("order of a billion, 10 M places", 10_000_000, time.process_time() - start)
    for sources in (2, 5, 20):
        mixer = Mixer(np.random.default_rng(0).dirichlet(np.ones(sources)).tolist())
        start = time.process_time()
        for _ in range(300_000):
            mixer.draw()
        report(f"mixer, {sources} sources", 300_000, time.process_time() - start)


def packing() -> None:
    lengths = lengths_like_chats(1_000_000)
    start = time.process_time()
    rows = pack(lengths, np.arange(len(lengths)), 4096)
    seconds = time.process_time() - start
    report(
        "pack 1 M examples, best-fit decreasing", 1e6, seconds, f"{100 * packing_efficiency(rows, lengths, 4096):.3f} %"
    )
    open_rows: OpenRows[int] = OpenRows(4096)
    closed, start = 0, time.process_time()
    for index, length in enumerate(lengths.tolist()):
        closed += len(open_rows.add(length, index))
    seconds = time.process_time() - start
    used = 100 * (lengths.sum() - sum(lengths[i] for _, row in open_rows.rows() for i in row)) / (closed * 4096)
    report("pack 1 M examples as they come", 1e6, seconds, f"{used:.3f} %")


def stored() -> None:
    lengths = lengths_like_chats(1_000_000)
    loader = TrainLoader(_Stored(lengths), Layout(16, 4), seed=0)
    start = time.process_time()
    for at in range(0, 640_000, 64):
        loader.step(0, at)
    report("prepared: which examples, unpacked, 64 a step", 640_000, time.process_time() - start)
    flows = [StoredFlow(n, 250_000, first=250_000 * n, seed=0, shuffle=True) for n in range(4)]
    documents = Documents(flows, Mixture.of(ShareSchedule.constant([4, 3, 2, 1]), ONCE))
    start = time.process_time()
    for number in range(400_000):
        documents.next()
        if number % 1000 == 0:
            documents.state()
    report("prepared: mixed order of 4 sources, with its state", 400_000, time.process_time() - start)


def streamed(folder: Path, rows: int) -> None:
    words = "the quick brown fox jumps over the lazy dog and then " * 100
    rng, paths, per_file = np.random.default_rng(1), [], rows // 16
    for shard in range(16):
        path = folder / f"{shard:02d}.jsonl"
        cuts = rng.integers(20, 260, per_file).tolist()
        path.write_text("".join(json.dumps({"text": words[:cut]}) + "\n" for cut in cuts))
        paths.append(path)
    megabytes = sum(path.stat().st_size for path in paths) / 1e6
    stamps = {str(path): stamp_of(str(path)) for path in paths}

    def flows() -> list[FileFlow]:
        reading = Reading(0, True, 1000, False, stamps)
        return [FileFlow(0, [DataFile(str(p)) for p in paths], reading, limit=None, size=None)]

    mixture = Mixture.of(ShareSchedule.constant([1.0]), ONCE)
    documents = Documents(flows(), mixture)
    start, count = time.process_time(), 0
    while documents.next() is not None:
        count += 1
        if count % 1000 == 0:
            documents.state()
    report("streamed: order of rows, with its state", count, time.process_time() - start, f"{megabytes:.0f} MB read")
    for name, layout in (("unpacked", Layout(64)), ("packed", Layout(16, packing_length=512))):
        task = StreamTask(RowOptions((), True, False), _Words())
        ledger = StreamLedger(None, ["corpus"], strict=True, max_bad_rows=0.0)
        intake = FileIntake(Documents(flows(), mixture), Workers(task, 0), ledger, lambda: DataError("empty"))
        outlook = Outlook(None, False, None, None, None)
        loader = StreamLoader(intake, layout, identity=(), longest=512, outlook=outlook)
        start, count = time.process_time(), 0
        for _ in range(400):
            count += sum(len(batch.refs) for batch in loader.next_step())
        seconds = time.process_time() - start
        start = time.process_time()
        size = len(json.dumps(loader.state()))
        took = time.process_time() - start
        report(
            f"streamed: whole batches, {name}", count, seconds, f"state {size / 1000:.0f} kB in {1000 * took:.1f} ms"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=400_000)
    arguments = parser.parse_args()
    order_and_mixer()
    packing()
    stored()
    with tempfile.TemporaryDirectory() as name:
        streamed(Path(name), arguments.rows)
