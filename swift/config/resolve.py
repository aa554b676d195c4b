"""From what was given to a configuration: names resolved, values typed, faults collected, origins remembered."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

from swift.config import engine_words, legacy
from swift.config.catalog import COMMANDS
from swift.config.files import Given, given_in_mapping
from swift.config.schema import names_of, settings_of
from swift.config.values import ValueProblem, Words, coerce
from swift.core.errors import UsageError, nearest

C = TypeVar("C")

# group -> (other names for it in files, prefix its keys may leave out)
_GROUPS: dict[str, tuple[tuple[str, ...], str]] = {
    "model": (("model",), ""),
    "data": (("data", "dataset", "datasets"), ""),
    "template": (("template", "chat"), ""),
    "batching": (("batching", "packing"), "packing_"),
    "tuner": (("tuner", "lora", "peft", "adapter"), "lora_"),
    "objective": (("objective", "loss"), ""),
    "optimizer": (("optimizer", "optim", "schedule", "scheduler", "lr_scheduler"), ""),
    "training": (("training", "train", "trainer"), ""),
    "eval": (("eval", "evaluation", "evaluate"), "eval_"),
    "checkpoint": (("checkpoint", "checkpoints", "save", "output"), "save_"),
    "monitor": (("monitor", "logging", "log"), "logging_"),
    "generation": (("generation", "generation_config", "generate"), ""),
    "engine": (("engine",), ""),
    "infer": (("infer", "inference"), ""),
    "merge": (("merge",), ""),
    "preference": (("preference", "rlhf", "dpo", "kto"), ""),
    "distill": (("distill", "distillation", "gkd", "teacher"), "teacher_"),
    "task": (("task",), ""),
}


@dataclass(frozen=True)
class Problem:
    """One fault in what was given."""

    message: str
    where: str | None = None
    fix: str | None = None


@dataclass
class Resolved:
    """Values by setting name, where each came from, and what the user should know."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def group_spellings(cls: type) -> dict[str, str]:
    """Names under which a file may group settings -> the prefix that its keys may leave out."""
    spellings: dict[str, str] = {}
    for member in fields(cls):
        names, prefix = _GROUPS.get(member.name, ((member.name,), ""))
        spellings.update(dict.fromkeys(names, prefix))
    return spellings


def raise_problems(problems: Iterable[Problem], *, subject: str = "the settings") -> None:
    """Raise one `UsageError` for all problems, if there are any.

    Raises:
        UsageError: with the only problem's own parts, or with a numbered list.
    """
    unique = list(dict.fromkeys(problems))
    if not unique:
        return
    if len(unique) == 1:
        raise UsageError(unique[0].message, where=unique[0].where, fix=unique[0].fix)
    lines = [f"{len(unique)} faults in {subject}:"]
    for number, problem in enumerate(unique, 1):
        lines.append(f"  {number}. {problem.message}")
        if problem.where:
            lines.append(f"       where: {problem.where}")
        if problem.fix:
            lines.append(f"       fix:   {problem.fix}")
    raise UsageError("\n".join(lines))


def resolve(cls: type, given: Iterable[Given], *, command: str | None = None) -> Resolved:
    """Find the setting that each given name means and give it its typed value.

    Later items win over earlier ones of another origin; the same setting twice in one origin under two names, with
    different values, is a fault. Nothing is raised: faults are in `Resolved.problems`.
    """
    result = Resolved()
    chosen: dict[str, Given] = {}
    for item in given:
        for name, words in _settings_meant(cls, item, command, result):
            before = chosen.get(name)
            same_origin = before is not None and before.origin == item.origin
            if before is not None and name == engine_words.SETTING:  # each flag adds to it
                chosen[name] = dataclasses.replace(item, words=Words((*before.words, *words)))
                continue
            if before is not None and same_origin and before.key != item.key and before.words != words:
                result.problems.append(
                    Problem(
                        f"{before.key} and {item.key} mean the same setting and disagree",
                        f"{before.where} and {item.where}",
                        f"keep one of them, as {name}",
                    )
                )
            chosen[name] = dataclasses.replace(item, words=words)
    for name, item in chosen.items():
        setting = settings_of(cls)[name]
        advice = legacy.missing_value(name, item.words)
        if advice:
            message = f"{_flag(item)} {' '.join(item.words)} is not available yet"
            result.problems.append(Problem(message, _elsewhere(item), advice))
            continue
        try:
            result.values[name] = coerce(legacy.rename_value(name, item.words), setting)
        except ValueProblem as problem:
            result.problems.append(Problem(f"{_flag(item)}: {problem.message}", _elsewhere(item), problem.fix))
            continue
        result.origins[name] = item.origin
        result.places[name] = item.where
    return result


