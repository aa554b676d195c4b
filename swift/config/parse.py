"""The command line: words -> what was given -> a configuration.

Works for a command's whole configuration as well as for a small dataclass of options; `--flag value`, `--flag=value`,
`--two-words`, bare booleans, lists by spaces, a YAML or JSON file as first positional or behind `--config`. Where
data files may stand without a flag as well, a JSON file is told from them by its content.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from swift.config.deepspeed import fill_from_deepspeed
from swift.config.files import (
    COMMAND_LINE,
    CONFIG_SUFFIXES,
    ConfigFile,
    Given,
    given_in_file,
    holds_settings,
    read_config_file,
    to_flat,
)
from swift.config.helptext import render_help
from swift.config.idle import idle_notes
from swift.config.resolve import Problem, construct, group_spellings, raise_problems, resolve
from swift.config.saved import fill_from_checkpoint
from swift.config.schema import names_of, settings_of
from swift.config.values import FALSE_WORDS, TRUE_WORDS, Words
from swift.core.errors import UsageError

C = TypeVar("C")

_FLAG = re.compile(r"--[A-Za-z][\w.-]*(=.*)?\Z", re.DOTALL)


class HelpRequested(Exception):
    """`--help` stood on the command line; `text` is the answer."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


@dataclass
class Parsed(Generic[C]):
    """A parsed command line.

    Attributes:
        config: the configuration, every value typed; cross-field checks are not made yet.
        origins: setting -> "command line", the file's name or "checkpoint"; settings left at their default are absent.
        places: setting -> the flag, or file:line.
        notes: one line each, for the user.
        positionals: what stood without a flag, after the configuration file.
        file: the configuration file, if there was one.
    """

    config: C
    origins: dict[str, str]
    places: dict[str, str]
    notes: list[str]
    positionals: list[str] = field(default_factory=list)
    file: ConfigFile | None = None


@dataclass
class _Split:
    given: list[Given] = field(default_factory=list)
    positionals: list[str] = field(default_factory=list)
    help: list[str] | None = None
    config: str | None = None
    problems: list[Problem] = field(default_factory=list)


def parse_command_line(
    cls: type[C], argv: Sequence[str], *, command: str, positionals: Sequence[str] = (), usage: str = ""
) -> Parsed[C]:
    """Parse the words after a command's name.

    Args:
        cls: a configuration class (groups of settings), which also accepts a configuration file, or a dataclass of
            plain options declared with `setting`, which doesn't.
        argv: the words.
        command: the command's name, for messages: ``"sft"``, ``"data check"``.
        positionals: names of words that must stand without a flag; a name in brackets may be left out.
        usage: what follows the command's name in the usage line of the help.

    Raises:
        HelpRequested: for `--help` or `-h`; words after it filter the help.
        UsageError: every fault found, in one error.
    """
    has_file = not all(s.group == "" for s in settings_of(cls).values())
    split = _split(cls, list(argv), has_file)
    if split.help is not None:
        raise HelpRequested(render_help(cls, command=command, usage=usage, words=split.help))
    file = None
    given: list[Given] = []
    if has_file:
        is_config = partial(names_config_file, cls) if positionals else _looks_like_config
        if split.config is None and split.positionals and is_config(split.positionals[0]):
            split.config = split.positionals.pop(0)
        if split.config is not None:
            file = read_config_file(split.config)
            _set_environment(file)
            given = given_in_file(file, group_spellings(cls), names_of(cls))
    resolved = resolve(cls, [*given, *split.given], command=command)
    problems = [*split.problems, *_positional_problems(split.positionals, positionals, command), *resolved.problems]
    raise_problems(problems, subject=f"the settings of `swift {command}`")
    fill_from_checkpoint(cls, resolved)
    fill_from_deepspeed(resolved)
    raise_problems(resolved.problems, subject=f"the settings of `swift {command}`")
    config = construct(cls, resolved.values)
    notes = [*resolved.notes, *idle_notes(to_flat(config), resolved.origins)]
    return Parsed(config, resolved.origins, resolved.places, notes, split.positionals, file)


def names_config_file(cls: type, word: str) -> bool:
    """Whether `word` names a file of settings of `cls`, where it could name a data file as well."""
    return holds_settings(word, names_of(cls), group_spellings(cls))


def _looks_like_config(word: str) -> bool:
    return word.lower().endswith(CONFIG_SUFFIXES)


