"""Documents of a mixture to examples, in the documents' order, however many ranks and processes work on it.

All ranks draw the same documents. Each encodes its share of a window of them, and the windows' results are exchanged;
so every rank holds the same examples in the same order, and nothing behind this file depends on how many ranks there
are. Encoding runs ahead in processes; the position is that of the last document that was taken.
"""

from __future__ import annotations

import base64
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from swift.core.errors import DataError, SwiftError
from swift.data.loading.batch import Examples, Tokens, tokens_of
from swift.data.loading.flow import Document, FileFlow
from swift.data.loading.mixture import Documents, Mixture
from swift.data.loading.stream_ledger import StreamLedger
from swift.data.pipeline import ChunkResult, RowResult, Workers
from swift.data.rows import RowRef
from swift.data.units import NO_NOTES

# Documents that a rank encodes at once.
CHUNK_DOCUMENTS = 32

Exchange = Callable[[Any], list[Any]]


class Item(Protocol):
    """An example on its way into a batch."""

    length: int

    def tokens(self) -> Tokens: ...
    @property
    def ref(self) -> RowRef: ...


class Intake(Protocol):
    """Where a stream loader gets its examples from.

    `next` gives the examples of the next document (there may be none of them), or None where an epoch ends.
    """

    def next(self) -> list[Item] | None: ...
    def state(self) -> dict[str, Any]: ...
    def load_state(self, state: dict[str, Any]) -> None: ...
    def dump(self, item: Item) -> Any: ...
    def load(self, value: Any) -> Item: ...
    def metrics(self) -> dict[str, float]: ...
    def summary(self) -> dict[str, Any] | None: ...
    def nothing_left(self) -> SwiftError: ...
    def close(self) -> None: ...


# --- prepared examples ---


class StoredItem:
    """A prepared example: a number."""

    __slots__ = ("examples", "index", "length")

    def __init__(self, examples: Examples, index: int) -> None:
        self.examples = examples
        self.index = index
        self.length = int(examples.lengths[index])

    def tokens(self) -> Tokens:
        return tokens_of(self.examples, self.index)

    @property
    def ref(self) -> RowRef:
        return self.examples.ref(self.index)


class StoredIntake:
    """Examples that were prepared before step 1, mixed."""

    def __init__(self, documents: Documents, examples: Examples) -> None:
        self.documents = documents
        self.examples = examples

    def next(self) -> list[Item] | None:
        """The next example."""
        document = self.documents.next()
        return None if document is None else [StoredItem(self.examples, document.index)]

    def state(self) -> dict[str, Any]:
        """The position."""
        return self.documents.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a position."""
        self.documents.load_state(state)

    def dump(self, item: Item) -> Any:
        """An example as a JSON value."""
        assert isinstance(item, StoredItem)
        return item.index

    def load(self, value: Any) -> Item:
        """What `dump` gave."""
        return StoredItem(self.examples, value)

    def metrics(self) -> dict[str, float]:
        """Shares in force, where they change."""
        return share_metrics(self.documents.mixture, self.documents.drawn)

    def summary(self) -> dict[str, Any] | None:
        """Nothing: the ledger said it all before step 1."""
        return None

    def nothing_left(self) -> SwiftError:
        """Can't be: prepared data has examples."""
        raise AssertionError("an epoch of prepared examples had none")

    def close(self) -> None:
        """Nothing is open."""


def share_metrics(mixture: Mixture, documents: int) -> dict[str, float]:
    """`mix_share_K` for each source behind that many documents, when a curriculum changes the shares."""
    if len(mixture.shares.steps) < 2:
        return {}
    return {f"mix_share_{k}": share for k, share in enumerate(mixture.shares_behind(documents))}


# --- rows that are read and encoded while training ---


class ReadItem:
    """An example that was just encoded."""

    __slots__ = ("_tokens", "length", "ref")

    def __init__(self, tokens: Tokens, ref: RowRef) -> None:
        self._tokens, self.ref = tokens, ref
        self.length = len(tokens.ids)

    def tokens(self) -> Tokens:
        return self._tokens


