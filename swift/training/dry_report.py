"""The text of a dry run. It computes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from swift.config.degrees import Degrees
from swift.distributed.trace import ACTIVATIONS, CATEGORIES, GATHERED, GRADIENTS, OPTIMIZER, WEIGHTS
from swift.training.dry_totals import Totals

_GIB = 2**30
_NOT_MODELLED = (
    "what an allocator reserves beyond live tensors, and fragments",
    "workspaces of kernels and of the communication library, and its channels' buffers",
    "gathering ahead of need: on a device, one more layer's gathered weights can be live",
    "evaluation, checkpoints, and the loop's own sums of a few numbers (two all-reduces a step)",
    "examples shorter than the longest: every row is full here, and every token is trained on",
)
_SHORT = {
    WEIGHTS: "weights",
    GATHERED: "gathered",
    GRADIENTS: "gradients",
    OPTIMIZER: "optimizer",
    ACTIVATIONS: "activations",
}


@dataclass(frozen=True)
class Facts:
    """What was settled about the run, in words.

    Attributes:
        ways: how the model lies on the processes; table: where ranks are; step: its batches; how: precision and tuning.
        experts: whether experts are on several ranks.
    """

    model: str
    degrees: Degrees
    ways: str
    table: str
    step: str
    how: str
    notes: list[str]
    experts: bool = False


def report(facts: Facts, stages: list[tuple[int, Totals]]) -> str:
    """The text.

    Args:
        stages: rank and totals, of the first rank of each pipeline stage.
    """
    lines = [f"dry run of {facts.model}: no weights or data were read, and no other process was started", ""]
    lines += [f"processes    {facts.degrees.world_size}: {facts.ways}", f"a step       {facts.step}"]
    lines += [f"training     {facts.how}", ""]
    if facts.table:
        lines += [*facts.table.splitlines(), ""]
    lines += _memory(stages)
    for rank, totals in stages:
        lines += ["", *_collectives(rank, totals)]
    lines += ["", "not modelled", *(f"  - {text}" for text in _NOT_MODELLED)]
    if facts.experts:
        lines.append("  - experts that are chosen unequally: routing is taken to be uniform")
    unknown = sorted(set().union(*(totals.unknown for _, totals in stages)))
    if unknown:
        lines.append(f"  - collectives of kinds that can't be counted: {', '.join(unknown)}")
    lines += ["", "notes", *(f"  - {note}" for note in facts.notes)]
    return "\n".join(lines) + "\n"


def _memory(stages: list[tuple[int, Totals]]) -> list[str]:
    heads = [_SHORT[category] for category in CATEGORIES]
    lines = [
        "memory in GiB of live tensors, at the step's peak",
        f"  {'rank':<6}" + "".join(f"{head:>12}" for head in [*heads, "peak"]) + "  in",
    ]
    for rank, totals in stages:
        part, parts = totals.peak
        numbers = [*(parts[category] for category in CATEGORIES), totals.peak_bytes]
        lines.append(f"  {rank:<6}" + "".join(f"{number / _GIB:>12.3f}" for number in numbers) + f"  {_part(part)}")
    return lines


def _part(name: str) -> str:
    """`last lower backward` -> the last micro-batch's backward pass, lower half."""
    if name == "step":
        return "optimizer step"
    which, *rest = name.split()
    passes = "forward" if rest == ["forward"] else "backward"
    half = ", lower layers" if "lower" in rest else ""
    batch = {"only": "", "all": "pipeline: "}.get(which, f"{which} micro-batch: ")
    return "pipeline's passes" if which == "all" else f"{batch}{passes}{half}"


def _collectives(rank: int, totals: Totals) -> list[str]:
    lines = [
        f"collectives of rank {rank} in a step, and GiB that it sends ({totals.flops / 1e12:.4g} TFLOP computed)",
        f"  {'axis':<14}{'kind':<16}{'count':>8}{'GiB':>12}",
    ]
    rows = sorted(totals.calls, key=lambda key: (-totals.bytes[key], key))
    for axis, kind in rows:
        size = totals.bytes[axis, kind] / _GIB
        shown = f"{size:.3f}" if size >= 0.0005 else f"{size * 2**20:.1f} KiB"
        lines.append(f"  {axis:<14}{kind:<16}{round(totals.calls[axis, kind]):>8}{shown:>12}")
    return lines if rows else [f"rank {rank} talks to nobody in a step ({totals.flops / 1e12:.4g} TFLOP computed)"]
