"""One document on its way through a recipe: a row of a file, and the texts in it that operators read and change.

A plain-text row has one text; a conversation has one for each message. The rest of the row travels along untouched and
is written out again with the changed texts in their places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from swift.data.columns import (
    ANSWER_COLUMNS,
    MEDIA_COLUMNS,
    MESSAGE_COLUMNS,
    PROMPT_COLUMNS,
    SYSTEM_COLUMNS,
    TEXT_COLUMNS,
)
from swift.data.messages import REASONING_KEYS, ROLE_ALIASES, decode_nested
from swift.data.rows import RowProblem

META_KEY = "meta"
_CHAT_COLUMNS = frozenset((*MESSAGE_COLUMNS, *PROMPT_COLUMNS, *ANSWER_COLUMNS))
_CALL_KEYS = ("tool_calls", "function_call")
_TEXT_PARTS = (None, "text", "input_text", "output_text")

Path = tuple[str | int, ...]
Found = tuple[Path, str, str]  # where a text stands, the text, and whose it is


@dataclass(slots=True)
class Document:
    """A row and its texts.

    Attributes:
        id: `file:line` of where it was read, unique in a run and never changed.
        record: the row as read; `to_record` gives it back with `texts` in their places.
        paths: for each text, the keys and indices that lead to it in `record`.
        texts: the texts, in order. Operators replace items; they don't add or remove any.
        roles: for each text `system`, `user`, `assistant` or `tool`; None for plain text.
        meta: what operators found out (language, scores); written out under `meta`.
        key: the id with the file called as it is within its folder: all randomness is a function of it, so that it
            depends neither on how a path was spelt nor on where the folder lies. Empty: the id.
    """

    id: str
    record: dict[str, Any]
    paths: list[Path]
    texts: list[str]
    roles: list[str] | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    key: str = ""

    @property
    def random_key(self) -> str:
        """What draws for this document are a function of."""
        return self.key or self.id

    @property
    def text(self) -> str:
        """All its texts, with a blank line between two."""
        return self.texts[0] if len(self.texts) == 1 else "\n\n".join(self.texts)

    def to_record(self) -> dict[str, Any]:
        """The row to write: the record with the present texts and, if there is any, `meta`."""
        record = dict(self.record)
        for path, text in zip(self.paths, self.texts):
            if len(path) == 1:
                record[path[0]] = text  # type: ignore[index]
            else:
                record = replaced_at(record, path, text)
        if self.meta:
            known = record.get(META_KEY)
            record[META_KEY] = {**known, **self.meta} if isinstance(known, dict) else dict(self.meta)
        return record


def document_from(record: dict[str, Any], doc_id: str, *, column: str | None = None) -> Document:
    """Find the texts of a row: those that training would read, whatever the layout.

    Args:
        record: the row.
        doc_id: its `file:line`.
        column: the column that holds the text; None finds a conversation or a text column by the known names.

    Raises:
        RowProblem: no text is found.
    """
    if column is not None:
        if not isinstance(record.get(column), str):
            raise RowProblem("no_text", f"the column {column!r} holds no text; {_columns(record)}")
        return Document(doc_id, record, [(column,)], [record[column]])
    text = next((name for name in TEXT_COLUMNS if isinstance(record.get(name), str)), None)
    if not _CHAT_COLUMNS.isdisjoint(record):
        record, found = _conversation(record, text)
        if any(path != (text,) for path, _, _ in found):
            paths, texts, roles = map(list, zip(*found))
            return Document(doc_id, record, paths, texts, roles)
    if text is None:
        raise RowProblem("no_text", f"no column holds a text; {_columns(record)}")
    return Document(doc_id, record, [(text,)], [record[text]])


def beside_texts(document: Document) -> bytes:
    """What else training reads of a conversation: tools, calls, parts that aren't text, and pictures; empty if nothing.

    Two conversations are equal only if this is equal as well as their texts.
    """
    if document.roles is None:
        return b""
    record = document.record
    things: list[Any] = [[name, record[name]] for name in ("tools", *MEDIA_COLUMNS) if record.get(name)]
    for name in _CHAT_COLUMNS.intersection(record):
        for number, message in enumerate(record[name] if isinstance(record[name], list) else ()):
            if not isinstance(message, dict):
                continue
            parts = [part for key in ("content", "value") for part in _parts(message.get(key)) if not _is_text(part)]
            things += [[number, parts]] if parts else []
            things += [[number, key, message[key]] for key in _CALL_KEYS if message.get(key)]
    return orjson.dumps(things, option=orjson.OPT_SORT_KEYS, default=str) if things else b""


def _columns(record: dict[str, Any]) -> str:
    kinds = {type(None): "null", list: "a list", dict: "an object", str: "a text", bool: "true or false"}
    shown = [f"{name} ({kinds.get(type(value), 'a number')})" for name, value in list(record.items())[:12]]
    return "there are " + (", ".join(shown) or "none")


def _conversation(record: dict[str, Any], text: str | None) -> tuple[dict[str, Any], list[Found]]:
    """The row (columns that hold messages as JSON are lists in it) and its texts with whose they are, in order."""
    system = next((name for name in SYSTEM_COLUMNS if isinstance(record.get(name), str)), None)
    found: list[Found] = [((system,), record[system], "system")] if system else []
    column = next((name for name in MESSAGE_COLUMNS if record.get(name) is not None), None)
    if column is not None:
        record = _decoded(record, column)
        if isinstance(record[column], list):
            turns = list(_messages(record[column], column))
            return record, found + turns if turns else []
    if record.get("history"):
        record = _decoded(record, "history")
        found += _history(record["history"])
    said = len(found)
    for names, role in ((PROMPT_COLUMNS, "user"), (ANSWER_COLUMNS, "assistant")):
        for name in names:
            value = record.get(name)
            if isinstance(value, str):
                found.append(((name,), value, role))
            elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
                found += _messages(value, name)
    if len(found) == said:
        return record, []
    if text is not None and not any(isinstance(record.get(name), str | list) for name in ANSWER_COLUMNS):
        found.append(((text,), record[text], "assistant"))
    return record, found


def _decoded(record: dict[str, Any], column: str) -> dict[str, Any]:
    """The row with a list in a column that held it as JSON."""
    value = record[column]
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        value = decode_nested(value, column)
        value = [value] if isinstance(value, dict) else value
    return {**record, column: value}


def _messages(messages: list[Any], column: str) -> Iterator[Found]:
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise RowProblem("bad_messages", f"message {number + 1} is not an object")
        role = message.get("role", message.get("from"))
        if not isinstance(role, str):  # {"human": …, "assistant": …}
            for name, value in message.items():
                if isinstance(value, str):
                    yield (column, number, name), value, ROLE_ALIASES.get(name) or name
            continue
        kind = role.strip().lower()
        kind = ROLE_ALIASES.get(kind, kind)
        for key in (*REASONING_KEYS, "content" if "content" in message else "value"):
            value = message.get(key)
            if isinstance(value, str):
                yield (column, number, key), value, kind
            else:
                yield from _part_texts(value, (column, number, key), kind)


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else []


def _is_text(part: Any) -> bool:
    return isinstance(part, str) or (
        isinstance(part, dict) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str)
    )


def _part_texts(content: Any, path: Path, role: str) -> Iterator[Found]:
    """The texts in content parts (OpenAI) and blocks (Anthropic)."""
    for number, part in enumerate(_parts(content)):
        here = (*path, number)
        if isinstance(part, str):
            yield here, part, role
        elif isinstance(part, dict):
            kind = part.get("type")
            if _is_text(part):
                yield (*here, "text"), part["text"], role
            elif kind == "thinking" and isinstance(part.get("thinking"), str):
                yield (*here, "thinking"), part["thinking"], role
            elif kind == "tool_result" and isinstance(part.get("content"), str):
                yield (*here, "content"), part["content"], "tool"
            elif kind == "tool_result":
                yield from _part_texts(part.get("content"), (*here, "content"), "tool")


def _history(rounds: Any) -> Iterator[Found]:
    for number, pair in enumerate(rounds if isinstance(rounds, list) else ()):
        if isinstance(pair, list):
            for place, role in enumerate(("user", "assistant")[: len(pair)]):
                if isinstance(pair[place], str):
                    yield ("history", number, place), pair[place], role


def replaced_at(value: Any, path: Path, text: str) -> Any:
    """A copy of `value` along `path`, with `text` at its end."""
    if not path:
        return text
    copy = value.copy()
    copy[path[0]] = replaced_at(value[path[0]], path[1:], text)
    return copy
