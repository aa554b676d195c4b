"""Encoded examples by number, whether they are in memory or in mapped shards.

A data set is a list of shards (`token_shards`) and, where examples are chosen, reordered or repeated, their numbers.
So a selection, a split or a repetition of rows copies no tokens, and a data set larger than memory is read from disk
page by page: what is held is 4 bytes an example, and 8 more for a selection.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from swift.data.rows import RowRef
from swift.data.token_files.shards import REF, Examples, Shard, in_memory, open_folder
from swift.data.token_files.writer import ShardWriter, write_view
from swift.data.units import NO_NOTES

_BATCH = 1024


class EncodedExample(Protocol):
    """What an encoder gives for an example (`swift.data.encoding.encode.Encoded`)."""

    input_ids: np.ndarray
    loss_weights: np.ndarray
    notes: np.ndarray | None


class TokenDataset:
    """Examples by number: token ids, loss weights, and the row each came from.

    Args:
        shards: the shards with, for each, the names of the files that its refs number.
        order: int64, the chosen examples (counted over all shards) in their order; None for each once in turn.

    Attributes:
        lengths: int32 [n], tokens of each example.
    """

    def __init__(self, shards: Sequence[tuple[Shard, list[str]]], order: np.ndarray | None = None) -> None:
        self.shards = list(shards)
        self.order = order
        self._bounds = np.cumsum([0, *(len(shard) for shard, _ in self.shards)], dtype=np.int64)
        lengths = [np.empty(0, np.int32), *(shard.lengths for shard, _ in self.shards)]
        whole = lengths[1] if len(self.shards) == 1 else np.concatenate(lengths)
        self.lengths: np.ndarray = whole if order is None else whole[order]

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int32 [n] and loss weights float32 [n] of one example.

        Raises:
            DataError: a shard on disk is damaged there.
        """
        shard, _, inside = self._locate(index)
        return shard.example(inside)

    def notes(self, index: int) -> np.ndarray:
        """What is known of one example beside its tokens (`swift.data.units`): float64 [any], empty for most."""
        shard, _, inside = self._locate(index)
        return shard.notes(inside)

    def ref(self, index: int) -> RowRef:
        """The row that an example came from."""
        shard, files, inside = self._locate(index)
        ref = shard.refs[inside]
        line = int(ref["line"])
        return RowRef(files[int(ref["file"])], line if line >= 0 else ~line, line < 0)

    def _locate(self, index: int) -> tuple[Shard, list[str], int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        place = int(self.order[index]) if self.order is not None else index % len(self)
        number = int(np.searchsorted(self._bounds, place, side="right")) - 1
        shard, files = self.shards[number]
        return shard, files, place - int(self._bounds[number])

    @property
    def places(self) -> np.ndarray:
        """int64 [n], the number of each example over all shards; equal for repetitions of one."""
        return np.arange(len(self), dtype=np.int64) if self.order is None else self.order

    def row_numbers(self) -> np.ndarray:
        """int64 [n], equal for examples of the same row (neighbours in a shard with the same ref)."""
        changes = [np.zeros(0, bool)]
        last: tuple[Any, list[str]] | None = None
        for shard, files in self.shards:
            new = np.ones(len(shard), bool)
            new[1:] = shard.refs[1:] != shard.refs[:-1]
            if len(shard) and last is not None and last[1] is files:  # a row may reach over the end of a shard
                new[0] = shard.refs[0] != last[0]
            last = (shard.refs[-1], files) if len(shard) else last
            changes.append(new)
        numbers = np.cumsum(np.concatenate(changes), dtype=np.int64) - 1
        return numbers if self.order is None else numbers[self.order]

    @property
    def num_tokens(self) -> int:
        """Tokens of all examples, repetitions counted."""
        return int(self.lengths.sum(dtype=np.int64))

    def trained_tokens(self) -> int:
        """Tokens with a loss weight above 0, repetitions counted."""
        if self.order is None:
            return sum(shard.trained() for shard, _ in self.shards)
        numbers = np.searchsorted(self._bounds, self.order, side="right") - 1
        return sum(
            shard.trained(self.order[numbers == number] - self._bounds[number])
            for number, (shard, _) in enumerate(self.shards)
        )

    def select(self, indices: Sequence[int] | np.ndarray) -> TokenDataset:
        """These examples in this order; tokens are shared, not copied."""
        chosen = np.asarray(indices, dtype=np.int64)
        return TokenDataset(self.shards, chosen if self.order is None else self.order[chosen])

    @classmethod
    def join(cls, datasets: Sequence[TokenDataset]) -> TokenDataset:
        """The examples of all, one data set after the other."""
        shards = [pair for dataset in datasets for pair in dataset.shards]
        if all(dataset.order is None for dataset in datasets):
            return cls(shards)
        starts = np.cumsum([0, *(dataset._bounds[-1] for dataset in datasets)])
        return cls(shards, np.concatenate([d.places + start for d, start in zip(datasets, starts)]))

    def digest(self) -> str:
        """Hash of what training sees: every example's tokens and weights, in order. Independent of paths, shards and
        caches; made of the examples' checksums, so no token is read."""
        sums = np.concatenate([np.zeros(0, np.uint64), *(shard.sums for shard, _ in self.shards)])
        state = hashlib.blake2b(digest_size=16)
        for array, dtype in ((sums, "<u8"), (self.lengths, "<i4")):
            chosen = array[self.order] if self.order is not None and array is sums else array
            state.update(np.ascontiguousarray(chosen, dtype=dtype).tobytes())
        return state.hexdigest()

    @classmethod
    def from_encoded(cls, examples: Iterable[tuple[EncodedExample, RowRef]]) -> TokenDataset:
        """Collect encoded examples, with the rows they came from, in memory."""
        pieces: list[Examples] = []
        numbers: dict[str, int] = {}
        for example, ref in examples:
            row = ref_array([ref], numbers)
            lengths = np.array([len(example.input_ids)])
            notes = [example.notes] if example.notes is not None else None
            pieces.append(Examples(example.input_ids, example.loss_weights, lengths, row, notes))
        return cls.from_examples(pieces, list(numbers))

    @classmethod
    def from_examples(cls, pieces: Sequence[Examples], files: list[str]) -> TokenDataset:
        """From pieces with some examples each, in memory."""
        return cls([(in_memory(_joined(pieces)), files)])

    def save(self, folder: Path, *, vocab_size: int | None = None, meta: dict[str, Any] | None = None) -> None:
        """Write the examples to a folder; the manifest, with `meta` in it, comes last and marks it complete.

        Tokens that no example uses are left out; those that several use are written once.
        """
        places, order = self.places, None
        if self.order is not None:
            unique, inverse = np.unique(places, return_inverse=True)
            if not np.array_equal(unique, places):
                places, order = unique, inverse
        source = self if order is None else TokenDataset(self.shards, places)
        files: dict[str, int] = {}
        writer = ShardWriter(folder, vocab_size)
        try:
            for start in range(0, len(places), _BATCH):
                writer.add(source._batch(range(start, min(len(places), start + _BATCH)), files))
            counts = {"tokens": self.num_tokens, "trained_tokens": self.trained_tokens(), "examples": len(self)}
            writer.close(list(files), counts | (meta or {}), order)
        finally:
            writer.drop()

    def _batch(self, indices: range, files: dict[str, int]) -> Examples:
        pieces = []
        for index in indices:
            ids, weights = self.tokens(index)
            ref = self.ref(index)
            row = ref_array([ref], files)
            notes = self.notes(index)
            pieces.append(Examples(ids, weights, np.array([len(ids)]), row, [notes] if len(notes) else None))
        return _joined(pieces)

    def save_view(self, folder: Path, meta: dict[str, Any] | None = None) -> None:
        """Write which examples these are to a folder, and copy no token: all shards must lie in finished folders, which
        keep their place relative to this one."""
        counts = {"examples": len(self), "tokens": self.num_tokens, "trained_tokens": self.trained_tokens()}
        counts["rows"] = len(np.unique(self.row_numbers()))
        shards = [(shard.path, files) for shard, files in self.shards if shard.path is not None]
        write_view(folder, shards, self.order, counts | (meta or {}))

    @classmethod
    def load(cls, folder: Path) -> TokenDataset:
        """Map a saved folder into memory, read-only.

        Raises:
            DataError: the folder is not there, incomplete, damaged, or of another format.
        """
        opened = open_folder(folder)
        return cls([(shard, opened.files_of(shard)) for shard in opened.shards], opened.order)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Tokens and weights of each example in turn."""
        return (self.tokens(index) for index in range(len(self)))


def ref_array(refs: Iterable[RowRef], files: dict[str, int]) -> np.ndarray:
    """REF [n]; `files` numbers the files and gets those it lacks."""
    lines = ((~r.line if r.by_offset else r.line, files.setdefault(r.file, len(files))) for r in refs)
    return np.array(list(lines), dtype=REF)


def _joined(pieces: Sequence[Examples]) -> Examples:
    return Examples(
        np.concatenate([np.empty(0, np.int32), *(piece.ids for piece in pieces)]),
        np.concatenate([np.empty(0, np.float32), *(piece.weights for piece in pieces)]),
        np.concatenate([np.empty(0, np.int64), *(piece.lengths for piece in pieces)]),
        np.concatenate([np.empty(0, REF), *(piece.refs for piece in pieces)]),
        joined_notes([piece.notes for piece in pieces], [len(piece.lengths) for piece in pieces]),
    )


def joined_notes(notes: Sequence[list[np.ndarray] | None], counts: Sequence[int]) -> list[np.ndarray] | None:
    """The notes of all examples of several pieces, which have so many examples; None when none has any."""
    if all(each is None for each in notes):
        return None
    return [note for each, count in zip(notes, counts, strict=True) for note in each or [NO_NOTES] * count]
