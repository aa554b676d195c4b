"""Where documents go at the end of a recipe: files of records, or whatever an operator that is a sink makes of them.

A sink that is named in a recipe is registered in `OPERATORS` like any operator, is the last step, and turns up in the
ledger under its name; `output: {format: tokens}` says that there is one. Knows nothing of tasks and their folders
beyond the one it is handed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from swift.data.engine.document import Document
from swift.data.engine.operator import Context

FILE_FORMATS = ("jsonl", "jsonl.zst", "jsonl.gz", "parquet")


@runtime_checkable
class Sink(Protocol):
    """Takes the documents of a recipe, output shard by output shard.

    Implementations are dataclasses of their settings, as operators are, and may have `check()`. They are built in each
    worker process, so `open` and `write` of one object may never run in the process that calls `finish`.
    """

    def open(self, context: Context) -> None:
        """Load what is needed; called once in each process before the first `write`."""
        ...

    def write(self, folder: Path, name: str, batches: Iterable[list[Document]]) -> dict[str, Any]:
        """Write one shard of the output; called at most once at a time.

        Args:
            folder: a fresh folder. Every file left in it belongs to the output, and no two shards may use one name.
            name: of the shard, such as `part-00007`; file names begin with it.
            batches: the documents in order, to be taken once and in full.

        Returns:
            Plain JSON values about the shard: `rows` (int) and whatever `finish` needs. `tally` (`Tally.as_json()`)
            puts drops and histograms of the sink into the ledger.
        """
        ...

    def finish(self, output: Path, facts: list[dict[str, Any]]) -> dict[str, Any]:
        """Called once, in one process, when all files of all shards are in the output folder.

        Args:
            output: the folder; the sink may add files of its own to it (written with `write_atomic`).
            facts: what `write` returned for each shard, in order.

        Returns:
            Values for the manifest's `sink` entry.
        """
        ...


class RecordSink:
    """Files of records, in one of `FILE_FORMATS`."""

    def __init__(self, format: str) -> None:
        self.format = format

    def open(self, context: Context) -> None:
        """Nothing to load."""

    def write(self, folder: Path, name: str, batches: Iterable[list[Document]]) -> dict[str, Any]:
        """Write `name.<format>`; a shard without rows leaves no file, since readers refuse an empty one."""
        from swift.data.writers import RecordWriter

        waiting = _not_empty(batches)
        first = next(waiting, None)
        if first is None:
            return {"rows": 0}
        path = folder / f"{name}.{self.format}"
        with RecordWriter(path, self.format) as writer:
            writer.write([document.to_record() for document in first])
            for batch in waiting:
                writer.write([document.to_record() for document in batch])
            written = writer.close()
        return {"rows": written.rows, "file": path.name, "bytes": written.bytes, "sha256": written.sha256}

    def finish(self, output: Path, facts: list[dict[str, Any]]) -> dict[str, Any]:
        """The number of rows."""
        return {"rows": sum(fact["rows"] for fact in facts)}


def _not_empty(batches: Iterable[list[Document]]) -> Iterator[list[Document]]:
    return (batch for batch in batches if batch)
