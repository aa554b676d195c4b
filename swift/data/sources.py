"""Which files a dataset argument means: `[hf::|ms::]name[:subset[/subset…]][#rows]`, where the name is a path, a
pattern, a URL or the id of a data set on a hub.

What exists as it is written wins over any reading of `:` and `#` in it. A folder means the data files in it, in name
order; `:name` chooses a sub-folder or the files of that name, `:all` everything below. A text that has `*`, `?` or `[`
in it is a pattern. Knows nothing of what is inside the files, and imports nothing heavy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from swift.config.data import DataConfig, RowsConfig
from swift.core.addresses import without_secrets
from swift.core.errors import DataError, NetworkError, SwiftError, UsageError, did_you_mean, nearest
from swift.data.files import (
    COMPRESSIONS,
    DOCUMENT_FORMATS,
    FORMATS,
    DataFile,
    base_name,
    exists,
    format_of,
    formats_text,
    glob_files,
    has_pattern,
    is_data_file,
    is_file,
    is_folder,
    is_url,
    join,
    list_folder,
    refuse_dead_links,
    stem_of,
    walk_files,
)
from swift.data.hubs import HubId, fetch_dataset, parse_hub_id
from swift.data.selfcog import identity_from

__all__ = ["COMPRESSIONS", "FORMATS", "DataFile", "Source", "parse_source", "resolve_rows", "resolve_sources"]

TXT_SUBSETS = ("lines", "paragraphs", "document")
SELF_COGNITION = ("self-cognition", "swift/self-cognition")
SELF_COGNITION_FILE = Path(__file__).parent / "assets" / "self_cognition.jsonl"
_SHARD = re.compile(r"-\d+(-of-\d+)?$")


@dataclass(frozen=True)
class Source:
    """One dataset argument, resolved.

    Attributes:
        text: as the user wrote it, without passwords and signatures.
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


def resolve_sources(data: DataConfig, *, fetch: bool = True) -> tuple[list[Source], list[Source]]:
    """The sources of `--dataset` and of `--val_dataset`; `fetch` as in `parse_source`.

    Raises:
        UsageError, DataError: an argument that can't be meant, naming its flag.
    """
    if not data.dataset and not data.cached_dataset:
        raise UsageError("no data was given", where="--dataset", fix="--dataset FILE.jsonl (or `self-cognition`)")
    if data.val_dataset and data.split_dataset_ratio > 0:
        raise UsageError(
            "--val_dataset and --split_dataset_ratio both give evaluation rows",
            where="--val_dataset and --split_dataset_ratio",
            fix="leave out one of them",
        )
    return resolve_rows(data, fetch=fetch)


def resolve_rows(data: RowsConfig, *, fetch: bool = True) -> tuple[list[Source], list[Source]]:
    """The sources of `--dataset` and of `--val_dataset`, of which there may be none; `fetch` as in `parse_source`.

    Raises:
        UsageError, DataError: an argument that can't be meant, naming its flag; self-cognition rows without names.
    """
    train = [_at_flag("--dataset", text, fetch) for text in data.dataset]
    validation = [_at_flag("--val_dataset", text, fetch) for text in data.val_dataset]
    if any(source.self_cognition for source in (*train, *validation)):
        identity_from(data.model_name, data.model_author)
    return train, validation


def _at_flag(flag: str, text: str, fetch: bool) -> Source:
    try:
        return parse_source(text, fetch=fetch)
    except SwiftError as error:
        if error.where:
            raise
        raise type(error)(error.message, where=f"{flag} {text}", fix=error.fix) from error


