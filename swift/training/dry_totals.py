"""What a traced step comes to: sums over its micro-batches, and larger models from two smaller ones.

What layers of one kind do is the same for each, so collectives, bytes and operations grow by the same amount with each
further layer, and so does the memory in each part of a step (its peak is at one of the part's ends). The whole step's
peak is the largest of the parts'.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from swift.core.errors import SwiftError
from swift.distributed.trace import CATEGORIES, Trace


@dataclass
class Totals:
    """One process's step.

    Attributes:
        calls: (axis, kind) -> collectives; bytes: (axis, kind) -> bytes that the process sends.
        flops: additions and multiplications.
        memory: part of the step -> what memory is for, at the part's peak, in bytes.
        unknown: collectives that were not counted.
    """

    calls: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    bytes: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    flops: float = 0.0
    memory: dict[str, dict[str, float]] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)

    @property
    def peak(self) -> tuple[str, dict[str, float]]:
        """The part of the step in which most memory is live, and what it is for."""
        return max(self.memory.items(), key=lambda item: sum(item[1].values()))

    @property
    def peak_bytes(self) -> float:
        return sum(self.peak[1].values())


def totals_of(trace: Trace, micro_batches: int) -> Totals:
    """Sums over a step of `micro_batches`; of those in the middle, one was traced."""
    totals = Totals(unknown=set(trace.unknown))
    for part, counts in trace.counts.items():
        times = micro_batches - 2 if part.startswith("middle") else 1
        for key, count in counts.calls.items():
            totals.calls[key] += times * count
            totals.bytes[key] += times * counts.bytes[key]
        totals.flops += times * counts.flops
    totals.memory = {
        part: {category: float(peak.parts.get(category, 0)) for category in CATEGORIES}
        for part, peak in trace.peaks.items()
        if part
    }
    return totals


def extend(small: Totals, large: Totals, steps: float) -> Totals:
    """What is `steps` times as far beyond `small` as `large` is."""

    def along(a: float, b: float) -> float:
        return a + (b - a) * steps

    result = Totals(unknown=small.unknown | large.unknown, flops=along(small.flops, large.flops))
    for key in small.calls.keys() | large.calls.keys():
        result.calls[key] = along(small.calls.get(key, 0.0), large.calls.get(key, 0.0))
        result.bytes[key] = along(small.bytes.get(key, 0.0), large.bytes.get(key, 0.0))
        if result.calls[key] % 1:
            raise SwiftError(f"collectives {key} don't grow evenly with layers or micro-batches: {result.calls[key]}")
    if small.memory.keys() != large.memory.keys():
        raise SwiftError(f"parts of a step differ: {sorted(small.memory.keys() ^ large.memory.keys())}")
    for part, before in small.memory.items():
        result.memory[part] = {name: along(value, large.memory[part][name]) for name, value in before.items()}
    return result


def depths(kinds: Sequence[object]) -> tuple[int, int] | None:
    """Two numbers of layers from which that of all layers follows, the fewer the better; None if all must be traced.

    Args:
        kinds: of each layer; equal ones do the same.
    """
    total = len(kinds)
    best: tuple[int, int] | None = None
    for period, start in _regular(kinds):
        small = max(start + period, _FEWEST)
        small += (total - small) % period
        if small + period < total and (best is None or small + period < sum(best) - best[0]):
            best = small, small + period
    return best


_FEWEST = 4  # layers, so that each half of the backward pass has two
_LONGEST_PERIOD = 8


def _regular(kinds: Sequence[object]) -> Iterator[tuple[int, int]]:
    """Periods, each with the number of layers after which kinds repeat with it."""
    for period in range(1, _LONGEST_PERIOD + 1):
        differing = [i for i in range(period, len(kinds)) if kinds[i] != kinds[i - period]]
        yield period, (differing[-1] + 1 - period if differing else 0)
