"""Memory of reading: that of the largest row, whatever the size of the file."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import zstandard

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
SMALL = b'{"text": "row"}\n' * 5

PEAK = """
import sys
from swift.data.readers import FileTally, RowStream, parse_raw
from swift.data.sources import DataFile
from swift.data.rows import RowProblem
def peak():
    return int(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0]) / 1024
for _ in RowStream(DataFile(sys.argv[1]), FileTally()): pass
before = peak()
reasons = []
for _, raw in RowStream(DataFile(sys.argv[2]), FileTally()):
    try:
        parse_raw(raw)
        reasons.append('good')
    except RowProblem as problem:
        reasons.append(problem.reason)
print(len(reasons), reasons[0], peak() - before)
"""


def _put(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def growth(small: Path, large: Path) -> tuple[str, float]:
    """What reading the second file gave, and by how many MiB the process grew over having read the first."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(small), str(large)], capture_output=True, text=True, check=True
    )
    rows, _, mb = done.stdout.strip().rpartition(" ")
    return rows, float(mb)


@pytest.mark.parametrize(
    "kind",
    [
        "jsonl.zst",
        "json",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("jsonl", "csv", "jsonl.gz", "parquet", "arrow", "tar")
        ),
    ],
)
def test_memory_does_not_grow_with_the_file(kind: str, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def write(path: Path, rows: int) -> Path:
        texts = [f"{i} " + "word " * 800 for i in range(rows)]
        if kind in ("parquet", "arrow"):
            table = pa.table({"text": texts})
            if kind == "parquet":
                pq.write_table(table, path, use_dictionary=False, compression="none")
            else:
                with pa.ipc.new_stream(str(path), table.schema) as writer:
                    writer.write_table(table, max_chunksize=500)
            return path
        if kind == "csv":
            return _put(path, "text\n" + "\n".join(texts))
        if kind == "tar":
            with tarfile.open(path, "w") as archive:
                for i, text in enumerate(texts):
                    info = tarfile.TarInfo(f"{i}.txt")
                    info.size = len(text)
                    archive.addfile(info, io.BytesIO(text.encode()))
            return path
        if kind == "json":
            return _put(path, json.dumps([{"text": text} for text in texts]))
        content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        pack = {"jsonl.gz": lambda data: gzip.compress(data, 1), "jsonl.zst": zstandard.compress}.get(kind, bytes)
        return _put(path, pack(content))

    rows, grown = growth(write(tmp_path / f"a.{kind}", 1000), write(tmp_path / f"b.{kind}", 20_000))
    assert rows == "20000 good"
    assert grown < 25, f"80 MB were read, and the process grew by {grown} MiB"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("good", "good"),
        ("gbk", "bad_encoding"),
        *(
            pytest.param(kind, reason, marks=pytest.mark.slow)
            for kind, reason in (("latin-1", "bad_encoding"), ("broken", "not_json"), ("no line end", "good"))
        ),
    ],
)
def test_a_line_of_100_mb(kind: str, reason: str, tmp_path: Path) -> None:
    small = _put(tmp_path / "a.jsonl", SMALL)
    body = {"latin-1": "é".encode("latin-1"), "gbk": "你好".encode("gbk")}.get(kind, b"word ")
    line = b'{"text": "' + body * (100_000_000 // len(body)) + (b'"' if kind == "broken" else b'"}')
    large = _put(tmp_path / "b.jsonl", line + (b"" if kind == "no line end" else b"\n" + SMALL))
    rows, grown = growth(small, large)
    assert rows == f"{1 if kind == 'no line end' else 6} {reason}"
    assert grown < 800
