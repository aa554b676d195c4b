"""Where data lies: local paths and URLs of any file system that fsspec knows, opened, listed and measured alike.

A location is a string: a local path, or `scheme://…`. What its name says of the format is known here; what is inside is
the readers' business. Nothing heavy is imported before a URL is used, and network URLs are refused when offline.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import io
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from swift.core.addresses import without_secrets
from swift.core.errors import DataError
from swift.data.patterns import path_pattern
from swift.data.remote import RemoteFile, filesystem, is_url, is_web, remote_errors
from swift.data.rows import RowRef
from swift.data.unpack import unpacked

FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".txt": "txt",
    ".md": "md",
    ".markdown": "md",
    ".html": "html",
    ".htm": "html",
    ".pdf": "pdf",
    ".tar": "tar",
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz"}
DOCUMENT_FORMATS = frozenset({"txt", "md", "html", "pdf"})  # files for people: often only company for the data
BUFFER_BYTES = 1 << 18
_UNPACKABLE = frozenset({"parquet", "arrow", "pdf"})  # packed inside already, and read from several places at once
# files that go with a data set and aren't part of it
_COMPANIONS = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
_CARDS = frozenset({"readme", "license", "licence", "changelog", "contributing"})


@dataclass(frozen=True)
class DataFile:
    """A file, or a piece of one.

    Attributes:
        location: a local path or a URL.
        part: what of it was asked for: a key of a json object, or how a text or pdf is cut.
        span: of jsonl, the bytes [first, end) in which the lines begin; of parquet, the row groups [first, end).
        first_line: of a jsonl span, the 1-based line that the byte before it belongs to (1 if there is none); None
            where counting would cost a second reading: then rows are numbered by the byte at which their line begins.
        label: what rows and messages call the file; None: its address.
    """

    location: str
    part: str | None = None
    span: tuple[int, int] | None = None
    first_line: int | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "location", os.fspath(self.location))

    @property
    def path(self) -> Path:
        """The local path.

        Raises:
            DataError: it lies elsewhere.
        """
        if is_url(self.location):
            raise DataError("this needs a local file", where=self.location, fix="copy it here first")
        return Path(self.location)

    @property
    def format(self) -> str:
        """One of the values of `FORMATS`; DataError for another ending."""
        return format_of(self.location)

    @functools.cached_property
    def address(self) -> str:
        """The location without passwords and signatures: what is written down, and stays when a URL is signed anew."""
        return without_secrets(self.location)

    @functools.cached_property
    def place(self) -> str:
        """Where it lies, however the user spelt it: runs are recognised by it."""
        return self.address if is_url(self.location) else str(self.path.resolve())

    @property
    def name(self) -> str:
        """What messages and row references call it."""
        return self.label or self.address

    @property
    def by_offset(self) -> bool:
        """Whether its rows are numbered by bytes, not by lines."""
        return self.span is not None and self.first_line is None and self.format == "jsonl"

    def ref(self, line: int) -> RowRef:
        """The reference of the row that a reader gave with this number; the same however the file was split."""
        return RowRef(self.name, line, self.by_offset)


# --- names ---


def base_name(location: str) -> str:
    """The last part of a path or URL, without a query."""
    if is_web(location):
        location = re.split(r"[?#]", location, maxsplit=1)[0]
    return location.rstrip("/").rsplit("/", 1)[-1] if is_url(location) else Path(location).name


def _endings(location: str) -> tuple[str, str]:
    """The format's ending and the compression's, in lower case; either may be empty."""
    name = base_name(location).lower()
    if name.endswith(".tgz"):
        return ".tar", ".gz"
    stem, dot, last = name.rpartition(".")
    if dot and f".{last}" in COMPRESSIONS:
        packed = f".{last}"
        stem, dot, last = stem.rpartition(".")
    else:
        packed = ""
    return (f".{last}" if dot and f".{last}" in FORMATS else ""), packed


def stem_of(location: str) -> str:
    """The name without the endings of format and compression."""
    name = base_name(location)
    plain, packed = _endings(location)
    if name.lower().endswith(".tgz"):
        return name[:-4]
    return name[: len(name) - len(plain) - len(packed)]


def compression_of(location: str) -> str | None:
    """`gzip`, `zstd`, `bzip2`, `xz`, or None."""
    return COMPRESSIONS.get(_endings(location)[1])


def format_of(location: str | Path) -> str:
    """The format that the ending stands for.

    Raises:
        DataError: for an ending that isn't known, or a format that can't be packed.
    """
    location = os.fspath(location)
    ending, packed = _endings(location)
    if not ending:
        raise DataError(
            f"{base_name(location)!r} is not a data file: its ending is none of {formats_text()}",
            where=location,
            fix="rename it to what it holds, or convert it to jsonl",
        )
    if packed and FORMATS[ending] in _UNPACKABLE:
        raise DataError(
            f"a {ending} file can't be read while it is packed as {packed}", where=location, fix="unpack it"
        )
    return FORMATS[ending]


def formats_text() -> str:
    """All endings, for messages."""
    return f"{', '.join(FORMATS)} (all but .parquet, .arrow and .pdf also with {', '.join(COMPRESSIONS)})"


def is_data_file(location: str | Path) -> bool:
    """Whether a file that was found in a folder is data: a known ending, not hidden, and no card beside the data."""
    location = os.fspath(location)
    name = base_name(location)
    ending, _ = _endings(location)
    if not ending or name.startswith((".", "_")) or name.lower() in _COMPANIONS:
        return False
    return not (FORMATS[ending] in DOCUMENT_FORMATS and stem_of(location).lower() in _CARDS)


def join(folder: str, name: str) -> str:
    """A location below a folder."""
    return f"{folder.rstrip('/')}/{name}" if is_url(folder) else str(Path(folder) / name)


# --- opening and measuring ---


def open_packed(location: str, *, anywhere: bool = False) -> io.BufferedReader:
    """The bytes as they are stored.

    Args:
        location: a path or URL.
        anywhere: whether reading has to jump about; without it, web servers that only give whole files will do, and
            then the stream isn't seekable.

    Raises:
        DataError, NetworkError, DependencyError: it isn't there or can't be read.
    """
    if not is_url(location):
        with remote_errors(location):
            try:
                return io.BufferedReader(Path(location).open("rb", buffering=0), BUFFER_BYTES)
            except FileNotFoundError as error:
                raise DataError(f"the file can't be read: {error.strerror}", where=location) from error
    system, path = filesystem(location)
    with remote_errors(location):
        in_order = not anywhere and is_web(location) and not _info(location).get("partial")
        inner = system.open(path, "rb", **({"block_size": 0} if in_order else {}))
        return io.BufferedReader(RemoteFile(inner, location, in_order), BUFFER_BYTES)


def open_input(location: str) -> BinaryIO:
    """The content, unpacked where the ending says that it is packed.

    Raises:
        DataError: it isn't there or can't be read; also from a read, when a packed stream is torn or damaged: it names
            the file and how many unpacked bytes came before.
        NetworkError, DependencyError: it lies elsewhere, and the network is forbidden or the driver missing.
    """
    stream = open_packed(location)
    codec = compression_of(location)
    return unpacked(stream, codec, location) if codec else stream


def size_of(location: str) -> int:
    """Bytes as stored; 0 where the server doesn't tell."""
    if not is_url(location):
        with remote_errors(location):
            return Path(location).stat().st_size
    with remote_errors(location):
        return int(_info(location).get("size") or 0)


