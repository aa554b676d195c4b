"""Files under a wrong ending: what their first bytes say they are, and how to name them."""

from __future__ import annotations

from swift.core.errors import DataError
from swift.data.files import FORMATS, DataFile, base_name, compression_of, stem_of
from swift.data.unpack import MAGIC

_BINARY = (  # (first bytes, what it is, ending)
    (b"PAR1", "a parquet file", ".parquet"),
    (b"ARROW1\0\0", "an arrow file", ".arrow"),
    (b"\xff\xff\xff\xff", "an arrow stream", ".arrow"),
    (b"%PDF-", "a pdf", ".pdf"),
    (MAGIC["gzip"], "packed with gzip", ".gz"),
    (MAGIC["zstd"], "packed with zstd", ".zst"),
    (MAGIC["bzip2"], "packed with bzip2", ".bz2"),
    (MAGIC["xz"], "packed with xz", ".xz"),
    (b"PK\x03\x04", "a zip archive (or an office document)", ""),
    (b"SQLite format 3\0", "an SQLite database", ""),
    (b"\x89HDF\r\n", "an HDF5 file", ""),
    (b"\x93NUMPY", "a numpy array", ""),
)
_WEB = (b"<!doctype html", b"<html", b"<?xml", b"<head", b"<body")


def kind_of(head: bytes) -> tuple[str, str] | None:
    """What the first bytes (at least 300, if there are so many) are a sign of, and its ending; None for plain text."""
    for magic, what, ending in _BINARY:
        if head.startswith(magic) and (what != "packed with bzip2" or head[4:10] == b"1AY&SY"):  # else: BZh, a name
            return what, ending
    if head[257:262] == b"ustar":
        return "a tar archive", ".tar"
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the data", ""
    if head.lstrip()[:20].lower().startswith(_WEB):
        return "a web page (perhaps an error page that was saved as the file)", ".html"
    return None


def refuse_wrong_content(head: bytes, file: DataFile) -> None:
    """Refuse a text file whose (unpacked) content is plainly something else.

    Raises:
        DataError: naming what it is, and how to name the file.
    """
    found = kind_of(head)
    expected = file.format
    if (
        found is None
        or (found[1] == ".html" and expected in ("html", "txt", "md"))
        or FORMATS.get(found[1]) == expected
    ):
        return
    raise wrong_content(file, *found)


def wrong_content(file: DataFile, what: str, ending: str) -> DataError:
    """The error for a file that is something else than its ending says."""
    name = base_name(file.location)
    packed = compression_of(file.location)
    if "LFS" in what:
        fix = "git lfs pull, or download the file"
    elif ending == ".html":
        fix = "open it to see what the server said, and download the file again"
    elif packed and ending in (".gz", ".zst", ".bz2", ".xz"):
        fix = "it was packed twice: unpack it once"
    elif packed:
        fix = f"unpack it and name it {stem_of(file.location)}{ending}" if ending else "unpack and convert it"
    elif ending in (".gz", ".zst", ".bz2", ".xz"):
        fix = f"rename it to {name}{ending}"
    elif ending:
        fix = f"rename it to {stem_of(file.location)}{ending}"
    else:
        fix = "convert it to jsonl or parquet"
    inside = "its content is" if packed else "it is"
    return DataError(f"the ending says {file.format}, but {inside} {what}", where=file.name, fix=fix)
