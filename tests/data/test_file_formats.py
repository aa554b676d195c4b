"""Formats beyond lines: pages, pdfs, archives and tables; files under a wrong name; memory; shards without rows."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from swift.core.errors import DataError
from swift.data.files import DataFile
from swift.data.readers import EmptyFileError, FileTally, count_raw, parse_raw, read_raw
from swift.data.rows import RowProblem
from swift.data.sources import parse_source

ROWS = [{"text": f"row {i}"} for i in range(4)]
JSONL = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


def put(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(argument: Path | str, tally: FileTally | None = None) -> list[tuple[int, Any]]:
    found: list[tuple[int, Any]] = []
    for file in parse_source(str(argument)).files:
        for line, raw in read_raw(file, tally or FileTally()):
            try:
                found.append((line, parse_raw(raw)))
            except RowProblem as problem:
                found.append((line, f"{problem.reason}: {problem.message} | {problem.fix}"))
    return found


# --- html ---

PAGE = """<!DOCTYPE html><html><head><title> A
 page </title><style>p {}</style></head><body>
<script>var x = "<p>never shown</p>"</script>
<h1>Head</h1><p>One <b>bold</b>word,&nbsp;and<br>a   break.</p>
<ul><li>first<li>second</ul><table><tr><td>a</td><td>b</td></tr></table>
<pre>if x:
    y</pre><noscript>no</noscript><p hidden>gone</p></body></html>"""


def test_html_is_what_a_reader_sees(tmp_path: Path) -> None:
    (line, row), *rest = read(put(tmp_path / "a.html", PAGE))
    assert (line, rest) == (1, [])
    assert row["title"] == "A page" and row["html"] == PAGE
    assert row["text"] == "Head\nOne boldword, and\na break.\nfirst\nsecond\na b\nif x:\n    y"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('<meta charset="gb2312"><p>你好'.encode("gbk"), "你好"),
        (
            "<meta http-equiv=Content-Type content='text/html; charset=iso-8859-1'>caf\u00e9 \u201cq\u201d".encode(
                "cp1252"
            ),
            "café “q”",
        ),
        ("\ufeff<p>é".encode(), "é"),
        ("<p>é中".encode("utf-16"), "é中"),
        (b"<p>" * 3000 + b"deep", "deep"),
    ],
)
def test_html_encodings_and_depth(tmp_path: Path, content: bytes, text: str) -> None:
    assert read(put(tmp_path / "a.htm", content))[0][1]["text"] == text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("<p>é".encode("latin-1"), "bad_encoding: byte 4 (0xe9) is not UTF-8"),
        (b"<meta charset=nonsense>x", "bad_encoding: the page names an encoding that isn't known: nonsense"),
        (b"<meta charset=punycode><p>x", "bad_encoding: the page isn't punycode"),
        (b"<meta charset=undefined><p>x", "bad_encoding: the page isn't undefined"),
        ("<meta charset=ascii>é".encode(), "bad_encoding: byte 21 is not ascii"),
        (b"<script>draw()</script>", "no_text: the page shows no text"),
        (b"%PDF-1.4 ...", "bad_html: the ending says html, but it is a pdf"),
    ],
)
def test_a_bad_page_is_one_bad_row(tmp_path: Path, content: bytes, message: str) -> None:
    assert read(put(tmp_path / "a.html", content))[0][1].startswith(message)


# --- pdf ---


def make_pdf(pages: list[str], title: str = "") -> bytes:
    """A small pdf, written by hand: an object for the catalogue, the pages, a font, and two for each page."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", "", "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    kids = []
    for text in pages:
        lines = "".join(f"({line}) Tj 0 -14 Td " for line in text.split("\n")) if text else ""
        stream = f"BT /F1 12 Tf 72 720 Td {lines}ET"
        kids.append(len(objects) + 1)
        page = "/Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >>"
        objects.append(f"<< {page} /Contents {len(objects) + 2} 0 R >>")
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
    objects[1] = f"<< /Type /Pages /Count {len(pages)} /Kids [{' '.join(f'{kid} 0 R' for kid in kids)}] >>"
    objects.append(f"<< /Title ({title}) >>")
    out = b"%PDF-1.4\n"
    offsets = []
    for number, content in enumerate(objects, 1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n{content}\nendobj\n".encode()
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    out += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}".encode()
    start = out.index(b"xref\n0")
    trailer = f"trailer << /Size {len(objects) + 1} /Root 1 0 R /Info {len(objects)} 0 R >>"
    return out + f"{trailer}\nstartxref\n{start}\n%%EOF".encode()


