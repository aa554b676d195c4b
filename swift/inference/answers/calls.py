"""Reads one tool call (or one list of calls) at the place where a text has come to, by the form of the template.

Knows nothing of what stands around calls. What can't be read as a call is None; nothing is mended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swift.inference.answers.forms import ID_NAME, CallForm
from swift.inference.answers.incoming import Incoming, Reading
from swift.inference.answers.loose_json import Found, read_json

_NAME = re.compile(r"[\w.:/-]+\Z")
_LONGEST_NAME = 300  # characters of a name, an id or a key, with what stands around it
_SPELT = {"True": True, "False": False, "None": None}  # as templates write them that don't write JSON


@dataclass(frozen=True, slots=True)
class Call:
    """What was read.

    Attributes:
        arguments: a JSON object.
        id: as written; None where the form has none.
        texts: the values are texts, whose types the tool's schema tells.
    """

    name: str
    arguments: dict[str, Any]
    id: str | None = None
    texts: bool = False

    def shown(self, schema: Mapping[str, Any] | None) -> str:
        """The arguments as JSON text.

        Args:
            schema: of the tool's parameters.
        """
        arguments = self.arguments
        if self.texts:
            properties = (schema or {}).get("properties") or {}
            arguments = {key: _typed(value, properties.get(key)) for key, value in arguments.items()}
        return json.dumps(arguments, ensure_ascii=False)


def read_calls(form: CallForm, source: Incoming) -> Reading[list[Call] | None]:
    """The calls that are next, with what opens and closes them; None if these are none."""
    if not (yield from source.take(form.opening)):
        return None
    calls = yield from _READ[form.kind](form, source)
    if calls is None or (yield from source.take(form.closing)):
        return calls
    # an answer may end before the closing mark is there: the call itself is complete
    ended = source.final and form.closing.strip().startswith(source.text[source.at :].strip())
    if not ended:
        return None
    source.at = len(source.text)
    return calls


def _read_object(form: CallForm, source: Incoming) -> Reading[list[Call] | None]:
    call = _from_object(form, (yield from source.json()))
    return None if call is None else [call]


def _read_list(form: CallForm, source: Incoming) -> Reading[list[Call] | None]:
    value = yield from source.json()
    if isinstance(value, dict):  # a single call without its list
        value = [value]
    if not isinstance(value, list) or not value:
        return None
    calls = [_from_object(form, each) for each in value]
    return None if None in calls else [call for call in calls if call is not None]


def _from_object(form: CallForm, value: Any) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get(form.keys[0]), str):
        return None
    others = [key for key in (form.keys[1], "arguments", "parameters") if key in value]
    arguments = value[others[0]] if others else {}
    if isinstance(arguments, str):
        inner = read_json(arguments)
        arguments = inner.value if isinstance(inner, Found) else None
    identity = value.get(form.id_key)
    if not isinstance(arguments, dict):
        return None
    return Call(value[form.keys[0]], arguments, identity if isinstance(identity, str) and identity else None)


def _read_named(form: CallForm, source: Incoming) -> Reading[list[Call] | None]:
    marks = [mark for mark in (form.id_mark, form.middle) if mark.strip()] or ["{"]
    found = yield from source.until(marks, within=_LONGEST_NAME)
    if found is None:
        return None
    name, identity = found[0].strip(), None
    if found[1] == "{":
        source.at -= 1
    if form.id_mark and found[1] == form.id_mark.strip():
        rest = yield from source.until([form.middle], within=_LONGEST_NAME)
        if rest is None:
            return None
        identity = rest[0].strip() or None
    if form.name_in_id:
        inside = ID_NAME.fullmatch(name)
        identity, name = name, inside["name"] if inside else ""
    if not _NAME.match(name):
        return None
    arguments = yield from source.json()
    return [Call(name, arguments, identity)] if isinstance(arguments, dict) else None


def _read_tagged(form: CallForm, source: Incoming) -> Reading[list[Call] | None]:
    tag, to_value, value_end = form.tags
    found = yield from source.until([tag, form.closing], within=_LONGEST_NAME)
    if found is None:
        return None
    name = found[0].strip().removesuffix(form.middle.strip()).strip()
    if not _NAME.match(name):
        return None
    arguments: dict[str, Any] = {}
    after = found[1]
    while after == tag.strip():
        key = yield from source.until([to_value], within=_LONGEST_NAME)
        if key is None:
            return None
        start = source.at
        while True:  # a value may contain what ends one: it ends where another key or the end of the call follows
            if (yield from source.until([value_end])) is None:
                return None
            end = source.at - len(value_end.strip())
            follows = yield from source.sees([tag, form.closing])
            if follows is not None:
                after, source.at = follows
                break
            if source.final and form.closing.strip().startswith(source.text[source.at :].strip()):
                after = ""
                break
        value = source.text[start:end]
        value = value.removeprefix(_spaces_after(to_value)).removesuffix(_spaces_before(value_end))
        arguments[key[0].strip()] = value
    if after:
        source.at -= len(after)  # the closing mark is the caller's
    return [Call(name, arguments, texts=True)]


def _spaces_after(mark: str) -> str:
    return mark[len(mark.rstrip()) :]


def _spaces_before(mark: str) -> str:
    return mark[: len(mark) - len(mark.lstrip())]


_READ = {"object": _read_object, "list": _read_list, "named": _read_named, "tagged": _read_tagged}


def _typed(text: str, schema: Any) -> Any:
    """A value that was written as text: text where the schema says so, else JSON if it is some."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = kind if isinstance(kind, list) else [kind]
    if "string" in kinds:
        return text
    if text in _SPELT and ("null" if text == "None" else "boolean") in kinds:
        return _SPELT[text]
    found = read_json(text)
    return found.value if isinstance(found, Found) and not text[found.end :].strip() else text