def _settings_meant(cls: type, item: Given, command: str | None, result: Resolved) -> list[tuple[str, Words]]:
    names = names_of(cls)
    name = names.get(item.name)
    if name is not None:
        setting = settings_of(cls)[name]
        if item.mapping and not setting.is_dict:
            result.problems.append(
                Problem(f"{item.key} wants {_article(setting)}, not a mapping", item.where, _not_a_group(cls, item.key))
            )
            return []
        return [(name, item.words)]
    if engine_words.SETTING in names and (found := engine_words.meaning(item.key, item.words)) is not None:
        if found.fault is not None:
            result.problems.append(Problem(found.fault, _elsewhere(item), found.fix))
        if found.note is not None:
            result.notes.append(f"note: --{item.key}: {found.note}")
        own = [(engine_words.SETTING, engine_words.kept(found))] if found.words else []
        return [*found.settings, *own]
    verdict = legacy.judge(item.key, item.words, cls.__name__)
    if verdict is not None:
        known = [(n, words) for n, words in verdict.settings if n in names]
        if known or verdict.note:
            if verdict.note:
                result.notes.append(f"note: {verdict.note}")
            return known
        if verdict.instead is not None and _owner(item.key, command):
            here = item.key in legacy.OF_COMMAND.get(cls.__name__, {})
            result.problems.append(_of_another(cls, item, command, verdict.instead if here else "remove it"))
            return []
        if verdict.instead is not None:
            message = f"{_flag(item)} {_short(item.words)}is not available yet"
            result.problems.append(Problem(message, _elsewhere(item), verdict.instead))
            return []
    result.problems.append(_unknown(cls, item, command))
    return []


def _article(setting: Any) -> str:
    return "a list" if setting.is_list else "a value"


def _not_a_group(cls: type, key: str) -> str:
    groups = ", ".join(sorted(group_spellings(cls)))
    return f"groups of settings are called: {groups}" if key not in group_spellings(cls) else "check the indentation"


def _short(words: Words) -> str:
    text = " ".join(words)
    return f"{text} " if text and len(text) <= 30 else ""


def _flag(item: Given) -> str:
    return f"--{item.key}" if item.where.startswith("--") else item.key


def _elsewhere(item: Given) -> str | None:
    """Where it was given, unless the message has just said it."""
    return None if item.where.startswith("--") else item.where


def _unknown(cls: type, item: Given, command: str | None) -> Problem:
    if _owner(item.key, command):
        return _of_another(cls, item, command, "remove it")
    kind = _kind(item)
    known = [*names_of(cls), *group_spellings(cls)] if kind == "setting" else list(names_of(cls))
    close = nearest(item.key.lower(), [n for n in known if "." not in n])
    dashes = "--" if kind == "flag" else ""
    fix = f"did you mean {dashes}{close[0]}?" if close else None
    if command:
        fix = f"{fix} " if fix else ""
        fix += f"`swift {command} --help` lists them all"
    return Problem(f"unknown {kind} {_flag(item)}", _elsewhere(item), fix)


def _kind(item: Given) -> str:
    return "flag" if item.where.startswith("--") else "setting"


def _of_another(cls: type, item: Given, command: str | None, fix: str) -> Problem:
    target = f"swift {command}" if command else cls.__name__
    owner = _owner(item.key, command)
    return Problem(f"{_flag(item)} is a {_kind(item)} of `swift {owner}`, not of `{target}`", _elsewhere(item), fix)


def _owner(key: str, command: str | None) -> str | None:
    """A command that knows `key`, when the present one doesn't."""
    from swift.config import commands as classes

    for other in COMMANDS.values():
        if other.config and other.name != command and key in names_of(getattr(classes, other.config)):
            return other.name
    return None


def construct(cls: type[C], values: Mapping[str, Any]) -> C:
    """The configuration with these values (typed, by setting name) over the defaults."""
    config = cls()
    for member in fields(cls):  # type: ignore[arg-type]
        group = getattr(config, member.name)
        if is_dataclass(group):
            chosen = {f.name: values[f.name] for f in fields(group) if f.name in values}
            if chosen:
                setattr(config, member.name, dataclasses.replace(group, **chosen))  # type: ignore[type-var]
        elif member.name in values:
            setattr(config, member.name, values[member.name])
    return config


def resolve_mapping(cls: type, values: Mapping[str, Any], source: str, command: str | None = None) -> Resolved:
    """`resolve` for a Python mapping, flat or nested."""
    given = given_in_mapping(values, group_spellings(cls), names_of(cls), source)
    return resolve(cls, given, command=command)