def test_pdf_is_one_document_or_a_row_a_page(tmp_path: Path) -> None:
    path = put(tmp_path / "a.pdf", make_pdf(["First page\nsecond line", "", "Third page"], "Report"))
    assert read(path) == [(1, {"text": "First page\nsecond line\n\nThird page", "pages": 3, "title": "Report"})]
    pages = [
        (1, {"text": "First page\nsecond line", "page": 1, "title": "Report"}),
        (3, {"text": "Third page", "page": 3, "title": "Report"}),
    ]
    assert read(f"{path}:pages") == pages
    from swift.data.readers import RowStream

    stream = RowStream(DataFile(str(path), "pages"), FileTally())
    next(iter(stream))
    assert list(RowStream(DataFile(str(path), "pages"), FileTally(), stream.position)) == pages[1:]


def test_a_bad_pdf_is_one_bad_row(tmp_path: Path) -> None:
    good = make_pdf(["text"])
    locked = good.replace(
        b"trailer <<",
        b"trailer << /ID [<00><00>] /Encrypt << /Filter /Standard /V 1 /R 2 /P -4 "
        b"/O <" + b"11" * 32 + b"> /U <" + b"22" * 32 + b"> >>",
    )
    for content, message in (
        (locked, "bad_pdf: the pdf is encrypted | remove its password"),
        (b"%PDF-1.4 nothing", "bad_pdf: the pdf is damaged"),
        (PAGE.encode(), "bad_pdf: the ending says pdf, but it is a web page"),
        (make_pdf(["", ""]), "no_text: the pdf has 2 page(s) and no text"),
    ):
        found = read(put(tmp_path / "a.pdf", content))
        assert len(found) == 1 and found[0][1].startswith(message)


# --- tar ---


def tar(members: dict[str, bytes | str]) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for name, content in members.items():
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
    return sink.getvalue()


def test_members_with_a_common_stem_are_a_sample(tmp_path: Path) -> None:
    content = tar(
        {
            "./a.txt": "one",
            "./a.json": '{"text": "kept apart", "n": 1}',
            "a.seg.png": b"123",
            "_note.txt": "hidden",
            "b.json": '{"messages": [{"role": "user", "content": "q"}], "n": 2}',
            "b.cls": "7\n",
            "b.list.json": "[1, 2]",
            "c/b.md": "# md",
            "c/b.html": "<p>x",
        }
    )
    found = [row for _, row in read(put(tmp_path / "a.tar", content))]
    offset = found[0]["seg.png"].pop("offset")
    assert content[offset : offset + 3] == b"123"
    assert found == [
        {
            "__key__": "a",
            "text": "one",
            "json": {"text": "kept apart", "n": 1},
            "seg.png": {"member": "a.seg.png", "bytes": 3},
        },
        {
            "__key__": "b",
            "messages": [{"role": "user", "content": "q"}],
            "n": 2,
            "cls": "7",
            "list.json": [1, 2],
        },
        {"__key__": "c/b", "text": "# md", "html": "<p>x"},
    ]
    packed = [row for _, row in read(put(tmp_path / "a.tar.zst", zstandard.compress(content)))]
    assert packed == found


def test_a_bad_member_spoils_its_sample_only(tmp_path: Path) -> None:
    content = tar({"a.txt": b"\xff", "b.txt": "fine", "c.json": "{", "d.txt": "x\0", "e.json": '{"a": 1, "a": 2}'})
    found = read(put(tmp_path / "a.tar", content))
    assert found[1] == (2, {"__key__": "b", "text": "fine"})
    for index, message in (
        (0, "bad_encoding: a.txt: byte 1"),
        (2, "not_json: c.json"),
        (3, "nul_byte"),
        (4, "duplicate"),
    ):
        assert found[index][1].startswith(message)


def test_sparse_members_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tarfile.TarInfo, "issparse", lambda self: True)  # the library can't write one
    with pytest.raises(DataError, match=r"1\.txt is stored as a sparse file"):
        read(put(tmp_path / "a.tar", tar({"1.txt": b"x"})))


def test_damaged_archives_are_named(tmp_path: Path) -> None:
    content = tar({f"{i}.txt": f"text {i}" * 100 for i in range(4)})
    for cut in (700, 1536 * 2 - 100, 1536 * 3 + 100):
        with pytest.raises(DataError, match="damaged or incomplete") as caught:
            read(put(tmp_path / "a.tar", content[:cut]))
        assert "after sample" in caught.value.where
        with pytest.raises(DataError, match="damaged or incomplete"):
            read(put(tmp_path / "a.tar.gz", gzip.compress(content[:cut])))
    with pytest.raises(DataError, match="holds a data file"):
        read(put(tmp_path / "b.tar", tar({"rows.jsonl": JSONL})))
    with pytest.raises(EmptyFileError, match="no rows"):
        read(put(tmp_path / "c.tar", tar({})))
    with pytest.raises(DataError, match="it is a pdf"):
        read(put(tmp_path / "d.tar", b"%PDF-1.4"))


