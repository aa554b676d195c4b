"""The end of a recipe: documents become token shards whose examples are full rows of several documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swift.config.fields import setting
from swift.core.errors import UsageError
from swift.data.engine.document import Document
from swift.data.engine.operator import OPERATORS, Context
from swift.data.loading.packing import pack
from swift.data.token_files.shards import REF, Examples
from swift.data.token_files.sink import Shard, TokenMaker, TokenSettings, finish_output, open_maker, write_shard

_WINDOW_ROWS = 512
_FULL = 0.98  # emptier rows are taken apart, and their documents packed with the next window's


@OPERATORS.register("pack_tokens")  # type: ignore[arg-type]
@dataclass
class PackTokens(TokenSettings):
    """Write token shards whose examples are rows of `length` tokens, filled with whole documents (best-fit decreasing).

    A row is one example: attention reaches over the borders of its documents, as in GPT-style pre-training, and only
    the first token of each document is not trained. For attention inside each document use `tokenise`, and
    `--packing true` in training. Longer documents are split, or treated as truncation_strategy says.
    """

    length: int = setting(4096, help="tokens per row; training then takes it as max_length")

    def check(self) -> None:
        if self.max_length != TokenSettings().max_length and self.max_length != self.length:
            raise UsageError(
                f"max_length {self.max_length} and length {self.length} disagree",
                where="max_length",
                fix="leave it out",
            )
        if self.length < 2:
            raise UsageError(f"rows of {self.length} tokens hold nothing", where="length", fix="2 or more")
        super().check()

    def open(self, context: Context) -> None:
        self.max_length = self.length
        self._maker: TokenMaker = open_maker(self, context)

    def write(self, folder: Path, name: str, batches: Iterable[list[Document]]) -> dict[str, Any]:
        shard = Shard()
        examples = packed(self._maker.examples(batches, shard), self.length, shard)
        return write_shard(self._maker, folder, name, examples, shard)

    def finish(self, output: Path, facts: list[dict[str, Any]]) -> dict[str, Any]:
        return finish_output(output, facts, packed=self.length)


def packed(batches: Iterable[Examples], length: int, shard: Shard) -> Iterator[Examples]:
    """Rows of at most `length` tokens, packed in windows of some hundred rows: a function of the documents alone.

    Within a row, and among the rows of a window, documents keep their order.
    """
    waiting: list[tuple[np.ndarray, np.ndarray, np.void]] = []
    tokens = 0
    for batch in batches:
        ends = np.cumsum(batch.lengths)
        for number, (start, end) in enumerate(zip((ends - batch.lengths).tolist(), ends.tolist())):
            waiting.append((batch.ids[start:end], batch.weights[start:end], batch.refs[number]))
            tokens += end - start
        if tokens >= _WINDOW_ROWS * length:
            rows, waiting = _rows(waiting, length, last=False)
            tokens = sum(len(ids) for ids, _, _ in waiting)
            yield _as_examples(rows, length, shard)
    rows, _ = _rows(waiting, length, last=True)
    yield _as_examples(rows, length, shard)


_Piece = tuple[np.ndarray, np.ndarray, np.void]


def _rows(pieces: list[_Piece], length: int, *, last: bool) -> tuple[list[list[_Piece]], list[_Piece]]:
    """Full rows, and the pieces of the others."""
    sizes = np.array([len(ids) for ids, _, _ in pieces], dtype=np.int64)
    rows = sorted(sorted(row) for row in pack(sizes, np.arange(len(pieces)), length))
    full = [last or int(sizes[row].sum()) >= _FULL * length for row in rows]
    left = sorted(i for row, done in zip(rows, full) if not done for i in row)
    return [[pieces[i] for i in row] for row, done in zip(rows, full) if done], [pieces[i] for i in left]


def _as_examples(rows: list[list[_Piece]], length: int, shard: Shard) -> Examples:
    flat = [piece for row in rows for piece in row]
    lengths = np.array([sum(len(ids) for ids, _, _ in row) for row in rows], dtype=np.int64)
    for tokens in lengths.tolist():
        shard.tally.observe("row filled", tokens / length, share=True)
    return Examples(
        np.concatenate([np.empty(0, np.int32), *(ids for ids, _, _ in flat)]),
        np.concatenate([np.empty(0, np.float32), *(weights for _, weights, _ in flat)]),
        lengths,
        np.array([row[0][2] for row in rows], dtype=REF),
    )