def parse_source(text: str, *, fetch: bool = True) -> Source:
    """Resolve one dataset argument to files.

    Args:
        text: the argument.
        fetch: whether a data set on a hub is downloaded; if not, such a source has no files yet.

    Raises:
        UsageError: `#` is followed by something that isn't a row count above 0.
        DataError: nothing is there, or it isn't clear which files are meant.
        NetworkError, DependencyError: it lies elsewhere; the network is forbidden or failed, or a driver is missing.
    """
    path, count = _split_count(text)
    if path in SELF_COGNITION:
        return Source(without_secrets(text), (DataFile(str(SELF_COGNITION_FILE)),), count, self_cognition=True)
    notes: list[str] = []
    hub_id = parse_hub_id(path)
    if hub_id is None:
        location, subset = _split_subset(path)
        if location is not None:
            files = _files(location, subset, notes)
            return Source(without_secrets(text), tuple(files), count, notes=tuple(notes))
        hub_id = _bare_hub_id(path)
        if hub_id is None:
            raise _not_found(path)
        notes.append(f"{path}: no such folder is here, so it is taken for the id {hub_id}")
    if not fetch:
        return Source(without_secrets(text), (), count)
    try:
        files = fetch_dataset(hub_id, notes)
    except NetworkError as error:
        if path.startswith(f"{hub_id.hub}::"):
            raise
        message = f"there is no file or folder {path!r}; as a data set on a hub: {error.message}"
        raise NetworkError(message, where=error.where, fix=error.fix) from error
    return Source(without_secrets(text), tuple(files), count, notes=tuple(notes))


def _exists(text: str) -> bool:
    return bool(text) and not text.startswith(("hf::", "ms::")) and exists(text)


def _bare_hub_id(path: str) -> HubId | None:
    """The hub id that a text without a prefix may be: `owner/name`, where nothing here looks like it."""
    owner = path.partition("/")[0]
    if is_url(path) or is_data_file(path.partition(":")[0]) or Path(owner).is_dir() or _nearest_file(Path(path)):
        return None
    return parse_hub_id(path, bare=True)


def _split_count(text: str) -> tuple[str, int | None]:
    # what follows # in a web address isn't sent to the server, which would find the file for any number
    if "#" not in text or (not text.startswith(("http://", "https://")) and _exists(text)):
        return text, None
    path, _, number = text.rpartition("#")
    if re.fullmatch(r"\d[\d_]*", number) and int(number) > 0:
        return path, int(number)
    if path in SELF_COGNITION or re.fullmatch(r"-?[\d_.]*", number) or _exists(path):
        raise UsageError(
            f"{number!r} is not a number of rows",
            fix=f"write {path}#1000 for 1000 rows, or {path} for all",
        )
    return text, None


def _split_subset(text: str) -> tuple[str | None, str | None]:
    """The path (or pattern) and the subset; what stands before the colon has to exist, as no drive letter does."""
    if _exists(text):
        return _plain(text), None
    head, colon, subset = text.rpartition(":")
    # in a URL the first colon belongs to the scheme, and one behind the host may begin a port
    in_address = is_url(text) and (not is_url(head) or (head.count("/") == 2 and subset[:1].isdigit()))
    if colon and not in_address and _exists(head):
        return _plain(head), subset
    if has_pattern(text):
        return text, None
    return None, None


def _plain(text: str) -> str:
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    return text if is_url(text) else str(Path(text).expanduser())


def _files(location: str, subset: str | None, notes: list[str]) -> list[DataFile]:
    if has_pattern(location) and not exists(location):
        found = [path for path in glob_files(_plain(location)) if is_data_file(path)]
        if not found:
            raise DataError("no data file matches the pattern", where=location, fix=_formats_fix())
        return _as_files(found)
    if is_file(location):
        return _parts_of_file(location, subset)
    if subset is None:
        return _files_of_folder(location, notes)
    if subset == "all":
        below = _without_documents(location, [path for path in walk_files(location) if is_data_file(path)], notes)
        if not below:
            raise DataError("there is no data file in the folder", where=location, fix=_formats_fix())
        return _as_files(below)
    return [file for name in subset.split("/") for file in _subset_of_folder(location, name, notes)]


def _as_files(locations: list[str]) -> list[DataFile]:
    return [DataFile(location) for location in locations]


