"""How numbers of a run are put into words: one place, used by the console, the report and the plots."""

from __future__ import annotations

import math
from typing import Any


def duration(seconds: float) -> str:
    """`75` -> `1:15`, `3675` -> `1:01:15`, unknown -> `-:--`."""
    if not math.isfinite(seconds) or seconds < 0:
        return "-:--"
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def count(number: float) -> str:
    """`134515008` -> `134.5 M`."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f}"


def number(value: Any) -> str:
    """A metric's value, short: four significant digits, no trailing noise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or (math.isfinite(value) and value.is_integer() and abs(value) < 1e6):
        return str(int(value))
    return f"{value:.4g}"


def counted(count: int | str, thing: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count} {thing}" + ("" if str(count) == "1" else "s")


def metric_words(metrics: dict[str, float]) -> list[str]:
    """The metrics that a console line shows, in reading order; the rest is in logging.jsonl only.

    Of an evaluation it shows what has a plain name; of families such as `f1/<class>` only margin and accuracy.
    """
    words = []
    for name, label, spec in (
        ("loss", "loss {}", "{:.4f}"),
        ("rewards/margins", "margin {}", "{:.3g}"),
        ("rewards/accuracies", "accuracy {}", "{:.2f}"),
        ("learning_rate", "lr {}", "{:.2e}"),
        ("grad_norm", "grad_norm {}", "{:.3g}"),
        ("tokens_per_second", "{} tok/s", "{:.0f}"),
        ("memory_gib", "{} GiB", "{:.1f}"),
        ("epoch", "epoch {}", "{:.2f}"),
    ):
        if isinstance(metrics.get(name), (int, float)):
            words.append(label.format(spec.format(metrics[name])))
    evaluated = {name: value for name, value in metrics.items() if name.startswith("eval_")}
    for name, value in evaluated.items():
        if "/" not in name or name in ("eval_rewards/margins", "eval_rewards/accuracies"):
            words.append(f"{name} {number(value)}")
    return words


_LEVELS = (" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█")


def sparkline(values: list[float], width: int = 48) -> str:
    """`values` as one line of blocks, averaged into `width` columns; empty when there is nothing finite."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    columns = min(width, len(finite))
    means = []
    for column in range(columns):
        part = finite[column * len(finite) // columns : (column + 1) * len(finite) // columns]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(_LEVELS[1 + round((value - low) / span * 7)] for value in means)
