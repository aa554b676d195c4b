"""Written files: the same records give the same bytes, and what isn't complete is never there."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swift.core.errors import DataError, SwiftError, UsageError
from swift.data.readers import FileTally, parse_raw, read_raw
from swift.data.sources import parse_source
from swift.data.writers import FORMATS, RecordWriter

ROWS: list[dict[str, Any]] = [
    {"text": "é中\u2028 " + "x" * i, "n": i, "score": i / 3, "ok": True, "tags": ["a"] * (i % 3), "deep": {"k": [i]}}
    for i in range(300)
]
UNEVEN: list[dict[str, Any]] = [
    {"text": "a"},
    {"text": "b", "meta": {"language": "en"}},
    {"messages": [{"role": "user", "content": "q"}], "meta": {"score": 0.5, "language": "de"}},
    {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]},
]


def read(path: Path) -> list[dict[str, Any]]:
    return [parse_raw(raw) for file in parse_source(str(path)).files for _, raw in read_raw(file, FileTally())]


def write(path: Path, rows: list[dict[str, Any]], step: int = 1000) -> Path:
    with RecordWriter(path) as writer:
        for start in range(0, len(rows), step):
            writer.write(rows[start : start + step])
    return path


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_written_is_read_again(kind: str, tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "new" / f"a.{kind}") as writer:
        writer.write(ROWS)
        assert not (tmp_path / "new" / f"a.{kind}").exists()
        done = writer.close()
    content = done.path.read_bytes()
    assert (done.rows, done.bytes, done.sha256) == (300, len(content), hashlib.sha256(content).hexdigest())
    assert read(done.path) == ROWS
    assert left(tmp_path / "new") == [f"a.{kind}"]


@pytest.mark.parametrize("kind", FORMATS)
def test_bytes_depend_on_records_alone(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swift.data.writers._GROUP_ROWS", 37)
    one = write(tmp_path / f"a.{kind}", ROWS).read_bytes()
    assert write(tmp_path / "other" / f"another-name.{kind}", ROWS, step=7).read_bytes() == one
    assert write(tmp_path / f"a.{kind}", ROWS[:-1]).read_bytes() != one
    if kind == "jsonl.gz":
        assert one[3:8] == bytes(5), "neither a name nor a time in the header"


def test_rows_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swift.data.writers._GROUP_ROWS", 1)  # each row is a group with its own columns
    expected = [
        UNEVEN[0],
        UNEVEN[1],
        UNEVEN[2],
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]},
    ]
    for kind in FORMATS:
        assert read(write(tmp_path / f"a.{kind}", UNEVEN)) == expected
    monkeypatch.undo()
    assert read(write(tmp_path / "b.parquet", UNEVEN)) == expected


def test_no_records_give_an_empty_file(tmp_path: Path) -> None:
    for kind in FORMATS:
        path = write(tmp_path / f"a.{kind}", [])
        with pytest.raises(DataError, match=r"no rows|is empty"):
            read(path)


@pytest.mark.parametrize("group", [1, 1000])
def test_columns_without_a_common_type_are_named(group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swift.data.writers._GROUP_ROWS", group)
    for rows in ([{"a": 1}, {"a": "x"}], [{"a": [1]}, {"a": {"b": 1}}], [{"a": {}}]):
        with pytest.raises(DataError, match=r"no common type|can't be written") as caught:
            write(tmp_path / "a.parquet", rows)
        assert "jsonl.zst" in (caught.value.fix or "")
        assert left(tmp_path) == []


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("record", [{"a": 1 << 70}, {"a": {1, 2}}, {"a": b"x"}, {1: "a"}, {"a": "\ud83d"}])
def test_records_that_cannot_be_written_are_numbered(kind: str, record: dict, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"record 3 can't be written"):
        write(tmp_path / f"a.{kind}", [{"a": 1}, {"a": 2}, record])
    assert left(tmp_path) == []


@pytest.mark.parametrize("kind", FORMATS)
def test_an_exception_leaves_the_old_file(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"a.{kind}", ROWS)
    before = path.read_bytes()
    with pytest.raises(KeyError), RecordWriter(path) as writer:
        writer.write(ROWS[:5])
        raise KeyError
    assert path.read_bytes() == before and left(tmp_path) == [path.name]


def test_formats_that_are_not_known(tmp_path: Path) -> None:
    for name, kind in (("a.csv", None), ("a.jsonl", "orc")):
        with pytest.raises(UsageError, match="format"):
            RecordWriter(tmp_path / name, kind)
    assert RecordWriter(tmp_path / "odd", "jsonl").close().rows == 0


# --- a disk that refuses ---


@pytest.mark.parametrize("kind", FORMATS)
def test_a_full_disk_is_named_and_nothing_is_left(kind: str, tmp_path: Path) -> None:
    """The kernel refuses a file above a size limit as it refuses one on a full disk, in the middle of a write."""
    rng = random.Random(0)
    code = f"""
import json, resource, signal, sys
from pathlib import Path
from swift.core.errors import SwiftError
from swift.data.writers import RecordWriter
import pyarrow.parquet
rows = json.load(sys.stdin)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, 1_500_000))
try:
    with RecordWriter(Path({str(tmp_path)!r}) / 'a.{kind}') as writer:
        for row in rows:
            writer.write([row])
except SwiftError as error:
    print(type(error).__name__, error)
"""
    rows = [{"text": rng.randbytes(1000).hex()} for _ in range(2500)]
    done = subprocess.run([sys.executable, "-c", code], input=json.dumps(rows), capture_output=True, text=True)
    assert done.stderr == ""
    assert "could not write" in done.stdout and f"a.{kind}" in done.stdout, done.stdout + done.stderr
    assert left(tmp_path) == []


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file" / "a.jsonl", Path("/proc/a.jsonl"), tmp_path / ("n" * 300 + ".jsonl")):
        with pytest.raises(SwiftError, match="could not write"):
            RecordWriter(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SwiftError, match="could not write"):
        RecordWriter(tmp_path / "a.jsonl")


def test_a_kill_in_the_middle_leaves_nothing_that_counts_as_data(tmp_path: Path) -> None:
    code = f"""
import os, signal
from swift.data.writers import RecordWriter
writer = RecordWriter({str(tmp_path / "a.jsonl")!r})
writer.write([{{"text": "x" * 3_000_000}}])
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code])
    assert done.returncode == -signal.SIGKILL and len(left(tmp_path)) == 1
    with pytest.raises(DataError, match="no data file"):
        parse_source(str(tmp_path))


def test_rows_without_any_column_are_refused_by_parquet(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="records 1 to 2"):
        write(tmp_path / "a.parquet", [{}, {}])
    assert left(tmp_path) == []
