"""Which texts of a row operators see: those that training reads, in every layout."""

from __future__ import annotations

import json

import pytest

from swift.data.engine.document import beside_texts, document_from
from swift.data.rows import RowProblem, RowRef
from swift.data.shapes import RowOptions, normalise_row

MAIL = "jane@example.com"
PARTS = [{"type": "text", "text": f"u {MAIL}"}, "bare"]
LAYOUTS = {
    "parts": {"messages": [{"role": "user", "content": PARTS}, {"role": "assistant", "content": "a"}]},
    "only parts": {
        "messages": [
            {"role": "user", "content": PARTS},
            {"role": "assistant", "content": [{"text": "a", "type": "text"}]},
        ]
    },
    "thinking": {
        "messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a", "reasoning_content": MAIL}]
    },
    "blocks": {
        "messages": [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"text": MAIL}]}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": MAIL}, {"type": "text", "text": "a"}]},
        ]
    },
    "as JSON": {"messages": json.dumps([{"role": "user", "content": MAIL}, {"role": "assistant", "content": "a"}])},
    "roles in capitals": {"messages": [{"role": "User", "content": MAIL}, {"role": "GPT", "content": "a"}]},
    "system beside": {
        "system": MAIL,
        "conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}],
    },
    "pairs": {"conversation": [{"human": MAIL, "assistant": "a"}]},
    "history": {"query": "u", "response": "a", "history": [[MAIL, "b"], ["c", "d"]]},
    "alpaca": {"instruction": "i", "input": MAIL, "output": "a"},
    "TRL": {"prompt": [{"role": "user", "content": MAIL}], "completion": [{"role": "assistant", "content": "a"}]},
    "text beside messages": {
        "text": "t",
        "messages": [{"role": "user", "content": MAIL}, {"role": "assistant", "content": "a"}],
    },
    "text beside an answer": {"text": "t", "question": MAIL, "answer": "a"},
    "text for an answer": {"text": MAIL, "prompt": "u"},
}


def trained(record: dict) -> list[tuple[str, str]]:
    """Roles and texts as training reads them."""
    row, _ = normalise_row(record, RowRef("f", 1), RowOptions())
    turns = []
    for message in row.messages:
        turns += [(message["role"], message[key]) for key in ("reasoning_content", "content") if message.get(key)]
    return turns


@pytest.mark.parametrize("name", LAYOUTS)
def test_operators_see_what_training_reads(name):
    record = LAYOUTS[name]
    document = document_from(record, "f:1")
    seen = [*zip(document.roles, document.texts)]
    read = trained(record)
    assert sorted(word for _, text in seen for word in text.split()) == sorted(
        word for _, text in read for word in text.split()
    )
    assert {role for role, _ in seen} == {role for role, _ in read}
    document.texts[:] = [text.replace(MAIL, "[EMAIL]") for text in document.texts]
    assert MAIL not in "".join(text for _, text in trained(document.to_record()))
    assert trained(document_from(record, "f:1").to_record()) == read


@pytest.mark.parametrize(
    "record",
    [
        {"text": "t", "target": 3},
        {"text": "t", "answers": [1, 2], "messages": None},
        {"text": "t", "conversation": "a title"},
        {"text": "t", "system": "s", "history": []},
    ],
)
def test_a_plain_text_stays_one(record):
    document = document_from(record, "f:1")
    assert (document.roles, document.texts, document.to_record()) == (None, ["t"], record)


@pytest.mark.parametrize("record", [{"text": None}, {"n": 1, "messages": []}, {"text": ["a"]}])
def test_a_row_without_a_text_says_what_there_is(record):
    with pytest.raises(RowProblem, match=r"there are .*\((null|a list|a number)\)"):
        document_from(record, "f:1")


def test_what_stands_beside_the_texts_tells_conversations_apart():
    def row(**keys) -> bytes:
        call = {"name": "weather", "arguments": {"city": keys.pop("city", "Paris")}}
        messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        return beside_texts(document_from({"messages": messages, **keys}, "f:1"))

    assert row() == row() != row(city="Rome")
    assert row(tools=[{"name": "weather"}]) != row()
    assert row(images=["a.png"]) != row(images=["b.png"])
    assert beside_texts(document_from({"messages": [{"role": "user", "content": "u"}], "id": 3}, "f:1")) == b""