_INFO_S = 60.0
_STAMP = "swift_stamp"
_MOST_INFOS = 10_000
_known_infos: dict[str, tuple[float, dict[str, Any]]] = {}  # web address: when it was asked, what it said


def _info(location: str, *, fresh: bool = False) -> dict[str, Any]:
    """What the file system says of a file. A web server is asked once a minute: everybody here wants to know."""
    system, path = filesystem(location)
    if not is_web(location):
        return system.info(path)
    asked, info = _known_infos.get(location, (0.0, {}))
    if fresh or not info or time.monotonic() - asked > _INFO_S:
        _known_infos.pop(location, None)
        info = system.info(path)
        _known_infos[location] = (time.monotonic(), info)
        while len(_known_infos) > _MOST_INFOS:
            del _known_infos[next(iter(_known_infos))]
    return info


def stamp_of(location: str, *, fresh: bool = False) -> str:
    """A text that changes when the content may have changed: size and time, or the store's own tag.

    A server that gives neither tag nor time is asked for the beginning and the end of the file.

    Args:
        location: a path or URL.
        fresh: ask a web server again, even if it was asked in the last minute.
    """
    if not is_url(location):
        with remote_errors(location):
            stat = Path(location).stat()
        return f"{stat.st_size}-{stat.st_mtime_ns}"
    with remote_errors(location):
        info = _info(location, fresh=fresh)
        if _STAMP in info:
            return info[_STAMP]
        size = info.get("size")
        for key in ("ETag", "etag", "mtime", "LastModified", "last_modified", "created", "sha256", "blob_id"):
            if info.get(key):
                return f"{size}-{info[key]}"
    with open_packed(location) as stream:
        digest = hashlib.sha256(stream.read(1 << 16))
        if size and stream.seekable():
            stream.seek(max(0, size - (1 << 16)))
            digest.update(stream.read())
    info[_STAMP] = f"{size}-{digest.hexdigest()}"
    return info[_STAMP]


# --- listing ---


def exists(location: str) -> bool:
    """Whether a file or folder is there."""
    if not location:
        return False
    if not is_url(location):
        return Path(location).expanduser().exists()
    system, path = filesystem(location)
    with remote_errors(location):
        if not is_web(location):
            return bool(system.exists(path))
        try:
            return bool(_info(location))
        except FileNotFoundError:
            return False


def is_file(location: str) -> bool:
    """Whether it is a file."""
    if not is_url(location):
        return Path(location).is_file()
    system, path = filesystem(location)
    with remote_errors(location):
        # a web server lists nothing; what has the ending of a file is one
        return bool(_endings(location)[0]) if is_web(location) else bool(system.isfile(path))


