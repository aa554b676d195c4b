"""Conversations with one fault each, in several layouts; and the parameters of tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from swift.core.errors import UsageError
from swift.data.engine.document import document_from
from swift.data.engine.operator import Context
from swift.data.engine.tally import Tally
from swift.data.operators.chat import ChatChecks
from swift.data.operators.json_schema import misfit

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
LONG = "a sentence that is long enough to count"


def turn(role: str, content: str | None = "text", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(arguments: Any, name: str = "weather", call_id: str | None = None) -> dict[str, Any]:
    body = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {**body, "id": call_id} if call_id else body


def caller(*calls: dict[str, Any]) -> dict[str, Any]:
    return turn("assistant", None, tool_calls=list(calls))


def faults(messages: list[dict[str, Any]], tools: Any = None, **settings: Any) -> list[str]:
    """All faults of a conversation, in order of name."""
    row: dict[str, Any] = {"messages": messages, **({"tools": tools} if tools else {})}
    operator = ChatChecks(action="tag", **settings)
    operator.check()
    operator.open(Context())
    (document,) = operator.run([document_from(row, "f:1")], Tally())
    return document.meta.get("chat_faults", [])


GOOD = [
    ([turn("user"), turn("assistant")], None),
    ([turn("system"), turn("user"), turn("assistant"), turn("user", "b"), turn("assistant", "b")], None),
    ([turn("user"), caller(call('{"city": "Rome", "days": 2}')), turn("tool"), turn("assistant")], TOOLS),
    ([turn("user"), caller(call({"city": "Rome"})), turn("tool"), turn("user"), turn("assistant")], TOOLS),
    (
        [turn("user"), caller(call({"city": "a"}), call({"city": "b"})), turn("tool"), turn("tool"), turn("assistant")],
        TOOLS,
    ),
    (
        [turn("user"), caller(call({"city": "a"}, call_id="1")), turn("tool", tool_call_id="1"), turn("assistant")],
        TOOLS,
    ),
    ([turn("user"), caller(call({"city": "Rome"}))], TOOLS),
    ([turn("user", "yes"), turn("assistant", "no"), turn("user", "yes"), turn("assistant", "no")], None),
    ([turn("user", LONG), turn("assistant", LONG)], None),
]


@pytest.mark.parametrize(("messages", "tools"), GOOD)
def test_sound_conversations(messages: list[dict[str, Any]], tools: Any) -> None:
    expected = ["role_order"] if [m["role"] for m in messages[2:4]] == ["tool", "user"] else []
    assert faults(messages, tools) == expected


@pytest.mark.parametrize(
    ("messages", "tools", "expected"),
    [
        ([turn("user"), turn("user"), turn("assistant")], None, ["role_order"]),
        ([turn("user"), turn("system"), turn("assistant")], None, ["role_order"]),
        ([turn("user"), turn("assistant"), turn("assistant", "b")], None, ["role_order"]),
        ([turn("assistant"), turn("user"), turn("assistant")], None, ["first_role"]),
        ([turn("user"), turn("assistant"), turn("user", "b")], None, ["last_role"]),
        ([turn("user", " \n"), turn("assistant")], None, ["empty_turn"]),
        (
            [turn("user", LONG), turn("assistant"), turn("user", f" {LONG}\n"), turn("assistant")],
            None,
            ["duplicate_turn"],
        ),
        ([turn("user"), caller(call({"city": "a"}, "rain"))], TOOLS, ["undeclared_tool"]),
        ([turn("user"), caller(call({"city": "a"}))], None, ["undeclared_tool"]),
        ([turn("user"), caller(call({"days": 1}))], TOOLS, ["tool_arguments"]),
        ([turn("user"), caller(call({"city": "a", "days": "1"}))], TOOLS, ["tool_arguments"]),
        ([turn("user"), caller(call("not json"))], TOOLS, ["bad_tool_call"]),
        ([turn("user"), caller(call('["city"]'))], TOOLS, ["bad_tool_call"]),
        ([turn("user"), turn("tool"), turn("assistant")], TOOLS, ["result_without_call", "role_order"]),
        (
            [turn("user"), caller(call({"city": "a"}), call({"city": "b"})), turn("tool"), turn("assistant")],
            TOOLS,
            ["missing_result"],
        ),
        (
            [turn("user"), caller(call({"city": "a"})), turn("tool"), turn("tool"), turn("assistant")],
            TOOLS,
            ["result_without_call"],
        ),
        (
            [turn("user"), caller(call({"city": "a"}, call_id="1")), turn("tool", tool_call_id="2"), turn("assistant")],
            TOOLS,
            ["result_without_call"],
        ),
        (
            [
                turn("user"),
                caller(call({"city": "a"}, call_id="1"), call({"city": "b"}, call_id="2")),
                turn("tool", tool_call_id="1"),
                turn("tool", tool_call_id="1"),
                turn("assistant"),
            ],
            TOOLS,
            ["result_without_call"],
        ),
        ([turn("user"), turn("narrator"), turn("assistant")], None, ["unknown_role"]),
    ],
)
def test_faults(messages: list[dict[str, Any]], tools: Any, expected: list[str]) -> None:
    assert faults(messages, tools) == expected


@pytest.mark.parametrize(
    ("messages", "settings"),
    [
        ([turn("user"), turn("user"), turn("assistant")], {"role_order": False}),
        ([turn("assistant"), turn("user")], {"first_role": "assistant", "last_role": "user"}),
        ([turn("assistant"), turn("user")], {"first_role": "any", "last_role": "any"}),
        ([turn("user", ""), turn("assistant")], {"empty_turns": False}),
        ([turn("user", LONG), turn("assistant"), turn("user", LONG), turn("assistant")], {"duplicate_turns": False}),
        ([turn("user", LONG), turn("assistant"), turn("user", LONG), turn("assistant")], {"duplicate_characters": 99}),
        ([turn("user"), caller(call({}, "rain"))], {"tool_schema": False}),
        ([turn("user"), turn("tool"), turn("assistant")], {"tool_results": False, "role_order": False}),
    ],
)
def test_each_check_can_be_left_out(messages: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    assert faults(messages, **settings) == []
    assert faults(messages) != []


def test_dropped_for_the_first_fault_with_the_message_named() -> None:
    operator = ChatChecks()
    operator.open(Context())
    tally = Tally()
    rows = [
        document_from({"messages": [turn("user"), turn("user", ""), turn("assistant")]}, "f:1"),
        document_from({"text": "plain text passes"}, "f:2"),
        document_from({"instruction": "i", "input": "x", "output": "o", "history": [["a", "b"]]}, "f:3"),
        document_from({"query": "q", "response": "", "system": "s"}, "f:4"),
        document_from({"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]}, "f:5"),
    ]
    assert [document.id for document in operator.run(rows, tally)] == ["f:2", "f:3", "f:5"]
    assert dict(tally.dropped) == {"role_order": 1, "empty_turn": 1}
    assert tally.samples["role_order"][0]["note"] == "message 2 (user) follows user"


def test_what_earlier_operators_changed_is_judged() -> None:
    document = document_from({"messages": [turn("user"), turn("assistant")]}, "f:1")
    document.texts[1] = ""
    operator = ChatChecks()
    operator.open(Context())
    assert operator.run([document], Tally()) == []


@pytest.mark.parametrize(
    ("value", "schema", "fits"),
    [
        (1, {"type": "integer"}, True),
        (1.0, {"type": "integer"}, True),
        (1.5, {"type": "integer"}, False),
        (True, {"type": "integer"}, False),
        (True, {"type": "number"}, False),
        (1, {"type": "number"}, True),
        (None, {"type": ["string", "null"]}, True),
        ("x", {"type": "text"}, True),
        ("x", {"enum": ["x", "y"]}, True),
        ("z", {"enum": ["x", "y"]}, False),
        (1, {"enum": [True]}, False),
        ([1, "2"], {"type": "array", "items": {"type": "integer"}}, False),
        ({"a": {"b": 1}}, {"properties": {"a": {"required": ["c"]}}}, False),
        ({"a": 1}, {"properties": {}, "additionalProperties": False}, False),
        ({"a": 1}, {"additionalProperties": {"type": "string"}}, False),
        (1, {"anyOf": [{"type": "string"}, {"type": "integer"}]}, True),
        (1, {"oneOf": [{"type": "number"}, {"type": "integer"}]}, False),
        (1, {"allOf": [{"type": "number"}, {"enum": [2]}]}, False),
        (1, {"const": 1}, True),
        (["a", 1], {"prefixItems": [{"type": "string"}], "items": {"type": "integer"}}, True),
        ([1, 1], {"prefixItems": [{"type": "string"}]}, False),
        ({"x-a": 1}, {"patternProperties": {"^x-": {}}, "additionalProperties": False}, True),
        ({"a": 1}, None, True),
    ],
)
def test_schemas(value: Any, schema: Any, fits: bool) -> None:
    assert (misfit(value, schema) is None) == fits
    assert (misfit(json.loads(json.dumps({"v": value})), {"properties": {"v": schema or {}}}) is None) == fits


def test_settings_that_cant_be_meant() -> None:
    with pytest.raises(UsageError, match="first_role"):
        ChatChecks(first_role="tool").check()  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="duplicate_characters"):
        ChatChecks(duplicate_characters=-1).check()
