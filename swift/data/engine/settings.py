"""The settings of an operator: read off its dataclass, filled from a recipe with every fault found.

Scalars go through the same conversion as flags do, so `1e-4`, `no` and `null` mean in a recipe what they mean in a
training file; lists and mappings of other types are compared with the annotation. Knows nothing of recipes.
"""

from __future__ import annotations

import re
import types
import typing
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, Union, get_args, get_origin

from swift.config.schema import NoneType, Setting
from swift.config.values import ValueProblem, Words, coerce
from swift.core.errors import did_you_mean
from swift.data.engine.nodes import Node

REQUIRED = object()
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_WHOLE = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


class Problem(Exception):
    """One fault of a recipe: what is wrong, where, and what helps."""

    def __init__(self, message: str, where: str, fix: str = "") -> None:
        super().__init__(message)
        self.message, self.where, self.fix = message, where, fix


def settings_of(operator: type) -> dict[str, Setting]:
    """The settings of an operator class by name; the default of one that must be given is `REQUIRED`."""
    hints = typing.get_type_hints(operator)
    return {
        member.name: Setting(
            member.name,
            "",
            "",
            hints[member.name],
            _default(member),
            str(member.metadata.get("help", "")),
            tuple(member.metadata.get("aliases", ())),
        )
        for member in fields(operator)
        if member.init and not member.name.startswith("_")
    }


def _default(member: Field[Any]) -> Any:
    if member.default is not MISSING:
        return member.default
    return member.default_factory() if member.default_factory is not MISSING else REQUIRED


def filled(kind: str, known: dict[str, Setting], node: Node | None, where: str) -> tuple[dict[str, Any], list[Problem]]:
    """The values that a mapping gives to settings.

    Args:
        kind: what has them, for messages: ``the operator 'sample'``.
        known: the settings there are.
        node: the mapping; None or null for none.
        where: the place to name when a required setting is missing.
    """
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    if node is not None and node.value is not None and node.entries is None:
        return values, [Problem(f"the settings of {kind} are a mapping, not {node.kind}", node.where, _example(known))]
    spellings = {word: item.name for item in known.values() for word in (item.name, *item.aliases)}
    for key, (place, value) in (node.entries or {}).items() if node else ():
        name = spellings.get(key.replace("-", "_"))
        if name is None:
            fix = " ".join(filter(None, [did_you_mean(key, spellings), "it has " + (", ".join(known) or "none")]))
            problems.append(Problem(f"{kind} has no setting {key!r}", place, fix))
        elif name in values:
            problems.append(Problem(f"{name} of {kind} is given twice", place, "keep one of its spellings"))
        else:
            try:
                values[name] = value_of(known[name], value)
            except Problem as problem:
                problems.append(Problem(f"{name} of {kind} {_is(problem.message)}", problem.where, problem.fix))
    for item in known.values():
        if item.default is REQUIRED and item.name not in values and not problems:
            problems.append(Problem(f"{kind} needs the setting {item.name}", where, item.help))
    return values, problems


def _is(message: str) -> str:
    """`'abc' is not a number` as it goes on behind what has that value: `is 'abc', which is not a number`."""
    value, found, rest = message.rpartition(" is not ")
    return f"is {value}, which is not {rest}" if found and value[:1] in "'\"" else message


def value_of(setting: Setting, node: Node) -> Any:
    """The typed value of one setting.

    Raises:
        Problem: it isn't of the setting's type.
    """
    base = setting.base
    scalar = base in _WHOLE or get_origin(base) is Literal
    if node.words is not None and scalar:
        try:
            return coerce(Words((node.words,)), setting)
        except ValueProblem as problem:
            fix = problem.fix.replace(f"--{setting.name} ", f"{setting.name}: ")
            raise Problem(problem.message, node.where, fix) from None
        except TypeError:  # a type that flags don't have
            pass
    return _fitted(setting.type, node)


def _fitted(annotation: Any, node: Node) -> Any:
    if annotation is Any:
        return node.value
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return _one_of(inner, node)
    if annotation in (None, NoneType):
        if node.value is not None:
            raise Problem(f"can't be {node.kind}", node.where, "leave it out")
        return None
    if annotation in (list, tuple, dict):
        origin, inner = annotation, ()
    if origin in (list, tuple, set, frozenset):
        if node.items is None and node.words is None:
            raise Problem(f"is a list, not {node.kind}", node.where, "write it as [a, b]")
        items = [node] if node.items is None else node.items  # one word stands for a list of it
        if origin is tuple and inner and inner[-1] is not Ellipsis:
            if len(inner) != len(items):
                raise Problem(f"takes {len(inner)} values, not {len(items)}", node.where)
            return tuple(_fitted(kind, item) for kind, item in zip(inner, items))
        return origin(_fitted(inner[0] if inner else Any, item) for item in items)
    if origin is dict:
        if node.entries is None:
            raise Problem(f"is a mapping, not {node.kind}", node.where, "write it as {key: value}")
        return {key: _fitted(inner[1] if inner else Any, item) for key, (_, item) in node.entries.items()}
    return _scalar(annotation, node)


def _one_of(kinds: tuple[Any, ...], node: Node) -> Any:
    if node.value is None and NoneType in kinds:
        return None
    problems = []
    for kind in sorted((k for k in kinds if k is not NoneType), key=lambda k: k is str):  # anything is text
        try:
            return _fitted(kind, node)
        except Problem as problem:
            problems.append(problem)
    raise problems[0]


def _scalar(annotation: Any, node: Node) -> Any:
    if annotation not in _WHOLE and get_origin(annotation) is not Literal:
        raise Problem(f"has a type that no recipe can give: {annotation}", node.where, "change the operator")
    if node.words is None:
        raise Problem(f"is {_WHOLE.get(annotation, 'one word')}, not {node.kind}", node.where)
    try:
        return coerce(Words((node.words,)), Setting("value", "", "", annotation, None, "", ()))
    except ValueProblem as problem:
        raise Problem(problem.message, node.where, problem.fix.replace("--value ", "")) from None


def _example(known: dict[str, Setting]) -> str:
    return "write them as {" + (f"{next(iter(known))}: …" if known else "") + "}"


def size_of_words(words: str) -> int | None:
    """`64MB` -> bytes. `MB` and `MiB` both count by 1024; None if it is no size."""
    match = _SIZE.fullmatch(words.strip())
    if match is None:
        return None
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))