def _parts_of_file(path: str, subset: str | None) -> list[DataFile]:
    kind, name = format_of(path), base_name(path)
    if not subset or subset == "all":
        return [DataFile(path)]
    if kind in ("txt", "md"):
        if subset not in TXT_SUBSETS:
            raise DataError(
                f"a {kind} file can't be cut into {subset!r}",
                where=path,
                fix=f"use {name}:lines (a line is a row), :paragraphs (blank lines between) or :document",
            )
        return [DataFile(path, subset)]
    if kind == "pdf" and subset in ("pages", "document"):
        return [DataFile(path, subset)]
    if kind == "json":
        return [DataFile(path, part) for part in subset.split("/")]
    raise DataError(
        f"a {kind} file has no subsets, but {subset!r} was asked for", where=path, fix=f"leave out :{subset}"
    )


def _without_documents(folder: str, files: list[str], notes: list[str]) -> list[str]:
    """Texts for people lie beside many data sets; they are data only where there is nothing else."""
    rows = [path for path in files if format_of(path) not in DOCUMENT_FORMATS]
    if not rows or len(rows) == len(files):
        return files
    kinds = "/".join(sorted({format_of(path) for path in files} & DOCUMENT_FORMATS))
    beside = len(files) - len(rows)
    notes.append(f"{without_secrets(folder)}: {beside} {kinds} file(s) beside the data files were not read")
    return rows


def _files_of_folder(folder: str, notes: list[str]) -> list[DataFile]:
    here, below = list_folder(folder, strict=True)
    files = _without_documents(folder, [path for path in here if is_data_file(path)], notes)
    if files:
        return _as_files(files)
    subsets = _subsets(here, below)
    if subsets:
        raise DataError(
            "the folder has no data files of its own, but sub-folders that do",
            where=folder,
            fix=f"choose with {folder}:{subsets[0]} or {folder}:all; there are {', '.join(subsets)}",
        )
    raise DataError("there is no data file in the folder", where=folder, fix=_formats_fix())


def _subset_of_folder(folder: str, name: str, notes: list[str]) -> list[DataFile]:
    here, below = list_folder(folder)
    names = {base_name(path): path for path in (*here, *below)}
    if name in names:
        return _files_of_folder(names[name], notes) if names[name] in below else _parts_of_file(names[name], None)
    files = [path for path in here if is_data_file(path) and _SHARD.sub("", stem_of(path)) == name]
    if not is_url(folder):
        refuse_dead_links(path for path in Path(folder).iterdir() if _SHARD.sub("", stem_of(str(path))) == name)
    if files:
        return _as_files(files)
    if "/" not in name and is_folder(join(folder, name)):  # a listing that hides folders
        return _files_of_folder(join(folder, name), notes)
    subsets = _subsets(here, below)
    raise DataError(
        f"there is no subset {name!r}",
        where=folder,
        fix=" ".join(filter(None, [did_you_mean(name, subsets), "there are: " + (", ".join(subsets) or "none")])),
    )


def _subsets(here: list[str], below: list[str]) -> list[str]:
    names = {
        base_name(folder) for folder in below if any(is_data_file(path) for path in walk_files(folder, strict=False))
    }
    names |= {_SHARD.sub("", stem_of(path)) for path in here if is_data_file(path)}
    return sorted(names)


def _formats_fix() -> str:
    return f"data files end in {formats_text()}"


def _not_found(path: str) -> DataError:
    if is_url(path):
        return DataError(f"there is no file or folder {path!r}", fix="check the URL, and the credentials of its driver")
    near = _nearest_file(Path(path).expanduser())
    known = did_you_mean(path, SELF_COGNITION)
    return DataError(
        f"there is no file or folder {path!r}",
        fix=near or known or f"check the path; it is taken from {Path.cwd()}",
    )


def _nearest_file(path: Path) -> str:
    """`did you mean X?`: names are compared without their endings, which make all of them alike."""
    if not path.parent.is_dir():
        return ""
    names = {stem_of(item.name): item.name for item in path.parent.iterdir() if is_data_file(item) or item.is_dir()}
    close = nearest(stem_of(path.name.partition(":")[0]), names)
    return f"did you mean {names[close[0]]}?" if close else ""
