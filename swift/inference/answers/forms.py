"""How a chat template writes tool calls, found by letting it write some.

Templates differ in marks, not in kind. A call is one JSON object with a name and arguments in it (`object`), a list of
such objects (`list`), a name and then the arguments as JSON (`named`), or a name and then key after key (`tagged`).
What stands between is taken literally from the rendering of probe calls, so no family is looked up by name. A form is
trusted only after the probe's own rendering was read back (`choose`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from swift.core.errors import TemplateError
from swift.data.encoding.encode import ChatEncoder
from swift.data.encoding.probe import CLOSE
from swift.data.rows import RowProblem

Kind = Literal["object", "list", "named", "tagged"]

_QUESTION = "Kvquestion3"
_NAMES = ("zq_first_tool", "zq_second_tool")
_KEYS = ("zq_alpha", "zq_beta")
_INNER = "zq_gamma"
_VALUES = ({_KEYS[0]: "Vqone", _KEYS[1]: "Vqtwo"}, {_KEYS[0]: "Vqthree", _KEYS[1]: "Vqfour"})
_HARD = 'He said: "{no}", \\ and\n  went to Zürich 😀'
_NESTED = {"list": [1.5, {"deep": 'a "b"\nc'}, None], "on": True, "text": "[x]"}
_IDS = ("call00000", "call00001")
# templates that write a call's id instead of its name have ids of this form, after Kimi K2
_IDS_WITH_NAMES = tuple(f"functions.{name}:{number}" for number, name in enumerate(_NAMES))
ID_NAME = re.compile(r"(?:functions\.)?(?P<name>[\w./-]+?)(?::\d+)?")

_LAST_MARK = re.compile(r"(?:<[^<>\s]+>|\[[^\[\]\s]+\])\s*$")

Call = tuple[str, dict[str, Any]]
_TYPES = {_KEYS[0]: "string", _INNER: "object", _KEYS[1]: "string"}
PROBES: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A probe.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind, "description": "A key."} for key, kind in _TYPES.items()},
                "required": list(_KEYS),
            },
        },
    }
    for name in _NAMES
]


@dataclass(frozen=True)
class CallForm:
    """How calls are written.

    Attributes:
        kind: see above.
        section: what stands before and after all calls; empty where there is nothing.
        opening, closing: before and after each call.
        keys: of name and arguments, in objects.
        id_key: of the call's id, in objects; empty where they have none.
        id_mark: between name and id (`named`); empty where no id follows the name.
        name_in_id: the call's id stands in the place of its name (`named`), and holds it.
        text_arguments: arguments are JSON text inside of the object's JSON.
        middle: between name (or id) and arguments (`named`), or after the name (`tagged`).
        tags: before a key, between key and value, after the value (`tagged`).
    """

    kind: Kind
    section: tuple[str, str] = ("", "")
    opening: str = ""
    closing: str = ""
    keys: tuple[str, str] = ("name", "arguments")
    id_key: str = ""
    id_mark: str = ""
    name_in_id: bool = False
    text_arguments: bool = False
    middle: str = ""
    tags: tuple[str, str, str] = ("", "", "")

    @property
    def begins(self) -> str:
        """The mark with which calls begin; empty where an answer that calls is nothing but JSON."""
        return self.section[0].strip() or self.opening.strip()

    @property
    def marks(self) -> tuple[str, ...]:
        """All literal text around names and arguments."""
        return (*self.section, self.opening, self.closing, self.id_mark, self.middle, *self.tags)


def find_form(encoder: ChatEncoder) -> CallForm | None:
    """How the encoder's template writes calls; None when it writes none, or in a way that isn't understood."""
    one = written(encoder, probe_calls(1))
    if one is None:
        return None
    two = written(encoder, probe_calls(2))  # none where the template knows single calls only
    try:
        return _as_objects(one, two) or _as_names(one, two) or _as_tags(one, two)
    except ValueError:  # something that should be there isn't
        return None


def probe_calls(count: int, *, nested: bool = False, hard: bool = False) -> list[Call]:
    """Names and arguments of one or two calls.

    Args:
        hard: with quotes, line breaks and other scripts in them.
        nested: with objects and lists in them.
    """
    calls = []
    for name, values in list(zip(_NAMES, _VALUES, strict=True))[:count]:
        more = {_INNER: _NESTED} if nested else {}
        first = {_KEYS[0]: _HARD} if hard else {_KEYS[0]: values[_KEYS[0]]}
        calls.append((name, {**first, **more, _KEYS[1]: values[_KEYS[1]]}))
    return calls


def as_message(calls: Sequence[Call], ids: Sequence[str] = _IDS) -> dict[str, Any]:
    """The assistant's message that makes some calls."""
    made = [
        {"type": "function", "id": identity, "function": {"name": name, "arguments": arguments}}
        for identity, (name, arguments) in zip(ids, calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def written(encoder: ChatEncoder, calls: Sequence[Call]) -> str | None:
    """What an assistant that makes these calls has written; None where the template shows none or refuses them."""
    if not encoder.use_chat_template:
        return None
    question = [{"role": "user", "content": _QUESTION}]
    for ids in (_IDS, _IDS_WITH_NAMES):
        try:
            before = encoder.render_prompt(question, PROBES)
            after = encoder.render_prompt([*question, as_message(calls, ids)], PROBES)
        except (RowProblem, TemplateError):
            return None
        text = added_to(before, after)
        if _NAMES[0] in text:
            break
    else:
        return None
    thought, _, rest = text.partition(CLOSE)
    if rest and _NAMES[0] not in thought:  # an empty thought, or the end of one that the prompt has opened
        text = rest.lstrip("\n")
    name, arguments = calls[-1]
    last = next((value for value in reversed(arguments.values()) if isinstance(value, str)), name)
    if last not in text:
        return None
    ends = text.rindex(last) + len(last)
    stops = [text.index(stop, ends) for stop in _stops(encoder) if stop in text[ends:]]
    return text[: min(stops)] if stops else text


def added_to(prompt: str, conversation: str) -> str:
    """What an answer adds to its prompt, in a conversation as the template shows it."""
    if conversation.startswith(prompt):
        return conversation[len(prompt) :]
    # the prompt opens something that the answer is shown without; both may begin with the same characters
    opened = _LAST_MARK.search(prompt)
    shared = len(_shared_start(prompt, conversation))
    return conversation[min(shared, opened.start()) if opened else shared :]


def last_mark(prompt: str) -> str:
    """The mark in which a prompt ends; empty if it ends otherwise."""
    found = _LAST_MARK.search(prompt)
    return found[0].strip() if found else ""


def shown_instead(encoder: ChatEncoder) -> str:
    """What the template makes of a call, for people whom it is refused."""
    if not encoder.use_chat_template:
        return "no template is used"
    try:
        text = encoder.render_prompt([{"role": "user", "content": _QUESTION}, as_message(probe_calls(1))], PROBES)
    except (RowProblem, TemplateError) as error:
        return f"it refuses a call: {error}"
    answer = text[text.rindex(_QUESTION) + len(_QUESTION) :] if _QUESTION in text else text
    return f"a call comes out as {answer[:300]!r}"


def _stops(encoder: ChatEncoder) -> list[str]:
    return [encoder.tokenizer.convert_ids_to_tokens(token) for token in encoder.stop_token_ids()]


def _objects(text: str) -> list[tuple[int, int, Any]]:
    """The outermost JSON objects and lists of objects in a text: start, end, value."""
    found, at, decoder = [], 0, json.JSONDecoder()
    while (match := re.compile(r"[\[{]").search(text, at)) is not None:
        try:
            value, at_end = decoder.raw_decode(text, match.start())
        except json.JSONDecodeError:
            at = match.start() + 1
            continue
        if value and (isinstance(value, dict) or all(isinstance(each, dict) for each in value)):
            found.append((match.start(), at_end, value))
        at = at_end
    return found


def _keys_of(value: dict[str, Any]) -> dict[str, Any] | None:
    """The keys of name, arguments and id in the first probe's object, and whether the arguments are text."""
    name = next((key for key, held in value.items() if held == _NAMES[0]), None)
    identity = next((key for key, held in value.items() if held == _IDS[0]), "")
    for key, held in value.items():
        text = isinstance(held, str) and held.lstrip().startswith("{")
        if name is not None and (json.loads(held) if text else held) == _VALUES[0]:
            return {"keys": (name, key), "id_key": identity, "text_arguments": text}
    return None


def _as_objects(one: str, two: str | None) -> CallForm | None:
    """Objects with a name and arguments, each by itself or in a list."""
    single, double = _objects(one), _objects(two or "")
    if not single:
        return None
    start, end, value = single[0]
    listed = isinstance(value, list)
    keys = _keys_of(value[0] if listed else value)
    if keys is None:
        return None
    before, after = one[:start], one[end:]
    if listed or two is None:
        return CallForm("list" if listed else "object", opening=before, closing=after, **keys)
    if len(double) != 2:
        return None
    section, opening, closing = _around(before, two[double[0][1] : double[1][0]], after)
    return CallForm("object", section, opening, closing, **keys)


def _around(before: str, between: str, after: str) -> tuple[tuple[str, str], str, str]:
    """Section, opening and closing, from what stands before the first call, between two, and after the last."""
    opening = _shared_end(before, between)
    rest = between[: len(between) - len(opening)]
    closing = _shared_start(rest, after)
    if not opening.strip() and not closing.strip():
        return (before, after), "", ""
    return (before[: len(before) - len(opening)], after[len(closing) :]), opening, closing


def _as_names(one: str, two: str | None) -> CallForm | None:
    """A name, then the arguments as JSON."""
    single, double = _objects(one), _objects(two or "")
    if two is None or len(single) != 1 or len(double) != 2 or single[0][2] != _VALUES[0] or double[1][2] != _VALUES[1]:
        return None
    start, end, _ = single[0]
    name_in_id = _IDS_WITH_NAMES[0] in one
    names = _IDS_WITH_NAMES if name_in_id else _NAMES
    name, second = one.index(names[0]), two.index(names[1])
    middle = one[name + len(names[0]) : start]
    if name > start or two[second + len(names[1]) : double[1][0]].replace(_IDS[1], _IDS[0]) != middle:
        return None
    id_mark, found, rest = middle.partition(_IDS[0])
    if found and not (id_mark.strip() and rest.strip()):
        return None
    section, opening, closing = _around(one[:name], two[double[0][1] : second], one[end:])
    if not (opening.strip() or section[0].strip()):
        return None
    id_mark, middle = (id_mark, rest) if found else ("", middle)
    return CallForm("named", section, opening, closing, id_mark=id_mark, name_in_id=name_in_id, middle=middle)


_BETWEEN_MARKS = re.compile(r"(?<=[>\]])\s*(?=[<\[])")


def _as_tags(one: str, two: str | None) -> CallForm | None:
    """A name, then key after key."""
    if two is None:
        return None
    cuts, at = [], 0
    for word in (_NAMES[0], _KEYS[0], _VALUES[0][_KEYS[0]], _KEYS[1], _VALUES[0][_KEYS[1]]):
        place = one.index(word, at)
        cuts.append(one[at:place])
        at = place + len(word)
    before, to_key, to_value, to_next, to_last = cuts
    after = one[at:]
    tag = _shared_end(to_key, to_next)
    mark_ends = _BETWEEN_MARKS.search(tag)  # what ends the name and a value alike isn't part of the key's mark
    tag = tag[mark_ends.start() :] if mark_ends else tag
    value_end = to_next[: len(to_next) - len(tag)]
    if to_value != to_last or not tag.strip() or not value_end.strip() or not after.startswith(value_end.rstrip()):
        return None
    last = two.index(_VALUES[0][_KEYS[1]]) + len(_VALUES[0][_KEYS[1]])
    second = two.index(_NAMES[1])
    after = after[len(_shared_start(value_end, after)) :]
    between = two[last + len(_shared_start(value_end, two[last:])) : second]
    section, opening, closing = _around(before, between, after)
    if not (opening.strip() or section[0].strip()) or not closing.strip():
        return None
    middle = to_key[: len(to_key) - len(tag)]
    return CallForm("tagged", section, opening, closing, middle=middle, tags=(tag, to_value, value_end))


def _shared_start(one: str, other: str) -> str:
    """The longest beginning of both."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return one[:count]


def _shared_end(one: str, other: str) -> str:
    """The longest end of both."""
    return _shared_start(one[::-1], other[::-1])[::-1]
