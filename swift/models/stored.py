"""A model folder's weights as tensors that stay on disk until a box of them is read.

The files name and cut tensors as the model's authors did; transformers knows how to get from there to the modules of
today (renaming, one file tensor per expert stacked into one, parts joined). Those steps are followed here without
reading anything: what a stacked tensor's box needs is read from the files of just these experts. Steps of other kinds
are done by transformers on whole tensors, when first read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from swift.models.hub import check_weight_file, weight_files

Box = list[tuple[int, int]]  # per dimension: where it begins, how long it is


class Stored(Protocol):
    """A tensor on disk."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, box: Box) -> torch.Tensor:
        """A box of it, in the dtype of the file."""

    def release(self) -> None:
        """Let go of what was kept for further boxes."""


@dataclass
class InFile:
    """A tensor as it lies in a file: a slice of safetensors, or a mapped tensor."""

    source: Any
    shape: tuple[int, ...]

    def read(self, box: Box) -> torch.Tensor:
        where = tuple(slice(start, start + size) for start, size in box)
        return self.source[where] if where else self.source[...]

    def release(self) -> None:
        pass


@dataclass
class Stacked:
    """Tensors of one shape, stacked along a new dimension."""

    parts: list[Stored]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        inner = list(self.parts[0].shape)
        return (*inner[: self.dim], len(self.parts), *inner[self.dim :])

    def read(self, box: Box) -> torch.Tensor:
        start, size = box[self.dim]
        inner = box[: self.dim] + box[self.dim + 1 :]
        return torch.stack([part.read(inner) for part in self.parts[start : start + size]], self.dim)

    def release(self) -> None:
        for part in self.parts:
            part.release()


@dataclass
class Joined:
    """Tensors laid end to end along a dimension."""

    parts: list[Stored]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.parts[0].shape)
        shape[self.dim] = sum(part.shape[self.dim] for part in self.parts)
        return tuple(shape)

    def read(self, box: Box) -> torch.Tensor:
        (start, size), found, begin = box[self.dim], [], 0
        for part in self.parts:
            length = part.shape[self.dim]
            first, last = max(start, begin), min(start + size, begin + length)
            if first < last:
                inner = [*box[: self.dim], (first - begin, last - first), *box[self.dim + 1 :]]
                found.append(part.read(inner))
            begin += length
        return found[0] if len(found) == 1 else torch.cat(found, self.dim)

    def release(self) -> None:
        for part in self.parts:
            part.release()


@dataclass
class Section:
    """A part of a tensor along one dimension."""

    whole: Stored
    dim: int
    start: int
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.whole.shape[: self.dim], self.size, *self.whole.shape[self.dim + 1 :])

    def read(self, box: Box) -> torch.Tensor:
        start, size = box[self.dim]
        return self.whole.read([*box[: self.dim], (self.start + start, size), *box[self.dim + 1 :]])

    def release(self) -> None:
        self.whole.release()


@dataclass
class Converted:
    """A tensor that must be made whole; it is kept until `release`."""

    make: Callable[[], torch.Tensor]
    shape: tuple[int, ...]
    made: torch.Tensor | None = field(default=None, repr=False)

    def read(self, box: Box) -> torch.Tensor:
        if self.made is None:
            self.made = self.make()
        return self.made[tuple(slice(start, start + size) for start, size in box)]

    def release(self) -> None:
        self.made = None


@dataclass
class Weights:
    """What a folder holds for a model.

    Attributes:
        tensors: by the model's own names.
        unexpected: names in the files (in today's spelling) that the model has no place for.
    """

    tensors: dict[str, Stored]
    unexpected: set[str]


@contextmanager
def open_weights(path: Path, model: PreTrainedModel) -> Iterator[Weights]:
    """The weights in folder `path` for `model`, which is whole and may be on the meta device.

    Raises:
        ModelError: files are missing or damaged.
    """
    with ExitStack() as stack:
        yield _follow(dict(_open_files(weight_files(path), stack)), model)


