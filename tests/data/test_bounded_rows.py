"""One row, page or member never takes the whole memory, and what is packed is unpacked in small pieces."""

from __future__ import annotations

import io
import json
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest
import zstandard

from swift.core.errors import DataError
from swift.data.files import DataFile
from swift.data.readers import FileTally, parse_raw, read_raw
from swift.data.rows import RowProblem
from swift.data.unpack import _MEMBERS, unpacked


@pytest.fixture(autouse=True)
def small_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swift.data.readers.base.VALUE_BYTES", 1 << 20)


def read(path: Path) -> list[Any]:
    rows = []
    for _, raw in read_raw(DataFile(str(path)), FileTally()):
        try:
            rows.append(parse_raw(raw))
        except RowProblem as problem:
            rows.append(problem)
    return rows


@pytest.mark.parametrize("start", ['[{"text": "a"},\n{"text": "', '{"text": "', '[{"text": "a"},\n{"list": ["a", '])
def test_a_value_that_is_not_closed_is_not_read_to_the_end(start: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    body = "text that goes on, " if start.endswith('"') else "1234, "
    path.write_text(start + body * 3_000_000)
    with pytest.raises(DataError, match="larger than 1 MiB") as caught:
        read(path)
    assert caught.value.where == f"{path}:{2 if start[0] == '[' else 1}" and "may not be closed" in str(
        caught.value.fix
    )


def test_a_json_list_may_be_larger(tmp_path: Path) -> None:
    rows = [{"text": "x" * 100_000}] * 50
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows))
    assert read(path) == rows


def test_a_member_of_an_archive_that_is_too_large_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for name, size in (("1.txt", 10), ("2.txt", 2 << 20), ("3.json", 2 << 20), ("4.jpg", 2 << 20), ("5.txt", 10)):
            info = tarfile.TarInfo(name)
            info.size = size
            archive.addfile(info, io.BytesIO(b"x" * size))
    rows = read(path)
    assert [isinstance(row, RowProblem) and row.reason for row in rows] == [
        False,
        "too_large",
        "too_large",
        False,
        False,
    ]
    assert "2.txt: the member is larger than 1 MiB" in rows[1].message


@pytest.mark.parametrize("name", ["a.html", "a.html.zst", "a.pdf"])
def test_a_page_that_is_too_large_is_a_bad_row(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    content = b"<p>" + b"word " * 1_000_000
    path.write_bytes(zstandard.compress(content) if name.endswith("zst") else content)
    (problem,) = read(path)
    assert problem.reason == "too_large"


# --- zstd ---


def frames() -> list[tuple[str, bytes, bytes]]:
    draw = random.Random(5)
    noise = draw.randbytes(700_000)
    words = b" ".join(str(draw.randrange(10**6)).encode() for _ in range(100_000))
    contents = {"nothing": b"", "a byte": b"x", "zeros": bytes(30_000_000), "noise": noise, "words": words}
    contents["a jump"] = words + b"the same line again\n" * 1_000_000
    made = []
    for name, content in contents.items():
        for settings in ({}, {"write_checksum": True}, {"write_content_size": False, "write_checksum": True}):
            made.append((name, content, zstandard.ZstdCompressor(**settings).compress(content)))
        stream = zstandard.ZstdCompressor(level=19 if len(content) < 10**6 else 1).compressobj()
        made.append((name, content, stream.compress(content) + stream.flush()))
    return made


def test_zstd_is_unpacked_in_small_pieces() -> None:
    for name, content, packed in frames():
        member = _MEMBERS["zstd"]()
        pieces = [member.feed(packed[:100_000])]
        at = 100_000
        while not member.eof:
            data = b""
            if member.needs_input:
                data, at = packed[at : at + 100_000], at + 100_000
                assert data, name
            pieces.append(member.feed(data))
        assert b"".join(pieces) == content, name
        assert max(map(len, pieces)) <= 1 << 20, name


class Slow(io.RawIOBase):
    """Gives a few bytes at a time."""

    def __init__(self, data: bytes, most: int) -> None:
        self.data, self.most, self.draw = data, most, random.Random(1)

    def read(self, size: int = -1) -> bytes:
        piece = self.data[: self.draw.randrange(1, self.most)]
        self.data = self.data[len(piece) :]
        return piece


@pytest.mark.parametrize("most", [2, 9, 5000])
def test_zstd_in_any_pieces_and_members(most: int) -> None:
    chosen = [(content, packed) for _, content, packed in frames() if len(packed) < (3000 if most < 10 else 10**6)]
    skippable = (0x184D2A53).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"abcde"
    whole = skippable + b"".join(packed + skippable for _, packed in chosen)
    content = b"".join(content for content, _ in chosen)
    assert unpacked(Slow(whole, most), "zstd", "a").read() == content  # type: ignore[arg-type]
    for cut in (len(whole) - 3, len(whole) - len(skippable) - 2, len(chosen[0][1]) + len(skippable) * 2 + 6):
        with pytest.raises(DataError, match="damaged or incomplete"):
            unpacked(Slow(whole[:cut], 5000), "zstd", "a").read()  # type: ignore[arg-type]


def test_damaged_zstd_ends_with_an_error() -> None:
    draw = random.Random(9)
    packed = zstandard.ZstdCompressor(write_checksum=True).compress(
        b"some words and more " * 5000 + draw.randbytes(3000)
    )
    for _ in range(300):
        broken = bytearray(packed)
        broken[draw.randrange(len(broken))] ^= 1 << draw.randrange(8)
        try:
            content = unpacked(io.BytesIO(broken), "zstd", "a").read()
        except DataError:
            continue
        assert content.startswith(b"some words")  # a flag that changes nothing
