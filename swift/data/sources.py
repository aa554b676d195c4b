"""Which files a dataset argument means: `path[:subset[/subset…]][#rows]`.

A path that exists as it is written wins over any reading of `:` and `#` in it. A folder means the data files in it, in
name order; `:name` chooses a sub-folder or the files of that name, `:all` everything below. A text that has `*`, `?`
or `[` in it is a pattern. Knows nothing of what is inside the files, and imports nothing heavy.
"""

from __future__ import annotations

import glob
import re
from dataclasses import dataclass
from pathlib import Path

from swift.config.data import DataConfig, RowsConfig
from swift.core.errors import DataError, SwiftError, UsageError, did_you_mean, nearest
from swift.data.selfcog import identity_from

FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".txt": "txt",
}
COMPRESSIONS = (".gz", ".zst")
TXT_SUBSETS = ("lines", "paragraphs", "document")
SELF_COGNITION = ("self-cognition", "swift/self-cognition")
SELF_COGNITION_FILE = Path(__file__).parent / "assets" / "self_cognition.jsonl"
_SHARD = re.compile(r"-\d+(-of-\d+)?$")


@dataclass(frozen=True)
class DataFile:
    """A file, and the part of it that was asked for (a key of a json object, or how a txt is cut)."""

    path: Path
    part: str | None = None

    @property
    def format(self) -> str:
        return format_of(self.path)


@dataclass(frozen=True)
class Source:
    """One dataset argument, resolved.

    Attributes:
        text: as the user wrote it.
        files: the files, in the order in which their rows count.
        count: rows wanted; None for all.
        self_cognition: whether {{NAME}} and {{AUTHOR}} are filled in.
        notes: what the user should know about the choice of files.
    """

    text: str
    files: tuple[DataFile, ...]
    count: int | None = None
    self_cognition: bool = False
    notes: tuple[str, ...] = ()


def format_of(path: Path) -> str:
    """`jsonl`, `json`, `csv`, `tsv`, `parquet` or `txt`.

    Raises:
        DataError: for another ending.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    if suffixes and suffixes[-1] in FORMATS:
        return FORMATS[suffixes[-1]]
    raise DataError(
        f"{path.name!r} is not a data file: its ending is none of {', '.join(FORMATS)} (also with .gz or .zst)",
        where=str(path),
        fix="rename it to what it holds, or convert it to jsonl",
    )


def resolve_sources(data: DataConfig) -> tuple[list[Source], list[Source]]:
    """The sources of `--dataset` and of `--val_dataset`.

    Raises:
        UsageError, DataError: an argument that can't be meant, naming its flag.
    """
    if not data.dataset:
        raise UsageError("no data was given", where="--dataset", fix="--dataset FILE.jsonl (or `self-cognition`)")
    if data.val_dataset and data.split_dataset_ratio > 0:
        raise UsageError(
            "--val_dataset and --split_dataset_ratio both give evaluation rows",
            where="--val_dataset and --split_dataset_ratio",
            fix="leave out one of them",
        )
    return resolve_rows(data)


def resolve_rows(data: RowsConfig) -> tuple[list[Source], list[Source]]:
    """The sources of `--dataset` and of `--val_dataset`, of which there may be none.

    Raises:
        UsageError, DataError: an argument that can't be meant, naming its flag; self-cognition rows without names.
    """
    train = [_at_flag("--dataset", text) for text in data.dataset]
    validation = [_at_flag("--val_dataset", text) for text in data.val_dataset]
    if any(source.self_cognition for source in (*train, *validation)):
        identity_from(data.model_name, data.model_author)
    return train, validation


def _at_flag(flag: str, text: str) -> Source:
    try:
        return parse_source(text)
    except SwiftError as error:
        if error.where:
            raise
        raise type(error)(error.message, where=f"{flag} {text}", fix=error.fix) from error


def is_data_file(path: Path) -> bool:
    """Whether the ending is one that can be read; hidden files and files that start with `_` aren't data."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return bool(suffixes) and suffixes[-1] in FORMATS and not path.name.startswith((".", "_"))


def parse_source(text: str) -> Source:
    """Resolve one dataset argument to files.

    Raises:
        UsageError: `#` is followed by something that isn't a row count above 0.
        DataError: nothing is there, or it isn't clear which files are meant.
    """
    path, count = _split_count(text)
    if path in SELF_COGNITION:
        return Source(text, (DataFile(SELF_COGNITION_FILE),), count, self_cognition=True)
    location, subset = _split_subset(path)
    notes: list[str] = []
    if location is None:
        raise _not_found(path)
    files = _files(location, subset, notes)
    return Source(text, tuple(files), count, notes=tuple(notes))


def _exists(text: str) -> bool:
    return bool(text) and Path(text).expanduser().exists()


def _split_count(text: str) -> tuple[str, int | None]:
    if _exists(text) or "#" not in text:
        return text, None
    path, _, number = text.rpartition("#")
    if re.fullmatch(r"\d[\d_]*", number) and int(number) > 0:
        return path, int(number)
    if _exists(path) or path in SELF_COGNITION or re.fullmatch(r"-?[\d_.]*", number):
        raise UsageError(
            f"{number!r} is not a number of rows",
            fix=f"write {path}#1000 for 1000 rows, or {path} for all",
        )
    return text, None


