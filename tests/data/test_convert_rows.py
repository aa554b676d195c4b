"""Conversion between layouts: nothing is lost unseen, and going there and back gives the same rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swift.cli import main
from swift.config.data import RowsConfig
from swift.core.errors import UsageError
from swift.data.convert_rows import Conversion, convert_rows, detect_layout

U, A, B = ({"role": role, "content": said} for role, said in (("user", "U"), ("assistant", "A"), ("assistant", "B")))
PAIR = {"messages": [U, A], "rejected_messages": [U, B]}
V = {"role": "user", "content": "V"}


@pytest.fixture
def convert(write_rows: Callable, tmp_path: Path) -> Callable[..., tuple[list[dict], Conversion]]:
    def run(rows: list[dict[str, Any]], target: Any, **more: Any) -> tuple[list[dict], Conversion]:
        source, out = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
        report = convert_rows([str(source)], RowsConfig(), target, out, **more)
        assert report.read == len(rows) == report.used + sum(report.dropped.values())
        written = [json.loads(line) for line in out.read_text().splitlines()]
        assert len(written) == report.written
        return written, report

    return run


def test_pairs_to_binary_and_back(convert: Callable) -> None:
    rows = [PAIR, {"query": "V", "response": "A", "rejected_response": ["B", "C"], "tools": [{"name": "f"}]}]
    binary, report = convert(rows, "binary")
    assert [row["label"] for row in binary] == [True, False, True, False, False]
    assert binary[:2] == [{"messages": [U, A], "label": True}, {"messages": [U, B], "label": False}]
    assert report.written == 5 and report.used == 2
    pairs, back = convert(binary, "pairs")
    assert pairs[0] == PAIR
    assert pairs[1]["messages"] == [V, A] and pairs[1]["rejected_messages"] == [V, B] and pairs[1]["tools"]
    assert back.dropped == {"no_partner": 1} and back.used == 4


def test_pairs_and_binary_to_sft(convert: Callable) -> None:
    assert convert([PAIR], "sft")[0] == [{"messages": [U, A]}]
    binary = [{"messages": [U, A], "label": True}, {"messages": [U, B], "label": False}]
    written, report = convert(binary, "sft")
    assert written == [{"messages": [U, A]}] and report.dropped == {"undesirable": 1}


def test_ranked_answers_become_pairs_with_margins(convert: Callable) -> None:
    row = {"messages": [U], "responses": ["B", "A", "C", "D"], "scores": [1, 4.5, 4.5, -1]}
    written, report = convert([row, {**row, "scores": [1, 1, 1, 1]}, {**row, "scores": [1]}], "pairs")
    assert [(r["messages"][-1]["content"], r["rejected_messages"][-1]["content"], r["margin"]) for r in written] == [
        ("A", "B", 3.5),
        ("A", "D", 5.5),
    ]
    assert report.dropped == {"tied": 1, "bad_scores": 1} and report.layouts["ranked"] == 3


def test_documents_change_sides(convert: Callable) -> None:
    rerank = {"messages": [U], "positive_messages": [[A]], "negative_messages": [[B], [A]]}
    embedding, _ = convert([rerank], "embedding")
    assert [m[0]["role"] for m in embedding[0]["negative_messages"]] == ["user", "user"]
    assert convert(embedding, "rerank")[0] == [rerank]


@pytest.mark.parametrize(("label", "said"), [("good", "good"), (2, "2"), (["x", "y"], "x, y")])
def test_labels_become_answers(convert: Callable, label: Any, said: str) -> None:
    written, _ = convert([{"text": "U", "label": label}], "sft")
    assert written == [{"messages": [U, {"role": "assistant", "content": said}]}]


def test_bad_rows_are_dropped_by_name_and_impossible_wishes_refused(convert: Callable, tmp_path: Path) -> None:
    written, report = convert([PAIR, {"prompt": "U", "chosen": "A", "rejected": "A"}], "pairs")
    assert written == [PAIR] and report.dropped == {"identical": 1}
    assert "in.jsonl:2" in report.render()
    (tmp_path / "out.jsonl").write_text("old")
    with pytest.raises(UsageError, match="can't become labelled"):
        convert([PAIR], "labelled")
    assert (tmp_path / "out.jsonl").read_text() == "old" and len(list(tmp_path.iterdir())) == 2


def test_the_command(write_rows: Callable, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source, out = write_rows(tmp_path / "in.jsonl", [PAIR]), tmp_path / "out.jsonl"
    command = ["data", "convert", str(source), "--to", "binary", "--output_file", str(out)]
    assert main(command) == 0
    assert "read 1 rows, used 1, wrote 2" in capsys.readouterr().out and len(out.read_text().splitlines()) == 2
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written"] == 2
    assert main(["data", "convert", str(source), "--to", "poems", "--output_file", str(out)]) == 2
    assert "one of pairs, binary" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("record", "layout"),
    [
        (PAIR, "pairs"),
        ({"messages": [U, A], "label": False}, "binary"),
        ({"query": "U", "response": "A", "kto_tag": True}, "binary"),
        ({"messages": [U, A], "label": "maths"}, "chat"),
        ({"query": "U", "response": "A", "documents": ["x"], "tokens": 12}, "chat"),
        ({"messages": [{"role": "user", "content": "You, assistant"}], "label": 1}, "labelled"),
        ({"messages": json.dumps([U]), "label": [1, 2]}, "labelled"),
        ({"tokens": ["a"], "labels": [1]}, "tokens"),
        ({"text": "a", "entities": []}, "tokens"),
        ({"messages": [U], "positive_messages": [[U]]}, "embedding"),
        ({"messages": [U], "positive_messages": [[A]]}, "rerank"),
        ({"query": "U", "teacher_prompt": "T"}, "prompts"),
        ({"text": "a"}, "chat"),
    ],
)
def test_layouts_are_recognised(record: dict[str, Any], layout: str) -> None:
    assert detect_layout(record) == layout
