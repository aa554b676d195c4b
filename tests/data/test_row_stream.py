"""Reading that is left and taken up again, and files in pieces: rows and references are those of one reading."""

from __future__ import annotations

import bz2
import dataclasses
import gzip
import io
import json
import lzma
import random
import tarfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import zstandard

from swift.core.errors import DataError
from swift.data import readers
from swift.data.files import DataFile
from swift.data.readers import FileTally, Position, RowStream, count_raw, parse_raw, read_raw, split_file
from swift.data.rows import RowProblem

ROWS: list[dict[str, Any]] = [{"text": f"row {i} é中" + "x" * (i * 7 % 23), "n": i} for i in range(12)]


def put(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def plain(raw: Any) -> Any:
    if isinstance(raw, RowProblem):
        return raw.reason, raw.message
    return raw


START = Position()


def rows_of(file: DataFile, at: Position = START) -> list[tuple[int, Any]]:
    return [(line, plain(raw)) for line, raw in RowStream(file, FileTally(), at)]


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def arrow_bytes(rows: list[dict[str, Any]], *, stream: bool) -> bytes:
    import pyarrow as pa

    table = pa.Table.from_pylist(rows)
    sink = io.BytesIO()
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, table.schema) as writer:
        for start in range(0, len(rows), 5):
            writer.write_table(table.slice(start, 5))
    return sink.getvalue()


