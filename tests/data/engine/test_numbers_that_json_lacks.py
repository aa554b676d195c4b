"""NaN, infinity and whole numbers of more than 64 bits: never silently something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swift.core.errors import DataError
from swift.data.engine.blocks import BlockWriter
from swift.data.engine.document import Document
from swift.data.files import DataFile
from swift.data.parse_json import non_finite_field
from swift.data.readers import FileTally, read_raw
from swift.data.rows import RowProblem
from swift.data.writers import RecordWriter


def recipe(path: Path, **keys: Any) -> dict[str, Any]:
    output = {"path": str(path.parent / "out"), "format": "jsonl"}
    return {"input": [str(path)], "output": output, "executor": {"num_proc": 1}, "steps": [], **keys}


def test_rows_of_jsonl_that_hold_them_are_bad(tmp_path: Path, run: Callable[..., Any]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "n": NaN}\n{"text": "b", "n": 1}\n{"text": "c", "n": [-Infinity]}\n')
    with pytest.raises(DataError, match="NaN is no number") as caught:
        run(recipe(path))
    assert caught.value.where == f"{path}:1"
    result = run(recipe(path, on_bad_row="drop", max_bad_rows=5), restart=True)
    assert result.manifest["rows"] == 1
    read = json.loads((tmp_path / "out" / "_ledger.json").read_bytes())["operators"][0]
    assert read["tally"]["dropped"] == {"not_json": 2}


@pytest.mark.parametrize("value", ["NaN", "[1, Infinity]", "1e999", "-1E+400", "1" * 400 + ".0"])
def test_a_row_of_a_json_file_is_bad_by_itself(value: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text in ('[{"text": "a"}, {"n": %s}, {"text": "e100"}]', '{"data": [{"text": "a"}, {"n": %s}, {"text": "b"}]}'):
        path.write_text(text % value)
        kinds = [isinstance(row, RowProblem) for _, row in read_raw(DataFile(str(path)), FileTally())]
        assert kinds == [False, True, False]


def test_those_of_tables_are_counted_as_null(tmp_path: Path, run: Callable[..., Any]) -> None:
    path = tmp_path / "a.parquet"
    rows = [{"text": f"t{number}", "n": [value]} for number, value in enumerate((1.5, float("nan"), float("-inf")))]
    pq.write_table(pa.Table.from_pylist(rows), path)
    run(recipe(path))
    assert [json.loads(line)["n"] for line in (tmp_path / "out" / "part-00000.jsonl").read_text().splitlines()] == [
        [1.5],
        [None],
        [None],
    ]
    read = json.loads((tmp_path / "out" / "_ledger.json").read_bytes())["operators"][0]
    assert "read as null" in json.dumps(read) and "2" in json.dumps(read["tally"]["labels"]["numbers"])


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), np.float64("nan"), np.float32("inf"), [1.0, float("nan")]]
)
def test_what_operators_make_is_refused_by_name(value: Any, tmp_path: Path) -> None:
    meta = {"none": None, "score": value}
    writer = BlockWriter(tmp_path)
    with pytest.raises(DataError, match=r"the field meta\.score") as caught:
        writer.write([Document("a.jsonl:7", {"text": "x"}, [("text",)], ["x"], None, meta)])
    writer.abandon()
    assert caught.value.where == "a.jsonl:7"
    if type(value) in (float, list):  # no other kind of number that records hold
        with (
            pytest.raises(DataError, match=r"record 1 .* field meta\.score"),
            RecordWriter(tmp_path / "x.jsonl") as out,
        ):
            out.write([{"text": "x", "meta": meta}])


def test_fields_are_named() -> None:
    assert non_finite_field({"a": [1, {"b": float("nan")}], "c": "NaN"}) == "a.1.b"
    assert non_finite_field({"a": [1.0, None], "c": "NaN"}) is None


@pytest.mark.parametrize("number", [str(1 << 64), str(-(1 << 63) - 1), "1" * 30, "1" * 400, "-" + "1" * 5000])
@pytest.mark.parametrize("layout", ['{{"text": "a", "n": {}}}', '{{"text": "a", "n": [1, {{"m": {}}}], "x": 1e300}}'])
def test_whole_numbers_of_more_than_64_bits_are_bad_rows(layout: str, number: str, tmp_path: Path, run: Any) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(layout.format(number) + '\n{"text": "b"}\n')
    with pytest.raises(DataError) as caught:
        run(recipe(path))
    assert "number_too_large" in caught.value.message and caught.value.where == f"{path}:1"
    assert "in quotes" in str(caught.value.fix)
    result = run(recipe(path, on_bad_row="drop", max_bad_rows=5), restart=True)
    assert result.manifest["rows"] == 1
    read = json.loads((tmp_path / "out" / "_ledger.json").read_bytes())["operators"][0]
    assert read["tally"]["dropped"] == {"number_too_large": 1}


def test_numbers_that_64_bits_hold_stay(tmp_path: Path, run: Any) -> None:
    values = [(1 << 64) - 1, -(1 << 63), 1e300, -1.5e20, 2.0**64, 0.1]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a", "n": values, "m": {"k": 1e25}}) + "\n")
    run(recipe(path))
    assert json.loads((tmp_path / "out" / "part-00000.jsonl").read_text())["n"] == values


def test_they_are_bad_rows_in_a_json_file_as_well(tmp_path: Path, run: Any) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "a"}, {"text": "b", "n": 1 << 70}]))
    with pytest.raises(DataError, match="number_too_large"):
        run(recipe(path))
    path.write_text('[{"text": "a", "n": ' + "1" * 5000 + "}]")
    with pytest.raises(DataError, match="more than 64 bits") as caught:
        run(recipe(path), restart=True)
    assert str(caught.value.where).startswith(str(path))
