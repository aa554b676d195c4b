"""Personal data beside the texts: in the arguments of tool calls and in other columns, where they are asked for."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from swift.core.errors import UsageError
from swift.data.engine.document import document_from
from swift.data.engine.operator import Context
from swift.data.engine.tally import Tally
from swift.data.operators.pii import Pii

MAIL = "anna.berg@uni-example.org"
PHONE = "4155552671"
ARGUMENTS = json.dumps({"to": MAIL, "say": 'a "quoted" \\ word', "phone": f"+1 415-555-2671, {MAIL}"})
ROW = {
    "messages": [
        {"role": "user", "content": f"write to {MAIL}"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "mail", "arguments": ARGUMENTS}},
                {"type": "function", "function": {"name": "mail", "arguments": {"to": MAIL, "n": 3}}},
            ],
        },
    ],
    "author": {"mail": [MAIL]},
    "images": ["data:image/png;base64,AAAA" + MAIL],
}


def run(row: dict[str, Any], **settings: Any) -> tuple[dict[str, Any] | None, Tally]:
    operator = Pii(**settings)
    operator.check()
    operator.open(Context())
    tally = Tally()
    kept = operator.run([document_from(copy.deepcopy(row), "f:1")], tally)
    return (kept[0].to_record() if kept else None), tally


def test_only_texts_unless_asked() -> None:
    record, tally = run(ROW)
    assert record is not None and record["author"] == ROW["author"]
    assert record["messages"][1] == ROW["messages"][1]
    assert tally.changes == {"email": 1}


def test_all_columns() -> None:
    record, tally = run(ROW, columns="all")
    assert record is not None and record["messages"][0]["content"] == "write to [EMAIL]"
    calls = [call["function"]["arguments"] for call in record["messages"][1]["tool_calls"]]
    assert json.loads(calls[0]) == {"to": "[EMAIL]", "say": 'a "quoted" \\ word', "phone": "[PHONE], [EMAIL]"}
    assert calls[1] == {"to": "[EMAIL]", "n": 3}
    assert record["author"] == {"mail": ["[EMAIL]"]}
    assert record["images"] == ROW["images"]
    assert tally.changes == {"email": 5, "phone": 1}
    assert MAIL not in json.dumps(tally.samples)


def test_a_number_in_the_json_of_a_call_leaves_json() -> None:
    arguments = json.dumps({"card": 4111111111111111, "note": "a"})
    row = {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"function": {"arguments": arguments}}]}]}
    record, _ = run(row, columns="all")
    assert record is not None
    after = record["messages"][0]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(after) == {"card": "[CARD]", "note": "a"}


def test_drop_and_tag_look_there_too() -> None:
    row = {"text": "nothing personal", "mail": MAIL}
    assert run(row, action="drop")[0] == row
    record, tally = run(row, action="drop", columns="all")
    assert record is None and tally.dropped == {"email": 1}
    tagged, _ = run(row, action="tag", columns="all")
    assert tagged == {**row, "meta": {"pii": {"email": 1}}}
    with pytest.raises(UsageError, match="columns"):
        Pii(columns="some").check()  # type: ignore[arg-type]