def parquet_bytes(rows: list[dict[str, Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=5)
    return sink.getvalue()


def tar_bytes(members: dict[str, bytes], **settings: Any) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", **settings) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return sink.getvalue()


TEXT = "".join(row["text"] + "\n" + "\n" * (i % 3) for i, row in enumerate(ROWS)).encode()
CSV = b"\n" + b"n,text\r\n" + b"".join(f'{i},"a\n""{i}"""\r\n\r\n'.encode() for i in range(9)) + b"too,many,cells\n"
SAMPLES = {
    name: content
    for i in range(6)
    for name, content in (
        (f"d/{i:03}.txt", f"text {i}".encode()),
        (f"d/{i:03}.json", json.dumps({"n": i}).encode()),
        (f"d/{i:03}.jpg", bytes(range(i * 40))),
        *([(f"d/{'long' * 60}{i}.txt", b"a name that takes a header of its own")] if i == 3 else []),
    )
}
BAD_LINES = jsonl(ROWS[:3]) + b"{broken\n\n \t\n\xff\n" + jsonl(ROWS[3:6]) + b"5\n\n"
CONTENT: dict[str, bytes] = {
    "a.jsonl": jsonl(ROWS),
    "bad.jsonl": BAD_LINES,
    "bom.jsonl": b"\xef\xbb\xbf" + jsonl(ROWS),
    "crlf.jsonl": jsonl(ROWS).replace(b"\n", b"\r\n").rstrip(),
    "utf16.jsonl": jsonl(ROWS).decode().encode("utf-16"),
    "a.jsonl.gz": gzip.compress(jsonl(ROWS[:5])) + gzip.compress(jsonl(ROWS[5:])),
    "a.jsonl.zst": zstandard.compress(jsonl(ROWS[:5])) + zstandard.compress(jsonl(ROWS[5:])),
    "a.jsonl.bz2": bz2.compress(jsonl(ROWS[:5])) + bz2.compress(jsonl(ROWS[5:])),
    "a.jsonl.xz": lzma.compress(jsonl(ROWS[:5])) + lzma.compress(jsonl(ROWS[5:])),
    "a.json": json.dumps(ROWS, indent=1).encode(),
    "lines.json": jsonl(ROWS),
    "object.json": json.dumps({"data": ROWS}, indent=1).encode(),
    "a.csv": CSV,
    "a.csv.gz": gzip.compress(CSV),
    "a.tsv": CSV.replace(b",", b"\t"),
    "a.txt": TEXT,
    "bad.txt": TEXT + b"\xff\nlast\n",
    "a.txt.zst": zstandard.compress(TEXT),
    "a.txt:paragraphs": TEXT,
    "bad.txt:paragraphs": b"one\n\xff\ntwo\n\nthree\n\n\nfour\x00\n",
    "a.md": b"# Title\n\ntext\n",
    "a.md:paragraphs": TEXT,
    "a.parquet": parquet_bytes(ROWS),
    "file.arrow": arrow_bytes(ROWS, stream=False),
    "stream.arrow": arrow_bytes(ROWS, stream=True),
    "a.html": b"<title>T</title><p>one<p>two",
    "a.tar": tar_bytes(SAMPLES),
    "gnu.tar": tar_bytes(SAMPLES, format=tarfile.GNU_FORMAT),
    "a.tar.gz": gzip.compress(tar_bytes(SAMPLES)),
    "a.tgz": gzip.compress(tar_bytes(SAMPLES)),
}


@pytest.fixture(params=CONTENT)
def any_file(request: pytest.FixtureRequest, tmp_path: Path) -> DataFile:
    name, _, part = request.param.partition(":")
    return DataFile(str(put(tmp_path / name, CONTENT[request.param])), part or None)


def test_going_on_behind_any_row_gives_the_rest(any_file: DataFile) -> None:
    whole = rows_of(any_file)
    assert whole and count_raw(any_file) == len(whole)
    stream = RowStream(any_file, FileTally())
    for taken, _ in enumerate(stream, 1):
        stored = Position(**json.loads(json.dumps(dataclasses.asdict(stream.position))))
        assert stored.row == taken
        assert rows_of(any_file, stored) == whole[taken:]
    assert rows_of(any_file) == whole == [(line, plain(raw)) for line, raw in read_raw(any_file, FileTally())]


def test_iterating_again_goes_on(any_file: DataFile) -> None:
    whole = rows_of(any_file)
    stream = RowStream(any_file, FileTally())
    first = [(line, plain(raw)) for line, raw in islice(stream, 3)]
    assert first + [(line, plain(raw)) for line, raw in stream] == whole


def test_tables_and_archives_hold_what_was_put_in(tmp_path: Path) -> None:
    for name in ("a.parquet", "file.arrow", "stream.arrow"):
        assert rows_of(DataFile(str(put(tmp_path / name, CONTENT[name])))) == list(enumerate(ROWS, 1))
    found = rows_of(DataFile(str(put(tmp_path / "a.tar", CONTENT["a.tar"]))))
    assert [line for line, _ in found] == list(range(1, 8))
    assert found[2][1]["text"] == "text 2" and found[2][1]["n"] == 2 and found[2][1]["__key__"] == "d/002"
    picture = found[2][1]["jpg"]
    assert picture["member"] == "d/002.jpg" and picture["bytes"] == 80
    assert CONTENT["a.tar"][picture["offset"] :][:80] == bytes(range(80))
    assert found[4][1]["text"].startswith("a name") and found[4][1]["__key__"].startswith("d/longlong")


# --- pieces ---


def pieces_of(file: DataFile, target_bytes: int) -> list[tuple[str, Any]]:
    """(reference, row) of all rows, read piece by piece, each piece left and taken up again in its middle."""
    found = []
    for piece in split_file(file, target_bytes):
        stream = RowStream(piece, FileTally())
        found += [(str(piece.ref(line)), plain(raw)) for line, raw in islice(stream, 2)]
        rest = RowStream(piece, FileTally(), stream.position)
        found += [(str(piece.ref(line)), plain(raw)) for line, raw in rest]
    return found


def test_pieces_of_any_size_give_the_same_rows_and_references(any_file: DataFile) -> None:
    whole = [(f"{any_file.location}:{line}", raw) for line, raw in rows_of(any_file)]
    size = len(CONTENT[any_file.path.name if any_file.part is None else f"{any_file.path.name}:{any_file.part}"])
    counts = set()
    for target in [*range(1, 60), size // 2, size - 1, size, size + 1]:
        assert pieces_of(any_file, target) == whole
        counts.add(len(split_file(any_file, target)))
    divisible = any_file.format == "parquet" or (any_file.path.suffix == ".jsonl" and "utf16" not in any_file.location)
    assert (max(counts) > 2) == divisible and min(counts) == 1


def test_rows_of_large_files_are_numbered_by_bytes_however_they_are_cut(
    any_file: DataFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    if any_file.path.suffix != ".jsonl" or "utf16" in any_file.location:
        return
    monkeypatch.setattr(readers.stream, "LINE_REF_BYTES", 10)
    whole = [raw for _, raw in rows_of(any_file)]
    one = pieces_of(any_file, 1 << 30)
    assert [raw for _, raw in one] == whole and len(split_file(any_file, 1 << 30)) == 1
    for target in range(1, 120, 7):
        assert pieces_of(any_file, target) == one
    content = any_file.path.read_bytes()
    for ref, raw in one:
        name, _, byte = ref.rpartition("@")
        assert name == any_file.location
        line = content[int(byte) :].split(b"\n")[0].strip().removeprefix(b"\xef\xbb\xbf")
        assert line == raw


def random_file(rng: random.Random) -> bytes:
    """Lines of all lengths, with blank ones, marks of byte order, half rows and bytes that aren't text."""
    pool: list[Callable[[], bytes]] = [
        lambda: json.dumps({"t": "y" * int(rng.expovariate(0.02))}).encode(),
        lambda: b"",
        lambda: rng.choice([b" ", b"\t\r", b"\xef\xbb\xbf"]),
        lambda: b'\xef\xbb\xbf{"t": "joined"}',
        lambda: rng.randbytes(rng.randrange(40)).replace(b"\n", b""),
        lambda: '{"t": "é中😀"}'.encode(),
    ]
    lines = [rng.choice(pool)() for _ in range(rng.randrange(1, 30))]
    return b'{"t": "first"}\n' + rng.choice([b"\n", b"\r\n"]).join(lines) + rng.choice([b"", b"\n", b"\n\n"])


def expected_rows(content: bytes) -> list[tuple[int, bytes]]:
    """What jsonl means, said differently: split at line feeds, strip, leave out what is empty."""
    rows = []
    for number, line in enumerate(content.split(b"\n"), 1):
        row = line.strip(b" \t\r\n")
        row = row[3:].lstrip(b" \t\r\n") if row.startswith(b"\xef\xbb\xbf") else row
        if row:
            rows.append((number, row))
    return rows


@pytest.mark.parametrize("seed", range(60))
def test_random_files(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    content = random_file(rng)
    expected = expected_rows(content)
    packers = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    for ending, pack in packers.items():
        cut = rng.randrange(len(content) + 1)
        packed = content if not ending else pack(content[:cut]) + pack(content[cut:])
        file = DataFile(str(put(tmp_path / f"a.jsonl{ending}", packed)))
        assert rows_of(file) == expected
        stream = RowStream(file, FileTally())
        taken = len(list(islice(stream, rng.randrange(len(expected) + 1))))
        if taken:
            assert rows_of(file, stream.position) == expected[taken:]
        found = [row for piece in split_file(file, rng.randrange(1, 80)) for row in rows_of(piece)]
        assert found == expected


def test_a_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    file = DataFile(str(put(tmp_path / "a.jsonl.gz", CONTENT["a.jsonl.gz"])))
    stream = RowStream(file, FileTally())
    list(islice(stream, 9))
    put(tmp_path / "a.jsonl.gz", gzip.compress(jsonl(ROWS[:3])))
    with pytest.raises(DataError, match="was to go on at byte"):
        rows_of(file, stream.position)


def test_a_plain_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    file = DataFile(str(put(tmp_path / "a.jsonl", jsonl([{"n": n} for n in range(5)]))))
    stream = RowStream(file, FileTally())
    assert len(list(stream)) == 5
    assert list(RowStream(file, FileTally(), stream.position)) == []  # at the end, which is where it stopped
    put(tmp_path / "a.jsonl", b'{"n": 0}\n')
    with pytest.raises(DataError, match="the file ends after 9 bytes"):
        list(RowStream(file, FileTally(), stream.position))


def test_only_whole_files_are_split(tmp_path: Path) -> None:
    file = DataFile(str(put(tmp_path / "a.jsonl", jsonl(ROWS))))
    for wrong, size in ((dataclasses.replace(file, span=(0, 5)), 5), (file, 0)):
        with pytest.raises(DataError, match="whole file"):
            split_file(wrong, size)
    assert parse_raw(next(read_raw(file, FileTally()))[1]) == ROWS[0]
