"""What an operator is. A recipe names operators; each is a dataclass of its settings, registered under its name.

Two kinds. A `MapOperator` sees a batch of documents at a time and can't depend on how documents were grouped into
batches. A `GlobalOperator` compares documents of all shards (deduplication) and works in phases of independent tasks
that hand files to one another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from swift.core.registry import Registry
from swift.data.engine.document import Document
from swift.data.engine.tally import Tally

OPERATORS: Registry[type[MapOperator] | type[GlobalOperator]] = Registry("operator")


@dataclass(frozen=True)
class Context:
    """What an operator may know of the run.

    Attributes:
        seed: of the recipe.
        label: the operator's name and how many of that name came before it (`sample`, `sample-2`): part of every
            random key, so two equal operators draw differently.
        offline: whether nothing may be fetched.
        memory_bytes: what a task may hold in memory.
    """

    seed: int = 42
    label: str = ""
    offline: bool = False
    memory_bytes: int = 300 << 20

    def uniform(self, document: Document) -> float:
        """A number in [0, 1): a function of seed, operator and document."""
        return int.from_bytes(self._digest(document)[:7], "little") / (1 << 56)

    def rng(self, document: Document) -> np.random.Generator:
        """A random stream: a function of seed, operator and document."""
        digest = self._digest(document)
        key = [int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")]
        return np.random.Generator(np.random.Philox(key=key))

    def _digest(self, document: Document) -> bytes:
        return hashlib.blake2b(f"{self.seed}\0{self.label}\0{document.random_key}".encode(), digest_size=16).digest()


class MapOperator:
    """Reads, changes or drops documents one by one.

    Subclasses are dataclasses whose fields are their settings (declared with `swift.config.fields.setting`), with a
    docstring whose first line says in a report what they do. They are pickled to worker processes before `open`.
    """

    def check(self) -> None:
        """Refuse settings that can't be meant; called before anything is read.

        Raises:
            UsageError: naming the setting, its value and what is allowed.
        """

    def open(self, context: Context) -> None:
        """Load what is needed; called once in each process before the first batch."""
        self.context = context

    def run(self, batch: list[Document], tally: Tally) -> list[Document]:
        """The documents that go on, in order, changed where the operator changes them."""
        raise NotImplementedError


class PhaseWork(Protocol):
    """What the engine hands to a task of a global operator.

    Attributes:
        context: of the operator; num_shards: shards of documents it reads.
        output: a fresh folder for this task's results; it becomes `result(phase, index)` when the task is complete.
        tally: of this task.
    """

    context: Context
    num_shards: int
    output: Path
    tally: Tally

    def documents(self, shard: int) -> Iterator[list[Document]]:
        """The documents of a shard as they reach this operator, in batches, always in the same order."""
        ...

    def result(self, phase: str, index: int) -> Path:
        """The folder that a task of an earlier phase left."""
        ...

    def write(self, batches: Iterable[list[Document]]) -> None:
        """Last phase only: the documents of the task's shard that go on."""
        ...


class GlobalOperator:
    """Compares documents of all shards.

    The last phase must have one task for each shard and `write` what goes on. The other phases write files of any
    kind into `work.output`. Results must not depend on the number of processes or on the order of tasks.

    Attributes:
        num_partitions: how many tasks should share what isn't divided by shards; the engine sets it, by the bytes of
            the input. 0: not known.
    """

    num_partitions = 0

    def check(self) -> None:
        """As `MapOperator.check`."""

    def phases(self, num_shards: int) -> list[tuple[str, int]]:
        """Name and number of tasks of each phase, in order. The tasks of a phase are independent of each other."""
        raise NotImplementedError

    def run_phase(self, phase: str, index: int, work: PhaseWork) -> None:
        """Do one task."""
        raise NotImplementedError
