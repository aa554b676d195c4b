"""Documents at the end of a recipe to token shards, by the very encoder that `swift pt` and `swift sft` use.

What `tokenise` and `pack_tokens` share: their settings, the way from documents to examples, and the manifest that makes
the output folder one that `--cached_dataset` takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from swift.config.export import ExportTemplateConfig
from swift.config.fields import setting
from swift.config.model import ModelConfig
from swift.core.errors import DataError, UsageError
from swift.data.engine.document import Document
from swift.data.engine.operator import Context
from swift.data.engine.tally import Tally
from swift.data.rows import Row, RowProblem, RowRef
from swift.data.shapes import RowOptions, normalise_row
from swift.data.token_files.cached import made_with
from swift.data.token_files.shards import REF, Examples
from swift.data.token_files.writer import ShardWriter, write_manifest

if TYPE_CHECKING:
    from swift.data.encoding.encode import ChatEncoder, Encoded

_BATCH_DOCUMENTS = 256
_BATCH_CHARACTERS = 1 << 20
_MODEL = ("model", "model_revision", "use_hf", "trust_remote_code", "new_special_tokens")
_TEMPLATE = ("template", "system", "max_length", "truncation_strategy", "loss_scale", "history_turns")


@dataclass
class TokenSettings:
    """How documents become tokens; the names are those of the flags of `swift export`."""

    model: str | None = setting(None, help="local folder, hub id or `smollm2`: the model whose tokenizer is used")
    cached_for: Literal["pt", "sft"] = setting(
        "pt", help="the command that will train on them: pt = plain text, every token trained; sft = conversations"
    )
    max_length: int = setting(2048, help="tokens per example; the one that training will have")
    truncation_strategy: Literal["delete", "right", "left", "split", "raise"] | None = setting(
        None, help="documents over max_length; default: split for pt, delete for sft"
    )
    loss_scale: Literal["default", "last_round", "all"] | None = setting(
        None, help="train on; default: all for pt, default (every assistant turn) for sft"
    )
    history_turns: Literal["split", "mask", "keep"] = setting(
        "split", help="sft: an answer that the template shows differently in the history, as in training"
    )
    template: str | None = setting(None, help="sft: chat template, a .jinja file or `chatml`; default: the tokenizer's")
    system: str | None = setting(None, help="sft: system prompt (text or a .txt file) for rows that have none")
    new_special_tokens: list[str] = setting(help="tokens added to the vocabulary, as in training", factory=list)
    model_revision: str | None = setting(None, help="branch, tag or commit on the hub")
    use_hf: bool = setting(True, help="true: Hugging Face hub; false: ModelScope")
    trust_remote_code: bool = setting(False, help="run Python code that comes with the tokenizer")

    def check(self) -> None:
        """Refuse settings that can't be meant."""
        if not self.model:
            raise UsageError("tokens need a tokenizer", where="model", fix="model: a folder, a hub id or smollm2")
        if self.max_length < 2:
            raise UsageError(
                f"max_length {self.max_length} leaves nothing to train", where="max_length", fix="2 or more"
            )
        if self.cached_for == "sft" and self.truncation_strategy == "split":
            raise UsageError(
                "a conversation can't be split",
                where="truncation_strategy",
                fix="delete, left or right, or cached_for: pt",
            )


