"""Token shards on disk: flat arrays that are written as they come and mapped by whoever reads them.

A folder (written by `token_writer`) holds shards of some hundred million tokens and a `manifest.json`, written last:
without it the folder is unfinished and nobody takes it for whole. A shard is

    NNNNN.bin      ids, little-endian uint16 (vocabularies up to 65,536) or uint32, all examples end to end
    NNNNN.idx      int64 [examples + 1], where each example begins
    NNNNN.weights  loss weights, uint8 or float32; not there when every token but an example's first weighs 1
    NNNNN.refs     (line int64, file int32) of each example's row; files are numbered in the manifest; a line below 0 is
                   ~byte, the place of a row that is numbered by its byte
    NNNNN.sums     uint64, a checksum of each example, compared whenever the example is read
    NNNNN.notes    float64, what is known of examples beside their tokens (`swift.data.units`), end to end; with
    NNNNN.nidx     int64 [examples + 1], where those of each begin; neither is there when no example has any

Knows nothing of tokenizers or of training.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from swift.core.errors import DataError
from swift.data.units import NO_NOTES

FORMAT = 2
MANIFEST = "manifest.json"
ORDER = "order.idx"
SMALL_VOCABULARY = 1 << 16
REF = np.dtype([("line", "<i8"), ("file", "<i4")])
_REMAKE = "make it again: `swift export --to_cached_dataset true` with the same settings"
COPY_BYTES = 1 << 22


def id_dtype(vocab_size: int | None) -> np.dtype:
    """How ids of a vocabulary are stored: uint16 up to 65,536 tokens, else (or where the size isn't known) uint32."""
    return np.dtype("<u2" if vocab_size is not None and vocab_size <= SMALL_VOCABULARY else "<u4")


def checksum(ids: np.ndarray, weights: np.ndarray, notes: np.ndarray = NO_NOTES) -> int:
    """64 bits of BLAKE2b over an example's ids (as int32), weights (as float32) and notes (as float64), little-endian.

    The same example has the same sum in every shard and in memory.
    """
    state = hashlib.blake2b(np.ascontiguousarray(ids, dtype="<i4").tobytes(), digest_size=8)
    state.update(np.ascontiguousarray(weights, dtype="<f4").tobytes())
    state.update(np.ascontiguousarray(notes, dtype="<f8").tobytes())
    return int.from_bytes(state.digest(), "little")


@dataclass
class Examples:
    """Some examples end to end, on their way into a shard.

    Attributes:
        ids: int32 [tokens]; weights: float32 [tokens]; lengths: int [examples].
        refs: REF [examples].
        notes: float64 [any], of each example; None when none has any.
    """

    ids: np.ndarray
    weights: np.ndarray
    lengths: np.ndarray
    refs: np.ndarray
    notes: list[np.ndarray] | None = None

    def sums(self) -> np.ndarray:
        """The checksum of each."""
        ends = np.cumsum(self.lengths).tolist()
        notes = self.notes or [NO_NOTES] * len(ends)
        places = zip([0, *ends], ends, notes)  # one start too many is left over
        return np.array([checksum(self.ids[a:b], self.weights[a:b], note) for a, b, note in places], dtype="<u8")


class Shard:
    """Examples by number, in memory or mapped.

    Args:
        ids: unsigned or int32 [tokens]; offsets: int64 [examples + 1].
        weights: uint8 or float32 [tokens]; None when every token but an example's first weighs 1.
        refs, sums: of each example; see the head of this file.
        path: of the `.bin` file; None in memory. What comes from a file is compared with its checksum.
        notes: float64, and int64 [examples + 1], where those of each example begin; None when none has any.
    """

    def __init__(
        self,
        ids: np.ndarray,
        offsets: np.ndarray,
        weights: np.ndarray | None,
        refs: np.ndarray,
        sums: np.ndarray,
        path: Path | None = None,
        notes: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:
        self.ids, self.offsets, self.weights, self.refs, self.sums, self.path = ids, offsets, weights, refs, sums, path
        self._notes = notes

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getstate__(self) -> dict[str, Any]:
        """For other processes: a mapped shard travels as its path, not as its content."""
        return {"path": self.path} if self.path is not None else dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        whole = open_shard(state["path"]).__dict__ if state["path"] is not None else state
        self.__dict__.update(whole)

    @cached_property
    def lengths(self) -> np.ndarray:
        """int32 [examples].

        Raises:
            DataError: the offsets can't be.
        """
        lengths = np.diff(self.offsets)
        if len(lengths) and (
            self.offsets[0] != 0
            or int(lengths.min()) < 1
            or self.offsets[-1] != len(self.ids)
            or lengths.max() >= 2**31
        ):
            bad = int(np.argmax(lengths < 1)) if int(lengths.min()) < 1 else len(lengths)
            raise _damaged(self.path and self.path.with_suffix(".idx"), 8 * bad, "its offsets don't rise to its end")
        return lengths.astype(np.int32)

    def example(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids int32 [n] and weights float32 [n].

        Raises:
            DataError: they aren't what was written; names file and byte offset.
        """
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        ids = self.ids[start:end].astype(np.int32)
        if self.weights is not None:
            weights = self.weights[start:end].astype(np.float32)
        else:
            weights = np.ones(len(ids), np.float32)
            weights[:1] = 0
        if self.path is not None and checksum(ids, weights, self.notes(index)) != int(self.sums[index]):
            raise _damaged(self.path, start * self.ids.itemsize, f"example {index} isn't what was written")
        return ids, weights

    def notes(self, index: int) -> np.ndarray:
        """Float64 [any], what is known of an example beside its tokens; empty for most."""
        if self._notes is None:
            return NO_NOTES
        flat, offsets = self._notes
        return np.asarray(flat[int(offsets[index]) : int(offsets[index + 1])], dtype=np.float64)

    def trained(self, chosen: np.ndarray | None = None) -> int:
        """Tokens with a weight above 0, of all or of the chosen examples."""
        if self.weights is None:
            lengths = self.lengths if chosen is None else self.lengths[chosen]
            return int(lengths.sum(dtype=np.int64)) - len(lengths)
        total = 0
        if chosen is None:
            pieces = range(0, len(self.weights), COPY_BYTES)
            return sum(int(np.count_nonzero(self.weights[start : start + COPY_BYTES])) for start in pieces)
        for index in chosen.tolist():
            total += int(np.count_nonzero(self.weights[self.offsets[index] : self.offsets[index + 1]]))
        return total


def in_memory(examples: Examples) -> Shard:
    """A shard of these examples."""
    weights: np.ndarray | None = examples.weights.astype(np.float32, copy=False)
    offsets = np.concatenate([[0], np.cumsum(examples.lengths, dtype=np.int64)])
    if weights is not None and np.array_equal(weights, weights.astype(bool)):
        weights = weights.astype(np.uint8)
    notes = None
    if examples.notes is not None:
        bounds = np.cumsum([0, *map(len, examples.notes)], dtype=np.int64)
        notes = np.concatenate([NO_NOTES, *examples.notes]), bounds
    return Shard(examples.ids, offsets, weights, examples.refs, examples.sums(), notes=notes)


@dataclass
class Folder:
    """An opened folder of shards.

    Attributes:
        shards: mapped; order: see `ShardWriter.close`; manifest: all that it says.
    """

    path: Path
    manifest: dict[str, Any]
    shards: list[Shard] = field(default_factory=list)
    order: np.ndarray | None = None
    _files: dict[int, list[str]] = field(default_factory=dict)

    def files_of(self, shard: Shard) -> list[str]:
        """The names of the row files that the refs of a shard number."""
        entry = self.manifest["shards"][next(i for i, each in enumerate(self.shards) if each is shard)]
        first = entry.get("first_file", 0)
        if first not in self._files:  # one list for all shards that share it
            self._files[first] = self.manifest["files"][first:]
        return self._files[first]


def open_folder(folder: Path) -> Folder:
    """Map a finished folder, read-only.

    Raises:
        DataError: it isn't there, unfinished, of another format, or a file of it is missing or has another size.
    """
    manifest = read_manifest(folder)
    opened = Folder(folder, manifest)
    for entry in manifest["shards"]:
        for name, known in entry["files"].items():
            _check_size(folder / name, known["bytes"])
        opened.shards.append(_map(folder, entry))
    if manifest["order"] is not None:
        _check_whole(folder / ORDER, manifest["order"])  # examples' checksums say nothing of which are chosen
        opened.order = _mapped(folder / ORDER, "<i8")
    return opened


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a finished folder.

    Raises:
        DataError: there is none, it can't be read, or it is of another format.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        what = (
            "has no manifest.json: it is unfinished, or no folder of token shards" if folder.is_dir() else "is missing"
        )
        raise DataError(f"the folder {what}", where=str(folder), fix=_REMAKE) from error
    except (OSError, ValueError) as error:
        raise DataError(f"its manifest can't be read: {error}", where=str(path), fix=_REMAKE) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise DataError(f"its format is {found}, this version reads {FORMAT}", where=str(path), fix=_REMAKE)
    return manifest


def verify_folder(folder: Path) -> None:
    """Read every file of a folder and compare it with its SHA-256.

    Raises:
        DataError: naming the first that differs.
    """
    manifest = read_manifest(folder)
    known = {name: entry for shard in manifest["shards"] for name, entry in shard["files"].items()}
    if manifest["order"] is not None:
        known[ORDER] = manifest["order"]
    for name, entry in known.items():
        _check_whole(folder / name, entry)


def open_shard(path: Path) -> Shard:
    """Map one shard by the path of its `.bin` file, for a process that was handed it."""
    entries = read_manifest(path.parent)["shards"]
    return _map(path.parent, next(entry for entry in entries if entry["name"] == path.stem))


def _map(folder: Path, entry: dict[str, Any]) -> Shard:
    base = folder / entry["name"]
    weights = None
    if entry["weights"] != "ones":
        weights = _mapped(base.with_suffix(".weights"), "u1" if entry["weights"] == "uint8" else "<f4")
    notes = None
    if entry.get("notes"):
        notes = _mapped(base.with_suffix(".notes"), "<f8"), _mapped(base.with_suffix(".nidx"), "<i8")
    return Shard(
        _mapped(base.with_suffix(".bin"), "<u2" if entry["dtype"] == "uint16" else "<u4"),
        _mapped(base.with_suffix(".idx"), "<i8"),
        weights,
        _mapped(base.with_suffix(".refs"), REF),
        _mapped(base.with_suffix(".sums"), "<u8"),
        base.with_suffix(".bin"),
        notes,
    )


def _mapped(path: Path, dtype: str | np.dtype) -> np.ndarray:
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)


def _check_whole(path: Path, known: Mapping[str, Any]) -> None:
    _check_size(path, known["bytes"])
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != known["sha256"]:
            raise _damaged(path, None, "its content isn't what was written")


def _check_size(path: Path, expected: int) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"a file of the token shards is missing: {error}", where=str(path), fix=_REMAKE) from error
    if size != expected:
        what = "is cut off" if size < expected else "has grown"
        raise _damaged(path, min(size, expected), f"it {what}: {size} bytes of {expected}")


def _damaged(path: Path | None, offset: int | None, what: str) -> DataError:
    where = str(path or "memory") if offset is None else f"{path or 'memory'}, byte {offset}"
    return DataError(f"the token shard is damaged: {what}", where=where, fix=_REMAKE)