def test_an_archive_cut_between_members_is_pointed_out(tmp_path: Path) -> None:
    content = tar({"a.txt": "one", "b.txt": "two"})
    tally = FileTally()
    assert len(read(put(tmp_path / "a.tar", content[: 4 * 512]), tally)) == 2
    assert "end mark" in tally.notes[0]
    tally = FileTally()
    read(put(tmp_path / "b.tar", content), tally)
    assert not tally.notes


# --- markdown ---


def test_markdown_is_one_document(tmp_path: Path) -> None:
    path = put(tmp_path / "a.md", "# T\n\none\ntwo\n\nthree\n")
    assert read(path) == [(1, {"text": "# T\n\none\ntwo\n\nthree"})]
    assert [row["text"] for _, row in read(f"{path}:paragraphs")] == ["# T", "one\ntwo", "three"]
    bad = read(put(tmp_path / "b.md", b"# T\n\nfine\n\xff\nfine\n"))
    assert len(bad) == 1 and bad[0][0] == 4 and bad[0][1].startswith("bad_encoding: byte 1")


# --- csv ---


def test_a_quote_that_is_not_closed_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swift.data.readers.base.VALUE_BYTES", 1000)
    path = put(tmp_path / "a.csv", 'text,n\na,1\n"b,2\n' + "c,3\n" * 1000)
    found = []
    with pytest.raises(DataError, match="a csv row that ends") as caught:
        found += [row for _, row in read_raw(DataFile(str(path)), FileTally())]
    assert int(caught.value.where.rsplit(":", 1)[1]) > 200
    assert len(read(put(tmp_path / "b.csv", "text\n" + "x" * 90 + "\n" + ("y" * 90 + "\n") * 100))) == 101


# --- tables ---