class TokenMaker:
    """The encoder of some settings, at work on documents."""

    def __init__(self, settings: TokenSettings, *, offline: bool) -> None:
        from swift.data.encoding.encode import ChatEncoder  # these three load transformers: not before they are needed
        from swift.models.hub import resolve_model
        from swift.models.loading import load_tokenizer

        values = {f.name: getattr(settings, f.name) for f in fields(TokenSettings)}
        model = ModelConfig(**{name: values[name] for name in _MODEL}, offline=offline)
        template = ExportTemplateConfig(**{name: values[name] for name in _TEMPLATE})
        self.encoder: ChatEncoder = ChatEncoder(
            load_tokenizer(resolve_model(model), model), template.of(settings.cached_for)
        )

    def examples(self, batches: Iterable[list[Document]], shard: Shard) -> Iterator[Examples]:
        """The examples of each document, some documents at a time; drops and counts go to `shard`."""
        waiting: list[Document] = []
        characters = 0
        for batch in batches:
            for document in batch:
                waiting.append(document)
                characters += sum(map(len, document.texts))
                if len(waiting) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
                    yield self._encode(waiting, shard)
                    waiting, characters = [], 0
        if waiting:
            yield self._encode(waiting, shard)

    def _encode(self, documents: list[Document], shard: Shard) -> Examples:
        rows: list[Row] = []
        kept: list[Document] = []
        for document in documents:
            shard.tally.read += 1
            shard.tally.characters_in += sum(map(len, document.texts))
            try:
                rows.append(row_of(document))
                kept.append(document)
            except RowProblem as problem:
                shard.tally.drop(document, problem.reason, problem.message)
        ids, weights, lengths, refs = [], [], [], []
        for row, document, outcome in zip(rows, kept, self.encoder.encode_batch(rows), strict=True):
            if isinstance(outcome, RowProblem):
                shard.tally.drop(document, outcome.reason, outcome.message)
                continue
            shard.tally.kept += 1
            shard.tally.characters_out += sum(map(len, document.texts))
            shard.rows += 1
            pieces: list[Encoded] = outcome
            shard.tally.observe("tokens", sum(len(piece.input_ids) for piece in pieces))
            for piece in pieces:
                ids.append(piece.input_ids)
                weights.append(piece.loss_weights)
                lengths.append(len(piece.input_ids))
                refs.append(shard.ref(row.ref))
        shard.encoding.update(self.encoder.counts)
        self.encoder.counts.clear()
        return Examples(
            np.concatenate([np.empty(0, np.int32), *ids]),
            np.concatenate([np.empty(0, np.float32), *weights]),
            np.array(lengths, np.int64),
            np.array(refs, dtype=REF),
        )


@dataclass
class Shard:
    """What is told of one shard of the output.

    Attributes:
        files: row files and their numbers in the refs. encoding: what the encoder counted.
    """

    tally: Tally = field(default_factory=Tally)
    rows: int = 0
    files: dict[str, int] = field(default_factory=dict)
    encoding: Counter[str] = field(default_factory=Counter)

    def ref(self, ref: RowRef) -> tuple[int, int]:
        """A ref as shards store it."""
        return (~ref.line if ref.by_offset else ref.line, self.files.setdefault(ref.file, len(self.files)))


def row_of(document: Document) -> Row:
    """The row that training would read of the document as it is now.

    Raises:
        RowProblem: there is none.
    """
    record = {"text": document.text} if document.roles is None else document.to_record()
    row, _ = normalise_row(record, ref_of(document.id), RowOptions())
    return row


def ref_of(document_id: str) -> RowRef:
    """`file:line` or `file@byte` back to a ref; an id of another kind is a file with line 0."""
    for mark in ":@":
        file, found, number = document_id.rpartition(mark)
        if found and number.isascii() and number.isdigit():
            return RowRef(file, int(number), mark == "@")
    return RowRef(document_id, 0)


def write_shard(
    maker: TokenMaker, folder: Path, name: str, examples: Iterable[Examples], shard: Shard
) -> dict[str, Any]:
    """Write examples into `folder` under names that begin with `name`.

    Returns:
        What `finish_output` and the engine want to know.
    """
    writer = ShardWriter(folder, maker.encoder.vocab_size, prefix=f"{name}-")
    try:
        for batch in examples:
            writer.add(batch)
        entries = writer.finish()
    finally:
        writer.drop()
    return {
        "rows": shard.rows,
        "shards": entries,
        "files": list(shard.files),
        "made": made_with(maker.encoder),
        "encoding": dict(shard.encoding),
        "tally": shard.tally.as_json(),
    }


def finish_output(output: Path, facts: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Write the manifest that makes the folder one data set.

    Raises:
        DataError: no example is left, or the parts were made with different tokenizers.
    """
    entries: list[dict[str, Any]] = []
    files: list[str] = []
    encoding: Counter[str] = Counter()
    for fact in facts:
        entries += [{**entry, "first_file": len(files)} for entry in fact["shards"]]
        files += fact["files"]
        encoding.update(fact["encoding"])
        if fact["made"] != facts[0]["made"]:
            raise DataError(
                "the tokenizer or the template was changed while the recipe ran", where=str(output), fix="--restart"
            )
    if not entries:
        raise DataError("no document is left to be tokenised", where=str(output), fix="look at the recipe's ledger")
    rows = sum(fact["rows"] for fact in facts)
    meta = {**facts[0]["made"], "rows": rows, "sources": [], "command": "swift data run RECIPE --restart"}
    manifest = write_manifest(output, entries, files, {**meta, "ledger": {"encoding": dict(encoding)}, **more})
    return {name: manifest[name] for name in ("rows", "examples", "tokens", "trained_tokens", "tokenizer_hash")}


def open_maker(settings: TokenSettings, context: Context) -> TokenMaker:
    """The maker for a sink's `open`."""
    return TokenMaker(settings, offline=context.offline)
