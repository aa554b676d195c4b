"""Tar archives of samples, as webdataset lays them out: neighbouring members with a common stem are one sample.

`0001.txt` and `0001.json` become one row: the text under `text`, the keys of the object beside it. `.md` counts as
text, `.html` goes under `html`, `.cls` under `cls`. Other members (pictures, sounds) aren't read: the row names them by
ending, with `member`, `bytes` and `offset` (of their content in the archive, where it isn't packed).
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import Any

import orjson

from swift.core.errors import DataError
from swift.data.files import DataFile, compression_of, format_of, open_input, size_of
from swift.data.parse_json import decode_utf8, nul_problem, parse_line
from swift.data.readers import base
from swift.data.readers.base import Cursor, FileTally, RawRow
from swift.data.readers.sniff import kind_of, wrong_content
from swift.data.rows import RowProblem

_TEXT = {"txt": "text", "text": "text", "md": "text", "html": "html", "htm": "html", "cls": "cls"}
_ROW_FILES = frozenset({"jsonl", "csv", "tsv", "parquet", "arrow", "tar"})
KEY = "__key__"


class _Member(tarfile.TarInfo):
    """The library takes a header that is cut off or damaged for the end of the archive; here it is an error."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> _Member:
        try:
            return super().fromtarfile(archive)
        except (tarfile.TruncatedHeaderError, tarfile.InvalidHeaderError) as error:  # type: ignore[attr-defined]
            raise tarfile.ReadError(f"at byte {archive.offset}: {error}") from error
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            archive.has_end_mark = True  # type: ignore[attr-defined]
            raise


def read_tar(file: DataFile, tally: FileTally, cursor: Cursor) -> Iterator[RawRow]:
    """Samples, numbered from 1 in the order of the archive."""
    packed = compression_of(file.location) is not None
    size = 0 if packed else size_of(file.location)
    number = cursor.row
    with open_input(file.location) as stream:
        head = stream.peek(512)[:512]  # type: ignore[attr-defined]
        if not head:
            return
        found = kind_of(head)
        if found and found[1] != ".tar":
            raise wrong_content(file, *found)
        _skip(stream, cursor.offset)
        if not stream.peek(1):  # type: ignore[attr-defined]
            return
        try:
            for sample, end in _samples(stream, file, packed, cursor.offset, tally):
                number += 1
                cursor.line, cursor.offset = number, end
                if size:
                    tally.share = min(1.0, end / size)
                yield number, sample
        except tarfile.TarError as error:
            raise DataError(
                f"the tar archive is damaged or incomplete: {error}",
                where=f"{file.name} (after sample {number})",
                fix="fetch it or write it again",
            ) from error


def _skip(stream: Any, offset: int) -> None:
    if offset and stream.seekable():
        stream.seek(offset)
        return
    while offset > 0:
        piece = stream.read(min(1 << 20, offset))
        if not piece:
            return
        offset -= len(piece)


def _samples(
    stream: Any, file: DataFile, packed: bool, base: int, tally: FileTally
) -> Iterator[tuple[dict[str, Any] | RowProblem, int]]:
    """The samples, and at which byte each ends."""
    sample: dict[str, Any] | RowProblem | None = None
    key = ""
    end = 0
    # a packed archive is read from front to back: it can't be asked where it is, so offsets are counted from here
    seekable = stream.seekable()
    shift = 0 if seekable else base
    with tarfile.open(fileobj=stream, mode="r:" if seekable else "r|", tarinfo=_Member) as archive:
        for member in archive:
            archive.members = []  # type: ignore[attr-defined]  # it would remember all
            if not member.isfile():
                continue
            stem, ending = split_member(member.name)
            if not stem:
                continue
            if sample is None or stem != key:
                if sample is not None:
                    yield sample, end
                sample, key = {KEY: stem}, stem
            _refuse_row_file(member.name, file)
            if member.issparse():  # a few bytes may stand for terabytes, and where it ends isn't told by its size
                raise DataError(
                    f"{member.name} is stored as a sparse file", where=file.name, fix="pack it again, by tar without -S"
                )
            if isinstance(sample, dict):
                try:
                    _add(sample, archive, member, ending, packed)
                except RowProblem as problem:
                    sample = RowProblem(problem.reason, f"{member.name}: {problem.message}", problem.fix)
            end = shift + member.offset_data + -(-member.size // 512) * 512
        if not hasattr(archive, "has_end_mark"):
            tally.notes.append(f"{file.name}: the archive has no end mark; members may be missing")
        if sample is not None:
            yield sample, end


def split_member(name: str) -> tuple[str, str]:
    """`a/b.seg.png` -> (`a/b`, `seg.png`): the ending begins at the first dot of the last part. Hidden: two empty."""
    folder, slash, base = name.removeprefix("./").rpartition("/")
    if base.startswith((".", "_")) or not base:
        return "", ""
    stem, _, ending = base.partition(".")
    return folder + slash + stem, ending.lower()


def _refuse_row_file(name: str, file: DataFile) -> None:
    try:
        kind = format_of(name)
    except DataError:
        return
    if kind in _ROW_FILES:
        raise DataError(
            f"the archive holds a data file, {name}, and not samples", where=file.name, fix="unpack it: tar -xf"
        )


def _add(sample: dict[str, Any], archive: tarfile.TarFile, member: tarfile.TarInfo, ending: str, packed: bool) -> None:
    """Put a member into its sample."""
    last = ending.rpartition(".")[2]
    if ending != last and ending in sample:
        last = ending
    if last == "json" or last in _TEXT:
        if member.size > base.VALUE_BYTES:
            raise base.too_large("the member")
        content = archive.extractfile(member)
        assert content is not None  # it is a file
        raw = content.read()
        if len(raw) < member.size:
            raise tarfile.ReadError("unexpected end of data")
        if last == "json":
            _add_json(sample, raw, ending)
            return
        text = decode_utf8(raw)
        if "\x00" in text:
            raise nul_problem(text)
        name = _TEXT[last] if ending == last else ending
        sample[name if name not in sample else ending] = text if last != "cls" else text.strip()
        return
    place = {} if packed else {"offset": member.offset_data}
    sample[ending or "file"] = {"member": member.name, "bytes": member.size, **place}


def _add_json(sample: dict[str, Any], raw: bytes, ending: str) -> None:
    if raw.lstrip()[:1] != b"{":
        try:
            sample[ending] = orjson.loads(raw)
        except orjson.JSONDecodeError:
            parse_line(raw)  # says what is wrong
        return
    value = parse_line(raw)
    if any(key in sample for key in value):
        sample[ending] = value
    else:
        sample.update(value)
