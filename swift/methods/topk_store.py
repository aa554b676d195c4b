"""A teacher's best tokens on disk: written once, mapped by every run that distils from them.

A folder holds parts (one for each process that wrote) and a `manifest.json`, written last: without it the folder is
unfinished and nobody takes it for whole. A part is

    NNNNN.ids    token ids, little-endian uint16 (vocabularies up to 65,536) or uint32, [targets, k]
    NNNNN.logps  log-probabilities, float16 or float32, [targets, k], best first; -inf where there is no k-th token
    NNNNN.idx    int64 [examples + 1], where each example's targets begin
    NNNNN.sums   uint64 [examples], the checksum of the example's tokens and weights (`token_files.shards.checksum`)

There is a row for each token that is trained on, in order. Examples are found by their checksum, never by their number,
so a store of another data set, template or tokenizer can't be taken for this one, and order and selection don't matter.
Knows nothing of models or of how the numbers were made.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from swift.core.errors import DataError
from swift.core.files import disk_errors, fsync_dir, fsync_tree, write_atomic
from swift.data.token_files.shards import checksum, id_dtype

FORMAT = 1
MANIFEST = "manifest.json"
_KINDS = ("ids", "logps", "idx", "sums")
_REMAKE = "make it again with the same data, template and teacher"


class BestTokens(NamedTuple):
    """The teacher's best tokens at each target of an example: ids int64 and log-probs float32, both [targets, k]."""

    ids: np.ndarray
    logps: np.ndarray


@dataclass(frozen=True)
class StoreHeader:
    """What all parts of a store have in common.

    Attributes:
        k: tokens of each position.
        vocab_size: ids that the tokenizer has.
        temperature: at which the log-probabilities were taken.
        precision: "float16" (relative error below 2^-11, so 0.005 at -10) or "float32".
        teacher: its name, for people.
    """

    k: int
    vocab_size: int
    temperature: float = 1.0
    precision: str = "float16"
    teacher: str = ""


class TopkWriter:
    """Writes one part. A part of the same number that is there is replaced; `finish_store` makes the folder whole."""

    def __init__(self, folder: Path, header: StoreHeader, *, part: int = 0) -> None:
        self.folder, self.header, self.name = folder, header, f"{part:05d}"
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / MANIFEST).unlink(missing_ok=True)
            self._entry_path.unlink(missing_ok=True)
            self._files: dict[str, IO[bytes]] = {kind: (folder / f"{self.name}.{kind}").open("wb") for kind in _KINDS}
        self._dtypes = id_dtype(header.vocab_size), np.dtype(header.precision).newbyteorder("<")
        self._seen: set[int] = set()
        self._rows = 0
        self._write("idx", np.zeros(1, "<i8"))

    def __contains__(self, example: tuple[np.ndarray, np.ndarray]) -> bool:
        """Whether an example (ids, weights) has been written: then the teacher needn't be asked again."""
        return checksum(*example) in self._seen

    def add(self, ids: np.ndarray, weights: np.ndarray, best: BestTokens) -> None:
        """The teacher's best tokens for one example; one that is there already is left out.

        Args:
            ids: int32 [n]; weights: float32 [n], as they come from the token store.

        Raises:
            DataError: the arrays don't fit the example or the header, or can't be log-probabilities.
        """
        key = checksum(ids, weights)
        shape = (count_targets(weights), self.header.k)
        if best.ids.shape != shape or best.logps.shape != shape:
            raise DataError(
                f"the example has {shape[0]} targets and the store {shape[1]} tokens for each, "
                f"but {best.ids.shape} ids and {best.logps.shape} log-probabilities came",
                where=str(self.folder),
            )
        known = best.logps > -math.inf
        outside = known & ((best.ids < 0) | (best.ids >= self.header.vocab_size))
        if outside.any() or np.isnan(best.logps).any() or (best.logps > 1e-3).any():
            what = f"token {best.ids[outside][0]} isn't in the vocabulary" if outside.any() else "no log-probabilities"
            raise DataError(f"what the teacher gave can't be stored: {what}", where=str(self.folder))
        if key in self._seen:
            return
        self._seen.add(key)
        self._rows += shape[0]
        self._write("ids", np.where(known, best.ids, 0).astype(self._dtypes[0]))
        self._write("logps", np.minimum(best.logps, 0).astype(self._dtypes[1]))
        self._write("idx", np.array([self._rows], "<i8"))
        self._write("sums", np.array([key], "<u8"))

    def close(self) -> None:
        """Make the part whole."""
        files = {}
        for kind, file in self._files.items():
            with disk_errors(Path(file.name)):
                file.close()
            path = Path(file.name)
            with path.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            files[kind] = {"bytes": path.stat().st_size, "sha256": digest}
        with disk_errors(self.folder):
            fsync_tree(self.folder)
        entry = {"header": asdict(self.header), "examples": len(self._seen), "targets": self._rows, "files": files}
        write_atomic(self._entry_path, json.dumps(entry))

    def drop(self) -> None:
        """Close the files without a word: the part stays unfinished."""
        for file in self._files.values():
            file.close()

    @property
    def _entry_path(self) -> Path:
        return self.folder / f"{self.name}.json"

    def _write(self, kind: str, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array).tobytes()
        with disk_errors(Path(self._files[kind].name), len(data)):
            self._files[kind].write(data)


