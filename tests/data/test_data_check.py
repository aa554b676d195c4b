"""`swift data check`: what the report finds in data with known contents."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swift.config.data import DataConfig, TemplateConfig
from swift.core.errors import DataError
from swift.data.check import CheckReport, run_check
from swift.data.encoding.encode import ChatEncoder
from swift.data.ledger import Ledger

LONG = {"query": "long " * 400, "response": "yes"}
BAD = {"messages": [{"role": "user", "content": None}]}


@pytest.fixture
def check(tokenizer: Any) -> Callable[..., CheckReport]:
    """`check(dataset…, tokens=True, template={…}, run_dir=…, **data settings)`."""

    def run(*dataset: Path | str, tokens: bool = True, template: dict | None = None, **settings: Any) -> CheckReport:
        config = TemplateConfig(**{"max_length": 256, **(template or {})})
        encoder = ChatEncoder(tokenizer, config) if tokens else None
        run_dir = settings.pop("run_dir", None)
        return run_check(DataConfig(dataset=[str(d) for d in dataset], **settings), config, encoder, run_dir=run_dir)

    return run


def test_clean_data(
    check: Callable[..., CheckReport], tokenizer: Any, chat_rows: Callable, write_rows: Callable, tmp_path: Path
) -> None:
    rows = chat_rows(20)
    report = check(write_rows(tmp_path / "a.jsonl", rows))
    expected = [len(tokenizer.apply_chat_template(row["messages"])["input_ids"]) for row in rows]
    assert report.lengths.tolist() == expected
    assert report.exit_code == 0
    assert report.quantiles()["min"] == min(expected) and report.quantiles()["max"] == max(expected)
    assert sum(count for _, _, count in report.histogram()) == 20
    assert report.roles == {"user": 20, "assistant": 20} and report.turns == {1: 20}
    assert (report.over, report.num_duplicates) == (0, 0)
    text = report.render()
    for piece in (
        "tokens per row: min",
        "no bad rows",
        "exact duplicates: none",
        "over max_length 256: 0 rows",
        "trained",
    ):
        assert piece in text


def test_goes_through_everything_though_rows_are_bad(
    check: Callable[..., CheckReport], chat_rows: Callable, tmp_path: Path
) -> None:
    lines = [json.dumps(row) for row in chat_rows(4)]
    lines[1:1] = [json.dumps(BAD), "{", "", "{"]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    report = check(path, strict=True, max_bad_rows=0)
    assert report.exit_code == 1
    assert report.ledger.sources[0].dropped == {"no_content": 1, "not_json": 2}
    text = report.render()
    assert f"dropped 2 not_json: first {path}:3: the JSON ends too early (column 2): {{" in text
    assert f"dropped 1 no_content: first {path}:2:" in text
    assert "blank lines skipped: 1" in text and "3 bad row(s)" in text


@pytest.mark.parametrize("strategy", ["delete", "right", "left"])
def test_lengths_are_those_before_truncation(
    check: Callable[..., CheckReport], chat_rows: Callable, write_rows: Callable, tmp_path: Path, strategy: str
) -> None:
    long = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "long " * 400}]}
    path = write_rows(tmp_path / "a.jsonl", [*chat_rows(3), long])
    report = check(path, template={"truncation_strategy": strategy})
    assert len(report.lengths) == 4 and report.lengths[-1] > 400 and report.over == 1
    assert report.exit_code == 0  # too long is not bad
    assert "over max_length 256: 1 rows (25.0%)" in report.render()


def test_a_text_that_is_split_counts_whole(
    check: Callable[..., CheckReport], write_rows: Callable, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": "word " * 400}])
    template = {"use_chat_template": False, "loss_scale": "all"}
    whole = check(path, template={**template, "max_length": 10_000})
    cut = check(path, template={**template, "truncation_strategy": "split"})
    assert cut.lengths.tolist() == whole.lengths.tolist()
    assert cut.ledger.sources[0].examples > 1 and cut.turns == {}


def test_duplicates_and_leaks(
    check: Callable[..., CheckReport], chat_rows: Callable, write_rows: Callable, tmp_path: Path
) -> None:
    rows = chat_rows(5)
    spelt = {
        "conversations": [
            {"from": "human", "value": rows[0]["messages"][0]["content"]},
            {"from": "gpt", "value": rows[0]["messages"][1]["content"]},
        ]
    }
    train = write_rows(tmp_path / "a.jsonl", [rows[0], rows[1], spelt, rows[2], rows[0]])
    val = write_rows(tmp_path / "v.jsonl", [rows[3], rows[2], rows[3]])
    report = check(train, val_dataset=[str(val)])
    assert report.num_duplicates == 4
    assert [(str(row), str(earlier)) for row, earlier in report.duplicates] == [
        (f"{train}:3", f"{train}:1"),
        (f"{train}:5", f"{train}:1"),
        (f"{val}:2", f"{train}:4"),
        (f"{val}:3", f"{val}:1"),
    ]
    assert report.num_leaked == 1
    assert "evaluation rows that are also training rows: 1" in report.render()
    assert "exact duplicates: 4 rows repeat an earlier one" in report.render()


def test_without_a_tokenizer_characters_are_counted(
    check: Callable[..., CheckReport], write_rows: Callable, tmp_path: Path
) -> None:
    report = check(
        write_rows(tmp_path / "a.jsonl", [{"query": "abc", "response": "de"}, {"text": "x" * 30}]), tokens=False
    )
    assert report.unit == "characters" and report.lengths.tolist() == [5, 30]
    text = report.render()
    assert "characters per row" in text and "max_length" not in text and "trained" not in text


def test_rows_sampled_and_repeated(
    check: Callable[..., CheckReport], chat_rows: Callable, write_rows: Callable, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "a.jsonl", chat_rows(10))
    assert check(f"{path}#4").ledger.sources[0].read == 4
    report = check(f"{path}#25")
    assert report.ledger.sources[0].repeated == 15
    assert report.num_duplicates == 0  # asked for, so no fault of the data


def test_the_number_of_processes_changes_nothing(
    check: Callable[..., CheckReport],
    chat_rows: Callable,
    write_rows: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swift.data.pipeline.CHUNK_ROWS", 8)
    path = write_rows(tmp_path / "a.jsonl", [*chat_rows(30), BAD, *chat_rows(9)])
    assert check(path, dataset_num_proc=2).render() == check(path).render()


def test_the_ledger_file_is_written_on_request(
    check: Callable[..., CheckReport], write_rows: Callable, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "a.jsonl", [BAD, {"query": "a", "response": "b"}])
    report = check(path, run_dir=tmp_path / "out")
    lines = [json.loads(line) for line in (tmp_path / "out" / "ledger.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["dropped", "summary"]
    assert json.loads(json.dumps(report.summary()))["sources"][0]["read"] == 2


def test_nothing_readable_still_reports(
    check: Callable[..., CheckReport], write_rows: Callable, tmp_path: Path
) -> None:
    report = check(write_rows(tmp_path / "a.jsonl", [BAD, BAD]))
    assert report.exit_code == 1 and report.quantiles() == {} and report.histogram() == []
    assert "2 bad row(s)" in report.render()
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="empty"):
        check(tmp_path / "empty.jsonl")


@pytest.mark.parametrize("lengths", [[0], [1], [16], [17], [16, 32, 33, 2048], [5, 100_000], list(range(300))])
def test_histogram_bins_hold_every_row_once(lengths: list[int]) -> None:
    report = CheckReport(Ledger(), "tokens", np.asarray(lengths), 10)
    bins = report.histogram()
    assert sum(count for _, _, count in bins) == len(lengths)
    for low, high, count in bins:
        inside = sum(low <= length <= high for length in lengths) + (lengths.count(0) if low == 1 else 0)
        assert inside == count
    assert bins[0][2] and bins[-1][2]
