"""A recipe: what is read, the operators it goes through, and where the result is written.

A YAML or JSON file (or a Python mapping) becomes a typed `Recipe`; every fault in it is found at once, with its line,
before any data is touched. Knows nothing of how a recipe is run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from swift.config.fields import setting
from swift.core.errors import SwiftError, UsageError, did_you_mean
from swift.data.engine.nodes import Node, plain_nodes, read_nodes
from swift.data.engine.operator import OPERATORS
from swift.data.engine.plugins import is_sink, load_builtin, load_plugin
from swift.data.engine.settings import Problem, filled, settings_of, size_of_words
from swift.data.files import is_data_file

TOKENS = "tokens"


@dataclass(frozen=True)
class InputSpec:
    """One dataset argument: how it is written in `--dataset`, which column holds the text, and what it is called."""

    path: str = setting("", help="a file, folder, pattern, URL or dataset id, as --dataset takes it")
    text_column: str | None = setting(None, help="the column that holds the text; default: found by its name")
    source: str | None = setting(None, help="a label that is counted in the report and written under meta.source")


@dataclass(frozen=True)
class OutputSpec:
    """Where the result goes."""

    path: str = setting("", help="a folder, new or of this recipe")
    format: Literal["jsonl", "jsonl.zst", "jsonl.gz", "parquet", "tokens"] | None = setting(
        None, help="of the files; default: jsonl.zst, or tokens where the last step writes those"
    )
    shard_bytes: str | None = setting(
        None, help="text in an output file, such as 256MB; default: one output file for each input shard"
    )


@dataclass(frozen=True)
class ExecutorSpec:
    """What runs the tasks. The result is the same for all of them."""

    kind: Literal["local", "ray"] = setting("local", help="processes of this machine, or a Ray cluster")
    num_proc: int | None = setting(None, help="tasks at a time; default: one for each core (of the cluster)")
    address: str | None = setting(None, help="of the Ray cluster; default: the one that runs here, else a new one")


@dataclass(frozen=True)
class Step:
    """One operator of a recipe: its name, its label (`sample`, `sample-2`), its typed settings, and its place."""

    name: str
    label: str
    settings: dict[str, Any]
    where: str

    def build(self) -> Any:
        """The operator."""
        return OPERATORS[self.name](**self.settings)


@dataclass(frozen=True)
class Recipe:
    """A recipe, checked.

    Attributes:
        steps: the operators; one that is a sink is last.
        folder: what relative paths of plugins are taken from.
        places: where each input is written, for messages.
    """

    input: tuple[InputSpec, ...] = ()
    output: OutputSpec = field(default_factory=OutputSpec)
    steps: tuple[Step, ...] = ()
    plugins: list[str] = setting(help="files ending in .py or modules that register operators", factory=list)
    executor: ExecutorSpec = field(default_factory=ExecutorSpec)
    seed: int = setting(42, help="of everything random; each draw is a function of seed, operator and row")
    shard_size: str = setting("256MB", help="larger input files are read in pieces of this size, where possible")
    join_files: str = setting(
        "16MB", help="neighbouring files that are smaller are read in one task up to this size; 0: a task for each file"
    )
    max_memory: str = setting("300MB", help="what a process may hold in memory, documents of extreme size aside")
    on_bad_row: Literal["stop", "drop"] = setting("stop", help="drop: count bad rows and go on")
    max_bad_rows: float = setting(
        0.01, help="with drop: stop above this share (below 1) or number (1 and more) of rows"
    )
    on_bad_shard: Literal["stop", "skip"] = setting("stop", help="skip: count unreadable or empty shards and go on")
    keep_dropped: bool = setting(False, help="list every dropped row with operator and reason: dropped.jsonl.zst")
    keep_work: bool = setting(False, help="keep the work folder, so that a changed recipe redoes only what it must")
    offline: bool = setting(False, help="refuse everything that needs the network")
    name: str = ""
    folder: str = ""
    places: tuple[str, ...] = ()

    @property
    def shard_size_bytes(self) -> int:
        return size_of_words(self.shard_size) or 0

    @property
    def join_files_bytes(self) -> int:
        return size_of_words(self.join_files) or 0

    @property
    def max_memory_bytes(self) -> int:
        return size_of_words(self.max_memory) or 0

    @property
    def output_shard_bytes(self) -> int | None:
        return None if self.output.shard_bytes is None else size_of_words(self.output.shard_bytes)

    @property
    def sink(self) -> Step | None:
        """The last step, if that one writes the output."""
        return self.steps[-1] if self.steps and is_sink(OPERATORS[self.steps[-1].name]) else None

    @property
    def format(self) -> str:
        return self.output.format or (TOKENS if self.sink else "jsonl.zst")

    def as_json(self) -> dict[str, Any]:
        """Plain values that `recipe_from` reads again."""
        values: dict[str, Any] = {
            "input": [_given(item) for item in self.input],
            "output": _given(self.output),
            "executor": _given(self.executor),
            "steps": [{step.name: step.settings} for step in self.steps],
        }
        for member in fields(self):
            if member.name not in (*_HIDDEN, *values):
                values[member.name] = getattr(self, member.name)
        return values


_NESTED = ("input", "output", "steps", "executor")
_HIDDEN = ("folder", "places")


def read_recipe(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe in a YAML or JSON file.

    Args:
        path: the file.
        overrides: values that win over the file's: keys of the recipe, or dotted (`output.path`).

    Raises:
        UsageError: every fault found, in one error.
    """
    path = Path(path)
    if path.suffix not in (".yaml", ".yml", ".json") and is_data_file(path):
        raise UsageError(
            f"{path} is data, and a recipe is wanted",
            fix=f"`swift data check {path}` looks at data; a recipe is a YAML file that says "
            f"`input: {path}`, `output: clean` and `steps: [...]`",
        )
    node = read_nodes(path)
    recipe = _recipe(node, path.parent, overrides or {}, str(path))
    return recipe if recipe.name else replace(recipe, name=path.stem)


