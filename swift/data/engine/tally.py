"""What an operator did: documents in and out, dropped by reason with samples, changes, and histograms of what it saw.

Tallies of tasks are merged in any order with the same result, so a run on many processes reports what one would.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from swift.data.engine.document import Document

SAMPLES_PER_REASON = 5
OTHER = "(other)"  # label of what `trim` has put together
_SAMPLE_CHARACTERS = 600


@dataclass
class Histogram:
    """Counts of a number, in buckets: width 0.02 for shares, else eight buckets for each factor of two.

    Attributes:
        share: whether values lie between 0 and 1.
        buckets: bucket number -> values in it.
    """

    share: bool = False
    count: int = 0
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf
    buckets: Counter[int] = field(default_factory=Counter)

    def add(self, value: float) -> None:
        """Count a value (at least 0)."""
        self.count += 1
        self.total += value
        self.least = min(self.least, value)
        self.most = max(self.most, value)
        self.buckets[self._bucket(value)] += 1

    def add_all(self, values: np.ndarray) -> None:
        """`add` for each of `values` [n]."""
        for value in values.tolist():
            self.total += value
        if len(values):
            self.count += len(values)
            self.least = min(self.least, float(values.min()))
            self.most = max(self.most, float(values.max()))
            self.buckets.update(map(self._bucket, values.tolist()))

    def _bucket(self, value: float) -> int:
        if self.share:
            return min(49, int(value * 50))
        return int(math.log2(value + 1) * 8)

    def edge(self, bucket: int) -> float:
        """The least value that falls into a bucket."""
        return bucket / 50 if self.share else 2 ** (bucket / 8) - 1

    def merge(self, other: Histogram) -> None:
        """Add another's counts."""
        self.count += other.count
        self.total += other.total
        self.least = min(self.least, other.least)
        self.most = max(self.most, other.most)
        self.buckets.update(other.buckets)

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "buckets": {str(k): v for k, v in sorted(self.buckets.items())}}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Histogram:
        return cls(**{**values, "buckets": Counter({int(k): v for k, v in values["buckets"].items()})})


@dataclass
class Tally:
    """The counts of one operator in one task, or merged over tasks.

    Attributes:
        read, kept, changed: documents. The engine counts `read` and `kept`; operators call `drop`, `change`, `count`
            and `observe`.
        dropped, changes: reason -> documents.
        characters_in, characters_out: of the texts, counted by the engine.
        labels: group (`language`, `domain`, ...) -> label -> documents.
        histograms: metric -> histogram.
        samples: reason -> a few documents it applied to, the same ones whatever the order of tasks.
    """

    read: int = 0
    kept: int = 0
    changed: int = 0
    characters_in: int = 0
    characters_out: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)
    labels: dict[str, Counter[str]] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)
    samples: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    def drop(self, document: Document, reason: str, note: str | Callable[[], str] = "") -> None:
        """Count a document that the operator leaves out; `note` says more about this one (a score, a twin).

        A note that costs something to find out can be given as a function, which is called for samples only.
        """
        self.dropped[reason] += 1
        self._sample(reason, document, document.text, note)

    def change(
        self,
        document: Document,
        reason: str,
        before: str,
        after: str,
        *,
        times: int = 1,
        note: str | Callable[[], str] = "",
    ) -> None:
        """Count a change of a text; `times` when one call stands for several replacements, `note` as in `drop`."""
        self.changes[reason] += times
        start = _first_difference(before, after)

        def full_note() -> str:
            said = note if isinstance(note, str) else note()
            return "; ".join(filter(None, [said, "now: " + after[start : start + 200]]))

        self._sample(reason, document, before[start:], full_note)

    def observe(self, metric: str, value: float, *, share: bool = False) -> None:
        """Put a number that was measured on a document into the metric's histogram."""
        self._histogram(metric, share).add(value)

    def observe_all(self, metric: str, values: np.ndarray, *, share: bool = False) -> None:
        """`observe` for each of `values` [n]."""
        self._histogram(metric, share).add_all(values)

    def _histogram(self, metric: str, share: bool) -> Histogram:
        histogram = self.histograms.get(metric)
        if histogram is None:
            histogram = self.histograms[metric] = Histogram(share)
        return histogram

    def count(self, group: str, label: str) -> None:
        """Count a label, such as the document's language."""
        self.labels.setdefault(group, Counter())[label] += 1

    def show(self, reason: str, document: Document, note: str = "") -> None:
        """Take the document into the samples of a reason without counting it."""
        self._sample(reason, document, document.text, note)

    def _sample(self, reason: str, document: Document, text: str, note: str | Callable[[], str]) -> None:
        """Keep the documents whose hashes are least: a sample that doesn't depend on order or on how tasks were cut."""
        kept = self.samples.setdefault(reason, [])
        key = hashlib.blake2b(document.random_key.encode(), digest_size=8).hexdigest()
        if len(kept) >= SAMPLES_PER_REASON and key >= kept[-1]["key"]:
            return
        said = note if isinstance(note, str) else note()
        kept.append({"key": key, "id": document.id, "text": text[:_SAMPLE_CHARACTERS], "note": said})
        kept.sort(key=_order)
        del kept[SAMPLES_PER_REASON:]

    def trim(self, most_labels: int) -> None:
        """Leave the most frequent labels of each group and count the others as `(other)`: tallies stay small."""
        for group, labels in self.labels.items():
            if len(labels) > most_labels:
                kept = sorted(labels.items(), key=lambda item: (-item[1], item[0]))[:most_labels]
                rest = labels.total() - sum(count for _, count in kept)
                self.labels[group] = Counter(dict(kept))
                self.labels[group][OTHER] += rest

    def merge(self, other: Tally) -> None:
        """Add another task's counts."""
        for name in ("read", "kept", "changed", "characters_in", "characters_out"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.dropped.update(other.dropped)
        self.changes.update(other.changes)
        for group, labels in other.labels.items():
            self.labels.setdefault(group, Counter()).update(labels)
        for metric, histogram in other.histograms.items():
            self.histograms.setdefault(metric, Histogram(histogram.share)).merge(histogram)
        for reason, samples in other.samples.items():
            both = [*self.samples.get(reason, []), *samples]
            self.samples[reason] = sorted(both, key=_order)[:SAMPLES_PER_REASON]

    def as_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them back."""
        return {
            **vars(self),
            "dropped": dict(self.dropped),
            "changes": dict(self.changes),
            "labels": {group: dict(labels) for group, labels in self.labels.items()},
            "histograms": {metric: histogram.as_json() for metric, histogram in self.histograms.items()},
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Tally:
        """The tally that `as_json` described."""
        return cls(
            **{
                **values,
                "dropped": Counter(values["dropped"]),
                "changes": Counter(values["changes"]),
                "labels": {group: Counter(labels) for group, labels in values["labels"].items()},
                "histograms": {m: Histogram.from_json(h) for m, h in values["histograms"].items()},
            }
        )


def _order(sample: dict[str, str]) -> tuple[str, str, str]:
    return sample["key"], sample["text"], sample["note"]


def _first_difference(before: str, after: str) -> int:
    """Where two texts begin to differ, a little before it."""
    low, high = 0, min(len(before), len(after))
    while low < high:  # the longest common beginning, by halving
        middle = (low + high + 1) // 2
        if before[:middle] == after[:middle]:
            low = middle
        else:
            high = middle - 1
    return max(0, low - 40)
