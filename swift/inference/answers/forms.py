"""How a chat template writes tool calls, found by letting it write some.

Templates differ in marks, not in kind. A call is one JSON object with a name and arguments in it (`object`), a list of
such objects (`list`), a name and then the arguments as JSON (`named`), or a name and then key after key (`tagged`).
What stands between is taken literally from the rendering of probe calls, so no family is looked up by name. A form is
trusted only after the probe's own rendering was read back (`choose`).
"""

from __future__ import annotations

import json
import re
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
_VALUES = ({_KEYS[0]: "Vqone", _KEYS[1]: "Vqtwo"}, {_KEYS[0]: "Vqthree", _KEYS[1]: "Vqfour"})

PROBES = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A probe.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string", "description": "A key."} for key in _KEYS},
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
        text_arguments: arguments are JSON text inside of the object's JSON.
        middle: between name and arguments (`named`), or after the name (`tagged`).
        tags: before a key, between key and value, after the value (`tagged`).
    """

    kind: Kind
    section: tuple[str, str] = ("", "")
    opening: str = ""
    closing: str = ""
    keys: tuple[str, str] = ("name", "arguments")
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
        return (*self.section, self.opening, self.closing, self.middle, *self.tags)


def find_form(encoder: ChatEncoder) -> CallForm | None:
    """How the encoder's template writes calls; None when it writes none, or in a way that isn't understood."""
    if not encoder.use_chat_template:
        return None
    try:
        one = _written(encoder, 1)
    except (RowProblem, TemplateError, ValueError):
        return None
    try:
        two = _written(encoder, 2)
    except (RowProblem, TemplateError, ValueError):  # the template knows single calls only
        two = None
    try:
        return _as_objects(one, two) or _as_names(one, two) or _as_tags(one, two)
    except ValueError:  # something that should be there isn't
        return None


def probe_answer(encoder: ChatEncoder, count: int) -> tuple[str, list[tuple[str, dict[str, str]]]]:
    """What the template writes for one or two calls, and which calls these are."""
    return _written(encoder, count), list(zip(_NAMES, _VALUES, strict=True))[:count]


def _written(encoder: ChatEncoder, count: int) -> str:
    """What an assistant that makes the first `count` probe calls has written."""
    calls = [
        {"type": "function", "id": f"call0000{k}", "function": {"name": name, "arguments": arguments}}
        for k, (name, arguments) in enumerate(zip(_NAMES[:count], _VALUES[:count], strict=True))
    ]
    question = [{"role": "user", "content": _QUESTION}]
    before = encoder.render_prompt(question, PROBES)
    after = encoder.render_prompt([*question, {"role": "assistant", "content": "", "tool_calls": calls}], PROBES)
    text = after[len(_shared_start(before, after)) :]
    thought, _, rest = text.partition(CLOSE)
    if rest and _NAMES[0] not in thought:  # an empty thought, or the end of one that the prompt has opened
        text = rest.lstrip("\n")
    last = list(_VALUES[count - 1].values())[-1]
    ends = text.index(last) + len(last)
    stops = [text.index(stop, ends) for stop in _stops(encoder) if stop in text[ends:]]
    return text[: min(stops)] if stops else text


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


def _keys_of(value: dict[str, Any]) -> tuple[str, str, bool] | None:
    """The keys of name and arguments in the first probe's object, and whether the arguments are text."""
    name = next((key for key, held in value.items() if held == _NAMES[0]), None)
    for key, held in value.items():
        text = isinstance(held, str) and held.lstrip().startswith("{")
        if name is not None and (json.loads(held) if text else held) == _VALUES[0]:
            return name, key, text
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
    if listed:
        return CallForm("list", opening=before, closing=after, keys=keys[:2], text_arguments=keys[2])
    if two is None:
        return CallForm("object", opening=before, closing=after, keys=keys[:2], text_arguments=keys[2])
    if len(double) != 2:
        return None
    section, opening, closing = _around(before, two[double[0][1] : double[1][0]], after)
    return CallForm("object", section, opening, closing, keys[:2], keys[2])


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
    name = one.index(_NAMES[0])
    second = two.index(_NAMES[1])
    middle = one[name + len(_NAMES[0]) : start]
    if name > start or two[second + len(_NAMES[1]) : double[1][0]] != middle:
        return None
    section, opening, closing = _around(one[:name], two[double[0][1] : second], one[end:])
    if not (opening.strip() or section[0].strip()):
        return None
    return CallForm("named", section, opening, closing, middle=middle)


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
