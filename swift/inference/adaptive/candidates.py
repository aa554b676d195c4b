"""The ways in which a model may be run, most exact first: precision, keys and values, fewer layers, a smaller model.

Knows what could be tried, not how fast or how good it is. What somebody asked for by its own flag isn't varied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from swift.config.adaptive_checks import read_skip
from swift.config.engine import KVCacheDtype, WeightFormat
from swift.core.errors import UsageError
from swift.inference.adaptive.layers import check_skipped

DtypeName = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Candidate:
    """One way to run a model.

    Attributes:
        name: for people, and unique among the candidates of a choice.
        dtype: of the model's weights.
        weight_format, kv_cache_dtype: as in `EngineConfig`.
        exact: answers are those of a run without `--adaptive`, or more precise ones.
        skip_layers: numbers of the layers left out.
        model: folder of the model; None for the one that was asked for.
    """

    name: str
    dtype: DtypeName
    weight_format: WeightFormat = "auto"
    kv_cache_dtype: KVCacheDtype = "auto"
    exact: bool = False
    skip_layers: tuple[int, ...] = ()
    model: str | None = None


@dataclass(frozen=True)
class Wanted:
    """What is asked for and what there is.

    Attributes:
        device: type of the device, `cpu` or another.
        bf16: whether it multiplies bfloat16 in hardware.
        fewer_bits: whether weights can be held in fewer bits than they are multiplied in (`linear.has_products`).
        dtype: of the weights in a run without `--adaptive`.
        dtype_given: by a flag, so that it isn't varied.
        weight_format, kv_cache_dtype: as in `EngineConfig`; anything but `auto` isn't varied.
        num_layers: of the decoder.
        exits: numbers of layers after which the model was trained to answer (`declared_exits`).
        skips: entries of `adaptive_skip_layers`.
        siblings: folders of smaller models.
    """

    device: str
    bf16: bool
    fewer_bits: bool
    dtype: DtypeName
    dtype_given: bool
    num_layers: int
    weight_format: WeightFormat = "auto"
    kv_cache_dtype: KVCacheDtype = "auto"
    exits: tuple[int, ...] = ()
    skips: tuple[str, ...] = ()
    siblings: tuple[Path, ...] = ()


def candidates(wanted: Wanted) -> list[Candidate]:
    """All ways, most exact first: the whole model in each precision, then fewer and fewer layers, then smaller models.

    Raises:
        UsageError: layers that the model doesn't have.
    """
    whole = list(_precisions(wanted))
    plain = [way for way in whole if way.kv_cache_dtype == wanted.kv_cache_dtype]
    found = list(whole)
    for name, skipped in _depths(wanted):
        found += [_changed(way, name, skip_layers=skipped) for way in plain]
    for sibling in wanted.siblings:
        found += [_changed(way, f"sibling {sibling.name}", model=str(sibling)) for way in plain]
    return found


def declared_exits(config: Any, generation: Any) -> tuple[int, ...]:
    """After how many layers the model was trained to answer, as its own files say it.

    Args:
        config: of the model; `early_exit_layers` is a list of numbers there.
        generation: its generation settings; transformers' `assistant_early_exit` is one number.
    """
    listed = getattr(config.get_text_config(decoder=True), "early_exit_layers", None) or []
    one = getattr(generation, "assistant_early_exit", None)
    count = config.get_text_config(decoder=True).num_hidden_layers
    exits = {int(number) for number in [*listed, *([] if one is None else [one])]}
    return tuple(sorted((number for number in exits if 0 < number < count), reverse=True))


def _precisions(wanted: Wanted) -> Iterator[Candidate]:
    """Of the whole model."""
    usual = wanted.dtype, wanted.weight_format
    weights: list[tuple[DtypeName, WeightFormat]] = [usual]
    if wanted.device != "cpu":
        if not wanted.dtype_given and wanted.dtype != "float32":
            weights.insert(0, ("float32", wanted.weight_format))
    elif wanted.dtype == "float32":
        if wanted.weight_format == "auto" and wanted.fewer_bits:
            weights += [("float32", "bfloat16"), ("float32", "int8")]
        if wanted.bf16 and not wanted.dtype_given:
            weights.append(("bfloat16", wanted.weight_format))
    for dtype, weight_format in weights:
        exact = weights.index((dtype, weight_format)) <= weights.index(usual)
        name = dtype if weight_format == "auto" else f"{dtype}, {weight_format} weights"
        yield Candidate(name, dtype, weight_format, wanted.kv_cache_dtype, exact)
        if wanted.kv_cache_dtype == "auto" and dtype == "float32":
            yield Candidate(f"{name}, bfloat16 KV", dtype, weight_format, "bfloat16")


def _depths(wanted: Wanted) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Layers that may be left out, fewest first."""
    found = {f"exit after {layers}": tuple(range(layers, wanted.num_layers)) for layers in wanted.exits}
    for text in wanted.skips:
        skipped = _skipped(text, wanted.num_layers)
        if skipped not in found.values():
            found[f"without {_words(skipped)}"] = skipped
    yield from sorted(found.items(), key=lambda item: len(item[1]))


def _skipped(text: str, count: int) -> tuple[int, ...]:
    entry = read_skip(text)
    if entry is None or (isinstance(entry, int) and entry >= count):
        raise UsageError(f"the model has {count} layers", where=f"--adaptive_skip_layers {text}")
    skipped = tuple(range(count - entry, count)) if isinstance(entry, int) else entry
    try:
        check_skipped(skipped, count)
    except UsageError as error:
        raise UsageError(error.message, where=f"--adaptive_skip_layers {text}", fix=error.fix) from error
    return skipped


def _words(skipped: Sequence[int]) -> str:
    first, last = skipped[0], skipped[-1]
    if len(skipped) == 1:
        return f"layer {first}"
    if last - first == len(skipped) - 1:
        return f"layers {first}-{last}"
    return f"layers {', '.join(map(str, skipped))}"


def _changed(way: Candidate, name: str, **changes: Any) -> Candidate:
    fields = {**vars(way), "name": f"{name}, {way.name}", "exact": False, **changes}
    return Candidate(**fields)
