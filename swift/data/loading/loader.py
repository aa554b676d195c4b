"""Which examples a step trains on, when all examples are at hand before step 1.

The order of an epoch is a function of (seed, epoch) alone. A position in it is one number, `consumed`: how many units
(examples, or packed rows) of this epoch were used. So the state of the loader is two integers, any step can be reached
without reading what came before, and neither world size, micro-batch size nor accumulation changes which examples share
an optimizer step. Mixed and streamed data have a loader of their own (`stream_loader`); the trainer sees only the
protocol `Loader`.

This file knows nothing of tensors (`batch`) or models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from swift.data.loading.batch import Annotate, Batch, Examples, Layout, collate
from swift.data.loading.order import ORDER_VERSION, FeistelOrder
from swift.data.loading.packing import pack

# Examples are sorted by length inside windows of this many steps when they are grouped by length.
GROUPING_WINDOW_STEPS = 50


T = TypeVar("T")


@dataclass(frozen=True)
class Outlook:
    """What can be said of an epoch before it is run.

    Attributes:
        units: examples or packed rows in it; None where nobody can know. exact: whether that is no estimate.
        examples, tokens: in it, as far as known.
        efficiency: share of the batches' slots that hold tokens.
        words: how the units are known, for the user, where they are estimated.
    """

    units: int | None
    exact: bool
    examples: int | None
    tokens: int | None
    efficiency: float | None
    words: str = ""


class Loader(Protocol):
    """What the trainer takes its batches from.

    Attributes:
        epoch, consumed: position of the next step: the epoch, from 0, and the units of it that were used.
        largest_micro_batch: no micro-batch has more tokens, padding included.
        identity: what decides the order; a resumed run must have the same.
    """

    layout: Layout
    epoch: int
    consumed: int

    @property
    def global_units(self) -> int: ...
    @property
    def largest_micro_batch(self) -> int: ...
    @property
    def identity(self) -> tuple[Any, ...]: ...
    def next_step(self) -> list[Batch]: ...
    def set_shares(self, shares: Sequence[int]) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def load_state(self, state: dict[str, Any]) -> None: ...
    def outlook(self, epoch: int) -> Outlook: ...
    def metrics(self) -> dict[str, float]: ...
    def summary(self) -> dict[str, Any] | None: ...
    def close(self) -> None: ...


def deal(
    units: Sequence[list[T]], layout: Layout, rank: int, world_size: int, shares: Sequence[int] = ()
) -> list[list[T]]:
    """The micro-batches of a step that fall to a rank: each takes some units, ranks take turns.

    All ranks get the same number of them, at least one; the last ones may be empty.

    Args:
        shares: micro-batches of each rank, where they are to differ; a rank has more turns then, and an empty
            micro-batch only where it would have none. The micro-batches are the same ones.
    """
    size = layout.units_per_micro_batch
    chunks = [units[i : i + size] for i in range(0, len(units), size)]
    if shares:
        turns = turns_of(shares)
        mine = [chunk for n, chunk in enumerate(chunks) if turns[n % len(turns)] == rank] or [[]]
        return [[item for unit in chunk for item in unit] for chunk in mine]
    rounds = max(1, -(-len(chunks) // world_size))
    numbers = [turn * world_size + rank for turn in range(rounds)]
    return [[item for unit in chunks[n] for item in unit] if n < len(chunks) else [] for n in numbers]


def turns_of(shares: Sequence[int]) -> list[int]:
    """Which rank's turn it is, for as many turns as the shares add up to; each rank's are spread evenly."""
    turns = [((turn + 0.5) / share, rank) for rank, share in enumerate(shares) for turn in range(share)]
    return [rank for _, rank in sorted(turns)]


class TrainLoader:
    """Deals an epoch's units out to steps, micro-batches and ranks.

    A step takes the next `global_units` units of the epoch; the last step of an epoch takes what is left, so every
    example is seen exactly once. Micro-batches go to ranks in turn, and all ranks run the same number of them.

    Args:
        ahead: steps whose tensors are made, in as many threads as `workers`, while others are trained on. They change
            nothing but the time: a step's tensors are a function of its position.
        annotate: adds facts to batches.

    Without packing and grouping, nothing is worked out before the first step, however many examples there are. Packed
    rows (best fit over all examples of the epoch) and windows of like length are made when an epoch begins: about
    0.8 s for a million examples.
    """

    def __init__(
        self,
        examples: Examples,
        layout: Layout,
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        ahead: int = 0,
        annotate: Annotate | None = None,
    ) -> None:
        self.examples = examples
        self._annotate = annotate
        self.layout = layout
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = self.consumed = 0
        self._shares: Sequence[int] = ()
        self._order: tuple[int, Sequence[Any]] = (-1, ())
        self._ahead = ahead if workers else 0
        self._pool = ThreadPoolExecutor(workers, "batches") if self._ahead else None
        self._coming: dict[tuple[int, int], Future[list[Batch]]] = {}

    @property
    def global_units(self) -> int:
        """Units in one optimizer step over all ranks and micro-batches."""
        return self.layout.units_per_micro_batch * self.layout.micro_batches * self.world_size

    @property
    def largest_micro_batch(self) -> int:
        """Tokens of the largest micro-batch that can come, padding included."""
        size, lengths = self.layout.units_per_micro_batch, self.examples.lengths
        if self.layout.packing_length:
            return size * self.layout.packing_length
        longest = np.sort(lengths)[-size:]
        return int(longest.sum()) if self.layout.padding_free else size * int(longest[-1])

    @property
    def identity(self) -> tuple[Any, ...]:
        """Only grouping by length makes the order depend on how many examples a step takes; and only it and packing
        make it depend on how long units are, which is less where their sequences share the prompt."""
        layout = self.layout
        grouped = layout.group_by_length and self.global_units
        order = (ORDER_VERSION, self.seed, layout.packing_length, layout.shuffle, grouped)
        return (*order, "shared") if layout.share_prefix and (layout.packing_length or grouped) else order

    # --- the position ---

    def next_step(self) -> list[Batch]:
        """This rank's micro-batches of the next step; moves on behind it."""
        here = (self.epoch, self.consumed)
        if self._pool is None:
            batches = self.batches(*here)
        else:
            batches = self._prepared(here).result()
        self.epoch, self.consumed = self._after(here)
        return batches

    def _after(self, place: tuple[int, int]) -> tuple[int, int]:
        epoch, consumed = place[0], place[1] + self.global_units
        return (epoch + 1, 0) if consumed >= self.num_units(epoch) else (epoch, consumed)

    def _prepared(self, here: tuple[int, int]) -> Future[list[Batch]]:
        assert self._pool is not None
        self._ordered(here[0])  # in this thread, once
        place = here
        for _ in range(self._ahead + 1):
            if place[0] != here[0]:  # the next epoch's rows are packed when it begins
                break
            if place not in self._coming:
                self._coming[place] = self._pool.submit(self.batches, *place)
            place = self._after(place)
        return self._coming.pop(here)

    def set_shares(self, shares: Sequence[int]) -> None:
        """Deal so many micro-batches of a step to each rank from the next step on; what was made ahead is dropped."""
        self._shares = tuple(shares)
        for future in self._coming.values():
            future.cancel()
        self._coming.clear()

    def state(self) -> dict[str, Any]:
        """The position behind the last step that `next_step` gave."""
        return {"epoch": self.epoch, "consumed": self.consumed}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a position, also one of another world size, batch size or accumulation."""
        self.epoch, self.consumed = int(state["epoch"]), int(state["consumed"])
        self._coming.clear()

    def metrics(self) -> dict[str, float]:
        """Nothing to report: the ledger said it all before step 1."""
        return {}

    def summary(self) -> dict[str, Any] | None:
        """Nothing either, for the same reason."""
        return None

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    # --- the order ---

    def units(self, epoch: int, start: int = 0, stop: int | None = None) -> list[list[int]]:
        """A stretch of the epoch's units in order; each is a list of examples (one, unless packed)."""
        stop = self.num_units(epoch) if stop is None else min(stop, self.num_units(epoch))
        order = self._ordered(epoch)
        if self.layout.packing_length:
            rows, places = order
            return [rows[i] for i in (places[start:stop].tolist() if self.layout.shuffle else range(start, stop))]
        return [[i] for i in np.asarray(order[start:stop]).tolist()]

    def _ordered(self, epoch: int) -> Any:
        if self._order[0] != epoch:
            self._order = (epoch, self._build(epoch))
        return self._order[1]

    def _build(self, epoch: int) -> Any:
        """The examples' order; when packed, the rows and their order."""
        n = len(self.examples)
        shuffled = FeistelOrder(n, self.seed, epoch)
        if self.layout.packing_length:
            order = shuffled[:] if self.layout.shuffle else np.arange(n)
            rows = pack(self.examples.lengths, order, self.layout.packing_length)
            return rows, FeistelOrder(len(rows), self.seed, epoch, 1)
        if self.layout.group_by_length:
            return self._grouped(shuffled[:] if self.layout.shuffle else np.arange(n), epoch)
        return shuffled if self.layout.shuffle else range(n)

    def _grouped(self, order: np.ndarray, epoch: int) -> np.ndarray:
        """Sort windows of the order by length, then shuffle the windows' steps, longest step of the epoch first.

        The longest first shows a lack of memory at once rather than after hours.
        """
        step = self.global_units
        lengths = self.examples.lengths
        steps: list[np.ndarray] = []
        for start in range(0, len(order), GROUPING_WINDOW_STEPS * step):
            window = order[start : start + GROUPING_WINDOW_STEPS * step]
            window = window[np.argsort(-lengths[window], kind="stable")]
            steps += [window[i : i + step] for i in range(0, len(window), step)]
        whole = [s for s in steps if len(s) == step]
        rest = [s for s in steps if len(s) != step]  # only the last window can leave a short step
        if self.layout.shuffle:
            whole = [whole[i] for i in FeistelOrder(len(whole), self.seed, epoch, 2)]
        if whole:
            longest = max(range(len(whole)), key=lambda i: int(lengths[whole[i]].max()))
            whole.insert(0, whole.pop(longest))
        return np.concatenate([*whole, *rest]) if steps else order

    def num_units(self, epoch: int) -> int:
        """Units in an epoch; only packed rows have to be worked out for it."""
        return len(self._ordered(epoch)[0]) if self.layout.packing_length else len(self.examples)

    def steps_in_epoch(self, epoch: int) -> int:
        """Optimizer steps of one whole epoch."""
        return -(-self.num_units(epoch) // self.global_units)

    def step(self, epoch: int, consumed: int) -> list[list[int]]:
        """This rank's micro-batches of the step that starts after `consumed` units: lists of example numbers."""
        units = self.units(epoch, consumed, consumed + self.global_units)
        return deal(units, self.layout, self.rank, self.world_size, self._shares)

    def batches(self, epoch: int, consumed: int) -> list[Batch]:
        """The tensors of `step`."""
        steps = self.step(epoch, consumed)
        return [collate(self.examples, indices, self.layout, self._annotate) for indices in steps]

    def outlook(self, epoch: int) -> Outlook:
        """An epoch's units, counted."""
        tokens = int(self.examples.lengths.sum(dtype=np.int64))
        return Outlook(self.num_units(epoch), True, len(self.examples), tokens, self.efficiency(epoch))

    def efficiency(self, epoch: int = 0) -> float:
        """Share of slots that hold tokens: of packed rows, or of padded micro-batches; 1 for padding-free ones."""
        lengths = self.examples.lengths
        if self.layout.packing_length:
            return float(lengths.sum(dtype=np.int64)) / (self.num_units(epoch) * self.layout.packing_length)
        if self.layout.padding_free:
            return 1.0
        order = [unit[0] for unit in self.units(epoch)]
        size = self.layout.units_per_micro_batch
        slots = sum(len(c) * int(lengths[c].max()) for c in (order[i : i + size] for i in range(0, len(order), size)))
        return float(lengths.sum()) / slots


def evaluation_batches(
    examples: Examples,
    layout: Layout,
    *,
    tokens_per_batch: int,
    rank: int = 0,
    world_size: int = 1,
    annotate: Annotate | None = None,
) -> Iterator[Batch]:
    """Every example once, in batches of like length; ranks take turns and all yield the same number of batches."""
    order = np.argsort(-examples.lengths, kind="stable").tolist()
    chunks: list[list[int]] = []
    for index in order:
        size = int(examples.lengths[index])
        full = not chunks or (len(chunks[-1]) + 1) * max(size, int(examples.lengths[chunks[-1][0]])) > tokens_per_batch
        if full:
            chunks.append([])
        chunks[-1].append(index)
    for turn in range(-(-len(chunks) // world_size)):
        number = turn * world_size + rank
        mine = chunks[number] if number < len(chunks) else []
        yield collate(examples, mine, layout, annotate)
