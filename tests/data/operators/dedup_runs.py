"""Running a global operator on documents in lists, without the engine: what the tests of deduplication share."""

from __future__ import annotations

from pathlib import Path

from swift.data.engine.document import Document
from swift.data.engine.operator import Context, GlobalOperator
from swift.data.engine.tally import Tally


def documents_of(texts: list[str], name: str = "s") -> list[Document]:
    """Plain-text documents with ids `name:1`, `name:2`, …"""
    return [Document(f"{name}:{row + 1}", {"text": text}, [("text",)], [text]) for row, text in enumerate(texts)]


class Work:
    """A task's `PhaseWork` over shards in memory."""

    def __init__(self, runner, phase, index):
        self.runner = runner
        self.context = runner.context
        self.num_shards = len(runner.shards)
        self.output = runner.folder / phase / str(index)
        self.output.mkdir(parents=True)
        self.tally = Tally()
        self.written = None

    def documents(self, shard):
        documents = self.runner.shards[shard]
        size = self.runner.batch
        for start in range(0, len(documents), size):
            yield [
                Document(d.id, d.record, d.paths, list(d.texts), d.roles, dict(d.meta))
                for d in documents[start : start + size]
            ]

    def result(self, phase, index):
        return self.runner.folder / phase / str(index)

    def write(self, batches):
        self.written = [document for batch in batches for document in batch]


class Runner:
    """Runs the phases of an operator, the tasks of each phase in any order that is asked for."""

    def __init__(self, shards: list[list[Document]], folder: Path, *, memory=64 << 20, batch=7, backwards=False):
        self.shards = shards
        self.folder = folder
        self.context = Context(memory_bytes=memory)
        self.batch = batch
        self.backwards = backwards
        self.tally = Tally()

    def run(self, operator: GlobalOperator) -> list[list[Document]]:
        """What each shard keeps."""
        operator.check()
        kept: list[list[Document]] = [[] for _ in self.shards]
        for phase, tasks in operator.phases(len(self.shards)):
            for index in sorted(range(tasks), reverse=self.backwards):
                work = Work(self, phase, index)
                operator.run_phase(phase, index, work)
                self.tally.merge(work.tally)
                if work.written is not None:
                    kept[index] = work.written
        return kept


def run_texts(operator, shards: list[list[str]], folder, **options) -> tuple[list[list[str]], Tally]:
    """The texts that each shard keeps, and the tally."""
    runner = Runner([documents_of(texts, f"f{n}") for n, texts in enumerate(shards)], folder, **options)
    kept = runner.run(operator)
    return [[document.text for document in shard] for shard in kept], runner.tally
