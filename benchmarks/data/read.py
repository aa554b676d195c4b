"""How fast jsonl becomes texts in Python, and how much memory reading takes, beside other readers.

    python benchmarks/data/read.py                     # 200 MB of jsonl, each reader in a process of its own
    python benchmarks/data/read.py --megabytes 2000 --formats   # also the memory of every format on a 2 GB input

Throughput is megabytes of the file per second of CPU time (user and system) of the reading process, without start-up;
memory is its peak resident size. The corpus is generated: documents of 0.2 to 20 kB of words, with some CJK.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

READERS: dict[str, Callable[[Path], int]] = {}


def reader(function: Callable[[Path], int]) -> Callable[[Path], int]:
    READERS[function.__name__] = function
    return function


@reader
def swift(path: Path) -> int:
    from swift.data.readers import FileTally, RowStream, parse_raw
    from swift.data.sources import DataFile

    return sum(len(parse_raw(raw)["text"]) for _, raw in RowStream(DataFile(str(path)), FileTally()))


@reader
def swift_split_16(path: Path) -> int:
    from swift.data.readers import FileTally, RowStream, parse_raw, split_file
    from swift.data.sources import DataFile

    pieces = split_file(DataFile(str(path)), path.stat().st_size // 16)
    return sum(len(parse_raw(raw)["text"]) for piece in pieces for _, raw in RowStream(piece, FileTally()))


@reader
def orjson_bare(path: Path) -> int:
    import orjson

    with path.open("rb") as file:
        return sum(len(orjson.loads(line)["text"]) for line in file)


@reader
def json_stdlib(path: Path) -> int:
    with path.open("rb") as file:
        return sum(len(json.loads(line)["text"]) for line in file)


@reader
def pyarrow_json(path: Path) -> int:
    import pyarrow.json

    with pyarrow.json.open_json(path) as batches:
        return sum(len(text) for batch in batches for text in batch["text"].to_pylist())


@reader
def polars(path: Path) -> int:
    import polars

    frames = polars.scan_ndjson(path).collect_batches()
    return sum(len(text) for frame in frames for text in frame["text"].to_list())


@reader
def datasets(path: Path) -> int:
    from datasets import load_dataset

    rows = load_dataset("json", data_files=str(path), split="train", streaming=True)
    return sum(len(row["text"]) for row in rows)


@reader
def swift_any(path: Path) -> int:
    from swift.data.readers import FileTally, RowStream, parse_raw
    from swift.data.sources import DataFile

    found = (parse_raw(raw) for _, raw in RowStream(DataFile(str(path)), FileTally()))
    return sum(len(row.get("text") or "") for row in found)


def corpus(num_bytes: int, seed: int = 0):
    """Rows of about that many bytes as jsonl."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("etaoinshrdlucmfwyp", k=rng.randint(1, 10))) for _ in range(5000)]
    words += ["数据", "引擎", "“quoted”", "naïve", 'say "hi"', "line\nbreak"]
    written = 0
    number = 0
    while written < num_bytes:
        length = min(4000, max(40, int(rng.lognormvariate(5.5, 1))))
        text = " ".join(rng.choices(words, k=length))
        line = json.dumps({"id": number, "text": text, "url": f"https://example.org/{number}"}, ensure_ascii=False)
        written += len(line.encode()) + 1
        number += 1
        yield line


def write_corpus(path: Path, num_bytes: int) -> None:
    """A block of distinct rows, repeated: generating gigabytes of words would take longer than reading them."""
    block = "".join(line + "\n" for line in corpus(min(num_bytes, 50_000_000))).encode()
    with path.open("wb") as file:
        for _ in range(max(1, round(num_bytes / len(block)))):
            file.write(block)


def write_formats(folder: Path, jsonl: Path) -> list[Path]:
    """The same rows in other formats."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import zstandard

    paths = [folder / name for name in ("a.jsonl.gz", "a.jsonl.zst", "a.json", "a.csv", "a.parquet", "a.arrow")]
    gz, zst, as_json, as_csv, parquet, arrow = paths
    with jsonl.open("rb") as lines, gzip.open(gz, "wb", compresslevel=1) as packed:
        while piece := lines.read(1 << 20):
            packed.write(piece)
    with jsonl.open("rb") as lines, zst.open("wb") as out:
        zstandard.ZstdCompressor(level=1).copy_stream(lines, out)
    with jsonl.open() as lines, as_json.open("w") as out:
        out.write("[\n")
        for number, line in enumerate(lines):
            out.write(("," if number else "") + line)
        out.write("]")
    with jsonl.open() as lines, as_csv.open("w") as out:
        out.write("id,text\n")
        for line in lines:
            row = json.loads(line)
            out.write(f'{row["id"]},"{row["text"].replace(chr(34), chr(34) * 2)}"\n')
    schema = pa.schema([("id", pa.int64()), ("text", pa.string()), ("url", pa.string())])
    with (
        jsonl.open() as lines,
        pq.ParquetWriter(parquet, schema) as to_parquet,
        pa.ipc.new_stream(str(arrow), schema) as to_arrow,
    ):
        rows: list[dict] = []
        for line in lines:
            rows.append(json.loads(line))
            if len(rows) == 20_000:
                to_parquet.write_table(pa.Table.from_pylist(rows, schema))
                to_arrow.write_table(pa.Table.from_pylist(rows, schema), max_chunksize=1000)
                rows = []
        to_parquet.write_table(pa.Table.from_pylist(rows, schema))
        to_arrow.write_table(pa.Table.from_pylist(rows, schema), max_chunksize=1000)
    return paths


def measure(name: str, path: Path, content_bytes: int) -> None:
    """Run one reader in a fresh process and print its line."""
    code = [sys.executable, __file__, "--reader", name, "--path", str(path)]
    done = subprocess.run(code, capture_output=True, text=True)
    if done.returncode:
        print(f"{name:16} {path.name:12} failed: {done.stderr.strip().splitlines()[-1]}")
        return
    found = json.loads(done.stdout.strip().splitlines()[-1])
    rate = content_bytes / 1e6 / found["cpu_s"]
    print(f"{name:16} {path.name:12} {found['cpu_s']:8.2f} CPU s {rate:8.0f} MB/CPU-s {found['peak_mb']:7.0f} MB peak")


def run_reader(name: str, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:  # imports and start-up aren't measured
        warm = Path(folder) / ("warm" + "".join(path.suffixes))
        if path.suffix == ".jsonl":
            write_corpus(warm, 1000)
            READERS[name](warm)
    start = time.process_time()
    characters = READERS[name](path)
    cpu_s = time.process_time() - start
    print(json.dumps({"cpu_s": cpu_s, "characters": characters, "peak_mb": peak_mb()}))


def peak_mb() -> float:
    """The peak of this process alone; getrusage would give that of the parent it was forked from, if larger."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)  # macOS: bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--formats", action="store_true", help="also read the same rows in all other formats")
    parser.add_argument("--reader", choices=READERS)
    parser.add_argument("--path", type=Path)
    options = parser.parse_args()
    if options.reader:
        run_reader(options.reader, options.path)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        write_corpus(path, options.megabytes * 1_000_000)
        size = path.stat().st_size
        for name in READERS:
            if name != "swift_any" and (name != "datasets" or importlib.util.find_spec("datasets")):
                measure(name, path, size)
        if options.formats:
            for other in write_formats(Path(folder), path):
                measure("swift_any", other, size)


if __name__ == "__main__":
    main()
