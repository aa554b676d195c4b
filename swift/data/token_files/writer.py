"""Writing token shards (`token_shards` says what they are): as examples come, with the memory of one batch.

Files grow under their final names; the manifest is written last and makes the folder whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from swift.core.files import disk_errors, fsync_dir, write_atomic
from swift.core.version import __version__
from swift.data.token_files.shards import COPY_BYTES, FORMAT, MANIFEST, ORDER, REF, Examples, id_dtype, read_manifest
from swift.data.units import NO_NOTES

SHARD_TOKENS = 1 << 28


class _File:
    """A file that is appended to, with the size and the SHA-256 of what went in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes, self._sha = 0, hashlib.sha256()
        with disk_errors(path):
            self._file: IO[bytes] = path.open("wb")

    def write(self, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array).data.cast("B") if array.size else b""
        with disk_errors(self.path, len(data)):
            self._file.write(data)
        self._sha.update(data)
        self.bytes += len(data)

    def close(self) -> dict[str, Any]:
        """What the manifest says of it."""
        with disk_errors(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return {"bytes": self.bytes, "sha256": self._sha.hexdigest()}

    def drop(self) -> None:
        """Close without a word: the folder stays unfinished."""
        self._file.close()


class _OpenShard:
    """The shard that is being written."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype) -> None:
        self.folder, self.name, self.dtype = folder, name, dtype
        self.examples = self.tokens = self.trained = 0
        self.files = {kind: _File(folder / f"{self.name}.{kind}") for kind in ("bin", "idx", "refs", "sums")}
        self.files["idx"].write(np.zeros(1, "<i8"))
        self.weights: str | None = None  # None: ones so far
        self.noted = 0  # numbers in the notes so far

    def add(self, batch: Examples) -> None:
        ends = np.cumsum(batch.lengths, dtype=np.int64)
        starts = ends - batch.lengths
        wide = batch.ids.astype(self.dtype)
        if not np.array_equal(wide, batch.ids):
            raise ValueError(f"an id doesn't fit {self.dtype}")  # the caller named a wrong vocabulary size
        self._add_weights(batch, starts)
        self._add_notes(batch)
        self.files["bin"].write(wide)
        self.files["idx"].write((ends + self.tokens).astype("<i8"))
        self.files["refs"].write(batch.refs.astype(REF))
        self.files["sums"].write(batch.sums())
        self.examples += len(batch.lengths)
        self.tokens += len(batch.ids)
        self.trained += int(np.count_nonzero(batch.weights))

    def _add_weights(self, batch: Examples, starts: np.ndarray) -> None:
        weights = batch.weights
        if self.weights is None:
            plain = np.ones(len(weights), np.float32)
            plain[starts] = 0
            if np.array_equal(weights, plain):
                return
            self._begin_weights()
        if self.weights == "uint8" and not np.array_equal(weights, weights.astype(bool)):
            self._widen_weights()
        self.files["weights"].write(weights.astype("u1" if self.weights == "uint8" else "<f4"))

    def _add_notes(self, batch: Examples) -> None:
        if batch.notes is None and "notes" not in self.files:
            return
        if "notes" not in self.files:
            for kind in ("notes", "nidx"):
                self.files[kind] = _File(self.folder / f"{self.name}.{kind}")
            self.files["nidx"].write(np.zeros(self.examples + 1, "<i8"))
        notes = batch.notes or [NO_NOTES] * len(batch.lengths)
        self.files["notes"].write(np.concatenate([NO_NOTES, *notes]).astype("<f8"))
        ends = self.noted + np.cumsum([len(note) for note in notes], dtype=np.int64)
        self.files["nidx"].write(ends.astype("<i8"))
        self.noted = int(ends[-1])

    def _begin_weights(self) -> None:
        """Write out the ones of the examples so far."""
        file = self.files["weights"] = _File(self.folder / f"{self.name}.weights")
        self.weights = "uint8"
        self.files["idx"]._file.flush()
        offsets = np.fromfile(self.files["idx"].path, "<i8")[:-1] if self.tokens else np.zeros(0, "<i8")
        for start in range(0, self.tokens, COPY_BYTES):
            end = min(self.tokens, start + COPY_BYTES)
            piece = np.ones(end - start, np.uint8)
            piece[offsets[np.searchsorted(offsets, start) : np.searchsorted(offsets, end)] - start] = 0
            file.write(piece)

    def _widen_weights(self) -> None:
        """The first weight that is neither 0 nor 1: go on in float32."""
        narrow = self.files["weights"]
        narrow.close()
        aside = narrow.path.with_name(f".{narrow.path.name}")
        with disk_errors(aside):
            narrow.path.rename(aside)
        wide = self.files["weights"] = _File(narrow.path)
        self.weights = "float32"
        with aside.open("rb") as file:
            while piece := file.read(COPY_BYTES):
                wide.write(np.frombuffer(piece, np.uint8).astype("<f4"))
        aside.unlink()

    def close(self) -> dict[str, Any]:
        """What the manifest says of it."""
        files = {file.path.name: file.close() for file in self.files.values()}
        entry = {"name": self.name, "examples": self.examples, "tokens": self.tokens, "trained_tokens": self.trained}
        kept = {"dtype": self.dtype.name, "weights": self.weights or "ones", "notes": "notes" in self.files}
        return entry | kept | {"files": files}


class ShardWriter:
    """Writes a folder of shards; `close` makes it whole. A folder that is there with content is refused by its caller.

    Args:
        folder: made when missing.
        vocab_size: of the tokenizer, for the width of ids; None takes the wide one.
        shard_tokens: a shard is closed once it has that many.
        prefix: before the numbers in the shards' names.
    """

    def __init__(
        self, folder: Path, vocab_size: int | None, *, shard_tokens: int = SHARD_TOKENS, prefix: str = ""
    ) -> None:
        self.folder, self.dtype, self.shard_tokens, self.prefix = folder, id_dtype(vocab_size), shard_tokens, prefix
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / MANIFEST).unlink(missing_ok=True)
        self._open: _OpenShard | None = None
        self._done: list[dict[str, Any]] = []
        self.rows = 0
        self._last: Any = None

    def add(self, batch: Examples) -> None:
        """Append examples."""
        if not len(batch.lengths):
            return
        if self._open is None:
            self._open = _OpenShard(self.folder, f"{self.prefix}{len(self._done):05d}", self.dtype)
        self._open.add(batch)
        keys = batch.refs
        self.rows += int(np.count_nonzero(keys[1:] != keys[:-1])) + int(self._last is None or keys[0] != self._last)
        self._last = keys[-1]
        if self._open.tokens >= self.shard_tokens:
            self.finish()

    def close(self, files: Sequence[str], meta: dict[str, Any], order: np.ndarray | None = None) -> dict[str, Any]:
        """Finish: the manifest, with the names of the row files and `meta` in it.

        Names in a manifest are relative to its folder, so a finished folder can be moved.

        Args:
            files: the names that `refs` number.
            meta: what else the manifest holds.
            order: int64, the examples in the order in which they count, when that is not each once in turn.

        Returns:
            The manifest.
        """
        entries = self.finish()
        return write_manifest(self.folder, entries, files, {"rows": self.rows, **meta}, order)

    def finish(self) -> list[dict[str, Any]]:
        """Close the last shard; what a manifest says of each. For writers whose manifest somebody else writes."""
        if self._open is not None:
            self._done.append(self._open.close())
            self._open = None
        return self._done

    def drop(self) -> None:
        """Give up: close what is open."""
        if self._open is not None:
            for file in self._open.files.values():
                file.drop()
            self._open = None


def write_manifest(
    folder: Path,
    entries: list[dict[str, Any]],
    files: Sequence[str],
    meta: dict[str, Any],
    order: np.ndarray | None = None,
) -> dict[str, Any]:
    """Make a folder of finished shards whole; the arguments are those of `ShardWriter.close`.

    Returns:
        The manifest.
    """
    sums = {name: sum(shard[name] for shard in entries) for name in ("examples", "tokens", "trained_tokens")}
    manifest: dict[str, Any] = {"format": FORMAT, "program": __version__, **sums, "shards": entries, "order": None}
    manifest |= {"files": list(files), **meta}
    if order is not None:
        file = _File(folder / ORDER)
        file.write(order.astype("<i8"))
        manifest["order"] = file.close()
    fsync_dir(folder)
    write_atomic(folder / MANIFEST, json.dumps(manifest, ensure_ascii=False, indent=1))
    return manifest


def write_view(
    folder: Path, shards: Sequence[tuple[Path, list[str]]], order: np.ndarray | None, meta: dict[str, Any]
) -> None:
    """A folder without shards of its own: it names those of other folders, by relative paths.

    Args:
        folder: made when missing.
        shards: the `.bin` file of each, and the names of the row files that its refs number.
        order, meta: as in `ShardWriter.close`.
    """
    manifests: dict[Path, dict[str, Any]] = {}
    entries: list[dict[str, Any]] = []
    files: list[str] = []
    bases: dict[int, int] = {}
    for path, names in shards:
        home = path.parent
        if home not in manifests:
            manifests[home] = read_manifest(home)
        entry = next(dict(each) for each in manifests[home]["shards"] if Path(each["name"]).name == path.stem)
        beside = os.path.relpath(home, folder)
        entry["name"] = f"{beside}/{path.stem}"
        entry["files"] = {f"{beside}/{Path(name).name}": known for name, known in entry["files"].items()}
        if id(names) not in bases:
            bases[id(names)] = len(files)
            files += names
        entries.append({**entry, "first_file": bases[id(names)]})
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_manifest(folder, entries, files, meta, order)
