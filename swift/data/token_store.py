"""Encoded examples in flat arrays, which a folder of `.npy` files can hold and the operating system can map.

One array of token ids and one of loss weights hold all examples end to end; an index of (start, length, file, line)
says which piece is which example. So a selection, a split or a repetition of rows copies no tokens, and a data set
larger than memory is read from disk page by page.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from swift.core.errors import DataError
from swift.core.files import disk_errors, write_atomic
from swift.data.rows import RowRef

_FORMAT = 1
_ARRAYS = ("input_ids", "loss_weights", "starts", "lengths", "file_ids", "lines")


class EncodedExample(Protocol):
    """What an encoder gives for an example (`swift.data.encode.Encoded`)."""

    input_ids: np.ndarray
    loss_weights: np.ndarray


class TokenDataset:
    """Examples by number: token ids, loss weights, and the row each came from.

    Args:
        input_ids: int32 [tokens], all examples end to end.
        loss_weights: float32 or (when every weight is 0 or 1) uint8 [tokens]; the weight of predicting a token from
            those before it.
        starts: int64 [n], where each example begins.
        lengths: int32 [n], its tokens.
        refs: file number (int32 [n]), line (int64 [n]), and the file names.
    """

    def __init__(
        self,
        input_ids: np.ndarray,
        loss_weights: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        refs: tuple[np.ndarray, np.ndarray, list[str]],
    ) -> None:
        self.input_ids = input_ids
        self.loss_weights = loss_weights
        self.starts = starts
        self.lengths = lengths
        self.file_ids, self.lines, self.files = refs

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int32 [n] and loss weights float32 [n] of one example."""
        start = int(self.starts[index])
        end = start + int(self.lengths[index])
        return self.input_ids[start:end], self.loss_weights[start:end].astype(np.float32, copy=False)

    def ref(self, index: int) -> RowRef:
        """The row that an example came from."""
        return RowRef(self.files[int(self.file_ids[index])], int(self.lines[index]))

    @property
    def num_tokens(self) -> int:
        """Tokens of all examples, repetitions counted."""
        return int(self.lengths.sum(dtype=np.int64))

    def trained_tokens(self) -> int:
        """Tokens with a loss weight above 0, repetitions counted."""
        before = np.concatenate([[0], np.cumsum(self.loss_weights > 0, dtype=np.int64)])
        return int((before[self.starts + self.lengths] - before[self.starts]).sum())

    def select(self, indices: Sequence[int] | np.ndarray) -> TokenDataset:
        """These examples in this order; tokens are shared, not copied."""
        chosen = np.asarray(indices, dtype=np.int64)
        refs = (self.file_ids[chosen], self.lines[chosen], self.files)
        return TokenDataset(self.input_ids, self.loss_weights, self.starts[chosen], self.lengths[chosen], refs)

    def digest(self) -> str:
        """Hash of what training sees: every example's tokens and weights, in order. Independent of paths and caches."""
        state = hashlib.blake2b(digest_size=16)
        for index in range(len(self)):
            ids, weights = self.tokens(index)
            state.update(len(ids).to_bytes(8, "little"))
            state.update(np.ascontiguousarray(ids).tobytes())
            state.update(np.ascontiguousarray(weights).tobytes())
        return state.hexdigest()

    @classmethod
    def from_encoded(cls, examples: Iterable[tuple[EncodedExample, RowRef]]) -> TokenDataset:
        """Collect encoded examples with the rows they came from."""
        ids, weights, lengths, lines, file_ids = [], [], [], [], []
        numbers: dict[str, int] = {}
        for example, ref in examples:
            ids.append(example.input_ids)
            weights.append(example.loss_weights)
            lengths.append(len(example.input_ids))
            lines.append(ref.line)
            file_ids.append(numbers.setdefault(ref.file, len(numbers)))
        return cls.from_parts(
            ids, weights, np.asarray(lengths), (np.asarray(file_ids), np.asarray(lines), list(numbers))
        )

    @classmethod
    def from_parts(
        cls,
        ids: list[np.ndarray],
        weights: list[np.ndarray],
        lengths: np.ndarray,
        refs: tuple[np.ndarray, np.ndarray, list[str]],
    ) -> TokenDataset:
        """From pieces that lie end to end (each piece may hold several examples) and the lengths of the examples."""
        input_ids = np.concatenate([np.empty(0, np.int32), *ids]).astype(np.int32, copy=False)
        flat = np.concatenate([np.empty(0, np.float32), *weights]).astype(np.float32, copy=False)
        if np.array_equal(flat, flat.astype(bool)):
            flat = flat.astype(np.uint8)
        lengths = lengths.astype(np.int32)
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        return cls(input_ids, flat, starts, lengths, (refs[0].astype(np.int32), refs[1].astype(np.int64), refs[2]))

    def save(self, folder: Path) -> None:
        """Write the examples to a folder that must not hold others; the meta file comes last and marks it complete.

        Tokens that no example uses are left out; those that several use are written once.
        """
        compact = self._compact()
        folder.mkdir(parents=True, exist_ok=True)
        for name in _ARRAYS:
            array = np.ascontiguousarray(getattr(compact, name))
            path = folder / f"{name}.npy"
            aside = folder / f".{name}.{os.getpid()}.npy"
            with disk_errors(path, array.nbytes):
                np.save(aside, array)
                aside.replace(path)
        meta = {"format": _FORMAT, "files": compact.files, "examples": len(compact)}
        write_atomic(folder / "meta.json", json.dumps(meta, ensure_ascii=False))

    @classmethod
    def load(cls, folder: Path) -> TokenDataset:
        """Map a saved folder into memory, read-only.

        Raises:
            DataError: the folder is not there, incomplete, or of another format.
        """
        try:
            meta = json.loads((folder / "meta.json").read_text())
            if meta["format"] != _FORMAT:
                raise ValueError(f"its format is {meta['format']}, expected {_FORMAT}")
            maps = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS}
            if len(maps["lengths"]) != meta["examples"]:
                raise ValueError("its arrays don't fit together")
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"the token cache can't be used: {error}", where=str(folder), fix="delete the folder; it is made again"
            ) from error
        refs = (maps["file_ids"], maps["lines"], meta["files"])
        return cls(maps["input_ids"], maps["loss_weights"], maps["starts"], maps["lengths"], refs)

    def _compact(self) -> TokenDataset:
        """The same examples over arrays that hold only the tokens in use."""
        starts, first, inverse = np.unique(self.starts, return_index=True, return_inverse=True)
        lengths = np.asarray(self.lengths)[first].astype(np.int64)
        if int(lengths.sum()) == len(self.input_ids):
            return self
        pieces = [slice(int(start), int(start + length)) for start, length in zip(starts, lengths)]
        packed = (np.cumsum(lengths) - lengths)[inverse]
        return TokenDataset(
            np.concatenate([self.input_ids[piece] for piece in pieces]),
            np.concatenate([self.loss_weights[piece] for piece in pieces]),
            packed,
            self.lengths,
            (self.file_ids, self.lines, self.files),
        )
