"""A YAML or JSON file as a tree whose values know their lines. Interprets nothing; keeps how scalars were written."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift.config.yaml_faults import utf8_text, yaml_faults
from swift.core.errors import UsageError


@dataclass
class Node:
    """One value of a file.

    Attributes:
        where: `file:line`, or what the caller of the Python API said.
        value: plain data.
        words: a scalar as it was written (`no`, `1e-4`); None for lists, mappings and null.
        items: of a list. entries: of a mapping, key -> (where the key stands, value).
    """

    where: str
    value: Any
    words: str | None = None
    items: list[Node] | None = None
    entries: dict[str, tuple[str, Node]] | None = None

    @property
    def kind(self) -> str:
        """In a user's words."""
        if self.entries is not None:
            return "a mapping"
        return "a list" if self.items is not None else "nothing" if self.words is None else repr(self.words)


def read_nodes(path: Path) -> Node:
    """Parse a file.

    Raises:
        UsageError: it is missing, not UTF-8, malformed (with the line), or repeats a key.
    """
    import yaml

    if not path.is_file():
        raise UsageError(f"there is no recipe {path}", fix="check the path; a recipe is a YAML or JSON file")
    text = utf8_text(path)
    if path.suffix == ".json":
        try:
            json.loads(text)
        except json.JSONDecodeError as error:
            raise UsageError(f"{path} is not valid JSON: {error.msg}", where=f"{path}:{error.lineno}") from None
        text = text.replace("\t", " ")  # YAML, which reads JSON with line numbers, has no tabs; strings escape theirs
    loader = yaml.SafeLoader(text)
    try:
        with yaml_faults(path):
            root = loader.get_single_node()
            if root is None:
                raise UsageError(f"{path} is empty", fix="a recipe has at least `input`, `output` and `steps`")
            return _node(loader, root, path)
    finally:
        loader.dispose()


def plain_nodes(value: Any, where: str) -> Node:
    """The tree of Python data."""
    if isinstance(value, dict):
        entries = {str(key): (f"{where}: {key}", plain_nodes(item, f"{where}: {key}")) for key, item in value.items()}
        return Node(where, value, entries=entries)
    if isinstance(value, (list, tuple)):
        return Node(where, list(value), items=[plain_nodes(item, where) for item in value])
    if value is None:
        return Node(where, None)
    return Node(where, value, words=str(value).lower() if isinstance(value, bool) else str(value))


def _node(loader: Any, node: Any, path: Path) -> Node:
    import yaml

    where = f"{path}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode):
        _refuse_repeated(node, path)
        loader.flatten_mapping(node)
        entries: dict[str, tuple[str, Node]] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise UsageError("a key must be a plain word", where=f"{path}:{key.start_mark.line + 1}")
            entries[key.value] = (f"{path}:{key.start_mark.line + 1}", _node(loader, value, path))
        return Node(where, {key: item.value for key, (_, item) in entries.items()}, entries=entries)
    if isinstance(node, yaml.SequenceNode):
        items = [_node(loader, item, path) for item in node.value]
        return Node(where, [item.value for item in items], items=items)
    value = loader.construct_object(node)
    return Node(where, value, words=None if value is None else node.value)


def _refuse_repeated(node: Any, path: Path) -> None:
    lines: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if key.value in lines and key.value != "<<":
            raise UsageError(
                f"{key.value} is written twice",
                where=f"{path}:{lines[key.value]} and {path}:{line}",
                fix="remove one of them",
            )
        lines[str(key.value)] = line
