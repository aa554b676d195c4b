"""The ledger file when the disk is full, and the places it names; what it counts is tested with the datasets."""

import json
import os
from pathlib import Path

import pytest

from swift.core.errors import SwiftError
from swift.data.ledger import Ledger
from swift.data.rows import RowProblem, RowRef

needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def full_disk_ledger(folder: Path) -> Ledger:
    """A ledger whose lines are refused as on a full disk, beside the ledger of an earlier run."""
    (folder / "ledger.jsonl").write_text("old")
    (folder / f".ledger.jsonl.{os.getpid()}.tmp").symlink_to("/dev/full")
    return Ledger(folder / "ledger.jsonl")


@needs_full
def test_a_refused_line_is_told_once_and_closing_adds_nothing(tmp_path: Path):
    ledger = full_disk_ledger(tmp_path)
    tally = ledger.begin("train", "a.jsonl")
    lines = 0
    with pytest.raises(SwiftError, match=r"could not write .*ledger\.jsonl") as caught:
        try:
            while True:  # until the buffer is full
                ledger.keep(tally, RowRef("a.jsonl", 1), examples=1, tokens_cut=lines + 1)
                lines += 1
        finally:
            ledger.close()
    assert lines
    assert isinstance(caught.value.__context__, OSError)  # of the line; none was raised on the way out
    assert caught.value.__context__.__context__ is None
    ledger.close()
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.jsonl"]
    assert (tmp_path / "ledger.jsonl").read_text() == "old"


@needs_full
def test_a_refused_summary_is_told_and_leaves_nothing(tmp_path: Path):
    ledger = full_disk_ledger(tmp_path)
    with pytest.raises(SwiftError, match=r"could not write .*ledger\.jsonl"):
        ledger.close()
    ledger.close()
    assert (tmp_path / "ledger.jsonl").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.jsonl"]


def test_closing_twice_writes_once(tmp_path: Path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.close()
    ledger.close()
    (line,) = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert json.loads(line)["event"] == "summary"


def test_a_row_that_is_known_by_its_byte_is_named_so(tmp_path: Path):
    ledger = Ledger(tmp_path / "ledger.jsonl", strict=False)
    tally = ledger.begin("train", "a.jsonl")
    ledger.drop(tally, RowRef("a.jsonl", 7), RowProblem("not_json", "no"))
    ledger.drop(tally, RowRef("a.jsonl", 70_000_000, by_offset=True), RowProblem("not_json", "no"))
    ledger.close()
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert (lines[0]["line"], lines[1]["byte"]) == (7, 70_000_000) and "line" not in lines[1]
    assert Ledger.restore(lines[-1]).problems == ledger.problems