def test_parts_with_different_schemas(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts = (
        [{"text": "a", "n": 1}],
        [{"messages": [{"role": "user", "content": "b"}], "n": "two"}],
        [{"q": None, "text": "c"}],
    )
    for index, rows in enumerate(parts):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{index}.parquet")
    assert [row for _, row in read(tmp_path)] == [parts[0][0], parts[1][0], {"text": "c"}]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_damaged_tables_are_named(name: str, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / name
    table = pa.table({"text": ["x" * 1000] * 500, "n": list(range(500))})
    if name == "a.parquet":
        pq.write_table(table, path, compression="none", use_dictionary=False)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=50)
    content = path.read_bytes()
    for cut in (len(content) // 2, 40, 3):
        with pytest.raises(DataError) as caught:
            read(put(path, content[:cut]))
        assert caught.value.where == str(path)
    with pytest.raises(DataError, match="text in JSON") as caught:
        read(put(path, JSONL))
    assert caught.value.fix == "rename it to a.jsonl"


def test_wide_rows_come_in_small_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from swift.data.readers import tables

    pq.write_table(pa.table({"text": ["x" * 100_000] * 64}), tmp_path / "a.parquet", use_dictionary=False)
    sizes: list[int] = []
    inner = tables._batch_rows
    monkeypatch.setattr(tables, "_batch_rows", lambda *args: sizes.append(inner(*args)) or sizes[-1])
    assert len(read(tmp_path / "a.parquet")) == 64
    assert sizes and all(size < 100 for size in sizes)


def test_a_folder_that_datasets_saved(tmp_path: Path) -> None:
    import pyarrow as pa

    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(str(tmp_path / "data-00000-of-00001.arrow"), table.schema) as writer:
        writer.write_table(table)
    put(tmp_path / "dataset_info.json", "{}")
    put(tmp_path / "state.json", "{}")
    assert [row for _, row in read(tmp_path)] == ROWS
    assert count_raw(parse_source(str(tmp_path)).files[0]) == 4


# --- wrong names ---

WRONG: dict[str, tuple[str, Callable[[], bytes], str, str]] = {
    "gzip": ("a.jsonl", lambda: gzip.compress(JSONL), "packed with gzip", "rename it to a.jsonl.gz"),
    "zstd": ("a.csv", lambda: zstandard.compress(JSONL), "packed with zstd", "rename it to a.csv.zst"),
    "packed twice": ("a.jsonl.gz", lambda: gzip.compress(gzip.compress(JSONL)), "packed with gzip", "packed twice"),
    "parquet": ("a.jsonl", lambda: b"PAR1" + bytes(40), "a parquet file", "rename it to a.parquet"),
    "parquet in gzip": ("a.json.gz", lambda: gzip.compress(b"PAR1" + bytes(40)), "a parquet file", "name it a.parquet"),
    "arrow": ("a.txt", lambda: b"ARROW1\0\0", "an arrow file", "rename it to a.arrow"),
    "zip": ("a.csv", lambda: b"PK\3\4" + bytes(40), "a zip archive", "convert it"),
    "pdf": ("a.txt", lambda: b"%PDF-1.7", "a pdf", "rename it to a.pdf"),
    "tar": ("a.jsonl", lambda: tar({"a.txt": "x"}), "a tar archive", "rename it to a.tar"),
    "web page": ("a.jsonl", lambda: b"\n <!DOCTYPE HTML><html>", "a web page", "download the file again"),
    "web page as parquet": ("a.parquet", lambda: b"<html>not found</html>", "a web page", "download the file again"),
    "git lfs": ("a.jsonl", lambda: b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer", "git lfs pull"),
    "a list": ("a.jsonl", lambda: json.dumps(ROWS).encode(), "a JSON list of rows", "rename it to a.json"),
    "a list over lines": (
        "a.jsonl",
        lambda: json.dumps(ROWS, indent=1).encode(),
        "over several lines",
        "rename it to a.json",
    ),
    "a long list": ("a.jsonl", lambda: json.dumps(ROWS * 5000).encode(), "a JSON list of rows", "rename it to a.json"),
    "an object over lines": (
        "a.jsonl.gz",
        lambda: gzip.compress(b'{\n"a": 1\n}'),
        "over several lines",
        "rename it to a.json",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_name_is_named_with_the_right_one(case: str, tmp_path: Path) -> None:
    name, content, message, fix = WRONG[case]
    with pytest.raises(DataError) as caught:
        read(put(tmp_path / name, content()))
    assert message in caught.value.message
    assert fix in (caught.value.fix or "")
    assert str(tmp_path / name) in (caught.value.where or "")


# --- json in pieces ---


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swift.data.readers.json_rows._PIECE", 7)


@pytest.mark.parametrize("indent", [None, 1])
def test_a_list_is_read_through_a_window(small_pieces: None, indent: int | None, tmp_path: Path) -> None:
    rows = [{"text": "é中" * i, "n": -1234567 * i, "deep": [{"a": [True, None, 1e9]}] * (i % 3)} for i in range(40)]
    text = json.dumps(rows, indent=indent, ensure_ascii=False)
    found = read(put(tmp_path / "a.json", text))
    assert [row for _, row in found] == rows
    lines = [1] * 40 if indent is None else [n for n, line in enumerate(text.split("\n"), 1) if line == " {"]
    assert [line for line, _ in found] == lines
    assert read(put(tmp_path / "b.json", "\n".join(json.dumps(row) for row in rows))) == list(enumerate(rows, 1))


@pytest.mark.parametrize("piece", [1, 3, 7, 64, 1 << 18])
def test_faults_of_a_list_are_found_where_they_are(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swift.data.readers.json_rows._PIECE", piece)
    good = '{"text": "é中"}'
    for broken, where, message in (
        (f"[{good},\n{good},\n  {{'a': 1}}]", 3, "line 3, column 4"),
        (f"[{good},\n{good},\n  {good}", 3, "isn't closed"),
        (f"[{good},\n{good}\n  {good}]", 3, "comma is missing"),
        (f'[{good},\n{good},\n  {{"a": tru}}]', 3, "line 3, column 9"),
        (f'[{good},\n{good}, {{"a": 1, "a": 2}}]', 2, "'a' occurs twice"),
        (f'[{good},\n{good}, {good}, {{"a": "x', 2, "ends too early"),
        (f"[{good},\n{good},\n\n5 6]", 4, "comma is missing"),
    ):
        path = put(tmp_path / "a.json", broken)
        with pytest.raises(DataError) as caught:
            read(path)
        assert message in caught.value.message and caught.value.where == f"{path}:{where}", broken
    broken = "[" + ", ".join([good] * 50) + ", {'a': 1}]"  # columns are counted across what was forgotten
    with pytest.raises(DataError, match=f"line 1, column {broken.index(chr(39)) + 1}"):
        read(put(tmp_path / "a.json", broken))
    assert "not an object: 1234567" in read(put(tmp_path / "a.json", f"[{good}, 1234567, {good}]"))[1][1]
    path = put(tmp_path / "a.json", f"[{good},\n{good},\n".encode() + b'{"a": "\xff"}]')
    with pytest.raises(DataError) as caught:
        read(path)
    byte = path.read_bytes().index(b"\xff") + 1
    assert f"byte {byte} of the file (0xff)" in caught.value.message and caught.value.where == f"{path}:3"
