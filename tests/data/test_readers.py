"""Which files an argument means, and what is read from them: formats, encodings, damage."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from swift.config.data import DataConfig
from swift.core.errors import DataError, NetworkError, SwiftError, UsageError
from swift.data.readers import FileTally, count_raw, parse_raw, read_raw
from swift.data.rows import RowProblem
from swift.data.sources import SELF_COGNITION_FILE, DataFile, parse_source, resolve_sources

ROWS = [{"query": f"q{i}", "response": "é中"} for i in range(4)]


def read(argument: Path | str, tally: FileTally | None = None) -> list[tuple[int, Any]]:
    """(line, object or reason of the problem) of all rows."""
    found: list[tuple[int, Any]] = []
    for file in parse_source(str(argument)).files:
        for line, raw in read_raw(file, tally or FileTally()):
            try:
                found.append((line, parse_raw(raw)))
            except RowProblem as problem:
                found.append((line, problem.reason))
    return found


def jsonl(rows: list[dict[str, Any]], end: str = "\n") -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + end for row in rows)


def put(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# --- formats: the same four rows, and the lines on which they start ---

FORMATS: dict[str, tuple[bytes, list[int]]] = {
    "a.jsonl": (jsonl(ROWS).encode(), [1, 2, 3, 4]),
    "crlf.jsonl": (jsonl(ROWS, "\r\n").encode(), [1, 2, 3, 4]),
    "no-newline-at-end.jsonl": (jsonl(ROWS).rstrip().encode(), [1, 2, 3, 4]),
    "bom.jsonl": (b"\xef\xbb\xbf" + jsonl(ROWS).encode(), [1, 2, 3, 4]),
    "joined.jsonl": ((jsonl(ROWS[:2]) + "\ufeff" + jsonl(ROWS[2:])).encode(), [1, 2, 3, 4]),
    "blank.jsonl": (("\n" + jsonl(ROWS, "\n \t\n")).encode(), [2, 4, 6, 8]),
    "utf16.jsonl": (jsonl(ROWS).encode("utf-16"), [1, 2, 3, 4]),
    "utf32.jsonl": (jsonl(ROWS).encode("utf-32"), [1, 2, 3, 4]),
    "list.json": (json.dumps(ROWS, indent=1).encode(), [2, 6, 10, 14]),
    "list-on-a-line.json": (json.dumps(ROWS).encode(), [1, 1, 1, 1]),
    "data.json": (json.dumps({"version": [1], "data": ROWS}, indent=1).encode(), [6, 10, 14, 18]),
    "one-list.json": (json.dumps({"name": "x", "train": ROWS}).encode(), [1, 1, 1, 1]),
    "really.jsonl.json": (jsonl(ROWS).encode(), [1, 2, 3, 4]),
    "a.csv": (("query,response\n" + "".join(f"{r['query']},{r['response']}\n" for r in ROWS)).encode(), [2, 3, 4, 5]),
    "bom.csv": (
        b"\xef\xbb\xbf" + ("query,response\r\n" + "".join(f'"{r["query"]}",é中\r\n' for r in ROWS)).encode(),
        [2, 3, 4, 5],
    ),
    "semicolon.csv": (("query;response\n" + "".join(f"{r['query']};é中\n" for r in ROWS)).encode(), [2, 3, 4, 5]),
    "a.tsv": (("query\tresponse\n" + "".join(f"{r['query']}\té中\n" for r in ROWS)).encode(), [2, 3, 4, 5]),
    "a.jsonl.gz": (gzip.compress(jsonl(ROWS).encode()), [1, 2, 3, 4]),
    "a.jsonl.zst": (zstandard.compress(jsonl(ROWS).encode()), [1, 2, 3, 4]),
    "bom.jsonl.gz": (gzip.compress(b"\xef\xbb\xbf" + jsonl(ROWS).encode()), [1, 2, 3, 4]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    content, lines = FORMATS[name]
    path = put(tmp_path / name, content)
    assert read(path) == list(zip(lines, ROWS))
    assert count_raw(DataFile(path)) == 4


def test_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"messages": [{"role": "user", "content": "u", "name": None}, {"role": "assistant", "content": None}]},
        {"messages": [{"role": "user", "content": "v", "name": "n"}]},
    ]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    found = read(path)
    assert [line for line, _ in found] == [1, 2]
    # fields that other rows have come back as null and are dropped; a null content stays visible
    assert found[0][1] == {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": None}]}
    assert found[1][1]["messages"][0]["name"] == "n"
    assert count_raw(DataFile(path)) == 2


def test_notes_and_blank_lines_are_counted(tmp_path: Path) -> None:
    tally = FileTally()
    read(put(tmp_path / "a.jsonl", "\n\n" + jsonl(ROWS) + "\n"), tally)
    assert tally.blank == 3
    tally = FileTally()
    read(put(tmp_path / "b.csv", "query;response\na;b\n"), tally)
    assert "';'" in tally.notes[0]
    tally = FileTally()
    read(put(tmp_path / "c.jsonl", jsonl(ROWS).encode("utf-16")), tally)
    assert "UTF-16" in tally.notes[0]


def test_csv_quotes_and_lines(tmp_path: Path) -> None:
    path = put(tmp_path / "a.csv", 'query,response,system\n"a ""b"",\nc",d,\n\ne,f,g\nh,i\nj,k,l\n')
    tally = FileTally()
    assert read(path, tally) == [
        (2, {"query": 'a "b",\nc', "response": "d", "system": None}),
        (5, {"query": "e", "response": "f", "system": "g"}),
        (6, "csv_columns"),
        (7, {"query": "j", "response": "k", "system": "l"}),
    ]
    assert tally.blank == 1


@pytest.mark.parametrize(
    ("content", "message", "where"),
    [
        ('query,response\na,b\nc,"d\ne,f\n', "can't be read", ":3"),
        ("query,query\na,b\n", "'query' occurs twice", ":1"),
        ("query,\na,b\n", "has no name", ":1"),
        (b"query,response\na,b\xff\n", "not UTF-8", ":2"),
        ("query,response\na,b\0\n", "NUL", ":2"),
        ("query,response\n", "no rows", ""),
    ],
)
def test_a_broken_csv_stops_with_its_line(tmp_path: Path, content: bytes | str, message: str, where: str) -> None:
    path = put(tmp_path / "a.csv", content)
    with pytest.raises(DataError) as caught:
        read(path)
    assert message in caught.value.message
    assert caught.value.where == f"{path}{where}"


def test_txt_by_line_paragraph_and_document(tmp_path: Path) -> None:
    path = put(tmp_path / "a.txt", "\none\ntwo \n\n\nthree\n")
    assert read(path) == [(2, {"text": "one"}), (3, {"text": "two "}), (6, {"text": "three"})]
    assert read(f"{path}:lines") == read(path)
    assert read(f"{path}:paragraphs") == [(2, {"text": "one\ntwo "}), (6, {"text": "three"})]
    assert read(f"{path}:document") == [(1, {"text": "\none\ntwo \n\n\nthree"})]
    with pytest.raises(DataError, match="paragraphs"):
        parse_source(f"{path}:pages")


def test_wrapped_text_is_pointed_out(tmp_path: Path) -> None:
    tally = FileTally()
    read(put(tmp_path / "book.txt", ("x" * 70 + "\n") * 30), tally)
    assert "wrapped" in tally.notes[0]
    tally = FileTally()
    read(put(tmp_path / "rows.txt", ("x" * 70 + "\n") * 30 + "y" * 200), tally)
    assert not tally.notes


# --- a line that is wrong stays one problem in its place ---

BAD_LINES: dict[str, tuple[bytes, str, str, str]] = {
    "cut off": (b'{"query": "a", "respon', "not_json", "ends", "cut off"),
    "cut off after a comma": (b'{"query": "a",', "not_json", "column", ""),
    "single quotes": (b"{'query': 'a'}", "not_json", "column 2", "double quotes"),
    "python literal": (b'{"query": None}', "not_json", "column 11", "Python"),
    "NaN": (b'{"query": "a", "score": NaN}', "not_json", "NaN is no number", "null"),
    "infinity": (b'{"query": "a", "b": [1, -Infinity]}', "not_json", "-Infinity is no number", "null"),
    "a number that is too large": (b'{"query": "a", "b": 1e999}', "not_json", "1e999 is no number", "null"),
    "two objects": (b'{"query": "a"}{"query": "b"}', "not_json", "column 15", "line of its own"),
    "comma after": (b'{"query": "a"},', "not_json", "column 15", ""),
    "a list": (b'[{"query": "a"}]', "not_an_object", "a list", "row"),
    "a number": (b"5", "not_an_object", "a number", ""),
    "null": (b"null", "not_an_object", "null", ""),
    "latin-1": ('{"query": "café"}'.encode("latin-1"), "bad_encoding", "byte 15", "CP1252"),
    "gbk": ('{"query": "你好世界"}'.encode("gbk"), "bad_encoding", "byte 12", "GB18030"),
    "NUL byte": (b'{"query": "a\x00b"}', "nul_byte", "column 13", "tr -d"),
    "only NUL bytes": (b"\x00" * 20, "nul_byte", "20 NUL", ""),
    "UTF-16 without mark": ('{"query": "a"}'.encode("utf-16-le"), "bad_encoding", "UTF-16", "iconv"),
    "duplicate key": (b'{"query": "a", "query": "b"}', "duplicate_key", "'query'", ""),
    "duplicate key inside": (b'{"m": [{"role": "a", "role": "b"}]}', "duplicate_key", "'role'", ""),
    "half an emoji": (b'{"query": "\\ud83d"}', "bad_encoding", "half a character", ""),
    "nested too deeply to look for keys": (
        b'{"a": 1, "a": ' + b"[" * 1010 + b"]" * 1010 + b"}",
        "not_json",
        "deep",
        "",
    ),
    "key with a colon twice": (b'{"a:b": "x:", "c": ":", "a:b": 1}', "duplicate_key", "'a:b'", ""),
    "key twice with odd spaces": (b'{"a": 1, "a" \t: 2}', "duplicate_key", "'a'", ""),
    "nested too deeply": (b"[" * 100_000, "not_json", "", ""),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named_and_the_next_is_read(name: str, tmp_path: Path) -> None:
    line, reason, message, fix = BAD_LINES[name]
    path = put(tmp_path / "a.jsonl", b'{"query": "before"}\n' + line + b'\n{"query": "after"}\n')
    raws = list(read_raw(DataFile(path), FileTally()))
    assert [number for number, _ in raws] == [1, 2, 3]
    assert [parse_raw(raws[i][1])["query"] for i in (0, 2)] == ["before", "after"]
    with pytest.raises(RowProblem) as caught:
        parse_raw(raws[1][1])
    assert caught.value.reason == reason
    assert message in caught.value.message
    assert fix in (caught.value.fix or "")
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (b'{"code": "x = {\\"a\\": 1, \\"a\\": 2}"}', {"code": 'x = {"a": 1, "a": 2}'}),
        (b'{"a": "\\u0000"}', {"a": "\0"}),
        (b'{"a": "\\ud83d\\ude00"}', {"a": "\N{GRINNING FACE}"}),
    ],
)
def test_odd_but_valid_lines(line: bytes, value: dict[str, Any]) -> None:
    assert parse_raw(line) == value


def test_a_huge_line(tmp_path: Path) -> None:
    text = "x" * 20_000_000
    path = put(tmp_path / "a.jsonl", jsonl([{"text": text}, {"text": "y"}]))
    assert read(path) == [(1, {"text": text}), (2, {"text": "y"})]


# --- files that can't be read any further ---

BAD_FILES: dict[str, tuple[str, bytes, str]] = {
    "empty jsonl": ("a.jsonl", b"", "empty (0 bytes)"),
    "blank jsonl": ("a.jsonl", b"\n\n\n", "only 3 blank line(s)"),
    "empty json list": ("a.json", b"[]", "no rows"),
    "empty json": ("a.json", b" ", "no rows"),
    "json cut off": ("a.json", b'[{"query": "a"},\n {"query": "b"', "line 2"),
    "json list not closed": ("a.json", b'[{"query": "a"}\n', "isn't closed"),
    "json missing comma": ("a.json", b'[{"query": "a"}\n{"query": "b"}]', "comma is missing"),
    "json a number": ("a.json", b"5", "a list of rows"),
    "json duplicate key": ("a.json", b'[{"a": 1, "a": 2}]', "'a' occurs twice"),
    "json latin-1": ("a.json", '[{"query": "é"}]'.encode("latin-1"), "not UTF-8"),
    "json several lists": ("a.json", b'{"train": [{"a": 1}], "test": [{"a": 1}]}', "several lists"),
    "damaged gzip": ("a.jsonl.gz", gzip.compress(jsonl(ROWS * 99).encode())[:60], "damaged"),
    "not gzip": ("a.jsonl.gz", b"hello hello", "damaged"),
    "damaged zst": ("a.jsonl.zst", b"hello hello", "damaged"),
    "not parquet": ("a.parquet", b"hello hello hello", "parquet"),
    "empty parquet": ("a.parquet", b"", "parquet"),
    "odd UTF-16": ("a.jsonl", b"\xff\xfe{", "UTF-16"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named(name: str, tmp_path: Path) -> None:
    file, content, message = BAD_FILES[name]
    path = put(tmp_path / file, content)
    with pytest.raises(DataError) as caught:
        read(path)
    assert message in caught.value.message
    assert str(path) in (caught.value.where or "")


def test_rows_of_a_json_list_that_are_not_objects(tmp_path: Path) -> None:
    assert read(put(tmp_path / "a.json", b'[{"a": 1},\n 5,\n {"a": "\\ud83d"}]')) == [
        (1, {"a": 1}),
        (2, "not_an_object"),
        (3, "bad_encoding"),
    ]


def test_a_json_object_that_is_one_row(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "x"}]}
    assert read(put(tmp_path / "a.json", json.dumps(row))) == [(1, row)]


def test_parts_of_a_json_object(tmp_path: Path) -> None:
    path = put(tmp_path / "a.json", json.dumps({"train": ROWS[:2], "test": ROWS[2:]}))
    assert [row for _, row in read(f"{path}:test")] == ROWS[2:]
    assert [row for _, row in read(f"{path}:train/test")] == ROWS
    with pytest.raises(DataError, match="it has train, test"):
        read(f"{path}:tst")


# --- arguments ---


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("one.jsonl", "b.jsonl", "a.jsonl", "_hidden.jsonl", ".dot.jsonl", "sub/x.jsonl", "deep/er/y.jsonl"):
        put(tmp_path / name, jsonl(ROWS))
    put(tmp_path / "README.md", "x")
    put(tmp_path / "notes.docx", "x")
    for name in ("train-00000-of-00002.csv", "train-00001-of-00002.csv", "test.csv"):
        put(tmp_path / "parts" / name, "query,response\na,b\n")
    put(tmp_path / "odd #1:x.jsonl", jsonl(ROWS))
    put(tmp_path / "run#5" / "a.jsonl", jsonl(ROWS))
    put(tmp_path / "mixed" / "a.jsonl", jsonl(ROWS))
    put(tmp_path / "mixed" / "notes.txt", "x")
    put(tmp_path / "texts" / "notes.txt", "x")
    (tmp_path / "hollow").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("argument", "files", "count"),
    [
        ("one.jsonl", ["one.jsonl"], None),
        ("one.jsonl#3", ["one.jsonl"], 3),
        ("one.jsonl#1_000", ["one.jsonl"], 1000),
        ("odd #1:x.jsonl", ["odd #1:x.jsonl"], None),
        ("odd #1:x.jsonl#2", ["odd #1:x.jsonl"], 2),
        ("run#5", ["run#5/a.jsonl"], None),
        (".", ["a.jsonl", "b.jsonl", "odd #1:x.jsonl", "one.jsonl"], None),
        (".#2", ["a.jsonl", "b.jsonl", "odd #1:x.jsonl", "one.jsonl"], 2),
        (".:sub", ["sub/x.jsonl"], None),
        (".:sub/one#5", ["sub/x.jsonl", "one.jsonl"], 5),
        (".:b.jsonl", ["b.jsonl"], None),
        ("deep:all", ["deep/er/y.jsonl"], None),
        ("parts:train", ["parts/train-00000-of-00002.csv", "parts/train-00001-of-00002.csv"], None),
        ("parts:train/test", [*(f"parts/train-0000{i}-of-00002.csv" for i in (0, 1)), "parts/test.csv"], None),
        ("parts/*.csv", [*(["parts/test.csv"]), *(f"parts/train-0000{i}-of-00002.csv" for i in (0, 1))], None),
        ("**/x.jsonl#2", ["sub/x.jsonl"], 2),
        ("mixed", ["mixed/a.jsonl"], None),
        ("texts", ["texts/notes.txt"], None),
    ],
)
def test_arguments_name_files(tree: Path, argument: str, files: list[str], count: int | None) -> None:
    source = parse_source(argument)
    assert [str(file.path) for file in source.files] == files
    assert source.count == count
    assert parse_source(str(tree / argument)).count == count


def test_text_beside_data_is_left_out_aloud(tree: Path) -> None:
    assert "1 txt file(s)" in parse_source("mixed").notes[0]


@pytest.mark.parametrize("argument", ["self-cognition", "swift/self-cognition", "self-cognition#50"])
def test_shipped_rows(tree: Path, argument: str) -> None:
    source = parse_source(argument)
    assert source.self_cognition
    assert source.files == (DataFile(SELF_COGNITION_FILE),)


@pytest.mark.parametrize(
    ("argument", "kind", "message", "fix"),
    [
        ("one.jsonl#0", UsageError, "'0' is not a number of rows", "one.jsonl#1000"),
        ("one.jsonl#-5", UsageError, "'-5'", ""),
        ("one.jsonl#x", UsageError, "'x'", ""),
        ("one.jsonl#1.5", UsageError, "'1.5'", ""),
        ("one.jsnl", DataError, "no file or folder 'one.jsnl'", "did you mean one.jsonl?"),
        ("gone/x.jsonl", DataError, "gone/x.jsonl", "check the path"),
        ("quite.jsonl", DataError, "quite.jsonl", "check the path"),
        ("subb", DataError, "'subb'", "did you mean sub?"),
        ("tatsu/alpaca", NetworkError, "no file or folder 'tatsu/alpaca'; as a data set on a hub", "hf download"),
        ("hf::tatsu/alpaca#5", NetworkError, "network is forbidden", "hf download"),
        ("self-cogniton", DataError, "self-cogniton", "did you mean self-cognition?"),
        ("notes.docx", DataError, "not a data file", "convert"),
        ("deep", DataError, "sub-folders", "deep:er"),
        ("hollow", DataError, "no data file", ".jsonl"),
        ("hollow:all", DataError, "no data file", ".jsonl"),
        ("parts:tst", DataError, "no subset 'tst'", "did you mean test?"),
        ("one.jsonl:sub", DataError, "no subsets", "leave out :sub"),
        ("gone/*.jsonl", DataError, "matches", ".jsonl"),
        ("", DataError, "''", ""),
    ],
)
def test_arguments_that_mean_nothing(tree: Path, argument: str, kind: type[SwiftError], message: str, fix: str) -> None:
    with pytest.raises(kind) as caught:
        for file in parse_source(argument).files:
            list(read_raw(file, FileTally()))
    assert message in caught.value.message
    assert fix in (caught.value.fix or "")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "no data"),
        ({"dataset": ["a.jsonl"], "val_dataset": ["b.jsonl"], "split_dataset_ratio": 0.1}, "both"),
        ({"dataset": ["self-cognition"]}, "--model_name"),
        ({"dataset": ["self-cognition"], "model_name": ["a"]}, "--model_author"),
        ({"dataset": ["self-cognition"], "model_name": ["a", "b", "c"], "model_author": ["a"]}, "3 values"),
    ],
)
def test_requests_that_contradict_themselves(tree: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve_sources(DataConfig(**settings))


def test_faults_name_their_flag(tree: Path) -> None:
    with pytest.raises(DataError) as caught:
        resolve_sources(DataConfig(dataset=["a.jsonl"], val_dataset=["gone.jsonl"]))
    assert caught.value.where == "--val_dataset gone.jsonl"


def test_windows_drive_is_not_a_subset(tree: Path, write_rows: Callable[..., Path]) -> None:
    with pytest.raises(DataError, match="no file or folder"):
        parse_source("C:\\data\\rows.jsonl")


def test_arguments_are_resolved_without_anything_heavy() -> None:
    heavy = ("numpy", "torch", "pyarrow", "orjson")
    code = f"import sys, swift.data.sources; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert done.stdout.strip() == "[]", done.stderr