def is_folder(location: str) -> bool:
    """Whether it is a folder."""
    if not is_url(location):
        return Path(location).is_dir()
    system, path = filesystem(location)
    with remote_errors(location):
        return not is_file(location) and bool(system.isdir(path))


def list_folder(folder: str, *, strict: bool = False) -> tuple[list[str], list[str]]:
    """The files and the folders in a folder, as locations, sorted; `strict` refuses links that lead nowhere."""
    if not is_url(folder):
        with remote_errors(folder):
            entries = sorted(Path(folder).iterdir())
        if strict:
            refuse_dead_links(entries)
        return [str(e) for e in entries if e.is_file()], [str(e) for e in entries if e.is_dir()]
    system, path = filesystem(folder)
    files: list[str] = []
    folders: list[str] = []
    with remote_errors(folder):
        for entry in system.ls(path, detail=True):
            name = system.unstrip_protocol(entry["name"].rstrip("/"))
            web_folder = is_web(folder) and not _endings(name)[0]
            (folders if entry["type"] == "directory" or web_folder else files).append(name)
    return sorted(files), sorted(folders)


def refuse_dead_links(paths: Iterable[str | Path]) -> None:
    """Refuse data that a link promises and that isn't there: left out in silence, nobody would miss it.

    Args:
        paths: what was found in a folder. Hidden names and other endings than those of data don't matter; a name
            without an ending may be that of a folder.

    Raises:
        DataError: a link leads nowhere.
    """
    for path in map(Path, paths):
        hidden = path.name.startswith((".", "_"))
        if path.is_symlink() and not path.exists() and not hidden and (not path.suffix or is_data_file(path)):
            raise DataError(
                f"the link leads nowhere: {path.name} -> {path.readlink()}",
                where=str(path),
                fix="remove the link, or put back what it names",
            )


def walk_files(folder: str, *, strict: bool = True, wanted: Callable[[str], Any] | None = None) -> list[str]:
    """All files below a folder, sorted. Links are followed; a loop of links ends, and each real file comes once.

    Args:
        folder: a path or URL.
        strict: refuse links that lead nowhere, of those files that are `wanted`.
        wanted: says of a path whether it matters; None: all do.

    Raises:
        DataError: the folder can't be read; or such a link.
    """
    if is_url(folder):
        system, path = filesystem(folder)
        with remote_errors(folder):
            names = sorted(system.unstrip_protocol(name) for name in system.find(path))
            return [name for name in names if wanted is None or wanted(name)]
    found: list[str] = []
    seen: set[tuple[int, int]] = set()
    for root, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        folders.sort()
        stat = Path(root).stat()
        if (stat.st_dev, stat.st_ino) in seen:
            folders.clear()
            continue
        seen.add((stat.st_dev, stat.st_ino))
        paths = [str(Path(root) / name) for name in names]
        chosen = [path for path in paths if wanted is None or wanted(path)]
        if strict:
            refuse_dead_links([*chosen, *(path for path in paths if not Path(path).suffix)])
        found += [path for path in chosen if Path(path).is_file()]
    return _once(sorted(found))


def _raise(error: OSError) -> None:
    raise DataError(f"the folder can't be read: {error.strerror}", where=error.filename) from error


def _once(paths: list[str]) -> list[str]:
    """Leave out paths that lead to a file which an earlier path has led to."""
    first: dict[str, str] = {}
    for path in paths:
        first.setdefault(os.path.realpath(path), path)
    return sorted(first.values())


def has_pattern(location: str) -> bool:
    """Whether it is a pattern, not a name; `?` begins a query in a web address."""
    return any(mark in location for mark in ("*[" if is_web(location) else "*?["))


def glob_files(pattern: str) -> list[str]:
    """The files that match a pattern (`*`, `?`, `[…]`, `**`), sorted; each real file once."""
    if is_url(pattern):
        system, path = filesystem(pattern)
        with remote_errors(pattern):
            found = system.glob(path, detail=True)
        return sorted(system.unstrip_protocol(name) for name, info in found.items() if info["type"] == "file")
    pattern = str(Path(pattern).expanduser())
    if "**" not in pattern:
        matching = glob.glob(pattern)  # noqa: PTH207
        refuse_dead_links(matching)
        return _once([path for path in matching if Path(path).is_file()])
    parts = Path(pattern).parts
    fixed = next(index for index, part in enumerate(parts) if has_pattern(part))
    root = Path(*parts[:fixed])
    matches = path_pattern("/".join(parts[fixed:])).fullmatch
    return walk_files(str(root), wanted=lambda path: matches(Path(path).relative_to(root).as_posix()))


def list_inputs(location: str) -> list[str]:
    """The data files that a file, a folder (not what is below it), a pattern or a URL of these means, sorted.

    Raises:
        DataError: there is none.
    """
    if is_file(location):
        return [location]
    if has_pattern(location) and not exists(location):
        found = glob_files(location)
    elif is_folder(location):
        found = list_folder(location, strict=True)[0]
        found = found if is_url(location) else _once(found)
    else:
        raise DataError("there is no such file or folder", where=location)
    files = [file for file in found if is_data_file(file)]
    if not files:
        raise DataError("there is no data file there", where=location, fix=f"data files end in {formats_text()}")
    return files