def finish_store(folder: Path, *, parts: int = 1) -> None:
    """Write the manifest of a folder whose parts 0 .. parts - 1 are whole.

    Raises:
        DataError: one isn't, or was written with another header.
    """
    entries = {}
    for number in range(parts):
        path = folder / f"{number:05d}.json"
        try:
            entries[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(
                f"part {number} of {parts} isn't finished: {error}", where=str(path), fix=_REMAKE
            ) from error
    headers = [entry.pop("header") for entry in entries.values()]
    if any(header != headers[0] for header in headers):
        raise DataError("the parts were written with different settings", where=str(folder), fix=_REMAKE)
    fsync_dir(folder)
    write_atomic(folder / MANIFEST, json.dumps({"format": FORMAT, "header": headers[0], "parts": entries}, indent=1))


class TopkStore:
    """A finished folder, mapped read-only.

    Attributes:
        header: what it was written with.

    Raises:
        DataError: it isn't there, unfinished, of another format, or a file has another size than it was written with.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        manifest = _read_manifest(folder)
        self.header = StoreHeader(**manifest["header"])
        shape = (-1, self.header.k)
        ids_type, logps_type = id_dtype(self.header.vocab_size), np.dtype(self.header.precision).newbyteorder("<")
        self._parts, sums, places = [], [np.zeros(0, "<u8")], [np.zeros((0, 2), np.int64)]
        for number, (name, entry) in enumerate(manifest["parts"].items()):
            for kind, known in entry["files"].items():
                self._check_size(folder / f"{name}.{kind}", known["bytes"])
            arrays = [_mapped(folder / f"{name}.{k}", t) for k, t in zip(_KINDS, (ids_type, logps_type, "<i8", "<u8"))]
            self._parts.append((arrays[0].reshape(shape), arrays[1].reshape(shape), arrays[2]))
            sums.append(arrays[3])
            places.append(np.stack([np.full(entry["examples"], number), np.arange(entry["examples"])], 1))
        keys = np.concatenate(sums)
        order = np.argsort(keys, kind="stable")
        self._keys, self._places = keys[order], np.concatenate(places)[order]

    def __len__(self) -> int:
        return len(self._keys)

    def missing(self, sums: Iterable[int] | np.ndarray) -> int:
        """How many of these checksums (`Shard.sums`) aren't here."""
        wanted = np.asarray(sums if isinstance(sums, np.ndarray) else list(sums), dtype=np.uint64)
        return int((~np.isin(wanted, self._keys)).sum())

    def require(self, sums: np.ndarray) -> None:
        """See that all examples of a data set are here, before a run begins.

        Raises:
            DataError: some aren't.
        """
        if missing := self.missing(sums):
            raise self._not_here(f"{missing} of {len(sums)} examples of the data set aren't in it")

    def read(self, ids: np.ndarray, weights: np.ndarray) -> BestTokens:
        """The teacher's best tokens at each target of an example.

        Args:
            ids: int [n]; weights: [n], as they come from the token store.

        Raises:
            DataError: the example isn't here.
        """
        key = np.uint64(checksum(ids, weights))
        place = int(np.searchsorted(self._keys, key))
        if place == len(self._keys) or self._keys[place] != key:
            raise self._not_here(f"an example of {len(ids)} tokens isn't in it")
        part, inside = self._places[place].tolist()
        all_ids, logps, offsets = self._parts[part]
        rows = slice(int(offsets[inside]), int(offsets[inside + 1]))
        if rows.stop - rows.start != count_targets(weights):
            raise DataError("its offsets are damaged", where=str(self.folder), fix=_REMAKE)
        return BestTokens(all_ids[rows].astype(np.int64), logps[rows].astype(np.float32))

    def verify(self) -> None:
        """Read every file and compare it with its SHA-256.

        Raises:
            DataError: naming the first that differs.
        """
        for name, entry in _read_manifest(self.folder)["parts"].items():
            for kind, known in entry["files"].items():
                path = self.folder / f"{name}.{kind}"
                with path.open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != known["sha256"]:
                        raise DataError("its content isn't what was written", where=str(path), fix=_REMAKE)

    def _not_here(self, what: str) -> DataError:
        return DataError(
            f"the stored log-probabilities of the teacher belong to other data: {what}",
            where=str(self.folder),
            fix="make them again for this data set; template, tokenizer, --max_length and loss weights count as well",
        )

    def _check_size(self, path: Path, expected: int) -> None:
        size = path.stat().st_size if path.exists() else None
        if size != expected:
            what = "is missing" if size is None else f"has {size} bytes of {expected}"
            raise DataError(f"a file of the teacher's log-probabilities {what}", where=str(path), fix=_REMAKE)


def at_temperature(logps: np.ndarray, stored: float, wanted: float, *, tail: bool) -> np.ndarray:
    """Stored log-probabilities for a loss at another temperature.

    Without the rest they only need dividing, since the loss renormalises them; with it they would need all logits.

    Raises:
        DataError: the temperatures differ, and the rest is to be compared.
    """
    if stored == wanted:
        return logps
    if tail:
        raise DataError(
            f"the teacher's log-probabilities were taken at temperature {stored:g} and the loss has {wanted:g}; "
            "what the other tokens add up to isn't known there",
            where="--temperature",
            fix=f"--temperature {stored:g}, or compare the best tokens only, renormalised",
        )
    return logps * (stored / wanted)


def count_targets(weights: np.ndarray) -> int:
    """Tokens that are trained on: with a weight, and not the first."""
    return int(np.count_nonzero(weights[1:]))


def _mapped(path: Path, dtype: Any) -> np.ndarray:
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        what = "is unfinished, or holds no log-probabilities of a teacher" if folder.is_dir() else "is missing"
        raise DataError(f"the folder {what}", where=str(folder), fix=_REMAKE) from error
    except (OSError, ValueError) as error:
        raise DataError(f"its manifest can't be read: {error}", where=str(path), fix=_REMAKE) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"its format isn't {FORMAT}, which this version reads", where=str(path), fix=_REMAKE)
    return manifest
