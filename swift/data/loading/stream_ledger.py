"""The row ledger of a run that reads while it trains: rows are counted as they pass, epoch after epoch.

Its counts belong to the position in the data: they are saved in a checkpoint, and `ledger.jsonl` is cut back to where
it was then, so that a resumed run counts every row once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from swift.core.files import disk_errors
from swift.data.ledger import Ledger, SourceTally
from swift.data.pipeline import ChunkResult, RowResult
from swift.data.rows import RowRef

# From this many rows on, the share of bad ones is looked at while rows pass, not only when an epoch ends.
_SHARE_FROM_ROWS = 1000


class StreamLedger(Ledger):
    """Counts rows of several sources as they pass.

    Args:
        path: `ledger.jsonl`, which is written line by line; None on ranks that write nothing.
        sources: the dataset arguments.
        strict, max_bad_rows: as for `Ledger`.
    """

    def __init__(self, path: Path | None, sources: Sequence[str], *, strict: bool, max_bad_rows: float) -> None:
        super().__init__(None, strict=strict, max_bad_rows=max_bad_rows)
        self._names = list(sources)
        for source in sources:
            self.begin("train", source)
        self._path = path
        self._cut_at = 0

    def take_row(self, source: int, ref: RowRef, row: RowResult, weights: np.ndarray) -> None:
        """Count a row; `weights` are the loss weights of all its tokens.

        Raises:
            DataError: this row stops the run.
        """
        tally = self.sources[source]
        if row.problem:
            self.drop(tally, ref, row.problem)
        else:
            self.keep(tally, ref, examples=len(row.lengths), tokens_cut=row.truncated)
            tally.tokens += len(weights)
            tally.trained_tokens += int(np.count_nonzero(weights))
        if self.read % _SHARE_FROM_ROWS == 0:
            self.check_share()

    def take_window(self, source: int, results: Sequence[ChunkResult]) -> None:
        """Count what rows that were encoded together have in common; `source` is that of the first."""
        for result in results:
            self.sources[source].unused.update(result.unused)
            self.encoding.update(result.encoding)
            for notice in result.notices:
                self.note(notice)

    def state(self) -> dict[str, Any]:
        """Everything counted so far, and how long the file is."""
        size = self._cut_at
        if self._path is not None:
            with disk_errors(self._path):
                self._open().flush()
                size = self._path.stat().st_size
        return {"counts": self.summary(), "bytes": size, "shortest_too_long": self.shortest_too_long}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on counting from there. The sources are known to be the same; they may be spelt in another way."""
        before = Ledger.restore(state["counts"])
        for tally, name in zip(before.sources, self._names, strict=True):
            tally.source = name
        self.sources, self.notes, self.problems = before.sources, before.notes, before.problems
        self.encoding, self.shortest_too_long = before.encoding, state["shortest_too_long"]
        self._cut_at = state["bytes"]

    def _open(self) -> IO[str]:
        """The file, cut back to where it was at the position of the ledger; opened when it is first needed."""
        assert self._path is not None
        if self._file is None:
            with disk_errors(self._path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("a", encoding="utf-8")
                self._file.truncate(min(self._cut_at, self._path.stat().st_size))
        return self._file

    def _write(self, tally: SourceTally, ref: RowRef, event: str, **details: Any) -> None:
        if self._path is not None:
            self._open()
        super()._write(tally, ref, event, **details)

    def close(self) -> None:
        """Write the summary line."""
        if self._path is None:
            return
        file = self._open()
        self._file = None
        with disk_errors(self._path):
            file.write(json.dumps({"event": "summary", **self.summary()}, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
            file.close()
