"""Takes an answer's text apart while it comes: thoughts, content, tool calls.

What comes out doesn't depend on how the text was cut into pieces: nothing is said before it is certain, so text that
may become a mark is held back, and a call is told when it is complete. What begins like a call and isn't one is
content, as it was written.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swift.data.encoding.probe import CLOSE, OPEN
from swift.inference.answers.forms import CallForm
from swift.inference.answers.loose_json import read_json
from swift.inference.answers.parts import CallPiece, Piece, Said

_NAME = re.compile(r"[\w.:/-]+\Z")


@dataclass(frozen=True)
class AnswerForm:
    """What may be in an answer.

    Attributes:
        calls: how tool calls are written; None where none are looked for.
        thinks: whether thoughts may be in it.
        begins_in_thought: the prompt has opened the thought already.
        schemas: of each tool's parameters, by the tool's name.
    """

    calls: CallForm | None = None
    thinks: bool = False
    begins_in_thought: bool = False
    schemas: Mapping[str, Mapping[str, Any]] | None = None

    def parse(self, text: str) -> Said:
        """Read a whole answer."""
        said, reader = Said(), AnswerReader(self)
        for piece in [*reader.feed(text), *reader.end()]:
            said.add(piece)
        return said


class AnswerReader:
    """Reads one answer.

    Args:
        form: what may be in it.
    """

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._text = ""  # not told yet
        self._state = "thought" if form.begins_in_thought else "start" if form.thinks else "content"
        self._told = False  # something other than white space of this part was told
        self._in_section = False
        self._after_thought = False
        self._gap = ""  # white space before what may be a call
        self._num_calls = 0
        self._steps = {"start": self._start, "thought": self._thought, "content": self._content, "call": self._call}

    def feed(self, text: str) -> list[Piece]:
        """What more text adds."""
        self._text += text
        return self._read(final=False)

    def end(self) -> list[Piece]:
        """What was held back, once no more text comes."""
        return self._read(final=True)

    def _read(self, *, final: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while True:
            before = (self._state, len(self._text))
            self._steps[self._state](pieces, final)
            if before == (self._state, len(self._text)):
                return pieces

    def _start(self, pieces: list[Piece], final: bool) -> None:
        """Whether the answer opens a thought itself."""
        rest = self._text.lstrip()
        if rest.startswith(OPEN):
            self._text, self._state = rest[len(OPEN) :], "thought"
        elif final or (rest and not OPEN.startswith(rest)):
            self._state = "content"

    def _thought(self, pieces: list[Piece], final: bool) -> None:
        """Everything up to the mark; line breaks around it aren't part of the thought."""
        if not self._told:
            self._text = self._text.lstrip("\n")
        at = self._text.find(CLOSE)
        ready = at if at >= 0 else len(self._text) if final else _before_mark(self._text, CLOSE)
        thought = self._text[:ready]
        thought = thought if at < 0 and final else thought.rstrip("\n")
        if thought:
            self._told = True
            pieces.append(Piece(thought=thought))
        self._text = self._text[len(thought) :]
        if at >= 0:
            self._text = self._text[at - len(thought) + len(CLOSE) :]
            self._state, self._told = "content", False
            self._after_thought = True

    def _content(self, pieces: list[Piece], final: bool) -> None:
        if (self._after_thought or self._num_calls) and not self._told:
            self._text = self._text.lstrip() if self._num_calls else self._text.lstrip("\n")
        calls = self._form.calls
        if calls is None:
            self._tell(pieces, len(self._text))
            return
        mark = calls.begins
        if not mark:  # an answer that calls is JSON from its beginning
            rest = self._text.lstrip()
            if not self._told and rest.startswith("{"):
                self._text, self._state = rest, "call"
            elif final or self._told or rest:
                self._tell(pieces, len(self._text))
            return
        at = self._text.find(mark)
        if at >= 0:
            self._tell(pieces, len(self._text[:at].rstrip()))
            self._gap, _, _ = self._text.partition(mark)
            self._text, self._state = self._text[len(self._gap) :], "call"
            return
        # white space before a call isn't content, so it waits for what follows
        self._tell(pieces, len(self._text) if final else len(self._text[: _before_mark(self._text, mark)].rstrip()))

    def _tell(self, pieces: list[Piece], count: int) -> None:
        if count:
            pieces.append(Piece(content=self._text[:count]))
            self._told = self._told or bool(self._text[:count].strip())
            self._text = self._text[count:]

    def _call(self, pieces: list[Piece], final: bool) -> None:
        """The text begins with a call, or goes on with another one of the section."""
        form = self._form.calls
        assert form is not None
        found = _next_calls(form, self._text, self._in_section, final)
        if found is None:
            return
        if isinstance(found, int):  # not a call after all: what was taken for one is content
            self._state = "content"
            self._in_section = False
            self._text = self._gap + self._text
            self._tell(pieces, len(self._gap) + found)
            self._gap = ""
            return
        for name, arguments in found.calls:
            shown = _arguments(arguments, (self._form.schemas or {}).get(name))
            identity = f"call_{uuid.uuid4().hex[:24]}"
            pieces.append(Piece(call=CallPiece(self._num_calls, identity, name, shown)))
            self._num_calls += 1
        self._text = self._text[found.end :]
        self._in_section = found.more
        self._told, self._gap = False, ""
        if not found.more:
            self._state = "content"


