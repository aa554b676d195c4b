"""One source as an endless supply of documents: pass after pass, each pass in an order of its own.

A `FileFlow` reads files while training: files in shuffled order, several of them open at once and read in turn, and
blocks of documents shuffled among each other. A `StoredFlow` deals out examples that were prepared before. Both are
functions of (seed, epoch, source, pass), and both can be left and taken up again by a few integers: nothing is read
again but the block of documents that was being dealt out.

This file knows nothing of tokens, of mixing or of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from swift.core.errors import DataError
from swift.data.files import DataFile, stamp_of
from swift.data.loading.order import FeistelOrder
from swift.data.readers import EmptyFileError, FileTally, Position, RawRow, RowStream
from swift.data.rows import RowRef

# Files of a source that are read in turn: their rows mix even if each file holds rows of one kind only.
OPEN_SHARDS = 8


@dataclass(slots=True)
class Document:
    """What a flow deals out.

    Attributes:
        source: number of the source.
        ref: where it comes from; raw: what the reader gave. None, None for a prepared example, which has `index`.
    """

    source: int
    ref: RowRef | None
    raw: Any
    index: int = -1


class Flow(Protocol):
    """A source of documents.

    Attributes:
        size: documents in a pass, where known.
    """

    size: int | None

    def begin(self, epoch: int, turn: int) -> None: ...
    def next(self) -> Document | None: ...
    def state(self) -> dict[str, Any]: ...
    def load_state(self, state: dict[str, Any]) -> None: ...


class StoredFlow:
    """Prepared examples, by their numbers.

    Args:
        source: its number.
        members: how many, or (for a difficulty bin) which examples.
        first: number of the first example, when `members` is a count.
    """

    def __init__(
        self, source: int, members: int | Sequence[int] | np.ndarray, *, first: int, seed: int, shuffle: bool
    ) -> None:
        self.source = source
        self.members: Sequence[int] | np.ndarray = (
            range(first, first + members) if isinstance(members, int) else members
        )
        self.size: int | None = len(self.members)
        self._seed, self._shuffle = seed, shuffle
        self._key = (0, 0)
        self._place = 0
        self._block: list[int] = []
        self._block_start = 0

    def begin(self, epoch: int, turn: int) -> None:
        """Start a pass."""
        self._key, self._place, self._block, self._block_start = (epoch, turn), 0, [], 0

    def next(self) -> Document | None:
        """The next document of the pass; None behind the last."""
        inside = self._place - self._block_start
        if inside >= len(self._block):
            self._block_start, inside = self._place, 0
            end = min(len(self.members), self._place + 4096)
            if end <= self._place:
                return None
            epoch, turn = self._key
            order = FeistelOrder(len(self.members), self._seed, epoch, self.source, turn)
            numbers = order[self._place : end].tolist() if self._shuffle else range(self._place, end)
            self._block = [int(self.members[n]) for n in numbers]
        self._place += 1
        return Document(self.source, None, None, self._block[inside])

    def state(self) -> dict[str, Any]:
        """The position."""
        return {"epoch": self._key[0], "turn": self._key[1], "place": self._place}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a position."""
        self.begin(state["epoch"], state["turn"])
        self._place = self._block_start = state["place"]


@dataclass
class Reading:
    """How files are read while training.

    Attributes:
        block: documents that are shuffled among each other.
        skip_bad: go on with the next file when one breaks off.
        stamps: what each file's stamp was when the run began, by place.
    """

    seed: int
    shuffle: bool
    block: int
    skip_bad: bool
    stamps: dict[str, str]


class _Slot:
    """A shard that is being read."""

    def __init__(self, place: int, file: DataFile, at: Position) -> None:
        self.place = place
        self.file = file
        self.stream = RowStream(file, FileTally(), at)
        self.rows: Iterator[RawRow] = iter(self.stream)

    def state(self) -> list[int]:
        position = self.stream.position
        return [self.place, position.row, position.line, position.offset]


