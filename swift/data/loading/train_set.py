"""What is trained on, whether it was prepared before step 1 or is read while training: one face for both.

A `TrainSet` knows how much there is, what identifies it, and makes the loader that suits: the plain one (`TrainLoader`)
for prepared data in one order, the stream loader for data that are mixed or streamed.

This file knows nothing of models. It turns settings into mixtures; what a mixture does is in `mixture`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from swift.config.curriculum import LENGTH, Curriculum, read_curriculum
from swift.config.data import DataConfig
from swift.core.errors import DataError, UsageError
from swift.data.loading.batch import Annotate, Examples, Layout, WrittenOut, longest_sequence
from swift.data.loading.flow import StoredFlow
from swift.data.loading.loader import Loader, Outlook, TrainLoader
from swift.data.loading.mixer import ShareSchedule, shares_by_size
from swift.data.loading.mixture import FIRST, ONCE, Documents, Mixture
from swift.data.loading.order import ORDER_VERSION
from swift.data.loading.packing import OPEN_ROWS, OpenRows
from swift.data.loading.stream_intake import Exchange, StoredIntake
from swift.data.loading.stream_loader import StreamLoader
from swift.data.token_files.store import TokenDataset


@dataclass(frozen=True)
class Place:
    """A rank among the others, and what works ahead for it.

    Attributes:
        exchange: `exchange(value)` gives every rank's value, in rank order, on every rank.
        workers, prefetch: processes or threads, and what each of them does ahead.
    """

    rank: int = 0
    world_size: int = 1
    exchange: Exchange = field(default=lambda value: [value])
    workers: int = 0
    prefetch: int = 2


class TrainSet(Protocol):
    """Rows to train on.

    `encoding` counts what the encoder did. `facts` of `loader` are those that an earlier process decided and saved
    (`Loader.state()["facts"]`): estimates on which a resumed run has to agree with it.
    """

    @property
    def longest(self) -> int:
        """No sequence has more tokens."""
        ...

    @property
    def encoding(self) -> Mapping[str, int]: ...
    def digest(self) -> str: ...
    def loader(self, layout: Layout, place: Place, facts: dict[str, Any] | None) -> Loader: ...


# --- settings to mixtures ---


def is_mixed(data: DataConfig) -> bool:
    """Whether the settings ask for more than all rows of all datasets in one order."""
    return bool(data.interleave_prob or data.mix_temperature is not None or data.mix_epochs or data.curriculum)


def mixture_of(data: DataConfig, sizes: Sequence[float], documents_per_step: float) -> Mixture:
    """How the settings mix sources of these sizes (in rows or examples; only their proportions count).

    Without any setting, every source is passed through once an epoch, in shares of their sizes, so that all of them end
    together.

    Raises:
        UsageError: the settings are for another number of datasets.
    """
    curriculum = read_curriculum(data.curriculum) if data.curriculum else None
    for name, count in _counts(data, curriculum).items():
        if count != len(sizes):
            raise UsageError(
                f"{name} is for {count} dataset(s), and there are {len(sizes)}",
                where=f"--{name}",
                fix="give one value for each, in the order of --dataset and --cached_dataset",
            )
    chosen = True
    if curriculum is not None:
        shares = ShareSchedule(curriculum.steps, curriculum.weights)
    elif data.interleave_prob:
        shares = ShareSchedule.constant(data.interleave_prob)
    elif data.mix_temperature is not None:
        shares = ShareSchedule.constant(shares_by_size(sizes, data.mix_temperature))
    else:
        passes = data.mix_epochs or [1.0] * len(sizes)
        shares = ShareSchedule.constant([size * times for size, times in zip(sizes, passes, strict=True)])
        chosen = False  # shares that follow from sizes make all sources end together
    stopping = data.stopping_strategy or (FIRST if chosen else ONCE)
    return Mixture.of(shares, stopping, data.mix_epochs, documents_per_step)


def _counts(data: DataConfig, curriculum: Curriculum | None) -> dict[str, int]:
    given = {"interleave_prob": len(data.interleave_prob), "mix_epochs": len(data.mix_epochs)}
    if curriculum is not None:
        given["curriculum"] = len(curriculum.weights[0])
    return {name: count for name, count in given.items() if count}


def units_of(layout: Layout, lengths: np.ndarray, documents: float, examples_per_document: float) -> float:
    """About how many units that many documents become, whose examples have lengths like these."""
    examples = documents * examples_per_document
    if not layout.packing_length:
        return examples
    tokens = examples * float(lengths.mean()) if len(lengths) else 0.0
    return tokens / (layout.packing_length * packing_share(layout, lengths))


def packing_share(layout: Layout, lengths: np.ndarray) -> float:
    """How full rows get that are packed as examples like these come: tried on some of them."""
    if not layout.packing_length:
        return 1.0
    rows: OpenRows[int] = OpenRows(layout.packing_length)
    tokens = closed = 0
    sample = np.resize(lengths, max(len(lengths), 4096))[:20_000].clip(max=layout.packing_length).tolist()
    for length in sample:
        for row in rows.add(length, length):
            closed += 1
            tokens += sum(row)
    return tokens / (closed * layout.packing_length) if closed > OPEN_ROWS else 0.99


# --- prepared data ---


@dataclass
class PreparedSet:
    """Prepared examples.

    Attributes:
        parts: examples of each dataset, in order; they lie one after the other in `examples`.
        difficulty: of each example, for a curriculum by a column.
        encoding: what the encoder counted.
        annotate: adds facts to batches.
    """

    examples: TokenDataset
    parts: Sequence[int]
    data: DataConfig
    seed: int
    difficulty: np.ndarray | None = None
    encoding: Mapping[str, int] = field(default_factory=dict)
    annotate: Annotate | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return longest_sequence(self.examples)

    def digest(self) -> str:
        """Identifies the examples."""
        return self.examples.digest()

    def loader(self, layout: Layout, place: Place, facts: dict[str, Any] | None) -> Loader:
        """The loader: plain, or one that mixes."""
        written_out = layout.units and not layout.share_prefix
        examples: Examples = WrittenOut(self.examples) if written_out else self.examples
        if not is_mixed(self.data):
            return TrainLoader(
                examples,
                layout,
                seed=self.seed,
                rank=place.rank,
                world_size=place.world_size,
                workers=place.workers,
                ahead=place.workers * place.prefetch,
                annotate=self.annotate,
            )
        members = self._members()
        sizes = [len(numbers) if not isinstance(numbers, int) else numbers for numbers in members]
        facts = facts or {"documents_per_step": self._documents_per_step(layout, place)}
        mixture = self._mixture(sizes, facts["documents_per_step"])
        flows, first = [], 0
        for number, part in enumerate(members):
            flows.append(StoredFlow(number, part, first=first, seed=self.seed, shuffle=layout.shuffle))
            first += part if isinstance(part, int) else 0
        documents = mixture.documents(sizes)
        if math.isinf(documents):
            raise _never_ends()
        if not documents:
            raise _only_empty()
        lengths = examples.lengths
        share = packing_share(layout, lengths)
        units = max(1, math.ceil(units_of(layout, lengths, documents, 1.0) - 1e-6))
        outlook = Outlook(
            units,
            False,
            round(documents),
            round(documents * float(lengths.mean())),
            share if layout.packing_length or layout.padding_free else None,
            f"an epoch of the mixture has about {documents:,.0f} examples",
        )
        return StreamLoader(
            StoredIntake(Documents(flows, mixture), self.examples),
            layout,
            identity=(ORDER_VERSION, self.seed, mixture.identity()),
            longest=int(lengths.max()),
            outlook=outlook,
            rank=place.rank,
            world_size=place.world_size,
            facts=facts,
            annotate=self.annotate,
        )

    def _documents_per_step(self, layout: Layout, place: Place) -> float:
        units = layout.units_per_micro_batch * layout.micro_batches * place.world_size
        per_unit = layout.packing_length / float(self.examples.lengths.mean()) if layout.packing_length else 1.0
        return max(1.0, units * per_unit)

    def _members(self) -> list[int | np.ndarray]:
        """The sources: datasets, or difficulty bins."""
        curriculum = read_curriculum(self.data.curriculum) if self.data.curriculum else None
        if curriculum is None or curriculum.difficulty is None:
            return list(self.parts)
        values = self.examples.lengths if curriculum.difficulty == LENGTH else self.difficulty
        if values is None or len(values) != len(self.examples):
            raise DataError(
                f"not every example has a difficulty {curriculum.difficulty!r}: cached tokens hold no columns",
                where="--curriculum",
                fix='give the rows with --dataset, or use {"difficulty": "length"}',
            )
        return list(difficulty_bins(np.asarray(values, np.float64), curriculum))

    def _mixture(self, sizes: Sequence[int], documents_per_step: float) -> Mixture:
        curriculum = read_curriculum(self.data.curriculum) if self.data.curriculum else None
        if curriculum is None or curriculum.difficulty is None:
            return mixture_of(self.data, sizes, documents_per_step)
        shares = ShareSchedule(curriculum.steps, curriculum.weights)
        return Mixture.of(shares, self.data.stopping_strategy or ONCE, (), documents_per_step)


def difficulty_bins(values: np.ndarray, curriculum: Curriculum) -> list[np.ndarray]:
    """Numbers of the examples in each bin, from easy (small values) to hard; all are in exactly one.

    Without borders the bins have equally many examples (equal values in the order of the data).
    """
    if curriculum.borders:
        of = np.searchsorted(np.asarray(curriculum.borders), values, side="right")
        return [np.flatnonzero(of == number) for number in range(curriculum.bins)]
    return [np.sort(part) for part in np.array_split(np.argsort(values, kind="stable"), curriculum.bins)]


def _never_ends() -> UsageError:
    return UsageError(
        "an epoch of this mixture would never end",
        where="--curriculum",
        fix="give every dataset a share above 0 at the last step, or --mix_epochs",
    )


def _only_empty() -> DataError:
    return DataError(
        "the mixture takes nothing: every dataset, or bin, with a share above 0 has no example left",
        where="--interleave_prob or --curriculum",
        fix="give a share to one that has examples; the ledger says what became of the rows",
    )