def open_tensors(file: Path, stack: ExitStack) -> Iterator[tuple[str, Stored]]:
    """The tensors of one file, open for as long as `stack` is."""
    check_weight_file(file)
    # read, not mapped: pages of a mapped file count as this process's memory until the kernel wants them back
    if file.suffix == ".safetensors":
        opened = stack.enter_context(safe_open(str(file), framework="pt", device="cpu", backend="pread"))
        for name in opened.keys():  # noqa: SIM118 - not a mapping
            part = opened.get_slice(name)
            yield name, InFile(part, tuple(part.get_shape()))
    else:
        for name, tensor in torch.load(file, map_location="cpu", mmap=True, weights_only=True).items():
            yield name, InFile(tensor, tuple(tensor.shape))


def _open_files(files: Iterable[Path], stack: ExitStack) -> Iterator[tuple[str, Stored]]:
    for file in files:
        yield from open_tensors(file, stack)


def _follow(files: dict[str, Stored], model: PreTrainedModel) -> Weights:
    """Follow the steps that transformers takes from the names of the files to those of the model."""
    steps = get_model_conversion_mapping(model)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    names: dict[str, Any] = model.state_dict()
    weights = Weights({}, set())
    gathered: dict[str, tuple[WeightConverter, dict[str, list[str]]]] = {}
    for key in sorted(files, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, names)
        if name not in names and key in names:
            name, pattern = key, None
        if name not in names:
            weights.unexpected.add(name)
        elif pattern is None:
            weights.tensors[name] = files[key]
        else:
            entry = gathered.setdefault(name, (by_pattern[pattern], {}))
            entry[1].setdefault(pattern, []).append(key)
    for name, (converter, keys) in gathered.items():
        made = _followed(converter, name, keys, files) or _converted(converter, name, keys, files, model)
        weights.tensors |= made
    return weights


def _followed(
    converter: WeightConverter, name: str, keys: dict[str, list[str]], files: dict[str, Stored]
) -> dict[str, Stored] | None:
    """What a converter makes, without reading; None if it takes a step of a kind that isn't known here."""
    current: dict[str, list[Stored]] = {pattern: [files[key] for key in found] for pattern, found in keys.items()}
    sources, targets = converter.source_patterns, converter.target_patterns
    for step in converter.operations:
        if type(step) is MergeModulelist:
            single = len(current) == 1
            current = {targets[0] if single else p: [Stacked(parts, step.dim)] for p, parts in current.items()}
        elif type(step) is Concatenate and len(targets) == 1:
            ordered = [part for pattern in sources for part in current.get(pattern, [])]
            if not ordered:
                return None
            current = {targets[0]: [Joined(ordered, step.dim)]}
        elif type(step) is Chunk and step.num_shards_attribute is None and len(current) == 1:
            whole = next(iter(current.values()))[0]
            size = -(-whole.shape[step.dim] // len(targets))
            current = {
                target: [Section(whole, step.dim, i * size, min(size, whole.shape[step.dim] - i * size))]
                for i, target in enumerate(targets)
            }
        else:
            return None
    inside = next((target for target in current if target in name), None)
    if inside is None or any(len(parts) != 1 for parts in current.values()):
        return None
    before, _, after = name.partition(inside)
    return {before + target + after: parts[0] for target, parts in current.items()}


def _converted(
    converter: WeightConverter, name: str, keys: dict[str, list[str]], files: dict[str, Stored], model: PreTrainedModel
) -> dict[str, Stored]:
    """What a converter makes, by transformers itself; the names and shapes from a trial without numbers."""

    def run(load: Callable[[Stored], torch.Tensor]) -> dict[str, torch.Tensor]:
        own = copy.deepcopy(converter)
        for pattern, found in keys.items():
            for key in found:
                own.add_tensor(name, key, pattern, cast(Any, lambda key=key: load(files[key])))
        made = own.convert(name, model=model, config=model.config)
        return {target: value[0] if isinstance(value, list) else value for target, value in made.items()}

    def whole(target: str) -> Callable[[], torch.Tensor]:
        return lambda: run(lambda stored: stored.read([(0, size) for size in stored.shape]))[target]

    trial = run(lambda stored: torch.empty(stored.shape, device="meta"))
    return {target: Converted(whole(target), tuple(value.shape)) for target, value in trial.items()}
