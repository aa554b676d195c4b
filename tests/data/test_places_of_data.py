"""Places of data: packed streams and their damage, URLs, web servers, links, and what is refused offline."""

from __future__ import annotations

import bz2
import functools
import gzip
import http.server
import io
import json
import lzma
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import pytest
import zstandard

from swift.core import network
from swift.core.errors import DataError, DependencyError, NetworkError
from swift.data import files
from swift.data.files import DataFile, format_of, is_data_file, list_inputs, open_input, size_of, stamp_of
from swift.data.readers import FileTally, RowStream, count_raw, parse_raw, read_raw, split_file
from swift.data.sources import parse_source
from swift.data.unpack import unpacked

ROWS = [{"text": f"row {i}", "n": i} for i in range(40)]
JSONL = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
CODEC = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz"}


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def rows_at(argument: str) -> list[dict[str, Any]]:
    return [parse_raw(raw) for file in parse_source(argument).files for _, raw in read_raw(file, FileTally())]


# --- packed streams ---


@pytest.mark.parametrize("ending", PACKERS)
def test_members_of_all_sizes_come_out_whole(ending: str) -> None:
    rng = random.Random(1)
    content = b"".join(
        rng.choice([b"", b"a" * rng.randrange(5_000_000), rng.randbytes(rng.randrange(300_000))]) for _ in range(8)
    )
    cuts = [0, *sorted(rng.randrange(len(content)) for _ in range(5)), len(content)]
    packed = b"".join(PACKERS[ending](content[start:end]) for start, end in pairwise(cuts))
    packed += PACKERS[ending](b"")
    stream = unpacked(io.BytesIO(packed), CODEC[ending], "x")
    pieces = []
    while piece := stream.read(rng.randrange(1, 700_000)):
        pieces.append(piece)
    assert b"".join(pieces) == content
    # byte by byte, as a slow server gives them
    small = PACKERS[ending](b"first") + PACKERS[ending](b"second")

    class Drops(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(1)

    assert unpacked(Drops(small), CODEC[ending], "x").read() == b"firstsecond"


@pytest.mark.parametrize("ending", PACKERS)
def test_a_stream_cut_anywhere_is_torn_and_says_where(ending: str, tmp_path: Path) -> None:
    first, second = PACKERS[ending](b"a" * 100), PACKERS[ending](random.Random(0).randbytes(50))
    packed = first + second
    for cut in range(1, len(packed)):
        path = put(tmp_path / f"a.txt{ending}", packed[:cut])
        if cut == len(first):
            assert open_input(str(path)).read() == b"a" * 100
            continue
        with pytest.raises(DataError, match="damaged or incomplete") as caught, open_input(str(path)) as stream:
            stream.read()
        assert str(path) in caught.value.where
        if cut > len(first):  # (what comes out of a torn member itself depends on its blocks)
            assert int(caught.value.where.split("after ")[1].split()[0]) >= 100


@pytest.mark.parametrize("ending", PACKERS)
def test_damage_in_the_middle_is_named_behind_the_rows_before_it(ending: str, tmp_path: Path) -> None:
    packed = PACKERS[ending](JSONL)
    broken = packed + packed[: len(packed) // 2] + bytes(b ^ 0xFF for b in packed[len(packed) // 2 :])
    found = []
    with pytest.raises(DataError, match="damaged") as caught:
        for _, raw in read_raw(DataFile(str(put(tmp_path / f"a.jsonl{ending}", broken))), FileTally()):
            found.append(parse_raw(raw))
    assert found[: len(ROWS)] == ROWS
    assert "unpacked bytes" in caught.value.where


def test_padding_and_what_is_not_packed_at_all(tmp_path: Path) -> None:
    assert open_input(str(put(tmp_path / "a.txt.gz", gzip.compress(b"x") + b"\0" * 600))).read() == b"x"
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00meta"
    assert open_input(str(put(tmp_path / "a.txt.zst", skippable + zstandard.compress(b"x")))).read() == b"x"
    with pytest.raises(DataError, match="no gzip file") as caught:
        open_input(str(put(tmp_path / "b.jsonl.gz", JSONL))).read()
    assert caught.value.fix and "rename it to" in caught.value.fix and "b.jsonl;" in caught.value.fix
    with pytest.raises(DataError, match="something else follows"):
        open_input(str(put(tmp_path / "c.txt.gz", gzip.compress(b"x") + b"tail tail"))).read()
    assert open_input(str(put(tmp_path / "d.txt.gz", b""))).read() == b""


# --- names ---


@pytest.mark.parametrize(
    ("name", "kind", "codec", "stem"),
    [
        ("a.jsonl", "jsonl", None, "a"),
        ("x/a.b.JSONL.GZ", "jsonl", "gzip", "a.b"),
        ("s3://b/k/part.json.zst", "json", "zstd", "part"),
        ("https://h/p/a.parquet?download=true", "parquet", None, "a"),
        ("a.tgz", "tar", "gzip", "a"),
        ("a.tar.xz", "tar", "xz", "a"),
        ("a.markdown", "md", None, "a"),
    ],
)
def test_names_say_format_and_packing(name: str, kind: str, codec: str | None, stem: str) -> None:
    assert (format_of(name), files.compression_of(name), files.stem_of(name)) == (kind, codec, stem)


def test_names_that_are_no_data() -> None:
    for name in (
        "a",
        "a.gz",
        "jsonl",
        ".jsonl.gz",
        "_a.jsonl",
        "README.md",
        "LICENSE.txt",
        "dataset_info.json",
        "a.doc",
    ):
        assert not is_data_file(name)
    assert is_data_file("readme-data.jsonl") and is_data_file("notes.md")
    with pytest.raises(DataError, match="while it is packed"):
        format_of("a.parquet.gz")


# --- links ---


def test_loops_of_links_end_and_each_file_comes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("d/a.jsonl", "d/sub/b.jsonl", "elsewhere/c.jsonl"):
        put(tmp_path / name, JSONL)
    Path("d/sub/up").symlink_to("..")
    Path("d/self").symlink_to(".")
    Path("d/there").symlink_to("../elsewhere")
    Path("elsewhere/back").symlink_to("../d")
    Path("d/again.jsonl").symlink_to("a.jsonl")
    for argument in ("d:all", "d/**/*.jsonl", f"{tmp_path}/d/**"):
        found = [os.path.realpath(file.location) for file in parse_source(argument).files]
        assert sorted(found) == sorted(os.path.realpath(p) for p in ("d/a.jsonl", "d/sub/b.jsonl", "elsewhere/c.jsonl"))
    assert [Path(p).name for p in list_inputs("d")] == ["a.jsonl"]


@pytest.mark.parametrize("target", ["nowhere.jsonl", "train-00002.jsonl"])
def test_a_link_that_leads_nowhere_is_an_error(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "d/train-00001.jsonl", JSONL)
    put(tmp_path / "d/test.jsonl", JSONL)
    link = Path("d/train-00002.jsonl")
    link.symlink_to(target)
    for argument in ("d", "d:all", "d:train", "d/*.jsonl", "d/train*", "**/*.jsonl", ".:d", f"{tmp_path}/d/**"):
        with pytest.raises(DataError, match=f"train-00002.jsonl -> {target}") as caught:
            parse_source(argument)
        assert str(caught.value.where).endswith("d/train-00002.jsonl") and "remove the link" in str(caught.value.fix)
    with pytest.raises(DataError, match="leads nowhere"):
        list_inputs("d")
    for argument in ("d:test", "d/test*", "**/test.jsonl"):  # what nobody asked for
        assert [Path(file.location).name for file in parse_source(argument).files] == ["test.jsonl"]
    with pytest.raises(DataError):
        parse_source(str(link))
    link.unlink()
    Path("d/.#train.jsonl").symlink_to("someone@machine")  # an editor's lock
    Path("d/notes.log").symlink_to("gone.log")
    assert len(parse_source("d:all").files) == 2
    Path("d/more").symlink_to("a-disk-that-is-away")
    for argument in ("d", "d:all", "d/**/*.jsonl"):
        with pytest.raises(DataError, match="more -> a-disk"):
            parse_source(argument)


def test_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a1.jsonl", "a2.jsonl", "b.jsonl", "x/a3.jsonl", "x/y/a4.jsonl", ".h/a5.jsonl", "x/.a6.jsonl"):
        put(tmp_path / name, JSONL)

    def found(pattern: str) -> list[str]:
        return [file.location for file in parse_source(pattern).files]

    assert found("a*.jsonl") == ["a1.jsonl", "a2.jsonl"]
    assert found("[!b]?.jsonl") == ["a1.jsonl", "a2.jsonl"]
    assert found("**/a*.jsonl") == ["a1.jsonl", "a2.jsonl", "x/a3.jsonl", "x/y/a4.jsonl"]
    assert found("x/**/a[34].jsonl") == ["x/a3.jsonl", "x/y/a4.jsonl"]
    assert found("**/y/*") == ["x/y/a4.jsonl"]
    assert found("*/*.jsonl#3") == ["x/a3.jsonl"]


# --- URLs ---


@pytest.fixture
def memory() -> Iterator[str]:
    """A folder of a file system that isn't the local one."""
    system = fsspec.filesystem("memory")
    for name, content in {
        "box/a.jsonl": JSONL,
        "box/b.jsonl.zst": zstandard.compress(JSONL),
        "box/sub/c.jsonl": JSONL,
        "box/sub/train-00000-of-00002.jsonl": JSONL[:20],
    }.items():
        system.pipe(f"/{name}", content)
    yield "memory://box"
    system.rm("/box", recursive=True)


def test_urls_mean_what_paths_mean(memory: str) -> None:
    assert rows_at(f"{memory}/a.jsonl") == ROWS
    source = parse_source(f"{memory}/a.jsonl#5")
    assert source.count == 5 and source.files == (DataFile(f"{memory}/a.jsonl"),)
    assert rows_at(memory) == ROWS + ROWS
    assert rows_at(f"{memory}/*.zst") == ROWS
    assert len(parse_source(f"{memory}/**/*.jsonl").files) == 3
    assert len(parse_source(f"{memory}:all").files) == 4
    assert [file.location.rsplit("/", 1)[-1] for file in parse_source(f"{memory}:sub").files] == [
        "c.jsonl",
        "train-00000-of-00002.jsonl",
    ]
    assert len(parse_source(f"{memory}/sub:train").files) == 1
    for wrong, message in ((f"{memory}/z.jsonl", "no file or folder"), (f"{memory}:gone", "no subset 'gone'")):
        with pytest.raises(DataError, match=message):
            parse_source(wrong)


def test_urls_are_measured_split_and_resumed(memory: str) -> None:
    file = parse_source(f"{memory}/a.jsonl").files[0]
    assert size_of(file.location) == len(JSONL) and count_raw(file) == 40
    pieces = split_file(file, 100)
    assert len(pieces) > 5
    assert [str(p.ref(line)) for p in pieces for line, _ in RowStream(p, FileTally())] == [
        f"{file.location}:{line}" for line in range(1, 41)
    ]
    before = stamp_of(file.location)
    fsspec.filesystem("memory").pipe("/box/a.jsonl", JSONL[::-1])
    assert stamp_of(file.location) != before
    with pytest.raises(DataError, match="local file"):
        _ = file.path


def test_tables_are_read_over_urls(memory: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(ROWS)
    for name, write in {
        "a.parquet": lambda sink: pq.write_table(table, sink, row_group_size=9),
        "f.arrow": lambda sink: pa.ipc.new_file(sink, table.schema).write_table(table),
    }.items():
        with fsspec.open(f"memory://tables/{name}", "wb") as sink:
            if name == "f.arrow":
                with pa.ipc.new_file(sink, table.schema) as writer:
                    writer.write_table(table)
            else:
                write(sink)
        assert rows_at(f"memory://tables/{name}") == ROWS
    fsspec.filesystem("memory").rm("/tables", recursive=True)


def test_file_urls_are_local_paths(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", JSONL)
    assert parse_source(f"file://{path}").files == (DataFile(str(path)),)


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A plain web server over a folder, which gives no parts of files."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    put(tmp_path / "www/data/a.jsonl", JSONL)
    put(tmp_path / "www/data/b.jsonl.gz", gzip.compress(JSONL))
    put(tmp_path / "www/data/page.jsonl", b"<!DOCTYPE html><html>404</html>")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    handler = functools.partial(Handler, directory=str(tmp_path / "www"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/data"
    server.shutdown()
    server.server_close()


def test_a_web_server(web: str, tmp_path: Path) -> None:
    assert rows_at(f"{web}/a.jsonl") == ROWS
    assert rows_at(f"{web}/b.jsonl.gz") == ROWS
    assert rows_at(f"{web}/a.jsonl?download=true#3") == ROWS
    assert [parse_source(f"{web}/a.jsonl{end}").count for end in ("", "#3", "?x=1#3")] == [None, 3, 3]
    file = parse_source(f"{web}/a.jsonl").files[0]
    assert stamp_of(file.location) == stamp_of(file.location) and size_of(file.location) in (0, len(JSONL))
    stream = RowStream(file, FileTally())
    rows = iter(stream)
    for _ in range(7):
        next(rows)
    assert [parse_raw(raw) for _, raw in RowStream(file, FileTally(), stream.position)] == ROWS[7:]
    big = [{"text": "x" * 100_000, "n": i} for i in range(100)]
    put(tmp_path / "www/data/big.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in big))
    assert rows_at(f"{web}/big.jsonl") == big
    assert len(split_file(parse_source(f"{web}/big.jsonl").files[0], 1000)) == 1
    assert len(parse_source(f"{web}/*.jsonl").files) == 3
    put(tmp_path / "www/data/t.parquet", b"PAR1" + bytes(12_000_000) + b"PAR1")
    with pytest.raises(DataError, match="whole files only"):
        rows_at(f"{web}/t.parquet")
    with pytest.raises(DataError, match="web page"):
        rows_at(f"{web}/page.jsonl")
    with pytest.raises(DataError, match="no file or folder"):
        parse_source(f"{web}/gone.jsonl")


@pytest.mark.parametrize("url", ["https://example.invalid/a.jsonl", "s3://b/a.jsonl", "hdfs://h/a", "oss://b/*.jsonl"])
def test_the_network_is_refused_when_offline(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert not network.is_offline()
    network.set_offline()
    with pytest.raises(NetworkError, match="forbidden") as caught:
        parse_source(url)
    assert caught.value.where == url


@pytest.mark.parametrize(
    ("url", "package"), [("s3://b/a.jsonl", "s3fs"), ("gs://b/a.jsonl", "gcsfs"), ("oss://b/a.jsonl", "ossfs")]
)
def test_a_missing_driver_is_named(url: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setitem(sys.modules, package, None)  # also where it is installed
    with pytest.raises(DependencyError) as caught:
        parse_source(url)
    assert caught.value.fix == f"pip install {package}"


def test_an_unknown_scheme_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with pytest.raises(DataError, match="no driver is known for nonsense://"):
        parse_source("nonsense://a/b.jsonl")


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    for function in (open_input, size_of, stamp_of):
        with pytest.raises(DataError) as caught:
            function(str(tmp_path / "gone.jsonl"))
        assert str(tmp_path / "gone.jsonl") in (caught.value.where or "")
    with pytest.raises(DataError, match="can't be read"):
        open_input(str(tmp_path))


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    real = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match="can't be read: Permission denied"):
        files.walk_files(str(tmp_path))
