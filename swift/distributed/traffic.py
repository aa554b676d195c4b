"""How many bytes this process sends along each axis, counted where our own collectives are called.

Bytes on the wire are those of the usual ring algorithms, for a tensor of n bytes over w ranks: all-reduce
2 (w - 1) / w n, all-gather and reduce-scatter (w - 1) / w of the whole tensor, all-to-all (w - 1) / w of what is sent.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class Traffic:
    """Counts since the last `reset`.

    Attributes:
        calls: (axis, kind) -> collectives; bytes: (axis, kind) -> bytes this rank sent.
        latest: axis and kind of the last one that was counted.
    """

    calls: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    bytes: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    latest: tuple[str, str] | None = None

    def count(self, axis: str, kind: str, num_bytes: float) -> None:
        """Add a collective of `kind` that sent `num_bytes` along `axis`."""
        self.calls[axis, kind] += 1
        self.bytes[axis, kind] += num_bytes
        self.latest = axis, kind

    def per_axis(self) -> dict[str, float]:
        """Axis -> bytes sent along it."""
        totals: dict[str, float] = defaultdict(float)
        for (axis, _), num_bytes in self.bytes.items():
            totals[axis] += num_bytes
        return dict(totals)

    def reset(self) -> None:
        self.calls.clear()
        self.bytes.clear()


TRAFFIC = Traffic()