def recipe_from(
    values: Mapping[str, Any], overrides: Mapping[str, Any] | None = None, *, folder: str | Path = ""
) -> Recipe:
    """The recipe in a Python mapping of the same keys; see `read_recipe`."""
    return _recipe(plain_nodes(dict(values), "recipe"), Path(folder), overrides or {}, "the recipe")


def _recipe(node: Node, folder: Path, overrides: Mapping[str, Any], subject: str) -> Recipe:
    if node.entries is None:
        raise UsageError(f"{subject} must hold `key: value` lines, not {node.kind}", where=node.where)
    entries = _with_overrides(dict(node.entries), overrides)
    plain = {name: item for name, item in settings_of(Recipe).items() if name not in (*_NESTED, *_HIDDEN)}
    known = (*_NESTED, *plain)
    problems: list[Problem] = []
    for key, (where, _) in entries.items():
        if key.replace("-", "_") not in known:
            fix = " ".join(filter(None, [did_you_mean(key, known), "a recipe has " + ", ".join(known)]))
            problems.append(Problem(f"a recipe has no key {key!r}", where, fix))
    rest = {key: item for key, item in entries.items() if key.replace("-", "_") in plain}
    values, found = filled("the recipe", plain, Node(node.where, rest, entries=rest), node.where)
    problems += found
    problems += _load_operators(values.get("plugins", []), folder, entries)
    steps, found = _steps(entries.get("steps"), node)
    problems += found
    inputs, places, found = _inputs(entries.get("input"), node)
    problems += found
    nested: dict[str, Any] = {}
    for key, cls in (("output", OutputSpec), ("executor", ExecutorSpec)):
        value = entries[key][1] if key in entries else None
        if key == "output" and value is not None and value.words is not None:  # `output: folder`
            value = Node(value.where, {}, entries={"path": (value.where, value)})
        given, found = filled(key, settings_of(cls), value, node.where)
        problems += found
        nested[key] = cls(**given)
    recipe = Recipe(input=inputs, places=places, steps=steps, folder=str(folder), **nested, **values)
    problems += _contradictions(recipe, {key: where for key, (where, _) in entries.items()}, node.where)
    _raise(problems, subject)
    return recipe


def _with_overrides(entries: dict[str, tuple[str, Node]], overrides: Mapping[str, Any]) -> dict[str, tuple[str, Node]]:
    for dotted, value in overrides.items():
        group, _, key = dotted.rpartition(".")
        where = f"--{key}"
        node = plain_nodes(value, where)
        node.where = where
        if not group:
            entries[key] = (where, node)
            continue
        old = entries.get(group, ("", Node(where, {}, entries={})))[1]
        inner = dict(old.entries or ({"path": (old.where, old)} if old.words is not None else {}))
        inner[key] = (where, node)
        entries[group] = (where, Node(old.where, {}, entries=inner))
    return entries


def _load_operators(plugins: Any, folder: Path, entries: dict[str, tuple[str, Node]]) -> list[Problem]:
    load_builtin()
    problems = []
    for name in plugins:
        try:
            load_plugin(name, folder)
        except SwiftError as error:
            where = error.where or entries["plugins"][0]
            problems.append(Problem(error.message, where, error.fix or ""))
    return problems


def _inputs(entry: tuple[str, Node] | None, root: Node) -> tuple[tuple[InputSpec, ...], tuple[str, ...], list[Problem]]:
    """The inputs, where each is written, and what is wrong."""
    if entry is None or entry[1].value in (None, [], {}):
        return (), (), [Problem("nothing to read: `input` is missing", root.where, "input: [folder/*.jsonl]")]
    node = entry[1]
    known = settings_of(InputSpec)
    found: list[InputSpec] = []
    problems: list[Problem] = []
    items = node.items if node.items is not None else [node]
    for item in items:
        if item.words is not None:
            found.append(InputSpec(item.words))
            continue
        values, faults = filled("an input", known, item, item.where)
        if not faults and not values.get("path"):
            faults = [Problem("an input has no path", item.where, "input: [{path: folder, source: web}]")]
        problems += faults
        found.append(InputSpec(**values))
    return tuple(found), tuple(item.where for item in items), problems