def _split(cls: type, argv: list[str], has_file: bool) -> _Split:
    """Sort the words into flags with their values, and positionals."""
    result = _Split()
    names, settings = names_of(cls), settings_of(cls)
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if word in ("-h", "--help"):
            result.help = [w for w in argv[position:] if not w.startswith("-")]
            return result
        if not _FLAG.match(word):
            result.positionals.append(word)
            continue
        written, equals, attached = word[2:].partition("=")
        name = written.replace("-", "_")
        following = _values_after(argv, position)
        setting = settings.get(names.get(name, ""))
        if equals:
            values = [attached]
            if setting is not None and setting.is_list:
                position += len(following)
                values += following
        elif name == "config" and has_file:
            values = following[:1]
            position += len(values)
        else:
            values = _claimed(setting, following)
            position += len(values)
            if setting is not None and setting.is_bool and not values:
                values = ["true"]
        if name == "config" and has_file:
            if not values:
                result.problems.append(Problem("--config needs a file name", fix="--config run.yaml"))
            else:
                result.config = values[0]
            continue
        if setting is not None and not values:
            result.problems.append(_missing_value(setting))
            continue
        _add(result, Given(name, Words(values), f"--{written}", COMMAND_LINE), setting)
    return result


def _values_after(argv: list[str], position: int) -> list[str]:
    end = position
    while end < len(argv) and not _FLAG.match(argv[end]) and argv[end] != "-h":
        end += 1
    return argv[position:end]


def _claimed(setting: Any, following: list[str]) -> list[str]:
    """The words that belong to a flag: all for lists and unknown flags, else one; a boolean's only if it is one."""
    if setting is None or setting.is_list:
        return following
    if setting.is_bool:
        first = following[0].lower() if following else ""
        known = first in TRUE_WORDS | FALSE_WORDS or (setting.optional and first in ("none", "null"))
        # one stray word is a misspelt value rather than a file name
        a_file = _looks_like_config(first) or (bool(following) and Path(following[0]).exists())
        stray = len(following) == 1 and first and not known and not a_file
        return following[:1] if known or stray else []
    return following[:1]


def _missing_value(setting: Any) -> Problem:
    from swift.config.values import example

    empty = f", or --{setting.name} '[]' for none" if setting.is_list else ""
    return Problem(f"--{setting.name} needs a value", fix=f"for example --{setting.name} {example(setting)}{empty}")


def _add(result: _Split, item: Given, setting: Any) -> None:
    before = next((g for g in result.given if g.key == item.key), None)
    if before is not None and before.words != item.words:
        if setting is not None and setting.is_list:
            fix = f"put all values behind one: --{item.key} {' '.join((*before.words, *item.words))}"
        else:
            fix = "keep the one you mean"
        result.problems.append(Problem(f"--{item.key} is given twice, with different values", fix=fix))
    result.given.append(item)


def _positional_problems(found: list[str], wanted: Sequence[str], command: str) -> list[Problem]:
    needed = [name for name in wanted if not name.startswith("[")]
    if len(found) < len(needed):
        missing = " ".join(needed[len(found) :])
        return [Problem(f"`swift {command}` needs {missing}", fix=f"swift {command} {' '.join(wanted)}")]
    many = any(name.rstrip("]").endswith("...") for name in wanted)
    if len(found) > len(wanted) and not many:
        extra = found[len(wanted)]
        return [
            Problem(
                f"unexpected {extra!r}: it follows no flag that takes it",
                fix="a value with spaces needs quotes; several values work for list settings only; "
                "a configuration file ends in .yaml, .yml or .json",
            )
        ]
    return []


def _set_environment(file: ConfigFile) -> None:
    """The `ENV` block; a variable that the shell has set already wins, like any flag over the file."""
    for name, value in file.env.items():
        os.environ.setdefault(name, value)


def require_choice(word: str | None, choices: dict[str, str], command: str) -> str:
    """The sub-command that `word` names.

    Args:
        word: what was typed; None if nothing was.
        choices: sub-command -> its help line.
        command: the command it belongs to.

    Raises:
        HelpRequested: if nothing was typed, or `--help`.
        UsageError: if there is none of that name.
    """
    from swift.core.errors import did_you_mean

    if word in choices:
        return word
    listing = "\n".join(f"  swift {command} {name:<9} {line}" for name, line in choices.items())
    if word is None or word in ("-h", "--help", "help"):
        raise HelpRequested(f"usage: swift {command} {'|'.join(choices)}\n\n{listing}\n")
    raise UsageError(
        f"unknown command `swift {command} {word}`",
        fix=f"{did_you_mean(word, choices)} there are: {', '.join(choices)}".strip(),
    )