@dataclass(frozen=True)
class _Calls:
    """Complete calls, where the text goes on, and whether their section is still open."""

    calls: list[tuple[str, Any]]
    end: int
    more: bool


def _next_calls(form: CallForm, text: str, inside: bool, final: bool) -> _Calls | int | None:
    """The calls at the beginning of `text`.

    Returns:
        the calls; None while more text is needed; a number of characters that are no call.
    """
    cursor = _Cursor(text, final)
    if not inside and not cursor.take(form.section[0]):
        return cursor.outcome(form)
    if inside:
        if cursor.take(form.section[1]) and form.section[1].strip():
            return _Calls([], cursor.at, False)
        if cursor.waits:
            return None
        if not cursor.rest() and not final:
            return None
        begins = form.opening.strip() or "{"
        if not cursor.sees(begins):
            # anything else ends a section without a mark; with one it can't be read
            return None if cursor.waits else _Calls([], 0, False)
    if not cursor.take(form.opening):
        return cursor.outcome(form)
    calls = _READ[form.kind](form, cursor)
    if calls is None:
        return cursor.outcome(form)
    if not cursor.take(form.closing) and not cursor.final:
        if cursor.waits:
            return None
        return cursor.outcome(form) if form.closing.strip() else _Calls(calls, cursor.at, False)
    more = form.kind != "list" and bool(form.section[0].strip() or form.section[1].strip() or not form.begins)
    return _Calls(calls, cursor.at, more)


class _Cursor:
    """A place in a text that may go on.

    Attributes:
        at: the place.
        waits: what was looked for may still come.
    """

    def __init__(self, text: str, final: bool) -> None:
        self.text = text
        self.final = final
        self.at = 0
        self.waits = False

    def rest(self) -> str:
        """What is left, without white space before it."""
        return self.text[self.at :].lstrip()

    def sees(self, mark: str) -> bool:
        """Whether a mark is next; white space around it doesn't matter."""
        rest, mark = self.rest(), mark.strip()
        self.waits = not self.final and len(rest) < len(mark) and mark.startswith(rest)
        return rest.startswith(mark)

    def take(self, mark: str) -> bool:
        """Go past a mark, if it is next; an empty mark always is."""
        if not mark.strip():
            return True
        if not self.sees(mark):
            return False
        self.at = self.text.index(mark.strip(), self.at) + len(mark.strip())
        return True

    def until(self, mark: str) -> str | None:
        """The text before a mark, going past it; None if it isn't there."""
        at = self.text.find(mark.strip(), self.at)
        if at < 0:
            self.waits = not self.final
            return None
        found = self.text[self.at : at]
        self.at = at + len(mark.strip())
        return found

    def json(self) -> Any:
        """The JSON value that is next; None if there is none."""
        start = len(self.text) - len(self.text[self.at :].lstrip())
        if start == len(self.text):
            self.waits = not self.final
            return None
        found = read_json(self.text, start)
        if found is None:
            self.waits = not self.final
            return None
        if isinstance(found, ValueError):
            return None
        self.at = found.end
        return found.value

    def outcome(self, form: CallForm) -> int | None:
        """Wait; or how much is no call: the mark that seemed to begin one, so that another may be found behind it."""
        if self.waits:
            return None
        return len(form.begins) or len(self.text)