def _steps(entry: tuple[str, Node] | None, root: Node) -> tuple[tuple[Step, ...], list[Problem]]:
    if entry is None or entry[1].value is None:
        return (), []
    node = entry[1]
    if node.items is None:
        return (), [Problem(f"`steps` is a list, not {node.kind}", node.where, "steps: [normalise, {sample: {}}]")]
    steps: list[Step] = []
    problems: list[Problem] = []
    count: Counter[str] = Counter()
    for item in node.items:
        name, where, settings = _step_parts(item, problems)
        if name is None:
            continue
        if name not in OPERATORS:
            fix = " ".join(
                filter(
                    None, [did_you_mean(name, OPERATORS), "`swift data operators` lists them; others need `plugins`"]
                )
            )
            problems.append(Problem(f"there is no operator {name!r}", where, fix))
            continue
        known = settings_of(OPERATORS[name])
        values, faults = filled(f"the operator {name!r}", known, settings, where)
        problems += faults
        count[name] += 1
        step = Step(name, name if count[name] == 1 else f"{name}-{count[name]}", values, where)
        steps.append(step)
        if not faults:
            problems += _refused(step)
    for step in steps[:-1]:
        if is_sink(OPERATORS[step.name]):
            problems.append(
                Problem(f"{step.name!r} writes the output: nothing can follow it", step.where, "move it last")
            )
    return tuple(steps), problems


def _step_parts(item: Node, problems: list[Problem]) -> tuple[str | None, str, Node | None]:
    """Name, place and settings of one item of `steps`."""
    if item.words is not None:
        return item.words, item.where, None
    if item.entries is not None and len(item.entries) == 1:
        ((name, (where, settings)),) = item.entries.items()
        return name, where, settings
    what = f"{len(item.entries)} keys" if item.entries else item.kind
    problems.append(
        Problem(
            f"a step is an operator's name, or `name: {{settings}}`, not {what}",
            item.where,
            "settings are indented further than the name" if item.entries else "",
        )
    )
    return None, item.where, None


def _refused(step: Step) -> list[Problem]:
    """What the operator itself says against its settings."""
    try:
        operator = step.build()
        if hasattr(operator, "check"):
            operator.check()
    except SwiftError as error:
        return [Problem(error.message, f"{step.where} ({error.where})" if error.where else step.where, error.fix or "")]
    return []


def _contradictions(recipe: Recipe, places: Mapping[str, str], root: str) -> list[Problem]:
    problems = []
    if not recipe.output.path:
        problems.append(Problem("no output folder was given", places.get("output", root), "output: {path: folder}"))
    for name, words in (
        ("shard_size", recipe.shard_size),
        ("join_files", recipe.join_files),
        ("max_memory", recipe.max_memory),
        ("output.shard_bytes", recipe.output.shard_bytes),
    ):
        if words is not None and (size_of_words(words) is None if name == "join_files" else not size_of_words(words)):
            where = places.get(name.partition(".")[0], root)
            problems.append(Problem(f"{name} is {words!r}, which is no size", where, "such as 256MB"))
    if recipe.executor.num_proc is not None and recipe.executor.num_proc < 1:
        where = places.get("executor", root)
        problems.append(Problem(f"num_proc is {recipe.executor.num_proc}: nothing would run", where, "1 or more"))
    if recipe.max_bad_rows < 0:
        problems.append(Problem("max_bad_rows is below 0", places.get("max_bad_rows", root), "a share or a number"))
    if recipe.executor.address and recipe.executor.kind != "ray":
        problems.append(Problem("address belongs to executor ray", places.get("executor", root), "kind: ray"))
    if recipe.sink and recipe.format != TOKENS:
        fix = f"leave out the format, or the step {recipe.sink.name}"
        problems.append(Problem(f"{recipe.sink.name} writes tokens, not {recipe.format}", places["output"], fix))
    if recipe.format == TOKENS and not recipe.sink:
        names = [name for name in OPERATORS if is_sink(OPERATORS[name])]
        problems.append(
            Problem("no step writes tokens", places.get("output", root), "the last step is one of " + ", ".join(names))
        )
    return problems


def _raise(problems: list[Problem], subject: str) -> None:
    if not problems:
        return
    if len(problems) == 1:
        raise UsageError(problems[0].message, where=problems[0].where, fix=problems[0].fix or None)
    lines = [f"{subject} has {len(problems)} faults:"]
    for problem in sorted(problems, key=lambda problem: _line(problem.where)):
        lines.append(f"  {problem.where}: {problem.message}" + (f" -> {problem.fix}" if problem.fix else ""))
    raise UsageError("\n".join(lines))


def _line(where: str) -> int:
    """The line of a place in a file, to tell faults in the order in which they stand there; flags come first."""
    number = where.partition(" ")[0].rpartition(":")[2]
    return int(number) if number.isdigit() else 0


def _given(spec: Any) -> dict[str, Any]:
    return {member.name: getattr(spec, member.name) for member in fields(spec)}
