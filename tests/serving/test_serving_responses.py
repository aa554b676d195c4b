"""/v1/responses: whole and as events, by OpenAI's client and schemas."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from live_server import MODEL, Live, check_schema

from swift.inference.answers.parts import CallPiece, Piece
from swift.serving.output_items import OutputItems


def test_a_response_is_as_openai_describes_it(live: Live, client: openai.OpenAI) -> None:
    body = {
        "model": MODEL,
        "input": "Hello",
        "max_output_tokens": 6,
        "instructions": "Be kind.",
        "metadata": {"a": "b"},
    }
    answer = live.post("/v1/responses", body)
    assert answer.status_code == 200, answer.text
    check_schema("Response", answer.json())
    assert answer.json()["status"] == "incomplete"
    assert answer.json()["incomplete_details"] == {"reason": "max_output_tokens"}
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}],
        max_tokens=6,
    )
    found = client.responses.create(model=MODEL, input="Hello", max_output_tokens=6, instructions="Be kind.")
    assert found.output_text == chat.choices[0].message.content
    assert found.usage and found.usage.input_tokens == chat.usage.prompt_tokens and found.usage.output_tokens == 6


def test_events_tell_the_whole_response(live: Live, client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": MODEL, "input": [{"role": "user", "content": "Hello"}], "max_output_tokens": 5}
    whole = client.responses.create(**settings)
    events = live.events("/v1/responses", settings)
    for event in events:
        check_schema("ResponseStreamEvent", event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:4]] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == whole.output_text
    form: Any = {"format": {"type": "json_schema", "name": "colour", "schema": {"enum": ["red", "blue"]}}}
    with client.responses.stream(model=MODEL, input="Hello", text=form) as stream:  # puts the response together
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert final.status == "completed" and final.output_text in ('"red"', '"blue"')


def test_items_of_thoughts_texts_and_calls() -> None:
    pieces = [
        Piece(thought="hm"), Piece(thought="m"), Piece(content="I "), Piece(content="look."),
        Piece(call=CallPiece(0, "call_a", "weather", '{"city"')), Piece(call=CallPiece(0, arguments=': "Rome"}')),
        Piece(call=CallPiece(1, "call_b", "time", "{}")),
    ]  # fmt: skip
    items = OutputItems("x")
    events = [event for piece in pieces for event in items.add(piece)] + items.finish([], complete=True)
    for number, event in enumerate(events):
        check_schema("ResponseStreamEvent", {**event, "sequence_number": number})
    assert [item["type"] for item in items.items] == ["reasoning", "message", "function_call", "function_call"]
    assert items.items[0]["content"][0]["text"] == "hmm"
    assert items.items[1]["content"][0]["text"] == "I look."
    assert items.items[2]["arguments"] == '{"city": "Rome"}' and items.items[2]["call_id"] == "call_a"
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["status"] for item in added] == ["in_progress"] * 4
    assert all(item["status"] == "completed" for item in items.items)


def test_earlier_turns_come_as_items(live: Live) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather in Rome?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Sunny."}]},
        {"role": "user", "content": "And tomorrow?"},
    ]
    answer = live.post("/v1/responses", {"input": items, "max_output_tokens": 2})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "store": True}, "store"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"role": "boss", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "messages[0].content[0]",
        ),
        ({"input": []}, "input"),
        ({}, "input"),
    ],
)
def test_what_cannot_be_is_refused_by_name(live: Live, body: dict[str, Any], param: str) -> None:
    answer = live.post("/v1/responses", body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
