"""Configuration files: reading a user's YAML or JSON with line numbers, and the file each run leaves behind.

A read file becomes a list of `Given`: what was written, where, and under which name. Nothing is interpreted here
except the `ENV` block. Scalars are kept as they were written, so that `save_strategy: no` stays "no" and `1e-4`
reaches a number the same way it would from a command line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from swift.config.values import NULL, Words, to_words
from swift.config.yaml_faults import utf8_text, yaml_faults
from swift.core.errors import UsageError, nearest

CONFIG_NAME = "swift_config.yaml"
CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
COMMAND_LINE = "command line"  # the origin of flags
_MOST_BYTES = 2**20  # of a file of settings; a larger one holds data


@dataclass(frozen=True)
class Given:
    """One setting as somebody gave it.

    Attributes:
        name: as written, dashes turned into underscores; dotted if it stood in groups.
        words: the value.
        where: `--flag`, `file.yaml:12` or the like.
        origin: "command line", the file's name, or what the caller of the Python API said.
        mapping: the value is a mapping and may be a group of settings.
    """

    name: str
    words: Words
    where: str
    origin: str
    mapping: bool = False

    @property
    def key(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]


@dataclass
class Entry:
    """One key of a mapping in a file: a scalar or list (as words), or a mapping (as entries and as plain data)."""

    key: str
    line: int
    words: Words
    entries: list[Entry] | None = None
    data: Any = None


@dataclass
class ConfigFile:
    """A parsed file: its entries, the `ENV` block and the whole thing as plain data."""

    path: Path
    entries: list[Entry]
    env: dict[str, str]
    data: dict[str, Any]


def read_config_file(path: str | Path) -> ConfigFile:
    """Parse a YAML or JSON file of settings.

    Raises:
        UsageError: if it is missing, unreadable, malformed (with file:line), not a mapping, or repeats a key.
    """
    path = Path(path)
    text = _read_text(path)
    entries, data = _parse_json(path, text) if path.suffix == ".json" else _parse_yaml(path, text)
    env: dict[str, str] = {}
    settings = []
    for entry in entries:
        if entry.key == "ENV":
            if entry.entries is None:
                raise UsageError("ENV must be a mapping of variables to values", where=f"{path}:{entry.line}")
            env = {item.key: " ".join(item.words) for item in entry.entries}
        else:
            settings.append(entry)
    return ConfigFile(path, settings, env, data)


def holds_settings(path: str | Path, known: Collection[str], groups: Collection[str]) -> bool:
    """Whether a word on the command line names a file of settings rather than one of data.

    YAML always is. JSON is one if most keys of its object are settings; a list, an object of lists (`{"data": […]}`),
    a single row, and what can't be read are data.

    Args:
        path: the word.
        known: names of settings.
        groups: names of groups of settings.
    """
    path = Path(path)
    if path.suffix.lower() in (".yaml", ".yml"):
        return True
    if path.suffix.lower() != ".json" or not path.is_file() or path.stat().st_size > _MOST_BYTES:
        return False
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, OSError):
        return False
    if not isinstance(data, dict):
        return False
    named = [key for key in (str(key).replace("-", "_") for key in data) if key in known or key == "ENV"]
    grouped = [key for key, value in data.items() if key in groups and key not in named and isinstance(value, dict)]
    return len(named) + len(grouped) > len(data) / 2


def _read_text(path: Path) -> str:
    if path.is_dir():
        raise UsageError(f"{path} is a folder, a configuration file is wanted", fix=f"{path}/{CONFIG_NAME}?")
    if not path.exists():
        here = (
            sorted(p.name for p in path.parent.glob("*") if p.suffix in CONFIG_SUFFIXES) if path.parent.is_dir() else []
        )
        known = f"configuration files there: {', '.join(here[:8])}" if here else "check the path"
        raise UsageError(f"there is no configuration file {path}", fix=known)
    return utf8_text(path)


def _parse_yaml(path: Path, text: str) -> tuple[list[Entry], dict[str, Any]]:
    import yaml

    loader_cls = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    loader = loader_cls(text)
    try:
        with yaml_faults(path):
            root = loader.get_single_node()
            if root is None:
                raise UsageError(f"{path} is empty", fix="write settings in it, such as `model: smollm2`")
            if not isinstance(root, yaml.MappingNode):
                raise UsageError(f"{path} must hold `key: value` lines", where=f"{path}:{root.start_mark.line + 1}")
            _refuse_repeated_keys(path, root)
            entries = _yaml_entries(path, loader, root)
            return entries, loader.construct_document(root)
    finally:
        loader.dispose()


def _refuse_repeated_keys(path: Path, node: Any) -> None:
    """YAML readers take the last of two equal keys in silence."""
    import yaml

    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise UsageError("a key must be a plain word", where=f"{path}:{line}")
            if key_node.value in lines and key_node.value != "<<":
                where = f"{path}:{lines[key_node.value]} and {path}:{line}"
                raise UsageError(f"{key_node.value} is written twice", where=where, fix="remove one of them")
            lines[key_node.value] = line
            _refuse_repeated_keys(path, value_node)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_repeated_keys(path, item)


def _yaml_entries(path: Path, loader: Any, node: Any) -> list[Entry]:
    import yaml

    loader.flatten_mapping(node)  # `<<: *defaults`: the merged keys first, so that the mapping's own win
    entries: list[Entry] = []
    for key_node, value_node in node.value:
        key, line = key_node.value, key_node.start_mark.line + 1
        if isinstance(value_node, yaml.MappingNode):
            data = loader.construct_object(value_node, deep=True)
            entries.append(Entry(key, line, to_words(data), _yaml_entries(path, loader, value_node), data))
        elif isinstance(value_node, yaml.SequenceNode):
            items = [_yaml_words(loader, item)[0] for item in value_node.value]
            entries.append(Entry(key, line, Words(items)))
        else:
            entries.append(Entry(key, line, _yaml_words(loader, value_node)))
    return entries


def _yaml_words(loader: Any, node: Any) -> Words:
    import yaml

    if not isinstance(node, yaml.ScalarNode):
        return to_words(loader.construct_object(node, deep=True))
    if node.tag == "tag:yaml.org,2002:null":
        return NULL
    return Words((node.value,))


def _parse_json(path: Path, text: str) -> tuple[list[Entry], dict[str, Any]]:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        for key in {k for k, _ in items}:
            if sum(k == key for k, _ in items) > 1:
                raise UsageError(f"{key} is written twice", where=str(path), fix="remove one of them")
        return dict(items)

    try:
        data = json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{path} is not valid JSON: {error.msg} at column {error.colno}", where=f"{path}:{error.lineno}"
        ) from None
    if not isinstance(data, dict):
        raise UsageError(
            f"{path} must hold one JSON object", where=f"{path}:1", fix=f"if it holds rows: --dataset {path}"
        )
    return list(_plain_entries(data, text)), data


def _plain_entries(data: Mapping[Any, Any], text: str = "") -> Iterator[Entry]:
    for key, value in data.items():
        found = re.search(rf'"{re.escape(str(key))}"\s*:', text)
        line = text.count("\n", 0, found.start()) + 1 if found else 0
        if isinstance(value, Mapping):
            yield Entry(str(key), line, to_words(dict(value)), list(_plain_entries(value, text)), dict(value))
        else:
            yield Entry(str(key), line, to_words(value))


def given_in_file(file: ConfigFile, groups: Mapping[str, str], names: Mapping[str, str]) -> list[Given]:
    """The settings of a file, with groups opened; see `open_groups`."""
    return list(
        open_groups(file.entries, groups, names, lambda entry: f"{file.path}:{entry.line}", origin=file.path.name)
    )


def given_in_mapping(
    values: Mapping[str, Any], groups: Mapping[str, str], names: Mapping[str, str], source: str
) -> list[Given]:
    """The settings of a Python mapping, flat or nested, or of dataclasses used as groups."""
    plain = {key: _as_mapping(value) for key, value in values.items()}
    return list(
        open_groups(_plain_entries(plain), groups, names, lambda entry: f"{source}: {entry.key}", origin=source)
    )


def _as_mapping(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in fields(value)}
    return value


def open_groups(
    entries: Any, groups: Mapping[str, str], names: Mapping[str, str], place: Any, *, origin: str, prefix: str = ""
) -> Iterator[Given]:
    """Turn nested entries into settings.

    A mapping under a group's name (`groups`: spelling -> prefix tried in front of its keys, so that `lora: {rank: 8}`
    means `lora_rank`) is a group; any setting may stand in any group. Other mappings are values.
    """
    for entry in entries:
        key = entry.key.replace("-", "_")
        if entry.entries is not None and key in groups:
            for given in open_groups(entry.entries, {}, names, place, origin=origin):
                inner = given.name
                prefixed = groups[key] + inner
                # a word such as `rank` or `dropout` belongs to its group; a full name is taken as it is
                name = prefixed if groups[key] and inner not in names and prefixed in names else inner
                yield Given(name, given.words, given.where, given.origin, given.mapping)
        else:
            yield Given(prefix + key, entry.words, place(entry), origin, mapping=entry.entries is not None)


# --- the file each run leaves behind --------------------------------------------------------------------------------


def to_nested(config: Any) -> dict[str, Any]:
    """A configuration as plain data, by group."""
    nested: dict[str, Any] = {}
    for member in fields(config):
        value = getattr(config, member.name)
        nested[member.name] = _as_mapping(value) if is_dataclass(value) else value
    return nested


def to_flat(config: Any) -> dict[str, Any]:
    """A configuration as plain data, without groups."""
    flat: dict[str, Any] = {}
    for key, value in to_nested(config).items():
        if isinstance(value, dict) and is_dataclass(getattr(config, key)):
            flat.update(value)
        else:
            flat[key] = value
    return flat


def dump_yaml(data: Any) -> str:
    """Plain data as YAML, in the given order, readable in every language."""
    import yaml

    return yaml.dump(data, Dumper=_dumper(), sort_keys=False, allow_unicode=True, width=100, default_flow_style=False)


def annotated_yaml(groups: Mapping[str, Mapping[str, Any]], comments: Mapping[str, str]) -> str:
    """Grouped settings as YAML, one line each, with remarks behind them."""
    lines: list[str] = []
    for group, members in groups.items():
        if group:
            lines.append(f"{group}:")
        for name, value in members.items():
            remark = f"  # {comments[name]}" if name in comments else ""
            lines.append(f"{'  ' if group else ''}{name}: {_inline_yaml(value)}{remark}")
    return "\n".join(lines) + "\n"


def _inline_yaml(value: Any) -> str:
    """A value as YAML on one line."""
    import yaml

    text = yaml.dump(
        [value], Dumper=_dumper(), allow_unicode=True, width=float("inf"), default_flow_style=True
    ).strip()[1:-1]
    return json.dumps(value, ensure_ascii=False) if "\n" in text else text


def _dumper() -> Any:
    """A safe dumper that writes numbers so that every YAML reader takes them as numbers (1.0e-05, not 1e-05)."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def number(dumper: Any, value: float) -> Any:
        text = repr(value)
        if "e" in text and "." not in text:
            text = text.replace("e", ".0e")
        if text in ("inf", "-inf", "nan"):
            text = text.replace("inf", ".inf").replace("nan", ".nan")
        return dumper.represent_scalar("tag:yaml.org,2002:float", text)

    Dumper.add_representer(float, number)
    return Dumper


def what_is_there(path: Path) -> str | None:
    """What a path that doesn't exist may have meant: the nearest name beside it, or what is there."""
    parent = path.expanduser().parent
    while not parent.is_dir() and parent != parent.parent:
        parent = parent.parent
    there = sorted(entry.name for entry in parent.iterdir() if not entry.name.startswith("."))
    close = nearest(path.name, there)
    if close:
        return f"did you mean {parent / close[0]}?"
    shown = ", ".join(there[:8]) + (", …" if len(there) > 8 else "")
    return f"{parent} holds: {shown or 'nothing'}"