class FileFlow:
    """The rows of files, read while they are needed.

    Args:
        source: its number.
        shards: files, or pieces of files, in their order.
        limit: documents in a pass; None for all. With a limit every pass takes the same documents, those that come
            first in the order of the seed; above the number of rows they repeat.
        size: documents in a pass, if somebody counted them.

    Attributes:
        bad: shards that broke off and were left (with `skip_bad`), and why.

    The state is where each open shard stood when the current block began, and the place in the block.
    """

    def __init__(
        self, source: int, shards: Sequence[DataFile], reading: Reading, *, limit: int | None, size: int | None
    ) -> None:
        self.source = source
        self.shards = list(shards)
        self.reading = reading
        self.limit = limit
        self.size = size
        self.bad: dict[str, str] = {}
        self._width = OPEN_SHARDS if reading.shuffle else 1
        self.begin(0, 0)

    def begin(self, epoch: int, turn: int) -> None:
        """Start a pass."""
        self._key = (epoch, turn)
        self._slots: list[_Slot] = []
        self._opened = self._cursor = self._number = self._given = 0
        self._rows: list[Document] = []
        self._place = 0
        self._order = self._shard_order()
        self._start = self._block_state()

    def _shard_order(self) -> list[int]:
        if not self.reading.shuffle:
            return list(range(len(self.shards)))
        key = (0, 0) if self.limit is not None else self._key
        return FeistelOrder(len(self.shards), self.reading.seed, key[0], self.source, key[1], 1)[:].tolist()

    def next(self) -> Document | None:
        """The next document of the pass; None behind the last.

        Raises:
            DataError: a file can't be read on, or isn't what it was when the run began.
        """
        if self._place >= len(self._rows) and not self._fill():
            return None
        self._place += 1
        return self._rows[self._place - 1]

    def state(self) -> dict[str, Any]:
        """The position."""
        return {**self._start, "place": self._place, "bad": self.bad}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a position: the shards are opened where they stood, and the block in hand is read again."""
        self._key = (state["epoch"], state["turn"])
        self.bad = dict(state["bad"])
        self._order = self._shard_order()
        self._opened, self._cursor = state["opened"], state["cursor"]
        self._number, self._given = state["number"], state["given"]
        self._slots = [self._slot(place, Position(row, line, offset)) for place, row, line, offset in state["slots"]]
        self._rows, self._place = [], 0
        self._start = self._block_state()
        if state["place"]:
            self._fill()
            self._place = state["place"]

    def _block_state(self) -> dict[str, Any]:
        return {
            "epoch": self._key[0],
            "turn": self._key[1],
            "slots": [slot.state() for slot in self._slots],
            "opened": self._opened,
            "cursor": self._cursor,
            "number": self._number,
            "given": self._given,
        }

    def _fill(self) -> bool:
        """Read the next block and shuffle it; False when nothing is left."""
        self._start = self._block_state()
        size = self.reading.block
        if self.limit is not None:
            size = min(size, self.limit - self._given)
        rows: list[Document] = []
        while len(rows) < size and (row := self._row()) is not None:
            rows.append(row)
        self._given += len(rows)
        if self.reading.shuffle:
            order = FeistelOrder(len(rows), self.reading.seed, self._key[0], self.source, self._key[1], 2, self._number)
            rows = [rows[i] for i in order]
        self._number += 1
        self._rows, self._place = rows, 0
        return bool(rows)

    def _row(self) -> Document | None:
        """A row of the shard whose turn it is."""
        while self._open():
            self._cursor %= len(self._slots)
            slot = self._slots[self._cursor]
            try:
                line, raw = next(slot.rows)
            except StopIteration:
                self._leave(slot)
                continue
            except EmptyFileError as error:
                if len(self.shards) == 1:
                    raise
                self._bad(slot, error, "empty: ")
                continue
            except DataError as error:
                if not self.reading.skip_bad:
                    raise self._with_remedy(error) from error
                self._bad(slot, error)
                continue
            self._cursor += 1
            return Document(self.source, slot.file.ref(line), raw)
        return None

    def _open(self) -> bool:
        """See to it that as many shards are open as may be; False when all are through."""
        while len(self._slots) < self._width:
            if self._opened and self._opened % len(self._order) == 0 and not self._again():
                break
            self._slots.append(self._slot(self._order[self._opened % len(self._order)], Position()))
            self._opened += 1
        return bool(self._slots)

    def _again(self) -> bool:
        """Whether the shards are read once more: for a limit above the rows there are, when all of them are through."""
        return self.limit is not None and not self._slots and self._given > 0

    def _slot(self, place: int, at: Position) -> _Slot:
        file = self.shards[place]
        known = self.reading.stamps.get(file.place)
        if known is not None and stamp_of(file.location, fresh=True) != known:
            raise DataError(
                "the file was changed since the run began, so the rows to come aren't known",
                where=file.name,
                fix="put the file back as it was, or start a new run (from these weights: --resume_only_model true)",
            )
        return _Slot(place, file, at)

    def _leave(self, slot: _Slot) -> None:
        self._slots.remove(slot)

    def _bad(self, slot: _Slot, error: DataError, prefix: str = "") -> None:
        self.bad.setdefault(slot.file.name, f"{prefix}{error.message} ({error.where})")
        self._leave(slot)

    def _with_remedy(self, error: DataError) -> DataError:
        skip = "--on_bad_shard skip counts it and goes on with the next file"
        return DataError(error.message, where=error.where, fix=f"{error.fix}; or {skip}" if error.fix else skip)
