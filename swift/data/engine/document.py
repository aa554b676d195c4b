"""One document on its way through a recipe: a row of a file, and the texts in it that operators read and change.

A plain-text row has one text; a conversation has one for each message. The rest of the row travels along untouched and
is written out again with the changed texts in their places.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from swift.data.messages import ROLE_ALIASES
from swift.data.rows import RowProblem
from swift.data.shapes import ANSWER_COLUMNS, MESSAGE_COLUMNS, PROMPT_COLUMNS, SYSTEM_COLUMNS, TEXT_COLUMNS

META_KEY = "meta"
_TURN_COLUMNS = (
    *((name, "system") for name in SYSTEM_COLUMNS),
    *((name, "user") for name in PROMPT_COLUMNS),
    *((name, "assistant") for name in ANSWER_COLUMNS),
)

Path = tuple[str | int, ...]


@dataclass(slots=True)
class Document:
    """A row and its texts.

    Attributes:
        id: `file:line` of where it was read, unique in a run and never changed; all randomness is a function of it.
        record: the row as read; `to_record` gives it back with `texts` in their places.
        paths: for each text, the keys and indices that lead to it in `record`.
        texts: the texts, in order. Operators replace items; they don't add or remove any.
        roles: for each text `system`, `user`, `assistant` or `tool`; None for plain text.
        meta: what operators found out (language, scores); written out under `meta`.
    """

    id: str
    record: dict[str, Any]
    paths: list[Path]
    texts: list[str]
    roles: list[str] | None = None
    meta: dict[str, Any] = field(default_factory=dict)

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
                record = _replaced(record, path, text)
        if self.meta:
            known = record.get(META_KEY)
            record[META_KEY] = {**known, **self.meta} if isinstance(known, dict) else dict(self.meta)
        return record


def document_from(record: dict[str, Any], doc_id: str, *, column: str | None = None) -> Document:
    """Find the texts of a row.

    Args:
        record: the row.
        doc_id: its `file:line`.
        column: the column that holds the text; None finds a conversation or a text column by the known names.

    Raises:
        RowProblem: no text is found.
    """
    if column is not None:
        if not isinstance(record.get(column), str):
            raise RowProblem("no_text", f"the column {column!r} holds no text; there are {', '.join(record) or 'none'}")
        return Document(doc_id, record, [(column,)], [record[column]])
    for name in TEXT_COLUMNS:  # by far the most frequent kind of row comes first
        if isinstance(record.get(name), str):
            return Document(doc_id, record, [(name,)], [record[name]])
    for name in MESSAGE_COLUMNS:
        if isinstance(record.get(name), list):
            return _conversation(record, doc_id, name)
    return _turns(record, doc_id)


def _conversation(record: dict[str, Any], doc_id: str, column: str) -> Document:
    paths: list[Path] = []
    texts: list[str] = []
    roles: list[str] = []
    for number, message in enumerate(record[column]):
        if not isinstance(message, dict):
            raise RowProblem("bad_messages", f"message {number + 1} is not an object")
        role = message.get("role", message.get("from"))
        key = "content" if "content" in message else "value"
        if isinstance(role, str):
            known_role = ROLE_ALIASES.get(role) or role
            pairs = [(key, known_role)] if isinstance(message.get(key), str) else []
        else:  # {"human": …, "assistant": …}
            pairs = [
                (name, ROLE_ALIASES.get(name) or name) for name, value in message.items() if isinstance(value, str)
            ]
        for name, known in pairs:
            paths.append((column, number, name))
            texts.append(message[name])
            roles.append(known)
    if not texts:
        raise RowProblem("no_text", f"no message of {column!r} holds a text")
    return Document(doc_id, record, paths, texts, roles)


def _turns(record: dict[str, Any], doc_id: str) -> Document:
    found = [(name, role) for name, role in _TURN_COLUMNS if isinstance(record.get(name), str)]
    if not found:
        raise RowProblem("no_text", f"no column holds a text; there are {', '.join(map(str, record)) or 'none'}")
    return Document(
        doc_id,
        record,
        [(name,) for name, _ in found],
        [record[name] for name, _ in found],
        [role for _, role in found],
    )


def _replaced(value: Any, path: Path, text: str) -> Any:
    """A copy of `value` along `path`, with `text` at its end."""
    if not path:
        return text
    copy = value.copy()
    copy[path[0]] = _replaced(value[path[0]], path[1:], text)
    return copy
