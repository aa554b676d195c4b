"""`swift config show|schema|convert`: what settings come to, what there is, and files of other tools."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from swift.config import commands as classes
from swift.config.catalog import COMMANDS
from swift.config.conversion import Conversion
from swift.config.convert import convert_file, is_own_file, read_foreign_file
from swift.config.fields import setting
from swift.config.files import CONFIG_SUFFIXES, annotated_yaml, given_in_file, read_config_file
from swift.config.parse import HelpRequested, Parsed, parse_command_line, require_choice
from swift.config.resolve import group_spellings
from swift.config.schema import groups_of, json_schema, names_of
from swift.core.errors import UsageError
from swift.core.files import write_atomic

CommandName = Literal["sft", "pt", "rlhf", "infer", "merge-lora"]

_ACTIONS = {
    "show": "the effective settings of a file and flags, and where each comes from",
    "schema": "a JSON schema of a command's files, for editors",
    "convert": "a file of ms-swift, LLaMA-Factory or Axolotl as one of ours",
}


@dataclass
class SchemaOptions:
    """Print a JSON schema of the files that a command accepts."""

    command: CommandName = setting("sft", help="the command")


@dataclass
class ConvertOptions:
    """Convert a configuration file of another tool."""

    tool: Literal["auto", "ms-swift", "llamafactory", "axolotl"] = setting(
        "auto", help="the tool it belongs to; auto: told by its keys", aliases=("from",)
    )
    command: CommandName | None = setting(None, help="our command; default: what the file is for")
    output: str | None = setting(None, help="file to write; default: standard output")
    exist_ok: bool = setting(False, help="write over an existing file")


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    action = require_choice(arguments[0] if arguments else None, _ACTIONS, "config")
    rest = arguments[1:]
    return {"show": _show, "schema": _schema, "convert": _convert}[action](rest)


def _show(arguments: list[str]) -> int:
    command, rest = _take_command(arguments)
    if {"-h", "--help"} & set(rest):
        usage = "usage: swift config show [FILE.yaml] [--command sft|pt|rlhf|infer|merge-lora] [--flag value ...]"
        raise HelpRequested(f"{usage}\n\nPrints {_ACTIONS['show']}.\nFlags: see `swift {command} --help`.\n")
    config_class = getattr(classes, COMMANDS[command].config or "")
    if command == "sft" and rest and rest[0].lower().endswith(CONFIG_SUFFIXES):
        _refuse_file_of_another_command(rest[0])
    parsed: Parsed[Any] = parse_command_line(config_class, rest, command=command)
    groups, comments = effective_settings(parsed)
    if parsed.file is not None and parsed.file.env:
        groups = {"ENV": dict(parsed.file.env), **groups}
    sys.stdout.write(f"# swift {command}\n" + annotated_yaml(groups, comments))
    for note in parsed.notes:
        print(note, file=sys.stderr)
    return 0


def _refuse_file_of_another_command(path: str) -> None:
    """Say which `--command` a file is for, when all that `swift sft` doesn't know in it belongs to one other command.

    `infer` counts alone where other commands that answer would do as well.

    Raises:
        UsageError: if so, or if the file can't be read.
    """
    file = read_config_file(path)
    foreign: dict[str, list[str]] = {}
    for other in COMMANDS.values():
        cls = getattr(classes, other.config) if other.config and other.name not in ("sft", "megatron rlhf") else None
        if cls is not None:
            given = given_in_file(file, group_spellings(cls), names_of(cls))
            extra = [item.name for item in given if item.name not in names_of(classes.SftConfig)]
            if extra and all(name in names_of(cls) for name in extra):
                foreign[other.name] = extra
    if "infer" in foreign:
        foreign = {"infer": foreign["infer"]}
    if len(foreign) == 1:
        ((command, names),) = foreign.items()
        verb = "is a setting" if len(names) == 1 else "are settings"
        raise UsageError(
            f"{', '.join(names)} {verb} of `swift {command}`, not of `swift sft`",
            where=path,
            fix=f"swift config show {path} --command {command}",
        )


def effective_settings(parsed: Parsed[Any]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Every setting by group, and for each a remark that says where its value comes from."""
    groups: dict[str, dict[str, Any]] = {}
    comments: dict[str, str] = {}
    for group, members in groups_of(type(parsed.config)).items():
        for item in members:
            groups.setdefault(group, {})[item.name] = getattr(getattr(parsed.config, group), item.name)
            place = parsed.places.get(item.name)
            comments[item.name] = "default" if place is None else _origin(parsed.origins[item.name], place)
    return groups, comments


def _origin(origin: str, place: str) -> str:
    return f"{origin}: {place}" if place.startswith("--") else place


def _take_command(arguments: list[str]) -> tuple[str, list[str]]:
    """Split `--command NAME` off; the other words are that command's own."""
    rest = list(arguments)
    for index, word in enumerate(rest):
        flag, equals, value = word.partition("=")
        if flag == "--command":
            if not equals and index + 1 >= len(rest):
                raise UsageError("--command needs a value", fix="for example --command infer")
            name = value if equals else rest[index + 1]
            del rest[index : index + (1 if equals else 2)]
            name = require_choice(
                name, {c.name: c.help for c in COMMANDS.values() if c.config}, "config show --command"
            )
            return name, rest
    return "sft", rest


def _schema(arguments: list[str]) -> int:
    options = parse_command_line(SchemaOptions, arguments, command="config schema", usage="[--command NAME]").config
    config_class = getattr(classes, COMMANDS[options.command].config or "")
    print(json.dumps(json_schema(config_class, title=f"swift {options.command}"), indent=2, ensure_ascii=False))
    return 0


def _convert(arguments: list[str]) -> int:
    parsed = parse_command_line(
        ConvertOptions,
        arguments,
        command="config convert",
        positionals=("FILE",),
        usage="FILE [--from TOOL] [--output F]",
    )
    options, source = parsed.config, parsed.positionals[0]
    if options.tool == "auto" and is_own_file(read_foreign_file(source)):
        print(f"{source} is a swift file already: nothing was changed or written", file=sys.stderr)
        return 0
    result = convert_file(source, tool=options.tool, command=options.command)
    text = result.to_yaml(Path(source).name)
    if options.output is None:
        sys.stdout.write(text)
    else:
        target = Path(options.output)
        if target.exists() and not options.exist_ok:
            raise UsageError(f"{target} exists already", fix="--exist_ok true writes over it")
        write_atomic(target, text)
    _report(result, options.output)
    return 0


def _report(result: Conversion, output: str | None) -> None:
    """What a human must know about the conversion, on standard error so that the file can be piped."""
    print(f"{result.tool} -> swift {result.command}: {len(result.values)} settings", file=sys.stderr)
    if result.lost:
        print(f"no equivalent ({len(result.lost)}):", file=sys.stderr)
        for key, (_, reason) in result.lost.items():
            print(f"  {key}: {reason}", file=sys.stderr)
    if result.satisfied:
        print(f"need no setting here ({len(result.satisfied)}):", file=sys.stderr)
        for key, reason in result.satisfied.items():
            print(f"  {key}: {reason}", file=sys.stderr)
    if output:
        print(
            f"written to {output}; look at it with: swift config show {output} --command {result.command}",
            file=sys.stderr,
        )
