"""Where data lies: local paths and URLs of any file system that fsspec knows, opened, listed and measured alike.

A location is a string: a local path, or `scheme://…`. What its name says of the format is known here; what is inside is
the readers' business. Nothing heavy is imported before a URL is used, and network URLs are refused when offline.
"""

from __future__ import annotations

import glob
import hashlib
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from swift.core.errors import DataError, DependencyError, SwiftError
from swift.core.network import require_network
from swift.data.patterns import path_pattern
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
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_NO_NETWORK = frozenset({"file", "local", "memory"})
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
        label: what rows and messages call the file; None: its location.
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

    @property
    def name(self) -> str:
        """What messages and row references call it."""
        return self.label or self.location

    @property
    def by_offset(self) -> bool:
        """Whether its rows are numbered by bytes, not by lines."""
        return self.span is not None and self.first_line is None and self.format == "jsonl"

    def ref(self, line: int) -> RowRef:
        """The reference of the row that a reader gave with this number; the same however the file was split."""
        return RowRef(self.name, line, self.by_offset)


# --- names ---


def is_url(location: str) -> bool:
    """Whether it names a file system other than the local one."""
    return _URL.match(location) is not None


def base_name(location: str) -> str:
    """The last part of a path or URL, without a query."""
    if location.startswith(("http://", "https://")):
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


# --- file systems ---


def filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it.

    Raises:
        NetworkError: it is on the network, which is forbidden.
        DependencyError: its driver isn't installed.
        DataError: no driver knows the scheme, or the driver refused.
    """
    match = _URL.match(url)
    scheme = match[1].lower() if match else "file"
    if scheme not in _NO_NETWORK:
        require_network(url)
    import fsspec
    from fsspec.registry import known_implementations

    try:
        with remote_errors(url):
            return fsspec.core.url_to_fs(url)
    except ValueError as error:
        raise DataError(f"no driver is known for {scheme}://", where=url, fix="copy the data here first") from error
    except ImportError as error:
        cause = error
        while isinstance(cause.__cause__ or cause.__context__, ImportError):
            cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
        package = known_implementations.get(scheme, {}).get("class", scheme).partition(".")[0]
        if package == "fsspec":
            package = (cause.name or scheme).partition(".")[0]
        raise DependencyError(
            f"reading {scheme}:// needs the package {package!r}, and importing it failed: {cause}",
            where=url,
            fix=f"pip install {package}",
        ) from error


@contextmanager
def remote_errors(location: str) -> Iterator[None]:
    """Failures of a file system, as errors that name the location."""
    try:
        yield
    except (SwiftError, ImportError, ValueError):
        raise
    except FileNotFoundError as error:
        raise DataError("there is no such file", where=location, fix="check the URL") from error
    except PermissionError as error:
        raise DataError(
            f"access is denied: {_first_line(error)}", where=location, fix="check the credentials of its driver"
        ) from error
    except Exception as error:  # drivers of file systems have no common type of error
        if not is_url(location) and not isinstance(error, OSError):
            raise
        why = error.strerror if isinstance(error, OSError) and error.strerror else _first_line(error)
        raise DataError(f"the file can't be read: {why}", where=location) from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


class _Remote(io.RawIOBase):
    """A file of a remote file system whose errors name it."""

    def __init__(self, inner: Any, location: str, in_order: bool) -> None:
        self.inner = inner
        self.location = location
        self.in_order = in_order

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return not self.in_order and bool(self.inner.seekable())

    def seek(self, offset: int, whence: int = 0) -> int:
        with self._errors():
            return self.inner.seek(offset, whence)

    def tell(self) -> int:
        return self.inner.tell()

    def readinto(self, buffer: Any) -> int:
        with self._errors():
            data = self.inner.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with remote_errors(self.location):
                yield
        except ValueError as error:  # so fsspec says that a server gives whole files only
            raise DataError(
                "the server gives whole files only, and this format is read from several places",
                where=self.location,
                fix="copy it here first",
            ) from error

    def close(self) -> None:
        if not self.closed:
            self.inner.close()
        super().close()


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
        in_order = not anywhere and _is_web(location) and not system.info(path).get("partial")
        inner = system.open(path, "rb", **({"block_size": 0} if in_order else {}))
        return io.BufferedReader(_Remote(inner, location, in_order), BUFFER_BYTES)


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
    system, path = filesystem(location)
    with remote_errors(location):
        return int(system.info(path).get("size") or 0)


def stamp_of(location: str) -> str:
    """A text that changes when the content may have changed: size and time, or the store's own tag.

    A server that gives neither tag nor time is asked for the beginning and the end of the file.
    """
    if not is_url(location):
        with remote_errors(location):
            stat = Path(location).stat()
        return f"{stat.st_size}-{stat.st_mtime_ns}"
    system, path = filesystem(location)
    with remote_errors(location):
        info = system.info(path)
        size = info.get("size")
        for key in ("ETag", "etag", "mtime", "LastModified", "last_modified", "created", "sha256", "blob_id"):
            if info.get(key):
                return f"{size}-{info[key]}"
    with open_packed(location) as stream:
        digest = hashlib.sha256(stream.read(1 << 16))
        if size and stream.seekable():
            stream.seek(max(0, size - (1 << 16)))
            digest.update(stream.read())
    return f"{size}-{digest.hexdigest()}"


# --- listing ---


def exists(location: str) -> bool:
    """Whether a file or folder is there."""
    if not location:
        return False
    if not is_url(location):
        return Path(location).expanduser().exists()
    system, path = filesystem(location)
    with remote_errors(location):
        return bool(system.exists(path))


def is_file(location: str) -> bool:
    """Whether it is a file."""
    if not is_url(location):
        return Path(location).is_file()
    system, path = filesystem(location)
    with remote_errors(location):
        # a web server lists nothing; what has the ending of a file is one
        return bool(_endings(location)[0]) if _is_web(location) else bool(system.isfile(path))


def _is_web(location: str) -> bool:
    return location.startswith(("http://", "https://"))


def is_folder(location: str) -> bool:
    """Whether it is a folder."""
    if not is_url(location):
        return Path(location).is_dir()
    system, path = filesystem(location)
    with remote_errors(location):
        return not is_file(location) and bool(system.isdir(path))


def list_folder(folder: str) -> tuple[list[str], list[str]]:
    """The files and the folders in a folder, as locations, sorted."""
    if not is_url(folder):
        with remote_errors(folder):
            entries = sorted(Path(folder).iterdir())
        return [str(e) for e in entries if e.is_file()], [str(e) for e in entries if e.is_dir()]
    system, path = filesystem(folder)
    files: list[str] = []
    folders: list[str] = []
    with remote_errors(folder):
        for entry in system.ls(path, detail=True):
            name = system.unstrip_protocol(entry["name"].rstrip("/"))
            web_folder = _is_web(folder) and not _endings(name)[0]
            (folders if entry["type"] == "directory" or web_folder else files).append(name)
    return sorted(files), sorted(folders)


def walk_files(folder: str) -> list[str]:
    """All files below a folder, sorted. Links are followed; a loop of links ends, and each real file comes once."""
    if is_url(folder):
        system, path = filesystem(folder)
        with remote_errors(folder):
            return sorted(system.unstrip_protocol(name) for name in system.find(path))
    found: list[str] = []
    seen: set[tuple[int, int]] = set()
    for root, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        folders.sort()
        stat = Path(root).stat()
        if (stat.st_dev, stat.st_ino) in seen:
            folders.clear()
            continue
        seen.add((stat.st_dev, stat.st_ino))
        found += [str(Path(root) / name) for name in names if (Path(root) / name).is_file()]
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
    return any(mark in location for mark in ("*[" if _is_web(location) else "*?["))


def glob_files(pattern: str) -> list[str]:
    """The files that match a pattern (`*`, `?`, `[…]`, `**`), sorted; each real file once."""
    if is_url(pattern):
        system, path = filesystem(pattern)
        with remote_errors(pattern):
            found = system.glob(path, detail=True)
        return sorted(system.unstrip_protocol(name) for name, info in found.items() if info["type"] == "file")
    pattern = str(Path(pattern).expanduser())
    if "**" not in pattern:
        return _once([p for p in glob.glob(pattern) if Path(p).is_file()])  # noqa: PTH207
    parts = Path(pattern).parts
    fixed = next(index for index, part in enumerate(parts) if has_pattern(part))
    root = Path(*parts[:fixed])
    matches = path_pattern("/".join(parts[fixed:])).fullmatch
    return [path for path in walk_files(str(root)) if matches(Path(path).relative_to(root).as_posix())]


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
        found = list_folder(location)[0]
        found = found if is_url(location) else _once(found)
    else:
        raise DataError("there is no such file or folder", where=location)
    files = [file for file in found if is_data_file(file)]
    if not files:
        raise DataError("there is no data file there", where=location, fix=f"data files end in {formats_text()}")
    return files
