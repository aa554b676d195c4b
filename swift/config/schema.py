"""What the configuration dataclasses declare, as data: names, types, defaults, help.

The parser, the help screen, the JSON schema and the reference are all made from the `Setting`s listed here, so none
of them can know a flag that another doesn't.
"""

from __future__ import annotations

import types
import typing
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

NoneType = type(None)


@dataclass(frozen=True)
class Setting:
    """One setting of a command.

    Attributes:
        name: the flag without dashes; also the key in files.
        group: attribute of the configuration that holds it; empty for option classes without groups.
        title: the group's heading in help.
        type: resolved annotation.
        default: value when the user says nothing.
        help: one sentence.
        aliases: other accepted spellings.
    """

    name: str
    group: str
    title: str
    type: Any
    default: Any
    help: str
    aliases: tuple[str, ...]

    @property
    def optional(self) -> bool:
        return NoneType in get_args(self.type)

    @property
    def base(self) -> Any:
        """The type without `None`."""
        return without_none(self.type)

    @property
    def is_bool(self) -> bool:
        return self.base is bool

    @property
    def is_list(self) -> bool:
        return get_origin(self.base) is list

    @property
    def is_dict(self) -> bool:
        return get_origin(self.base) is dict

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values, when they are a closed set."""
        base = get_args(self.base)[0] if self.is_list else self.base
        return tuple(get_args(base)) if get_origin(base) is Literal else ()


def without_none(annotation: Any) -> Any:
    """`X | None` -> `X`; anything else unchanged."""
    if get_origin(annotation) in (Union, types.UnionType):
        rest = [a for a in get_args(annotation) if a is not NoneType]
        return rest[0] if len(rest) == 1 else Union[tuple(rest)]  # noqa: UP007 - built at run time
    return annotation


def settings_of(cls: Any) -> dict[str, Setting]:
    """Every setting of a configuration class by name, in the order they are declared.

    Raises:
        TypeError: if two settings of one class share a name or an alias. That is a mistake in the dataclasses.
    """
    return _settings_of(cls)


def values_of(config: Any) -> dict[str, Any]:
    """The value of every setting of a configuration, by name."""
    found: dict[str, Any] = {}
    for setting in settings_of(type(config)).values():
        holder = getattr(config, setting.group) if setting.group else config
        found[setting.name] = getattr(holder, setting.name)
    return found


@cache
def _settings_of(cls: Any) -> dict[str, Setting]:
    defaults = cls()
    found: dict[str, Setting] = {}
    taken: set[str] = set()
    hints = typing.get_type_hints(cls)
    for member in fields(cls):
        group_cls = hints[member.name]
        if is_dataclass(group_cls):
            holder = getattr(defaults, member.name)
            group_hints = typing.get_type_hints(group_cls)
            title = (group_cls.__doc__ or member.name).splitlines()[0]
            items = [(f, member.name, title, group_hints[f.name], getattr(holder, f.name)) for f in fields(group_cls)]
        else:
            items = [(member, "", "Options", group_cls, getattr(defaults, member.name))]
        for field_, group, title, annotation, default in items:
            aliases = tuple(field_.metadata.get("aliases", ()))
            clash = taken & {field_.name, *aliases}
            if clash:
                raise TypeError(f"{cls.__name__}: {sorted(clash)} declared twice")
            taken |= {field_.name, *aliases}
            found[field_.name] = Setting(
                field_.name, group, title, annotation, default, field_.metadata.get("help", ""), aliases
            )
    return found


def names_of(cls: Any) -> dict[str, str]:
    """Every accepted spelling -> the setting's name; `group.name` is accepted as well."""
    return _names_of(cls)


@cache
def _names_of(cls: Any) -> dict[str, str]:
    names: dict[str, str] = {}
    for setting in settings_of(cls).values():
        for spelling in (setting.name, *setting.aliases):
            names[spelling] = setting.name
            if setting.group:
                names[f"{setting.group}.{spelling}"] = setting.name
    return names


def groups_of(cls: type) -> dict[str, list[Setting]]:
    """The settings by group attribute, in order."""
    groups: dict[str, list[Setting]] = {}
    for setting in settings_of(cls).values():
        groups.setdefault(setting.group, []).append(setting)
    return groups


def type_words(setting: Setting) -> str:
    """The type as a user reads it: `int`, `true|false`, `a|b|c`, `text ...` for lists, `JSON`."""
    base = setting.base
    if setting.is_list:
        return ("|".join(setting.choices) or _scalar_words(get_args(base)[0])) + " ..."
    if setting.choices:
        return "|".join(setting.choices)
    return _scalar_words(base)


def _scalar_words(annotation: Any) -> str:
    if get_origin(annotation) is dict:
        return "JSON"
    return {bool: "true|false", str: "text", int: "int", float: "number"}.get(annotation, str(annotation))


def default_words(value: Any) -> str:
    """The default as it would be typed; empty when it is `None` or an empty list (the help says what happens then)."""
    if value is None or value == []:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, float) and value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return str(value)


def json_schema(cls: type, *, title: str) -> dict[str, Any]:
    """A JSON Schema (2020-12) of the files that a command accepts: settings grouped, flat, or both mixed."""
    flat: dict[str, Any] = {}
    grouped: dict[str, dict[str, Any]] = {}
    for setting in settings_of(cls).values():
        schema = _setting_schema(setting)
        flat[setting.name] = schema
        grouped.setdefault(setting.group, {})[setting.name] = schema
        for alias in setting.aliases:
            flat[alias] = {**schema, "description": f"the same as {setting.name}", "deprecated": True}
    properties: dict[str, Any] = dict(flat)
    definitions: dict[str, Any] = {}
    for group, members in grouped.items():
        if not group:
            continue
        definitions[group] = {"type": "object", "properties": members, "additionalProperties": False}
        reference = {"$ref": f"#/$defs/{group}"}
        # a group may carry the name of one of its settings (model: {...} or model: path)
        properties[group] = {"anyOf": [reference, flat[group]]} if group in flat else reference
    properties["ENV"] = {
        "type": "object",
        "description": "environment variables set before anything else is loaded",
        "additionalProperties": {"type": ["string", "number", "boolean"]},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "description": (cls.__doc__ or "").strip(),
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": definitions,
    }


def _setting_schema(setting: Setting) -> dict[str, Any]:
    base = setting.base
    kinds: dict[Any, str] = {bool: "boolean", str: "string", int: "integer", float: "number"}
    schema: dict[str, Any]
    if setting.is_list:
        item: dict[str, Any] = (
            {"enum": list(setting.choices)} if setting.choices else {"type": kinds[get_args(base)[0]]}
        )
        schema = {"type": "array", "items": item}
    elif setting.is_dict:
        schema = {"type": "object"}
    elif setting.choices:
        schema = {"enum": list(setting.choices)}
    else:
        schema = {"type": kinds[base]}
    if setting.optional:
        schema = {"anyOf": [schema, {"type": "null"}]}
    return {**schema, "description": setting.help, "default": setting.default}