def _read_object(form: CallForm, cursor: _Cursor) -> list[tuple[str, Any]] | None:
    call = _from_object(form, cursor.json())
    return None if call is None else [call]


def _read_list(form: CallForm, cursor: _Cursor) -> list[tuple[str, Any]] | None:
    value = cursor.json()
    if isinstance(value, dict):  # a single call without its list
        value = [value]
    if not isinstance(value, list) or not value:
        return None
    calls = [_from_object(form, each) for each in value]
    return None if None in calls else [call for call in calls if call is not None]


def _from_object(form: CallForm, value: Any) -> tuple[str, Any] | None:
    if not isinstance(value, dict) or not isinstance(value.get(form.keys[0]), str):
        return None
    others = [key for key in (form.keys[1], "arguments", "parameters") if key in value]
    arguments = value[others[0]] if others else {}
    if isinstance(arguments, str):
        inner = read_json(arguments)
        arguments = getattr(inner, "value", None)
    return (value[form.keys[0]], arguments) if isinstance(arguments, dict) else None


def _read_named(form: CallForm, cursor: _Cursor) -> list[tuple[str, Any]] | None:
    if form.middle.strip():
        name = cursor.until(form.middle)
    else:
        at = cursor.text.find("{", cursor.at)
        name = cursor.text[cursor.at : at] if at >= 0 else None
        cursor.waits = at < 0 and not cursor.final
        cursor.at = max(at, cursor.at)
    if name is None or not _NAME.match(name.strip()):
        return None
    arguments = cursor.json()
    return [(name.strip(), arguments)] if isinstance(arguments, dict) else None


def _read_tagged(form: CallForm, cursor: _Cursor) -> list[tuple[str, Any]] | None:
    body = cursor.until(form.closing)
    if body is None:
        return None
    cursor.at -= len(form.closing.strip())
    tag, to_value, value_end = form.tags
    first = body.find(tag.strip())
    name = (body if first < 0 else body[:first]).strip().removesuffix(form.middle.strip()).strip()
    if not _NAME.match(name):
        return None
    arguments: dict[str, Any] = {}
    pattern = re.escape(tag.strip()) + r"\s*(.*?)\s*" + re.escape(to_value.strip()) + r"\n?(.*?)\n?"
    for match in re.finditer(pattern + re.escape(value_end.strip()), body, re.DOTALL):
        arguments[match[1]] = match[2]
    return [(name, _Texts(arguments))]


class _Texts(dict[str, Any]):
    """Arguments as text, whose types the tool's schema tells."""


_READ = {"object": _read_object, "list": _read_list, "named": _read_named, "tagged": _read_tagged}


def _arguments(arguments: dict[str, Any], schema: Mapping[str, Any] | None) -> str:
    """JSON text of a call's arguments."""
    if isinstance(arguments, _Texts):
        properties = (schema or {}).get("properties") or {}
        arguments = {key: _typed(value, properties.get(key)) for key, value in arguments.items()}
    return json.dumps(arguments, ensure_ascii=False)


def _typed(text: str, schema: Any) -> Any:
    """A value that was written as text: text where the schema says so, else JSON if it is some."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string" or (isinstance(kind, list) and "string" in kind):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _before_mark(text: str, mark: str) -> int:
    """How much of a text can't be the beginning of a mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return len(text) - length
    return len(text)
