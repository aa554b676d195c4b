"""What `swift data check` says of pairs, labelled answers and labels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swift.cli import main


@pytest.fixture
def check(
    write_rows: Callable, tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture
) -> Callable[..., tuple[dict[str, Any], str, int]]:
    """`check(rows, *flags)`: the findings as JSON, as text, and the exit code."""

    def run(rows: list[dict[str, Any]], *flags: str) -> tuple[dict[str, Any], str, int]:
        command = ["data", "check", str(write_rows(tmp_path / "rows.jsonl", rows)), *flags]
        main([*command, "--json", "true"])
        found = json.loads(capsys.readouterr().out)
        code = main([*command, "--model", str(tiny_model_dir)])
        return found, capsys.readouterr().out, code

    return run


def test_pairs(check: Callable) -> None:
    rows = [{"prompt": f"U{n}", "chosen": "a longer one", "rejected": "short", "margin": n} for n in range(20)]
    rows += [{"prompt": "U1", "chosen": "A", "rejected": "A"}, {"prompt": "U1", "chosen": "A", "rejected": "B"}]
    found, text, code = check(rows)
    units = found["units"]
    assert (units["layout"], units["pairs"], units["chosen_longer"], units["equally_long"]) == ("pairs", 21, 20, 1)
    assert units["repeated_prompts"] == 1 and units["margins"] == 20
    assert "dropped 1 identical: first" in text and code == 1
    assert "longer answers are preferred" in text and "margins: 20, from 0 to 19, mean 9.5" in text
    assert "tokens per row" in text


@pytest.mark.parametrize(
    ("wanted", "unwanted", "advice"),
    [
        (4, 4, None),
        (4, 3, None),
        (2, 6, [3.0, 1.0]),
        (3, 7, [2.34, 1.0]),
        (9, 3, [1.0, 2.25]),
    ],
)
def test_kto_weights_bring_the_proportion_into_its_range(
    check: Callable, wanted: int, unwanted: int, advice: list | None
) -> None:
    rows = [{"query": f"U{n}", "response": "A", "label": n < wanted} for n in range(wanted + unwanted)]
    found, text, code = check(rows)
    assert found["units"]["kto_weights"] == advice and code == 0
    desirable, undesirable = advice or [1, 1]
    assert 1 <= desirable * wanted / (undesirable * unwanted) <= 4 / 3
    flag = "" if not advice else f"--desirable_weight {desirable:g}" if desirable > 1 else "--undesirable_weight 2.25"
    assert flag in text and f"answers: {wanted} desirable, {unwanted} undesirable" in text


def test_labels(check: Callable) -> None:
    found, text, _ = check([{"text": "x", "label": name} for name in "aab"])
    assert found["units"]["labels"] == {"a": 2, "b": 1} and "  a: 2 (66.7%)" in text
    _, text, _ = check([{"text": f"x{n}", "label": "a"} for n in range(3)])
    assert "warning: all labels are the same" in text
    found, _, _ = check([{"tokens": ["a", "b"], "ner_tags": ["O", "X"]}])
    assert found["units"]["layout"] == "tokens" and found["units"]["labels"] == {"O": 1, "X": 1}


def test_the_layout_can_be_said(check: Callable) -> None:
    rows = [{"messages": [{"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}], "label": 1}]
    assert check(rows, "--layout", "chat")[0]["units"] is None
    assert check(rows)[0]["units"]["layout"] == "binary"


def test_rows_that_differ_only_in_the_rejected_answer_are_no_duplicates(check: Callable) -> None:
    rows = [{"prompt": "U", "chosen": "A", "rejected": said} for said in ("B", "C", "B")]
    assert check(rows)[0]["duplicates"] == 1
