"""What can be wrong with the settings of adaptive inference, known from them alone; and how layers are named there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from swift.config.files import what_is_there
from swift.config.resolve import Problem

_LAST = re.compile(r"last:([1-9]\d*)")
_THESE = re.compile(r"\d+(,\d+)*")
_OPTIONAL = (
    "adaptive_latency_ms", "adaptive_eval_file", "adaptive_siblings", "adaptive_skip_layers", "adaptive_report",
)  # fmt: skip


def read_skip(text: str) -> int | tuple[int, ...] | None:
    """An entry of `adaptive_skip_layers`: how many of the last layers, or which; None where it is neither."""
    if last := _LAST.fullmatch(text):
        return int(last[1])
    return tuple(sorted({int(number) for number in text.split(",")})) if _THESE.fullmatch(text) else None


def adaptive_faults(values: Mapping[str, Any], fault: Callable[..., Problem]) -> Iterator[Problem]:
    """Faults of the `adaptive` settings."""
    if not values["adaptive"]:
        for name in _OPTIONAL:
            if values[name]:
                yield fault(f"{name} adaptive", f"{name} does nothing without adaptive", "--adaptive true")
        return
    if values["adaptive_latency_ms"] is None:
        yield fault("adaptive", "adaptive needs to know what is fast enough", "--adaptive_latency_ms 30, say")
    if values["infer_backend"] not in ("auto", "swift"):
        message = f"adaptive chooses among ways of our own engine, and infer_backend is {values['infer_backend']}"
        yield fault("adaptive infer_backend", message, "--infer_backend swift, or leave out adaptive")
    if values["skip_layers"]:
        message = "with adaptive, layers are left out only where that is fast enough and good enough"
        yield fault("skip_layers adaptive", message, "name them in --adaptive_skip_layers")
    if values["tensor_parallel_size"] > 1:
        yield fault(
            "adaptive tensor_parallel_size", "adaptive measures a model in one process", "leave one of them out"
        )
    if values["adaptive_concurrency"] > values["max_batch_size"]:
        message = (
            f"no {values['adaptive_concurrency']} requests are computed together, {values['max_batch_size']} at most"
        )
        yield fault("adaptive_concurrency max_batch_size", message, "make --max_batch_size larger")
    for text in values["adaptive_skip_layers"]:
        if read_skip(text) is None:
            message = f"adaptive_skip_layers {text!r} names no layers"
            yield fault("adaptive_skip_layers", message, "last:4 for the last four, or numbers like 8,9,10")
    yield from _eval_file(values, fault)
    if values["adaptive_siblings"] and values.get("adapters"):
        yield fault("adaptive_siblings adapters", "an adapter fits no smaller model", "leave one of them out")


def _eval_file(values: Mapping[str, Any], fault: Callable[..., Problem]) -> Iterator[Problem]:
    """Nothing that changes answers is tried without rows that tell by how much."""
    file = values["adaptive_eval_file"]
    if file is None:
        for name in ("adaptive_siblings", "adaptive_skip_layers"):
            if values[name]:
                message = f"{name} changes answers, and nothing says how good they have to be"
                yield fault(name, message, "--adaptive_eval_file FILE (rows with answers)")
        return
    path = Path(file.rpartition("#")[0] or file).expanduser()
    if not path.exists():
        yield fault("adaptive_eval_file", f"there is no file {path} with rows", what_is_there(path))
