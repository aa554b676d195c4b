"""Counters and histograms of a server, and Prometheus' text form of them.

Few kinds of labels, all of known values: what clients send never becomes a label.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping

from swift.inference.backends.base import EngineStats

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
_GAUGES = {
    "num_running": "requests in the batch", "num_waiting": "requests that wait for a place",
    "blocks_used": "blocks of the KV cache in use", "blocks_total": "blocks of the KV cache",
    "utilisation": "rows computed over rows that were possible",
}  # fmt: skip
_COUNTERS = {
    "prompt_tokens": "tokens of prompts", "cached_tokens": "of them found in the prefix cache",
    "generated_tokens": "tokens of answers", "preemptions": "requests that gave their blocks back for a while",
    "steps": "forward passes", "draft_tokens": "tokens guessed", "accepted_tokens": "guesses that were right",
}  # fmt: skip


class Histogram:
    """Counts of values by size.

    Args:
        bounds: upper ends of the buckets, ascending.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str) -> Iterable[str]:
        seen = 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts):
            seen += count
            yield f'{name}_bucket{{le="{bound}"}} {seen}'
        yield f"{name}_sum {self.total:.9g}"
        yield f"{name}_count {seen}"


class Metrics:
    """What the server counts. All methods are for the event loop's thread."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = defaultdict(int)
        self.num_active = 0
        self.disconnects = 0
        self.histograms = {
            "request_seconds": ("time from a request's headers to the end of its answer", Histogram(_SECONDS)),
            "first_token_seconds": ("time from a request's headers to its first token", Histogram(_SECONDS)),
            "token_seconds": ("mean time between two tokens of an answer", Histogram(_SECONDS)),
            "request_prompt_tokens": ("tokens of a request's prompts", Histogram(_TOKENS)),
            "request_generated_tokens": ("tokens of a request's answers", Histogram(_TOKENS)),
        }

    def observe(self, name: str, value: float) -> None:
        self.histograms[name][1].add(value)

    def render(self, engines: Mapping[str, EngineStats]) -> str:
        """The text that Prometheus reads.

        Args:
            engines: how each backend is doing, by the name of its model.
        """
        lines = ["# HELP swift_requests_total requests by route and status", "# TYPE swift_requests_total counter"]
        lines += [
            f'swift_requests_total{{route="{route}",status="{status}"}} {count}'
            for (route, status), count in sorted(self.requests.items())
        ]
        lines += _one("requests_active", "gauge", "requests being answered", self.num_active)
        lines += _one("disconnects_total", "counter", "clients that left before their answer ended", self.disconnects)
        for name, (help_text, histogram) in self.histograms.items():
            lines += [f"# HELP swift_{name} {help_text}", f"# TYPE swift_{name} histogram"]
            lines += histogram.lines(f"swift_{name}")
        for names, kind, end in ((_GAUGES, "gauge", ""), (_COUNTERS, "counter", "_total")):
            for field_name, help_text in names.items():
                name = f"swift_engine_{field_name}{end}"
                lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
                for model, stats in engines.items():
                    lines.append(f'{name}{{model="{_escaped(model)}"}} {getattr(stats, field_name)}')
        return "\n".join(lines) + "\n"


def _one(name: str, kind: str, help_text: str, value: float) -> list[str]:
    return [f"# HELP swift_{name} {help_text}", f"# TYPE swift_{name} {kind}", f"swift_{name} {value}"]


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
