"""What `--grad_compression` and `--local_updates` say: a name, or JSON with its options.

    bf16                                                   every gradient travels in 16 bits
    {"method": "topk", "ratio": 0.05}                      only the largest twentieth of it
    {"intra": "bf16", "inter": "topk", "ratio": 0.1}       16 bits within a node, top-k across nodes
    {"method": "diloco", "every": 50, "dtype": "bfloat16"}

With `--fsdp hsdp`, `{"inter": ...}` alone says what goes across replicas.

This file reads them into dataclasses and says which settings exclude each other. It knows nothing of torch; what the
methods do is in `swift.distributed.compression` and `swift.training.local_updates`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from swift.config.resolve import Problem
from swift.core.errors import did_you_mean

CASTS = ("bf16", "fp16")
_INTRA = ("none", *CASTS)
_INTER = ("none", *CASTS, "topk")
_TWO_STAGE = "two_stage"
_TOPK = ("ratio", "error_feedback")
# method -> its options
_COMPRESSIONS: dict[str, tuple[str, ...]] = {
    "bf16": (),
    "fp16": (),
    "hierarchical": ("node_size",),
    "powersgd": ("rank", "start_step", "error_feedback", "warm_start"),
    "topk": _TOPK,
    "ring2d": ("columns",),
}
_STAGES = ("intra", "inter", "node_size", *_TOPK)
_LOCAL = ("every", "dtype", "delay", "alpha")
_OUTER = ("outer_lr", "outer_momentum")
_LOCAL_UPDATES: dict[str, tuple[str, ...]] = {
    "local_sgd": _LOCAL,
    "diloco": (*_LOCAL, *_OUTER),
    "streaming_diloco": (*_LOCAL, *_OUTER, "fragments"),
}
_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class GradCompression:
    """How data-parallel ranks exchange gradients.

    Attributes:
        method: bf16, fp16, topk, powersgd, ring2d or two_stage (hierarchical is two_stage with nothing compressed).
        intra, inter: two_stage: what travels within a node and across nodes.
        ratio: topk: share of the elements that are sent.
        error_feedback: topk, powersgd: what isn't sent is added to the next step's gradient.
        rank, start_step, warm_start: powersgd: rank of the matrices, steps before it begins, whether they go on from
            the step before.
        node_size: two_stage: ranks of a node; None: as the launcher says.
        columns: ring2d: ranks in a row; None: a node, or about the square root of the ranks.
    """

    method: str
    intra: str = "none"
    inter: str = "none"
    ratio: float = 0.01
    error_feedback: bool = True
    rank: int = 4
    start_step: int = 10
    warm_start: bool = True
    node_size: int | None = None
    columns: int | None = None


@dataclass(frozen=True)
class LocalUpdates:
    """Steps that ranks make alone, and how they agree again.

    Attributes:
        method: local_sgd, diloco or streaming_diloco.
        every: steps between two outer steps (of one fragment).
        outer_lr, outer_momentum: of the outer Nesterov SGD; 1 and 0 average the weights.
        fragments: groups of layers that take turns.
        delay: steps between the start of an exchange and the use of its result.
        alpha: share of a rank's own weights in what it goes on with when a delayed result arrives.
        dtype: in which differences of weights travel.
    """

    method: str
    every: int
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    dtype: str = "float32"


_LOCAL_DEFAULTS = {
    "local_sgd": LocalUpdates("local_sgd", every=8),
    "diloco": LocalUpdates("diloco", every=100, outer_lr=0.7, outer_momentum=0.9),
    "streaming_diloco": LocalUpdates("streaming_diloco", every=100, outer_lr=0.7, outer_momentum=0.9, fragments=4),
}


def read_compression(value: str) -> GradCompression:
    """Read `--grad_compression`.

    Raises:
        ValueError: with what is wrong in it.
    """
    options = _options(value, _COMPRESSIONS)
    if "intra" in options or "inter" in options:
        if "method" in options:
            raise ValueError('has "intra" or "inter" beside "method": leave "method" out')
        _check_keys(options, _STAGES, "two stages")
        _choice(options, "intra", _INTRA)
        _choice(options, "inter", _INTER)
        for key in _TOPK:
            if key in options and options.get("inter") != "topk":
                raise ValueError(f'has "{key}", which is for "inter": "topk"')
        options["method"] = _TWO_STAGE
    else:
        method = _method(options, _COMPRESSIONS, 'or "intra" and "inter"')
        _check_keys(options, ("method", *_COMPRESSIONS[method]), method)
        if method == "hierarchical":
            options["method"] = _TWO_STAGE
    _fraction(options, "ratio", above=0.0, at_most=1.0)
    for key, least in (("rank", 1), ("start_step", 2), ("node_size", 1), ("columns", 1)):
        _whole(options, key, least)
    for key in ("error_feedback", "warm_start"):
        if not isinstance(options.get(key, True), bool):
            raise ValueError(f'"{key}" is true or false, not {options[key]!r}')
    return GradCompression(**options)


def read_local_updates(value: str) -> LocalUpdates:
    """Read `--local_updates`.

    Raises:
        ValueError: with what is wrong in it.
    """
    options = _options(value, _LOCAL_UPDATES)
    method = _method(options, _LOCAL_UPDATES)
    _check_keys(options, ("method", *_LOCAL_UPDATES[method]), method)
    for key, least in (("every", 1), ("fragments", 1), ("delay", 0)):
        _whole(options, key, least)
    _fraction(options, "outer_lr", above=0.0)
    _fraction(options, "outer_momentum", below=1.0)
    _fraction(options, "alpha", below=1.0)
    _choice(options, "dtype", _DTYPES)
    if options.get("delay"):
        options.setdefault("alpha", 0.5)
    elif options.get("alpha"):
        raise ValueError('has "alpha", which is for results that come with a "delay"')
    defaults = _LOCAL_DEFAULTS[method]
    if "fragments" not in options:  # as many as usual, where there are as many steps for them to take turns in
        options["fragments"] = min(defaults.fragments, options.get("every", defaults.every))
    updates = replace(defaults, **options)
    if updates.delay >= updates.every:
        raise ValueError(f'"delay" {updates.delay} must be below "every" {updates.every}')
    if updates.fragments > updates.every:
        raise ValueError(f'"fragments" {updates.fragments} must be at most "every" {updates.every}')
    return updates


def _options(value: str, methods: Mapping[str, Any]) -> dict[str, Any]:
    text = value.strip()
    if not text.startswith("{"):
        return {"method": text}
    try:
        options = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not options:
        raise ValueError(f"is empty: name a method, one of {', '.join(methods)}")
    return options


def _method(options: dict[str, Any], methods: Mapping[str, Any], otherwise: str = "") -> str:
    method = options.get("method")
    if method is None:
        raise ValueError(f'has no "method" {otherwise}'.rstrip() + f"; methods: {', '.join(methods)}")
    if not isinstance(method, str) or method not in methods:
        hint = did_you_mean(str(method), methods) or f"There are {', '.join(methods)}"
        raise ValueError(f"has no method {method!r}. {hint}")
    return method


def _check_keys(options: dict[str, Any], known: tuple[str, ...], what: str) -> None:
    for key in options:
        if key not in known:
            hint = did_you_mean(key, known) or (f"Its keys are {', '.join(known)}" if len(known) > 1 else "It has none")
            raise ValueError(f"has no option {key!r} for {what}. {hint}")


def _choice(options: dict[str, Any], key: str, known: tuple[str, ...]) -> None:
    if key in options and options[key] not in known:
        hint = did_you_mean(str(options[key]), known) or f"There are {', '.join(known)}"
        raise ValueError(f'"{key}" can\'t be {options[key]!r}. {hint}')


def _whole(options: dict[str, Any], key: str, least: int) -> None:
    value = options.get(key, least)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f'"{key}" is a whole number from {least} on, not {value!r}')


def _fraction(
    options: dict[str, Any], key: str, *, above: float | None = None, at_most: float = math.inf, below: float = math.inf
) -> None:
    if key not in options:
        return
    value = options[key]
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value > at_most or value >= below or (value <= above if above is not None else value < 0):
        least = f"above {above:g}" if above is not None else "from 0 on"
        most = (
            f" and at most {at_most:g}" if at_most < math.inf else f" and below {below:g}" if below < math.inf else ""
        )
        raise ValueError(f'"{key}" is a number {least}{most}, not {value!r}')


# --- which settings exclude each other ---


def communication_faults(values: Mapping[str, Any], fault: Callable[..., Problem]) -> Iterator[Problem]:
    """What is wrong with how ranks are to communicate.

    Args:
        values: every setting by name.
        fault: makes a problem of (settings, message, remedy).
    """
    for name, read in (("grad_compression", read_compression), ("local_updates", read_local_updates)):
        if values.get(name):
            try:
                read(values[name])
            except ValueError as error:
                yield fault(name, f"{name} {error}")
    asked = [name for name in ("grad_compression", "local_updates", "balance_micro_batches") if values.get(name)]
    for name in asked:
        if name == "grad_compression" and values.get("fsdp") == "hsdp":
            yield from _replica_faults(values, fault)
            continue
        for other, words in _spread(values):
            fix = f"leave {name} out"
            if name == "grad_compression" and other == "fsdp":
                fix = "--reduce_dtype bfloat16 halves what fsdp sends; across nodes, --fsdp hsdp takes grad_compression"
            yield fault(f"{name} {other}", f"{name} is for ranks that hold the whole model each, not for {words}", fix)
    if values.get("local_updates"):
        for name in ("grad_compression", "balance_micro_batches"):
            if values.get(name):
                yield fault(
                    f"{name} local_updates",
                    f"{name} does nothing with local_updates: ranks step alone, without exchanging gradients",
                    'leave it out; {"dtype": "bfloat16"} in local_updates halves what the outer steps send'
                    if name == "grad_compression"
                    else "leave it out",
                )
        if values.get("tuner_type") == "adalora":
            yield fault(
                "local_updates tuner_type",
                "adalora prunes by gradients, which differ between ranks that step alone",
                "--tuner_type lora",
            )
        if values.get("torch_dtype") == "float16":
            yield fault(
                "local_updates torch_dtype",
                "float16 scales its loss by what all ranks' gradients are, and with local_updates ranks step alone",
                "--torch_dtype bfloat16 or float32",
            )
    if values.get("balance_micro_batches") and values.get("gradient_accumulation_steps") == 1:
        yield fault(
            "balance_micro_batches gradient_accumulation_steps",
            "with one micro-batch a step and rank there is nothing to balance",
            "--gradient_accumulation_steps 4 with smaller micro-batches gives some to deal out",
        )


def _replica_faults(values: Mapping[str, Any], fault: Callable[..., Problem]) -> Iterator[Problem]:
    """What goes across the replicas of hsdp is compressed; all else is sent by fsdp."""
    try:
        settings = read_compression(values["grad_compression"])
    except ValueError:  # which was said before
        return
    if settings.method != _TWO_STAGE or settings.intra != "none" or settings.node_size is not None:
        yield fault(
            "grad_compression fsdp",
            "with hsdp the ranks of a replica add gradients up as fsdp does, so grad_compression is only for what goes "
            "across replicas",
            'give "inter" alone, such as {"inter": "topk", "ratio": 0.1}; --reduce_dtype bfloat16 is for the rest',
        )
    if (values.get("pipeline_parallel_size") or 1) > 1:
        yield fault(
            "grad_compression pipeline_parallel_size",
            "grad_compression is not for pipelines",
            "leave grad_compression out",
        )


def _spread(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The ways in which the model is, or may be, spread over ranks."""
    if values.get("parallel") == "auto":
        yield "parallel", "parallel auto, which may share it between ranks"
    if values.get("fsdp", "none") != "none":
        yield "fsdp", f"fsdp {values['fsdp']}"
    for axis in ("tensor_parallel_size", "sequence_parallel_size", "pipeline_parallel_size", "expert_parallel_size"):
        if (values.get(axis) or 1) > 1:
            yield axis, f"{axis} {values[axis]}"
    if values.get("deepspeed"):
        yield "deepspeed", "deepspeed, which exchanges gradients itself"
