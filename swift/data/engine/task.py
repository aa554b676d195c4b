"""One task: a shard through one stage. Any process that can reach the work folder can run it, any number of times.

A task writes into a folder under another name, which gets its own when everything in it is on the disk; then its marker
is written, with what it made and what the operators counted. A task is done if its marker carries the stage's
fingerprint and the files are there in full.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import zstandard

from swift.core.errors import DataError, SwiftError
from swift.core.files import disk_errors, fsync_tree, write_atomic
from swift.core.memory import return_free_memory
from swift.core.network import set_offline
from swift.data.engine.blocks import BlockWriter, read_blocks
from swift.data.engine.chain import Link, Record, RecordingTally, counted_output, run_chain
from swift.data.engine.document import Document
from swift.data.engine.inputs import BadShard, PieceReading, batches_of, unreadable
from swift.data.engine.operator import Context, GlobalOperator
from swift.data.engine.plugins import load_builtin, load_plugin
from swift.data.engine.recipe import Recipe
from swift.data.engine.shards import Piece, Shard, num_partitions, with_skip_hint
from swift.data.engine.sink import RecordSink, Sink
from swift.data.engine.stages import Stage, global_operator, plan_stages
from swift.data.engine.tally import Tally

READ, OUTPUT, BAD_SHARDS = "read", "output", "bad shard"
DROPPED_NAME, RESULTS = "dropped.jsonl.zst", "results"
_MOST_LABELS = 1000
Pieces = tuple[tuple[int, int, int], ...]  # of an output file: shard, first block, end


@dataclass(frozen=True)
class Job:
    """Everything a process must know to run any task of a run.

    Attributes:
        recipe: checked. shards: of its input. work: the folder where stages keep what they make.
    """

    recipe: Recipe
    shards: list[Shard]
    work: Path

    def folder(self, stage: str, index: int) -> Path:
        """All that a task leaves."""
        return self.work / stage / f"{index:05d}"

    def results(self, stage: str, index: int) -> Path:
        """What a task leaves for later stages, or for the output."""
        return self.folder(stage, index) / RESULTS

    def marker(self, stage: str, index: int) -> Path:
        """The file that says that a task is done."""
        return self.work / stage / f"{index:05d}.done"


# what a process takes before it has read anything: the interpreter, numpy, compiled kernels
_PROGRAM_BYTES = 120 << 20


@dataclass
class Worker:
    """Runs tasks of a job in this process; opened operators are kept from one task of a stage to the next."""

    job: Job
    stages: dict[str, Stage] = field(default_factory=dict)
    _stage: str = ""
    maps: list[Any] = field(default_factory=list)
    operator: GlobalOperator | None = None
    sink: Sink | None = None

    def __post_init__(self) -> None:
        if self.job.recipe.offline:  # a process of a cluster has another environment
            set_offline()
        load_builtin()
        for name in self.job.recipe.plugins:
            load_plugin(name, Path(self.job.recipe.folder))
        self.stages = {stage.name: stage for stage in plan_stages(self.job.recipe, self.job.shards)}

    def run(self, name: str, index: int, pieces: Pieces = ()) -> dict[str, Any]:
        """Run a task and return its marker, without the records of its operators.

        Args:
            name: of the stage. index: of the task. pieces: for `collect`, what the file is put together from.

        Raises:
            SwiftError: named with what is at fault; nothing is left of the task then.
        """
        stage = self.stages[name]
        self._open(stage)
        job = self.job
        aside = job.work / name / f"{index:05d}.{socket.gethostname()}-{os.getpid()}.tmp"
        start, cpu = time.time(), time.process_time()
        try:
            with disk_errors(aside):
                shutil.rmtree(aside, ignore_errors=True)
                (aside / RESULTS).mkdir(parents=True)
            task = _Task(self, stage, index, aside)
            facts = task.run(pieces)
            with disk_errors(aside):
                files = [_described(path, aside) for path in sorted(aside.rglob("*")) if path.is_file()]
                fsync_tree(aside)
                self._publish(aside, job.folder(name, index))
        finally:
            shutil.rmtree(aside, ignore_errors=True)
            return_free_memory()
        read = task.records[READ].tally if READ in task.records else Tally()
        marker: dict[str, Any] = {
            "fingerprint": task_fingerprint(stage, pieces),
            "files": files,
            "facts": facts,
            "records": [record.as_json() for record in task.records.values()],
            "bad_rows": [read.dropped.total(), read.read],
            "notes": task.notes,
            "cpu_s": time.process_time() - cpu,
            "seconds": time.time() - start,
        }
        write_atomic(job.marker(name, index), orjson.dumps(marker, option=orjson.OPT_SERIALIZE_NUMPY))
        return _light(marker)

    def _publish(self, aside: Path, folder: Path) -> None:
        """Give the results their name, in place of older ones."""
        marker = self.job.work / folder.parent.name / f"{folder.name}.done"
        marker.unlink(missing_ok=True)
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)

    def context(self, label: str) -> Context:
        """What an operator may know."""
        recipe = self.job.recipe
        most = recipe.max_memory_bytes
        return Context(recipe.seed, label, recipe.offline, max(most // 2, most - _PROGRAM_BYTES))

    def _open(self, stage: Stage) -> None:
        if stage.name == self._stage:
            return
        self._stage, self.maps, self.operator, self.sink = "", [], None, None
        recipe = self.job.recipe
        if stage.step is not None:
            self.operator = global_operator(recipe.steps[stage.step], num_partitions(recipe, self.job.shards))
        for index in stage.maps:
            operator = recipe.steps[index].build()
            operator.open(self.context(recipe.steps[index].label))
            self.maps.append(operator)
        if stage.final:
            self.sink = make_sink(recipe)
            self.sink.open(self.context(recipe.sink.label if recipe.sink else OUTPUT))
        self._stage = stage.name


def make_sink(recipe: Recipe) -> Sink:
    """What writes the output of a recipe."""
    return recipe.sink.build() if recipe.sink else RecordSink(recipe.format)


def task_fingerprint(stage: Stage, pieces: Pieces = ()) -> str:
    """What a marker must carry for its task to be done."""
    if not pieces:
        return stage.fingerprint
    return hashlib.sha256(orjson.dumps([stage.fingerprint, pieces])).hexdigest()[:32]


def done_marker(job: Job, stage: Stage, index: int, *, output: Path, pieces: Pieces = ()) -> dict[str, Any] | None:
    """The marker of a task that is done, else None: files are where they belong, or (of the last stage) in `output`."""
    try:
        marker = orjson.loads(job.marker(stage.name, index).read_bytes())
    except (FileNotFoundError, NotADirectoryError, orjson.JSONDecodeError):
        return None
    if marker.get("fingerprint") != task_fingerprint(stage, pieces):
        return None
    folder = job.folder(stage.name, index)
    for file in marker["files"]:
        if _size(folder / file["name"]) == file["bytes"]:
            continue
        moved = output / file["name"].removeprefix(f"{RESULTS}/")
        if not (stage.final and _size(moved) == file["bytes"]):
            return None
    return _light(marker)


def read_records(job: Job, stage: str, index: int) -> list[Record]:
    """What the operators counted in a task that is done."""
    return [Record.from_json(values) for values in orjson.loads(job.marker(stage, index).read_bytes())["records"]]


def _light(marker: dict[str, Any]) -> dict[str, Any]:
    """Without the records: a run of many thousand tasks must not hold all of them."""
    return {key: value for key, value in marker.items() if key != "records"}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _described(path: Path, folder: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return {"name": str(path.relative_to(folder)), "bytes": path.stat().st_size, "sha256": digest.hexdigest()}


@dataclass
class _Waits:
    """CPU seconds that a consumer of batches has spent on getting them."""

    cpu_s: float = 0.0

    def timed(self, batches: Iterable[list[Document]]) -> Iterator[list[Document]]:
        start = time.process_time()
        for batch in batches:
            self.cpu_s += time.process_time() - start
            yield batch
            start = time.process_time()
        self.cpu_s += time.process_time() - start


class _Task:
    """A running task; for a phase of a global operator, it is the `PhaseWork` that the operator is handed."""

    def __init__(self, worker: Worker, stage: Stage, index: int, folder: Path) -> None:
        self.worker, self.stage, self.index, self.folder = worker, stage, index, folder
        self.output = folder / RESULTS
        self.job = worker.job
        self.recipe = self.job.recipe
        self.num_shards = len(self.job.shards)
        self.records: dict[str, Record] = {}
        self.notes: list[str] = []
        self._facts: dict[str, Any] | None = None
        self._dropped: Any = None
        if stage.step is not None:
            step = self.recipe.steps[stage.step]
            self.context = worker.context(step.label)
            self.tally = self._record(step.label).tally

    def run(self, pieces: Pieces) -> dict[str, Any]:
        """Do the work; returns the facts about what was written."""
        try:
            if self.stage.kind == "read":
                self._read()
            elif self.stage.kind == "collect":
                self._finish(self._collected(pieces))
            else:
                self._phase()
        except Exception:
            self._close_dropped()
            raise
        self._close_dropped()
        for record in self.records.values():
            record.tally.trim(_MOST_LABELS)
        return self._facts or {}

    def _record(self, label: str) -> Record:
        if label not in self.records:
            tell = self._drop_teller(label) if self.recipe.keep_dropped else None
            self.records[label] = Record(label, RecordingTally(tell))
        return self.records[label]

    # --- the kinds of tasks ---

    def _read(self) -> None:
        pieces = self.job.shards[self.index].pieces
        try:
            self._finish(self._counted_read(pieces))
        except BadShard as bad:
            if self.recipe.on_bad_shard == "stop":
                raise with_skip_hint(bad.error) from bad.error
            self._read_without_bad(pieces, bad.error)

    def _counted_read(self, pieces: Sequence[Piece]) -> Iterator[list[Document]]:
        record = self._record(READ)
        readings = [PieceReading(piece, self.recipe, record.tally) for piece in pieces]
        waits = _Waits()
        yield from waits.timed(batches_of(readings))
        record.cpu_s += waits.cpu_s
        record.bytes = sum(reading.bytes for reading in readings)
        record.tally.characters_out = record.tally.characters_in
        self.notes += [note for reading in readings for note in reading.notes]

    def _read_without_bad(self, pieces: Sequence[Piece], first: DataError) -> None:
        """Begin again without the files that can't be read: their rows before the damage aren't kept either."""
        errors = [first] if len(pieces) == 1 else [unreadable(piece) for piece in pieces]
        self._close_dropped()
        self._dropped = None
        shutil.rmtree(self.folder)
        self.output.mkdir(parents=True)
        self.records = {}
        self._facts = None
        for piece, error in zip(pieces, errors):
            if error is not None:
                self._record(READ).tally.count(BAD_SHARDS, piece.file.name)
                self.notes.append(f"{piece.file.name} was skipped: {error.message} ({error.where})")
        self._finish(self._counted_read([piece for piece, error in zip(pieces, errors) if error is None]))

    def _phase(self) -> None:
        operator, stage = self.worker.operator, self.stage
        assert operator is not None and stage.step is not None
        label = self.recipe.steps[stage.step].label
        start = time.process_time()
        try:
            operator.run_phase(stage.phase, self.index, self)
        except (SwiftError, BadShard):
            raise
        except Exception as error:  # somebody else's code: whatever it raises is told with the operator and the task
            if isinstance(error, OSError):
                with disk_errors(self.output):
                    raise
            raise SwiftError(
                f"the operator {label} failed in its phase {stage.phase}: {type(error).__name__}: {error}",
                where=f"task {self.index} of {stage.name}",
            ) from error
        if stage.kind == "last" and self._facts is None:
            raise SwiftError(f"the operator {label} wrote nothing in its last phase", fix="call work.write(batches)")
        others = sum(record.cpu_s for name, record in self.records.items() if name != label)
        self._record(label).cpu_s += time.process_time() - start - others

    def _collected(self, pieces: Pieces) -> Iterator[list[Document]]:
        for shard, first, end in pieces:
            yield from read_blocks(self.job.results(self.stage.source, shard), first, end)

    # --- PhaseWork ---

    def documents(self, shard: int) -> Iterator[list[Document]]:
        """The documents of a shard as they reach the operator."""
        counts = self.stage.kind == "last"
        for batch in read_blocks(self.job.results(self.stage.source, shard)):
            if counts:
                self.tally.read += len(batch)
                self.tally.characters_in += sum(len(text) for document in batch for text in document.texts)
            yield batch

    def result(self, phase: str, index: int) -> Path:
        """The folder that a task of an earlier phase left."""
        stage = next(s for s in self.worker.stages.values() if s.step == self.stage.step and s.phase == phase)
        return self.job.results(stage.name, index)

    def write(self, batches: Iterable[list[Document]]) -> None:
        """The documents of this shard that go on: through the operators behind, and to the disk."""
        if self.stage.kind != "last":
            raise SwiftError(f"the phase {self.stage.phase} isn't the last and can't write documents")
        self._finish(self._kept(batches))

    def _kept(self, batches: Iterable[list[Document]]) -> Iterator[list[Document]]:
        for batch in batches:
            self.tally.kept += len(batch)
            self.tally.characters_out += sum(len(text) for document in batch for text in document.texts)
            yield batch

    # --- the end of a task ---

    def _finish(self, batches: Iterable[list[Document]]) -> None:
        links = []
        for index, operator in zip(self.stage.maps, self.worker.maps):
            links.append(Link(operator, self._record(self.recipe.steps[index].label)))
        left = run_chain(links, batches)
        if not self.stage.final:
            writer = BlockWriter(self.output)
            try:
                for batch in left:
                    writer.write(batch)
                self._facts = writer.close()
            finally:
                writer.abandon()
            return
        sink = self.worker.sink
        assert sink is not None
        record = self._record(OUTPUT)
        waits = _Waits()
        start = time.process_time()
        counted = counted_output(waits.timed(left), record)
        written = sink.write(self.output, f"part-{self.index:05d}", counted)
        record.cpu_s += time.process_time() - start - waits.cpu_s
        if "tally" in written and self.recipe.sink is not None:
            record = Record.from_json(
                {"label": self.recipe.sink.label, "tally": written.pop("tally"), "cpu_s": 0.0, "bytes": 0}
            )
            self.records[record.label] = record
        self._facts = written

    # --- the list of dropped rows ---

    def _drop_teller(self, label: str) -> Any:
        def tell(doc_id: str, reason: str) -> None:
            if self._dropped is None:
                path = self.folder / DROPPED_NAME
                with disk_errors(path):
                    self._dropped = (path, zstandard.ZstdCompressor(level=3).stream_writer(path.open("wb")))
            line = orjson.dumps({"id": doc_id, "operator": label, "reason": reason}) + b"\n"
            with disk_errors(self._dropped[0]):
                self._dropped[1].write(line)

        return tell

    def _close_dropped(self) -> None:
        if self._dropped is not None:
            with disk_errors(self._dropped[0]):
                self._dropped[1].close()
