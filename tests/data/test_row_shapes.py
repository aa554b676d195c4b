"""Every text row shape of the reference, and every way in which a row can be wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from swift.data.rows import Row, RowProblem, RowRef
from swift.data.shapes import RowOptions, normalise_row

REF = RowRef("rows.jsonl", 7)
U, A = {"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}
S = {"role": "system", "content": "S"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def read(record: dict[str, Any], **options: Any) -> Row:
    return normalise_row(record, REF, RowOptions(**options))[0]


def refused(record: dict[str, Any], **options: Any) -> RowProblem:
    with pytest.raises(RowProblem) as caught:
        read(record, **options)
    return caught.value


CONVERSATIONS = {
    "messages": ({"messages": [S, U, A]}, [S, U, A]),
    "messages as a JSON text": ({"messages": json.dumps([U, A])}, [U, A]),
    "messages as a JSON text of a JSON text": ({"messages": json.dumps(json.dumps([U, A]))}, [U, A]),
    "query/response": ({"query": "U", "response": "A"}, [U, A]),
    "query/response, system, history": (
        {"system": "S", "query": "U", "response": "A", "history": [["u0", "a0"]]},
        [S, {"role": "user", "content": "u0"}, {"role": "assistant", "content": "a0"}, U, A],
    ),
    "history as a JSON text": (
        {"query": "U", "response": "A", "history": '[["u0", "a0"]]'},
        [{"role": "user", "content": "u0"}, {"role": "assistant", "content": "a0"}, U, A],
    ),
    "empty system and history": ({"query": "U", "response": "A", "system": "", "history": []}, [U, A]),
    "alpaca": (
        {"instruction": "I", "input": "X", "output": "A"},
        [{"role": "user", "content": "I\nX"}, A],
    ),
    "alpaca, empty input": ({"instruction": "U", "input": "", "output": "A"}, [U, A]),
    "alpaca, null input": ({"instruction": "U", "input": None, "output": "A"}, [U, A]),
    "alpaca with system and history": (
        {"instruction": "U", "input": "", "output": "A", "system": "S", "history": [["p", "q"]]},
        [S, {"role": "user", "content": "p"}, {"role": "assistant", "content": "q"}, U, A],
    ),
    "instruction without input": ({"instruction": "U", "output": "A"}, [U, A]),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "U"}, {"from": "gpt", "value": "A"}], "system": "S"},
        [S, U, A],
    ),
    "sharegpt in capitals": (
        {"conversations": [{"from": "Human", "value": "U"}, {"from": "GPT", "value": "A"}]},
        [U, A],
    ),
    "sharegpt pairs": (
        {"conversation": [{"human": "U", "assistant": "A"}, {"assistant": "A", "human": "U"}]},
        [U, A, U, A],
    ),
    "pairs with system": ({"conversation": [{"system": "S", "human": "U", "assistant": "A"}]}, [S, U, A]),
    "question/answer": ({"question": "U", "answer": "A"}, [U, A]),
    "prompt/completion": ({"prompt": "U", "completion": "A"}, [U, A]),
    "conversational prompt/completion": ({"prompt": [S, U], "completion": [A]}, [S, U, A]),
    "problem/solution": ({"problem": "U", "solution": "A"}, [U, A]),
    "answer alone": ({"response": "A"}, [A]),
    "assistant alone": ({"messages": [A]}, [A]),
    "system column equal to the message": ({"system": "S", "messages": [S, U, A]}, [S, U, A]),
    "content parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, A]},
        [{"role": "user", "content": "a\nb"}, A],
    ),
    "developer": ({"messages": [{"role": "developer", "content": "S"}, U, A]}, [S, U, A]),
    "openai tool calls": (
        {
            "messages": [
                U,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "42"},
                A,
            ]
        },
        [
            U,
            {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "c1"}]},
            {"role": "tool", "content": "42", "name": "f", "tool_call_id": "c1"},
            A,
        ],
    ),
    "openai function_call": (
        {
            "messages": [
                U,
                {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}},
                {"role": "function", "name": "f", "content": "42"},
                A,
            ]
        },
        [
            U,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "42", "name": "f"},
            A,
        ],
    ),
    "anthropic": (
        {
            "messages": [
                U,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm"},
                        {"type": "text", "text": "A"},
                        {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "42"}]},
                        {"type": "text", "text": "U"},
                    ],
                },
                A,
            ]
        },
        [
            U,
            {"role": "assistant", "content": "A", "tool_calls": [{**CALL, "id": "t1"}], "reasoning_content": "hm"},
            {"role": "tool", "content": "42", "tool_call_id": "t1"},
            U,
            A,
        ],
    ),
    "ms-swift tool calls, two in parallel": (
        {
            "messages": [
                U,
                {"role": "tool_call", "content": '{"name": "f", "arguments": {"x": 1}}'},
                {"role": "tool_call", "content": '{"name": "f", "arguments": "{\\"x\\": 1}"}'},
                {"role": "tool_response", "content": "1"},
                {"role": "tool_response", "content": "2"},
                A,
            ]
        },
        [
            U,
            {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
            {"role": "tool", "content": "1"},
            {"role": "tool", "content": "2"},
            A,
        ],
    ),
    "a call after the assistant's own words": (
        {"messages": [U, A, {"role": "function_call", "content": {"name": "f", "arguments": {"x": 1}}}]},
        [U, {**A, "tool_calls": [CALL]}],
    ),
    "sharegpt tool calls": (
        {
            "conversations": [
                {"from": "human", "value": "U"},
                {"from": "function_call", "value": '[{"name": "f", "arguments": {"x": 1}}]'},
                {"from": "observation", "value": "42"},
                {"from": "gpt", "value": "A"},
            ]
        },
        [U, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "42"}, A],
    ),
    "a tool that answers an object": (
        {"messages": [U, A, {"role": "tool", "content": {"é": 1}}, A]},
        [U, A, {"role": "tool", "content": '{"é": 1}'}, A],
    ),
    "thoughts": (
        {"messages": [U, {**A, "reasoning_content": "hm"}]},
        [U, {**A, "reasoning_content": "hm"}],
    ),
    "loss marks": (
        {"messages": [U, {**A, "loss": False}, U, {**A, "loss_scale": 2}, U, {**A, "weight": 0}]},
        [U, {**A, "loss": False}, U, {**A, "loss_scale": 2.0}, U, {**A, "loss": False}],
    ),
    "two users in a row": ({"messages": [U, U, A]}, [U, U, A]),
    "empty answer that isn't trained": (
        {"messages": [U, {"role": "assistant", "content": "", "loss": False}, U, A]},
        [U, {"role": "assistant", "content": "", "loss": False}, U, A],
    ),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_shape_becomes_messages(name: str) -> None:
    record, messages = CONVERSATIONS[name]
    row = read(record)
    assert row.messages == messages
    assert row.text is None
    assert row.ref == REF


@pytest.mark.parametrize("record", [{"text": "hello"}, {"content": "hello"}, {"text": "hello", "meta": 1}])
def test_plain_text(record: dict[str, Any]) -> None:
    row = read(record)
    assert (row.text, row.messages) == ("hello", [])


@pytest.mark.parametrize(
    "tools",
    [
        [TOOL],
        json.dumps([TOOL]),
        [json.dumps(TOOL)],
        [TOOL["function"]],
        TOOL,
        [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    ],
)
def test_tools_have_one_form(tools: Any) -> None:
    assert read({"messages": [U, A], "tools": tools}).tools == [TOOL]


@pytest.mark.parametrize("tools", [None, "", [], "[]"])
def test_no_tools(tools: Any) -> None:
    assert read({"messages": [U, A], "tools": tools}).tools is None


def test_template_kwargs_are_kept_per_row() -> None:
    assert read({"messages": [U, A], "chat_template_kwargs": {"enable_thinking": False}}).template_kwargs == {
        "enable_thinking": False
    }
    assert read({"messages": [U, A], "chat_template_kwargs": '{"x": 1}'}).template_kwargs == {"x": 1}


def test_unused_columns_and_keys_are_named() -> None:
    user = {**U, "id": 3, "name": "n", "reasoning": "r", "nothing": None}
    record = {"messages": [user, A], "rejected_response": "B", "label": True, "empty": None}
    row, unused = normalise_row(record, REF, RowOptions())
    assert unused == {"rejected_response", "label", "messages[].id", "messages[].name", "messages[].reasoning"}
    assert row.extra == {"rejected_response": "B", "label": True}


def test_columns_rename() -> None:
    assert read({"ask": "U", "reply": "A"}, columns=(("ask", "query"), ("reply", "response"))).messages == [U, A]
    swap = (("query", "response"), ("response", "query"))
    assert read({"query": "A", "response": "U"}, columns=swap).messages == [U, A]


def test_a_rename_onto_a_column_with_a_value_is_a_contradiction() -> None:
    assert refused({"ask": "U", "query": "Q", "response": "A"}, columns=(("ask", "query"),)).reason == "contradiction"


def test_without_auto_mapping_only_our_own_names_count() -> None:
    assert read({"query": "U", "response": "A", "question": "no"}, auto=False).messages == [U, A]
    assert refused({"question": "U", "answer": "A"}, auto=False).reason == "no_known_columns"
    renamed = read(
        {"question": "U", "answer": "A"}, auto=False, columns=(("question", "query"), ("answer", "response"))
    )
    assert renamed.messages == [U, A]


def test_prompts_need_no_answer_for_inference() -> None:
    assert refused({"messages": [U]}).reason == "no_assistant"
    assert read({"messages": [U]}, need_answer=False).messages == [U]
    assert read({"query": "U"}, need_answer=False).messages == [U]


def test_a_null_answer_is_no_fault_where_none_is_needed() -> None:
    null = {"role": "assistant", "content": None}
    rows = ({"query": "U", "response": None}, {"messages": [U, null]}, {"messages": json.dumps([U, null])})
    foreign = {"conversations": [{"from": "human", "value": "U"}, {"from": "gpt", "value": None}]}
    for record in (*rows, foreign):
        assert refused(record).reason == "no_content"
        assert read(record, need_answer=False).messages == [U]
    for record in ({"response": None}, {"messages": [{"role": "user", "content": None}]}, {"query": None}):
        with pytest.raises(RowProblem, match=r"null|no content"):
            read(record, need_answer=False)


# record, reason, a piece of the message, a piece of the fix
REFUSALS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "content null": (
        {"messages": [U, {"role": "assistant", "content": None}]},
        "no_content",
        "message 2 (assistant)",
        "",
    ),
    "content missing": ({"messages": [{"role": "user"}, A]}, "no_content", "message 1 (user): there is no content", ""),
    "content a number": ({"messages": [U, {"role": "assistant", "content": 5}]}, "content_type", "a number: 5", "text"),
    "content a boolean": ({"messages": [U, {"role": "assistant", "content": True}]}, "content_type", "a boolean", ""),
    "content an object": ({"messages": [{"role": "user", "content": {}}, A]}, "content_type", "an object", ""),
    "unknown role": ({"messages": [{"role": "asistant", "content": "x"}]}, "unknown_role", "message 1", "assistant"),
    "role a number": ({"messages": [{"role": 1, "content": "x"}]}, "unknown_role", "a number", ""),
    "no role": ({"messages": [{"content": "x"}]}, "no_role", "message 1 has no role", "role"),
    "empty list": ({"messages": []}, "empty", "no messages", ""),
    "only a system message": ({"messages": [S]}, "empty", "only a system message", ""),
    "no assistant": ({"messages": [U]}, "no_assistant", "no assistant turn", "--columns"),
    "null messages": ({"messages": None, "query": "U"}, "no_content", "null", ""),
    "messages a number": ({"messages": 5}, "bad_messages", "a number", ""),
    "a message a text": ({"messages": ["hi"]}, "bad_messages", "message 1 is a text", ""),
    "messages not JSON": ({"messages": "hello"}, "bad_nested_json", "isn't JSON", ""),
    "messages printed by Python": (
        {"messages": "[{'role': 'user', 'content': 'x'}]"},
        "bad_nested_json",
        "isn't JSON",
        "json.dumps",
    ),
    "empty answer": ({"messages": [U, {"role": "assistant", "content": " "}]}, "empty_answer", "message 2", "loss"),
    "empty text": ({"text": " \n"}, "empty", "the text is empty", ""),
    "text a number": ({"text": 5}, "content_type", "'text'", ""),
    "query a list of numbers": ({"query": 3, "response": "A"}, "content_type", "'query'", ""),
    "NUL in a message": ({"messages": [U, {**A, "content": "a\0"}]}, "nul_byte", "message 2 (assistant)", "u0000"),
    "NUL in a query": ({"query": "a\0b", "response": "A"}, "nul_byte", "message 1 (user)", ""),
    "NUL in a text": ({"text": "a\0b"}, "nul_byte", "the text", ""),
    "NUL in the arguments of a call": (
        {"messages": [U, {**A, "tool_calls": [{"function": {"name": "f", "arguments": {"x": ["\0"]}}}]}]},
        "nul_byte",
        "message 2",
        "",
    ),
    "null query": ({"query": None, "response": "A"}, "no_content", "'query'", ""),
    "null response": ({"query": "U", "response": None}, "no_content", "'response'", ""),
    "alpaca without both": ({"instruction": "", "input": "", "output": "A"}, "no_content", "both empty", ""),
    "image part": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, A]},
        "multimodal",
        "image_url",
        "",
    ),
    "images column": ({"messages": [U, A], "images": ["a.png"]}, "multimodal", "images", ""),
    "unknown part": ({"messages": [{"role": "user", "content": [{"type": "blob"}]}, A]}, "unknown_part", "blob", ""),
    "empty part list": ({"messages": [{"role": "user", "content": []}, A]}, "no_content", "empty list", ""),
    "tool calls of a user": ({"messages": [{**U, "tool_calls": [CALL]}, A]}, "bad_tool_call", "only an assistant", ""),
    "arguments not JSON": (
        {"messages": [U, {**A, "tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}]},
        "bad_tool_call",
        "'f'",
        "",
    ),
    "arguments a list": (
        {"messages": [U, {**A, "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
        "bad_tool_call",
        "a list, not an object",
        "",
    ),
    "call without a name": ({"messages": [U, {**A, "tool_calls": [{"function": {}}]}]}, "bad_tool_call", "no name", ""),
    "tool_call not JSON": ({"messages": [U, {"role": "tool_call", "content": "f(1)"}]}, "bad_tool_call", "", '"name"'),
    "tools not JSON": ({"messages": [U, A], "tools": "x"}, "bad_nested_json", "tools", ""),
    "tool without a name": ({"messages": [U, A], "tools": [{}]}, "bad_tools", "tool 1", ""),
    "history of three": (
        {"query": "U", "response": "A", "history": [["a", "b", "c"]]},
        "bad_history",
        "round 1",
        "user",
    ),
    "loss a text": ({"messages": [U, {**A, "loss": "yes"}]}, "bad_loss", "'loss'", "true or false"),
    "negative loss_scale": ({"messages": [U, {**A, "loss_scale": -1}]}, "bad_loss", "loss_scale", ""),
    "merged call with another loss": (
        {"messages": [U, {**A, "loss": False}, {"role": "tool_call", "content": '{"name": "f"}'}]},
        "bad_loss",
        "message 3",
        "same",
    ),
    "two message columns": (
        {"messages": [U, A], "conversations": [U, A]},
        "contradiction",
        "'messages' and 'conversations'",
        "--columns",
    ),
    "two system prompts": ({"system": "T", "messages": [S, U, A]}, "contradiction", "differ", ""),
    "role and from differ": (
        {"messages": [{"role": "user", "from": "gpt", "content": "x"}]},
        "contradiction",
        "from",
        "",
    ),
    "unknown columns": ({"messges": [U, A]}, "no_known_columns", "messges", "messages"),
    "preference row": ({"chosen": [U, A], "rejected": [U, A]}, "no_known_columns", "chosen", "preference"),
    "preference row with a prompt": (
        {"prompt": "U", "chosen": [U, A], "rejected": [U, A]},
        "no_assistant",
        "no assistant",
        "preference",
    ),
    "empty object": ({}, "empty", "empty object", ""),
    "template kwargs a list": (
        {"messages": [U, A], "chat_template_kwargs": [1]},
        "bad_template_kwargs",
        "not an object",
        "",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_names_the_cause(name: str) -> None:
    record, reason, message, fix = REFUSALS[name]
    problem = refused(record)
    assert problem.reason == reason
    assert message in problem.message
    assert fix in (problem.fix or "")


def test_reading_a_row_does_not_change_it() -> None:
    for record, _ in CONVERSATIONS.values():
        before = json.dumps(record)
        read(record)
        assert json.dumps(record) == before


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_normal_form_reads_as_itself(name: str) -> None:
    first = read(CONVERSATIONS[name][0])
    assert read({"messages": first.messages}).messages == first.messages
