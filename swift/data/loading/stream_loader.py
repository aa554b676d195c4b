"""Batches of documents that come one after another: mixed, streamed, packed as they come.

Every rank holds the same units (examples, or packed rows) in the same order and takes its share of each step, so a
checkpoint is the same on all of them and can be continued by any number of them. The state is the position in the
documents (a few integers), the examples in rows that are still open, and those of rows that no step has taken yet.

This file knows nothing of files or mixing: an `Intake` gives it the examples of one document after another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from swift.core.errors import DataError
from swift.data.loading.batch import Annotate, Batch, Layout, collate, make_batch, mismatch, with_previous
from swift.data.loading.loader import Outlook, deal
from swift.data.loading.packing import OPEN_ROWS, OpenRows
from swift.data.loading.stream_intake import Intake, Item, StoredIntake, StoredItem
from swift.data.units import Unit


class StreamLoader:
    """Deals units out to steps, micro-batches and ranks, as `TrainLoader` does, while documents come in.

    A step takes the next `global_units` units; at the end of an epoch open rows are closed, and the last step takes
    what is left. With `group_by_length` the units of a step are sorted by length before they are dealt out.

    Args:
        intake: gives examples; the same on all ranks.
        identity: what decides the order of documents; the loader adds what decides the units.
        longest: no example has more tokens.
        outlook: what is known of an epoch.
        open_rows: packed rows that are filled side by side.
        annotate: adds facts to batches; only for examples that were prepared.
        facts: what was decided when the run began and must stay so; saved with the state.
    """

    def __init__(
        self,
        intake: Intake,
        layout: Layout,
        *,
        identity: tuple[Any, ...],
        longest: int,
        outlook: Outlook,
        rank: int = 0,
        world_size: int = 1,
        facts: dict[str, Any] | None = None,
        open_rows: int = OPEN_ROWS,
        annotate: Annotate | None = None,
    ) -> None:
        self._examples = intake.examples if isinstance(intake, StoredIntake) else None
        self._annotate = annotate
        self.intake = intake
        self.layout = layout
        self.facts = facts or {}
        self._longest = longest
        self.rank, self.world_size = rank, world_size
        self.epoch = self.consumed = 0
        self._identity = identity
        self._outlook = outlook
        self._ready: deque[list[Item]] = deque()
        self._open: OpenRows[Item] = OpenRows(layout.packing_length or 1, open_rows)
        self._shares: Sequence[int] = ()
        self._ending = False  # the epoch's documents are through; its last units are being taken

    @property
    def global_units(self) -> int:
        """Units in one optimizer step over all ranks and micro-batches."""
        return self.layout.units_per_micro_batch * self.layout.micro_batches * self.world_size

    @property
    def identity(self) -> tuple[Any, ...]:
        """What decides which units come, and in which order."""
        return (*self._identity, self.layout.packing_length, self.layout.shuffle)

    @property
    def largest_micro_batch(self) -> int:
        """Tokens of the largest micro-batch that can come, padding included."""
        return self.layout.units_per_micro_batch * (self.layout.packing_length or self._longest)

    def next_step(self) -> list[Batch]:
        """This rank's micro-batches of the next step; moves on behind it.

        Raises:
            DataError: a row, a file or a process stops the run; or an epoch had nothing to train on.
        """
        units = self._take()
        if self.layout.group_by_length:
            units.sort(key=lambda unit: -max(self._length(item) for item in unit))
        place = (self.layout, self.rank, self.world_size, self._shares)
        if not self.layout.companions or self._examples is not None:
            return [self._batch(chunk) for chunk in deal(units, *place)]
        mine = deal(with_previous(units), *place)
        batches = [self._batch([item for item, _ in chunk]) for chunk in mine]
        for batch, chunk in zip(batches, mine, strict=True):
            mixed = [mismatch(item.tokens(), other.tokens(), self.layout.max_length) for item, other in chunk]
            batch.companion = make_batch(mixed, batch.refs, self.layout)
        return batches

    def _batch(self, items: list[Item]) -> Batch:
        if self._examples is not None:
            indices = [item.index for item in items if isinstance(item, StoredItem)]
            return collate(self._examples, indices, self.layout, self._annotate)
        return make_batch([item.tokens() for item in items], [item.ref for item in items], self.layout)

    def _length(self, item: Item) -> int:
        """Tokens that an example takes in a row."""
        written_out = self.layout.units and not self.layout.share_prefix
        return Unit.read(item.tokens().notes).written_out if written_out else item.length

    def _fitting_length(self, item: Item) -> int:
        length, room = self._length(item), self.layout.packing_length
        if length > room:
            raise DataError(
                f"an example has {length} tokens in all, and packed rows have {room}",
                where=str(item.ref),
                fix=f"--packing_length {length} or more, or shorten the row",
            )
        return length

    def set_shares(self, shares: Sequence[int]) -> None:
        """Deal so many micro-batches of a step to each rank from the next step on."""
        self._shares = tuple(shares)

    def _take(self) -> list[list[Item]]:
        """The next step's units. One more is looked for, to know whether this was the epoch's last step."""
        wanted = self.global_units
        while len(self._ready) <= wanted and not self._ending:
            self._draw()
        units = [self._ready.popleft() for _ in range(min(wanted, len(self._ready)))]
        if not units:
            raise self.intake.nothing_left()
        self.consumed += len(units)
        if self._ending and not self._ready:
            self.epoch, self.consumed, self._ending = self.epoch + 1, 0, False
        return units

    def _draw(self) -> None:
        items = self.intake.next()
        if items is None:
            self._ready.extend(self._open.flush())
            self._ending = True
        elif self.layout.packing_length:
            for item in items:
                self._ready.extend(self._open.add(self._fitting_length(item), item))
        else:
            self._ready.extend([item] for item in items)

    def state(self) -> dict[str, Any]:
        """The position behind the last step that `next_step` gave; plain JSON values, equal on all ranks."""
        dump = self.intake.dump
        return {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "ending": self._ending,
            "ready": [[dump(item) for item in unit] for unit in self._ready],
            "open": [[number, [dump(item) for item in row]] for number, row in self._open.rows()],
            "following": self._open.following,
            "intake": self.intake.state(),
            "facts": self.facts,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a position, also one of another world size, batch size or accumulation.

        Raises:
            DataError: the data aren't what they were.
        """
        self.epoch, self.consumed = state["epoch"], state["consumed"]
        self._ending = state["ending"]
        load = self.intake.load
        self._ready = deque([load(value) for value in unit] for unit in state["ready"])
        rows = [(number, [load(value) for value in row]) for number, row in state["open"]]
        sized = [(number, [(self._length(item), item) for item in row]) for number, row in rows]
        self._open.restore(sized, state["following"])
        self.intake.load_state(state["intake"])

    def outlook(self, epoch: int) -> Outlook:
        """What is known of an epoch before it is run."""
        return self._outlook

    def metrics(self) -> dict[str, float]:
        """What there is to log beside the loss."""
        return self.intake.metrics()

    def summary(self) -> dict[str, Any] | None:
        """What became of the rows: `words` for the user, and `ledger`, the counts."""
        return self.intake.summary()

    def close(self) -> None:
        """End the processes that encode, and finish the ledger."""
        self.intake.close()
