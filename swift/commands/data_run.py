"""`swift data run RECIPE`, `swift data report DIR`, `swift data operators [NAME]`: the data engine's commands."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from swift.config.fields import setting
from swift.config.helptext import Style
from swift.config.parse import parse_command_line
from swift.config.schema import Setting, default_words, type_words
from swift.core.addresses import without_secrets
from swift.core.errors import UsageError

_SPELLINGS = {"-i": "--input", "-o": "--output"}


@dataclass
class RunFlags:
    """Run a recipe: read, clean, filter, deduplicate, tokenise and write data, restartable at any moment."""

    input: list[str] = setting(
        help="dataset arguments in place of the recipe's input (also -i)", factory=list, aliases=("dataset",)
    )
    output: str | None = setting(None, help="folder for the result (also -o)", aliases=("output_dir",))
    num_proc: int | None = setting(
        None, help="tasks at a time; default: one for each core", aliases=("dataset_num_proc",)
    )
    executor: Literal["local", "ray"] | None = setting(
        None, help="processes of this machine, or a Ray cluster that shares the output folder"
    )
    address: str | None = setting(None, help="of the Ray cluster; default: RAY_ADDRESS, else a new one on this machine")
    rank: int | None = setting(None, help="which of --world_size processes this is, from 0")
    world_size: str | None = setting(
        None,
        help="processes, started apart, that share the work; auto: rank and size from SLURM_PROCID and SLURM_NTASKS, "
        "or from RANK and WORLD_SIZE",
    )
    rank_timeout: float = setting(600.0, help="seconds without a sign of life after which another rank counts as gone")
    max_memory: str | None = setting(None, help="what a process may hold in memory, such as 300MB")
    seed: int | None = setting(None, help="of everything random")
    restart: bool = setting(False, help="forget what is done, and a finished output, and begin anew")
    dry_run: bool = setting(False, help="check the recipe, list stages and tasks, and stop")
    keep_work: bool | None = setting(
        None, help="keep the work folder, so that a changed recipe redoes only what it must"
    )
    offline: bool | None = setting(None, help="refuse everything that needs the network")


@dataclass
class ReportFlags:
    """Make _report.html of a finished run anew, from its ledger and manifest."""

    html: str | None = setting(None, help="file to write; default: _report.html in the folder")


@dataclass
class OperatorsFlags:
    """List the operators, or the settings of one."""

    plugins: list[str] = setting(help="files ending in .py or modules that register more", factory=list)
    json: bool = setting(False, help="print JSON")


# flag -> key of the recipe
_KEYS = {
    "input": "input",
    "output": "output.path",
    "num_proc": "executor.num_proc",
    "executor": "executor.kind",
    "address": "executor.address",
    "max_memory": "max_memory",
    "seed": "seed",
    "keep_work": "keep_work",
    "offline": "offline",
}


def run(arguments: list[str]) -> int:
    """Run a recipe; the exit code is 1 when no row is left, 130 or 143 when a signal stopped it."""
    words = [_SPELLINGS.get(word, word) for word in arguments]
    usage = "RECIPE.yaml [--flag value ...]"
    parsed = parse_command_line(RunFlags, words, command="data run", positionals=["RECIPE.yaml"], usage=usage)
    flags = parsed.config
    overrides = {_KEYS[name]: value for name in _KEYS if (value := getattr(flags, name)) not in (None, [])}
    from swift.data.engine.pool import Stopped
    from swift.data.engine.recipe import read_recipe
    from swift.data.engine.run import RunOptions, plan_text, run_recipe

    recipe = read_recipe(parsed.positionals[0], overrides)
    if flags.dry_run:
        print(plan_text(recipe))
        return 0
    options = RunOptions(flags.rank, flags.world_size, flags.rank_timeout, flags.restart)
    try:
        result = run_recipe(recipe, options=options)
    except Stopped as stopped:
        again = shlex.join(["swift", "data", "run", *(word for word in arguments if word != "--restart")])
        print(f"{stopped}; tasks that are done stay done, go on with:\n  {without_secrets(again)}", file=sys.stderr)
        return 128 + stopped.signal
    print(result.output)
    if not result.manifest["rows"]:
        if result.already_complete:
            print("warning: the output has no rows", file=sys.stderr)
        return 1
    return 0


def report(arguments: list[str]) -> int:
    """Write the page about a run again."""
    parsed = parse_command_line(
        ReportFlags, arguments, command="data report", positionals=["DIR"], usage="DIR [--html FILE]"
    )
    from swift.data.engine.report import write_report
    from swift.data.engine.summary import LEDGER, read_manifest

    folder = Path(parsed.positionals[0])
    manifest = read_manifest(folder)
    if manifest is None:
        raise UsageError(
            "there is no finished run of a recipe", where=str(folder), fix="give the output folder of `swift data run`"
        )
    try:
        ledger = json.loads((folder / LEDGER).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise UsageError(f"the ledger can't be read: {error}", where=str(folder / LEDGER)) from None
    print(write_report(folder, ledger, manifest, Path(parsed.config.html) if parsed.config.html else None))
    return 0


def operators(arguments: list[str]) -> int:
    """List operators, or show one."""
    parsed = parse_command_line(
        OperatorsFlags, arguments, command="data operators", positionals=["[NAME]"], usage="[NAME] [--plugins FILE.py]"
    )
    from swift.data.engine.operator import OPERATORS
    from swift.data.engine.plugins import kind_of, load_builtin, load_plugin

    load_builtin()
    for plugin in parsed.config.plugins:
        load_plugin(plugin, Path())
    names = parsed.positionals or sorted(OPERATORS)
    found = {name: OPERATORS[name] for name in names}
    if parsed.config.json:
        described = {name: _described(cls, kind_of(cls)) for name, cls in found.items()}
        print(json.dumps(described, indent=2, ensure_ascii=False, default=str))
    elif parsed.positionals:
        ((name, cls),) = found.items()
        print(_page(name, cls, kind_of(cls)))
    else:
        width = max(map(len, found), default=0)
        for name, cls in found.items():
            print(f"{name:<{width}}  {_first_line(cls)}")
        print("\nswift data operators NAME  its settings; in a recipe: `steps: [name, {name: {setting: value}}]`")
    return 0


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").strip().splitlines()[0]


def _described(cls: type, kind: str) -> dict[str, Any]:
    from swift.data.engine.settings import REQUIRED, settings_of

    settings = {}
    for item in settings_of(cls).values():
        settings[item.name] = {"type": type_words(item), "help": item.help}
        if item.default is not REQUIRED:
            settings[item.name]["default"] = item.default
    return {"does": _first_line(cls), "kind": kind, "settings": settings}


_KINDS = {
    "map": "sees one document at a time",
    "global": "compares documents of all shards",
    "sink": "writes the output, as the last step",
}


def _page(name: str, cls: type, kind: str) -> str:
    from swift.data.engine.settings import settings_of

    style = Style.for_stdout()
    doc = "\n".join(line.removeprefix("    ") for line in (cls.__doc__ or "").strip().splitlines())
    lines = [style.bold(name) + f"  ({_KINDS[kind]})", "", doc, "", style.bold("Settings")]
    settings = settings_of(cls).values()
    for item in settings:
        lines.append(f"  {item.name} {style.dim(type_words(item))}{_default(item)}")
        if item.help:
            lines.append(f"      {item.help}")
    if not settings:
        lines.append("  none")
    return "\n".join(lines)


def _default(item: Setting) -> str:
    from swift.data.engine.settings import REQUIRED

    if item.default is REQUIRED:
        return "  (must be given)"
    words = default_words(item.default)
    return f"  [{words}]" if words else ""
