"""A recipe as stages: what each of them does, how many tasks it has, and the fingerprint of everything it depends on.

Map operators that follow one another are one stage with whatever hands them their documents: the reading of the input,
or the last phase of a global operator. Each stage's fingerprint takes in the one before it, so a changed operator
changes its own stage and all later ones, and no earlier one. Knows nothing of folders and processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from swift.core.errors import SwiftError
from swift.core.version import __version__
from swift.data.engine.operator import OPERATORS, GlobalOperator
from swift.data.engine.plugins import kind_of, version_of
from swift.data.engine.recipe import Recipe, Step
from swift.data.engine.shards import Shard, num_partitions, pieces_of
from swift.data.files import stamp_of

_LAYOUT = 2  # of the work folder; a number that changes with it


@dataclass(frozen=True)
class Stage:
    """Tasks that are independent of each other.

    Attributes:
        name: of its folder, such as `01-near_dedup.signatures`.
        kind: `read` takes shards of the input; `phase` is one of a global operator that isn't its last; `last` is that;
            `collect` puts documents together into files of the wanted size.
        num_tasks: None for `collect`, which is known once its documents are.
        step: the global operator (number of the step). phase: its phase.
        maps: the map operators that follow in the same tasks.
        source: the stage whose documents are read; empty for `read`.
        final: whether it writes the output (else documents for the next stage; a `phase` writes what it likes).
        fingerprint: of all that its results depend on.
    """

    name: str
    kind: Literal["read", "phase", "last", "collect"]
    num_tasks: int | None
    step: int | None
    phase: str
    maps: tuple[int, ...]
    source: str
    final: bool
    fingerprint: str

    def title(self, recipe: Recipe) -> str:
        """What it does, for plans and progress."""
        maps = [recipe.steps[index].label for index in self.maps]
        if self.kind == "read":
            return " + ".join(["read", *maps])
        if self.kind == "collect":
            return "collect"
        assert self.step is not None
        return " + ".join([f"{recipe.steps[self.step].label}: {self.phase}", *maps])


def plan_stages(recipe: Recipe, shards: list[Shard]) -> list[Stage]:
    """The stages of a recipe, in order.

    Raises:
        SwiftError: a global operator whose phases aren't as `GlobalOperator` says.
    """
    stages = list(_stages(recipe, shards, input_fingerprint(recipe, shards)))
    if recipe.output_shard_bytes is not None:
        before = stages[-1]
        fingerprint = _hash(before.fingerprint, recipe.output_shard_bytes, _sink_key(recipe))
        name = f"{len(stages):02d}-collect"
        stages.append(Stage(name, "collect", None, None, "", (), before.name, True, fingerprint))
    return stages


def _stages(recipe: Recipe, shards: list[Shard], fingerprint: str) -> Iterator[Stage]:
    num_shards, partitions = len(shards), num_partitions(recipe, shards)
    steps = recipe.steps[:-1] if recipe.sink else recipe.steps
    parts: list[tuple[int | None, list[int]]] = [(None, [])]  # a global operator and the map operators behind it
    for index, step in enumerate(steps):
        if kind_of(OPERATORS[step.name]) == "global":
            parts.append((index, []))
        else:
            parts[-1][1].append(index)
    number, source = 0, ""
    for part, (step_index, maps) in enumerate(parts):
        final = part == len(parts) - 1 and recipe.output_shard_bytes is None
        phases: list[tuple[str, int]] = [("read", num_shards)]
        if step_index is not None:
            phases = phases_of(steps[step_index], num_shards, partitions)
            fingerprint = _hash(fingerprint, _step_key(steps[step_index]))
        before = source
        for place, (phase, num_tasks) in enumerate(phases):
            last = place == len(phases) - 1
            kind: Any = "read" if step_index is None else "last" if last else "phase"
            fingerprint = _hash(fingerprint, phase, num_tasks)
            if last:
                fingerprint = _hash(fingerprint, [_step_key(steps[index]) for index in maps])
                fingerprint = _hash(fingerprint, _sink_key(recipe)) if final else fingerprint
            name = f"{number:02d}-read" if step_index is None else f"{number:02d}-{steps[step_index].label}.{phase}"
            stage_maps = tuple(maps) if last else ()
            yield Stage(name, kind, num_tasks, step_index, phase, stage_maps, before, final and last, fingerprint)
            number += 1
            source = name


def global_operator(step: Step, partitions: int) -> GlobalOperator:
    """The operator of a step, told how many tasks should share what isn't divided by shards."""
    operator: GlobalOperator = step.build()
    operator.num_partitions = partitions
    return operator


def phases_of(step: Step, num_shards: int, partitions: int) -> list[tuple[str, int]]:
    """Name and number of tasks of each phase of a global operator.

    Raises:
        SwiftError: the last one doesn't have one task for each shard, or a name occurs twice.
    """
    phases = global_operator(step, partitions).phases(num_shards)
    names = [name for name, _ in phases]
    if not phases or phases[-1][1] != num_shards or len(set(names)) != len(names):
        raise SwiftError(
            f"the phases of the operator {step.label} can't be run: {phases}",
            where=step.where,
            fix="phases have different names, and the last one has one task for each shard",
        )
    return phases


def input_fingerprint(recipe: Recipe, shards: list[Shard]) -> str:
    """Of all that the reading depends on: files, how they are cut, columns, and what happens to bad rows."""
    policy = [recipe.on_bad_row, recipe.on_bad_shard, recipe.seed, recipe.keep_dropped]
    inputs = [[item.text_column, item.source] for item in recipe.input]
    files = [[piece.input, piece.key, piece.as_json()] for piece in pieces_of(shards)]
    cuts = [len(shard.pieces) for shard in shards]
    return _hash(_LAYOUT, __version__, policy, inputs, files, cuts)


def _step_key(step: Step) -> list[Any]:
    """Name, settings and code of an operator, and stamps of the files and folders that its settings name."""
    return [step.label, step.settings, version_of(step.name), sorted(_named_files(step.settings))]


def _sink_key(recipe: Recipe) -> list[Any]:
    return [recipe.format, _step_key(recipe.sink) if recipe.sink else None]


def _named_files(value: Any) -> Iterator[list[str]]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _named_files(item)
    elif isinstance(value, str) and value and len(value) < 1000 and "\n" not in value:
        path = Path(value)
        if path.is_dir():
            yield from ([str(item), stamp_of(str(item))] for item in sorted(path.iterdir()) if item.is_file())
        elif path.is_file():
            yield [value, stamp_of(value)]


def _hash(*values: Any) -> str:
    told = orjson.dumps(values, option=orjson.OPT_SORT_KEYS, default=_plain)
    return hashlib.sha256(told).hexdigest()[:32]


def _plain(value: Any) -> Any:
    return (
        sorted(value)
        if isinstance(value, (set, frozenset))
        else list(value)
        if isinstance(value, tuple)
        else str(value)
    )