@dataclass
class _Window:
    """Neighbouring documents that are encoded side by side.

    Attributes:
        before: state of the documents before the first of them.
        ends_epoch: the epoch ends behind the last of them.
        error: what came while they were drawn; raised when they are needed.
    """

    before: dict[str, Any]
    documents: list[Document]
    ends_epoch: bool
    error: SwiftError | None
    mine: Future[ChunkResult] | None = None

    @property
    def mark(self) -> tuple[int, bool, int]:
        """Equal on all ranks if they drew the same documents; ints have the same hash everywhere."""
        lines = tuple((document.source, document.ref.line) for document in self.documents if document.ref)
        return (len(self.documents), self.ends_epoch, hash(lines))


class FileIntake:
    """Rows of files, encoded ahead.

    Args:
        documents: a mixture of `FileFlow`s.
        workers: run a `StreamTask`.
        ledger: counts rows as they are taken.
        rank, world_size, exchange: this rank's place; `exchange(value)` gives every rank's value, in rank order.
        ahead: windows that are encoded before they are needed.
    """

    def __init__(
        self,
        documents: Documents,
        workers: Workers,
        ledger: StreamLedger,
        nothing_left: Callable[[], SwiftError],
        *,
        rank: int = 0,
        world_size: int = 1,
        exchange: Exchange = lambda value: [value],
        ahead: int = 1,
    ) -> None:
        self.documents = documents
        self.workers = workers
        self.ledger = ledger
        self.nothing_left = nothing_left
        self.rank, self.world_size, self.exchange = rank, world_size, exchange
        self.ahead = max(1, ahead)
        self._queue: deque[_Window] = deque()
        self._window: _Window | None = None
        self._items: list[tuple[RowResult, list[Item], np.ndarray]] = []
        self._results: list[ChunkResult] = []
        self._at = 0  # documents of the window that were taken
        self._skip = 0  # documents that were taken before this process began
        self._end_due = False
        self._taken = 0

    def next(self) -> list[Item] | None:
        """The examples of the next document; None where an epoch ends.

        Raises:
            DataError: a bad row, a file that breaks off, a worker that died.
        """
        while True:
            if self._end_due:
                self._end_due = False
                self.ledger.check_share()
                return None
            if self._window is None:
                self._next_window()
                continue
            if self._at == len(self._items):
                self._close_window()
                continue
            document, (row, items, weights) = self._window.documents[self._at], self._items[self._at]
            self._at += 1
            seen = self._skip > 0
            if seen:
                self._skip -= 1
            else:
                assert document.ref is not None
                self.ledger.take_row(document.source, document.ref, row, weights)
                self._taken += 1
            if self._at == len(self._items):
                self._close_window()
            if not seen:
                return items

    def _close_window(self) -> None:
        window, self._window = self._window, None
        assert window is not None
        if window.documents:
            self.ledger.take_window(window.documents[0].source, self._results)
        self._end_due = window.ends_epoch
        self._items, self._results = [], []

    def _next_window(self) -> None:
        while len(self._queue) < self.ahead:
            self._queue.append(self._draw())
        window = self._queue.popleft()
        self._results = self._exchanged(window)
        items = [item for result in self._results for item in _items(result)]
        self._items = [
            (row, [ReadItem(tokens, document.ref) for tokens in examples if document.ref], flat)
            for document, (row, examples, flat) in zip(window.documents, items, strict=True)
        ]
        self._window, self._at = window, 0

    def _draw(self) -> _Window:
        """Draw the next window's documents, and start to encode this rank's share of them."""
        window = _Window(self.documents.state(), [], False, None)
        try:
            while len(window.documents) < CHUNK_DOCUMENTS * self.world_size:
                document = self.documents.next()
                if document is None:
                    window.ends_epoch = True
                    break
                window.documents.append(document)
            mine = window.documents[self.rank * CHUNK_DOCUMENTS : (self.rank + 1) * CHUNK_DOCUMENTS]
            window.mine = self.workers.submit([(d.source, d.ref, d.raw) for d in mine])
        except SwiftError as error:
            window.error = error
        return window

    def _exchanged(self, window: _Window) -> list[ChunkResult]:
        """Every rank's share of the window; an error of one rank is raised on all, so that none waits for it."""
        result, error = None, window.error
        if error is None and window.mine is not None:
            try:
                result = self.workers.result(window.mine)
            except SwiftError as caught:
                error = caught
        answers = self.exchange((result, error, window.mark))
        for _, failure, _ in answers:
            if failure is not None:
                raise failure
        if any(mark != window.mark for _, _, mark in answers):
            first = window.documents[0].ref if window.documents else None
            raise DataError(
                "the files don't give the same rows on all processes",
                where=f"between {first} and the next {len(window.documents)} rows" if first else "the end of an epoch",
                fix="a file could be read by some of them only: look at the ledger's notes, or use --on_bad_shard stop",
            )
        return [answer for answer, _, _ in answers]

    def state(self) -> dict[str, Any]:
        """The position behind the last document taken, what was counted up to there, and the shards that broke off."""
        if self._window is not None:
            before = self._window.before
        else:
            before = self._queue[0].before if self._queue else self.documents.state()
        place = {"documents": before, "skip": (self._at if self._window else 0) + self._skip}
        return {**place, "end_due": self._end_due, "taken": self._taken, "ledger": self.ledger.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a position."""
        self.documents.load_state(state["documents"])
        self.ledger.load_state(state["ledger"])
        self._queue.clear()
        self._window = None
        self._skip, self._end_due, self._taken = state["skip"], state["end_due"], state["taken"]

    def dump(self, item: Item) -> Any:
        """An example as a JSON value: its tokens travel with the checkpoint, so that no file is searched for them."""
        ids, weights, notes = item.tokens()
        binary = bool(np.array_equal(weights, weights.astype(bool)))
        packed = weights.astype(np.uint8) if binary else weights.astype("<f4")
        ref = [item.ref.file, item.ref.line, item.ref.by_offset]
        kept = {"ids": _text(ids.astype("<i4")), "weights": _text(packed), "binary": binary, "ref": ref}
        return kept | ({"notes": notes.tolist()} if len(notes) else {})

    def load(self, value: Any) -> Item:
        """What `dump` gave."""
        weights = _array(value["weights"], "u1" if value["binary"] else "<f4").astype(np.float32)
        notes = np.array(value.get("notes", ()), dtype=np.float64)
        return ReadItem(Tokens(_array(value["ids"], "<i4").astype(np.int32), weights, notes), RowRef(*value["ref"]))

    def metrics(self) -> dict[str, float]:
        """Rows taken and dropped so far, and the shares in force."""
        dropped = sum(sum(tally.dropped.values()) for tally in self.ledger.sources)
        shards = sum(len(flow.bad) for flow in self.documents.flows if isinstance(flow, FileFlow))
        values = {"data_rows": float(self._taken), "data_rows_dropped": float(dropped)}
        return (
            values
            | ({"data_bad_shards": float(shards)} if shards else {})
            | share_metrics(self.documents.mixture, self._taken)
        )

    def summary(self) -> dict[str, Any] | None:
        """What became of the rows that were taken."""
        for flow in self.documents.flows:
            for name, why in flow.bad.items() if isinstance(flow, FileFlow) else ():
                self.ledger.note(f"{name} was left: {why}")
        return {"words": self.ledger.render(), "ledger": self.ledger.summary()}

    def close(self) -> None:
        """End the processes, and write what was counted."""
        self.summary()
        self.ledger.close()
        self.workers.__exit__()


def _items(result: ChunkResult) -> list[tuple[RowResult, list[Tokens], np.ndarray]]:
    """Each row of a result with its examples, and all its weights.

    Examples are copies: one that waits in an open row would else hold the tokens of all rows it was encoded with.
    """
    rows, at = [], 0
    weights = result.loss_weights.astype(np.float32, copy=False)
    notes = iter(result.notes or [])
    for row in result.rows:
        start, examples = at, []
        for length in row.lengths:
            piece = slice(at, at + length)
            examples.append(Tokens(result.input_ids[piece].copy(), weights[piece].copy(), next(notes, NO_NOTES)))
            at += length
        rows.append((row, examples, weights[start:at]))
    return rows


def _text(array: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(array.tobytes(), 1)).decode()


def _array(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=dtype)