def _split_subset(text: str) -> tuple[Path | str | None, str | None]:
    """The path (or pattern) and the subset; what stands before the colon has to exist, as no drive letter does."""
    if _exists(text):
        return Path(text).expanduser(), None
    head, colon, subset = text.rpartition(":")
    if colon and _exists(head):
        return Path(head).expanduser(), subset
    if any(mark in text for mark in "*?["):
        return text, None
    return None, None


def _files(location: Path | str, subset: str | None, notes: list[str]) -> list[DataFile]:
    if isinstance(location, str):
        found = sorted(Path(name) for name in glob.glob(str(Path(location).expanduser()), recursive=True))  # noqa: PTH207
        files = [path for path in found if path.is_file() and is_data_file(path)]
        if not files:
            raise DataError("no data file matches the pattern", where=location, fix=_formats_fix())
        return [DataFile(path) for path in files]
    if location.is_file():
        return _parts_of_file(location, subset)
    if subset is None:
        return _files_of_folder(location, notes)
    if subset == "all":
        below = [path for path in sorted(location.rglob("*")) if path.is_file() and is_data_file(path)]
        if not below:
            raise DataError("there is no data file in the folder", where=str(location), fix=_formats_fix())
        return [DataFile(path) for path in below]
    return [file for name in subset.split("/") for file in _subset_of_folder(location, name, notes)]


def _parts_of_file(path: Path, subset: str | None) -> list[DataFile]:
    kind = format_of(path)
    if not subset or subset == "all":
        return [DataFile(path)]
    if kind == "txt":
        if subset not in TXT_SUBSETS:
            raise DataError(
                f"a txt file can't be cut into {subset!r}",
                where=str(path),
                fix=f"use {path.name}:lines (default: a line is a row), :paragraphs (blank lines between) or :document",
            )
        return [DataFile(path, subset)]
    if kind == "json":
        return [DataFile(path, name) for name in subset.split("/")]
    raise DataError(
        f"a {kind} file has no subsets, but {subset!r} was asked for", where=str(path), fix=f"leave out :{subset}"
    )


def _files_of_folder(folder: Path, notes: list[str]) -> list[DataFile]:
    files = sorted(path for path in folder.iterdir() if path.is_file() and is_data_file(path))
    rows = [path for path in files if format_of(path) != "txt"]
    if rows and len(rows) < len(files):
        notes.append(f"{folder}: {len(files) - len(rows)} txt file(s) beside the data files were not read")
        files = rows
    if files:
        return [DataFile(path) for path in files]
    subsets = _subsets(folder)
    if subsets:
        raise DataError(
            "the folder has no data files of its own, but sub-folders that do",
            where=str(folder),
            fix=f"choose with {folder}:{subsets[0]} or {folder}:all; there are {', '.join(subsets)}",
        )
    raise DataError("there is no data file in the folder", where=str(folder), fix=_formats_fix())


def _subset_of_folder(folder: Path, name: str, notes: list[str]) -> list[DataFile]:
    if (folder / name).is_dir():
        return _files_of_folder(folder / name, notes)
    if (folder / name).is_file():
        return _parts_of_file(folder / name, None)
    files = [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and is_data_file(path) and _SHARD.sub("", _stem(path)) == name
    ]
    if files:
        return [DataFile(path) for path in files]
    subsets = _subsets(folder)
    raise DataError(
        f"there is no subset {name!r}",
        where=str(folder),
        fix=" ".join(filter(None, [did_you_mean(name, subsets), "there are: " + (", ".join(subsets) or "none")])),
    )


def _subsets(folder: Path) -> list[str]:
    names = {path.name for path in folder.iterdir() if path.is_dir() and any(is_data_file(p) for p in path.rglob("*"))}
    names |= {_SHARD.sub("", _stem(path)) for path in folder.iterdir() if path.is_file() and is_data_file(path)}
    return sorted(names)


def _stem(path: Path) -> str:
    name = path.name
    for suffix in (*COMPRESSIONS, *FORMATS):
        name = name.removesuffix(suffix)
    return name


def _formats_fix() -> str:
    return f"data files end in {', '.join(FORMATS)} (also with .gz or .zst)"


def _not_found(path: str) -> DataError:
    near = _nearest_file(Path(path).expanduser())
    looks_remote = path.startswith(("hf::", "ms::")) or (
        re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w./-]+)?", path) is not None and not is_data_file(Path(path))
    )
    if looks_remote and not near:
        return DataError(
            f"there is no file or folder {path!r}, and datasets are read from local files only",
            fix="download it first and give the folder",
        )
    known = did_you_mean(path, SELF_COGNITION)
    return DataError(
        f"there is no file or folder {path!r}",
        fix=near or known or f"check the path; it is taken from {Path.cwd()}",
    )


def _nearest_file(path: Path) -> str:
    """`did you mean X?`: names are compared without their endings, which make all of them alike."""
    if not path.parent.is_dir():
        return ""
    names = {_stem(item): item.name for item in path.parent.iterdir() if is_data_file(item) or item.is_dir()}
    close = nearest(_stem(Path(path.name.partition(":")[0])), names)
    return f"did you mean {names[close[0]]}?" if close else ""
