"""Documents between two stages: a file of zstd frames, each a block of JSON lines, and a list of the blocks.

Blocks can be read from any one on, so that the last stage can put them together into files of another size. Everything
about a document is kept: its id, texts, roles, metadata and the rest of its row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import zstandard

from swift.core.errors import DataError
from swift.core.files import disk_errors
from swift.data.engine.document import META_KEY, Document
from swift.data.parse_json import non_finite_field

FILE_NAME, INDEX_NAME = "documents.zst", "blocks"
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Block:
    """Where a block begins, how long it is packed and unpacked (bytes), and its documents."""

    offset: int
    packed: int
    bytes: int
    rows: int


class BlockWriter:
    """Writes the documents of one shard into a folder. The files are complete after `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / FILE_NAME
        self.blocks: list[Block] = []
        self._packer = zstandard.ZstdCompressor(level=1, write_checksum=True)
        self._lines: list[bytes] = []
        self._bytes = self._offset = 0
        with disk_errors(self.path):
            self._file: BinaryIO = self.path.open("wb")

    def write(self, batch: list[Document]) -> None:
        """Add documents."""
        for document in batch:
            line = _packed(document)
            self._lines.append(line)
            self._bytes += len(line) + 1
            if self._bytes >= _BLOCK_BYTES:
                self._flush()

    def _flush(self) -> None:
        if not self._lines:
            return
        frame = self._packer.compress(b"\n".join(self._lines) + b"\n")
        with disk_errors(self.path, len(frame)):
            self._file.write(frame)
        self.blocks.append(Block(self._offset, len(frame), self._bytes, len(self._lines)))
        self._offset += len(frame)
        self._lines, self._bytes = [], 0

    def close(self) -> dict[str, Any]:
        """Finish both files; returns the counts."""
        self._flush()
        with disk_errors(self.path):
            self._file.close()
            index = [[b.offset, b.packed, b.bytes, b.rows] for b in self.blocks]
            (self.folder / INDEX_NAME).write_bytes(orjson.dumps(index))
        return {"rows": sum(b.rows for b in self.blocks), "bytes": self._offset}

    def abandon(self) -> None:
        """Let go of an unfinished file."""
        self._file.close()


def read_index(folder: Path) -> list[Block]:
    """The blocks of a shard."""
    return [Block(*values) for values in orjson.loads((folder / INDEX_NAME).read_bytes())]


def read_blocks(folder: Path, first: int = 0, end: int | None = None) -> Iterator[list[Document]]:
    """The documents of a shard, or of its blocks from `first` to before `end`, a block at a time.

    Raises:
        DataError: the file is damaged.
    """
    unpacker = zstandard.ZstdDecompressor()
    with (folder / FILE_NAME).open("rb") as file:
        for block in read_index(folder)[first:end]:
            file.seek(block.offset)
            try:
                lines = unpacker.decompress(file.read(block.packed), max_output_size=block.bytes)
            except zstandard.ZstdError as error:
                raise DataError(
                    f"a file of the work folder is damaged at byte {block.offset}: {error}",
                    where=str(folder / FILE_NAME),
                    fix="--restart runs the recipe from its beginning",
                ) from error
            yield [_unpacked(line) for line in lines.splitlines()]


def _packed(document: Document) -> bytes:
    meta, document.meta = document.meta, {}
    record = document.to_record()  # with the present texts in it, so that they aren't stored twice
    document.meta = meta
    values = [document.id, record, document.paths, document.roles, meta, document.key]
    try:
        line = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # whole numbers of more than 64 bits
        line = json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()
    # orjson writes NaN and infinity as null, json as words
    if b"null" in line or b"NaN" in line or b"Infinity" in line:
        _refuse_non_finite(document, record)
    return line


def _refuse_non_finite(document: Document, record: dict[str, Any]) -> None:
    field = non_finite_field({**record, META_KEY: document.meta})
    if field is not None:
        raise DataError(
            f"the field {field} is NaN or infinity, which can't be written",
            where=document.id,
            fix="the operator that makes the field should leave it out, or make it None",
        )


def _unpacked(line: bytes) -> Document:
    doc_id, record, paths, roles, meta, random_key = orjson.loads(line)
    texts = []
    tuples = []
    for path in paths:
        value = record
        for key in path:
            value = value[key]
        texts.append(value)
        tuples.append(tuple(path))
    return Document(doc_id, record, tuples, texts, roles, meta, random_key)
