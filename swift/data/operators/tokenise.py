"""The end of a recipe: documents become token shards, one example for each as `swift pt` would make it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift.data.engine.document import Document
from swift.data.engine.operator import OPERATORS, Context
from swift.data.token_files.sink import Shard, TokenMaker, TokenSettings, finish_output, open_maker, write_shard


@OPERATORS.register("tokenise")  # type: ignore[arg-type]
@dataclass
class Tokenise(TokenSettings):
    """Write token shards that `--cached_dataset` takes; the examples are those of training on the documents.

    With `cached_for: pt` a document is a plain text, ended by the eos token and split at max_length; with `sft` it is a
    conversation under the chat template. Texts that hold the string of a special token are read as that token, as in
    training.
    """

    def open(self, context: Context) -> None:
        self._maker: TokenMaker = open_maker(self, context)

    def write(self, folder: Path, name: str, batches: Iterable[list[Document]]) -> dict[str, Any]:
        shard = Shard()
        return write_shard(self._maker, folder, name, self._maker.examples(batches, shard), shard)

    def finish(self, output: Path, facts: list[dict[str, Any]]) -> dict[str, Any]:
        return finish_output(output, facts)
