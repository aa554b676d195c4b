"""Data sets on the Hugging Face hub and on ModelScope: from an id to data files in the hub's local cache.

`hf::owner/name[@revision][:subset][:split]`. Which files make up a subset and a split is taken from the data set's
card (`configs` in the README), else from the names of files and folders; the training split is the default, so that
test rows aren't trained on by accident. Only the files that are wanted are downloaded; from ModelScope, all data files.
Offline, the cache has to hold them.
"""

from __future__ import annotations

import functools
import glob
import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from swift.core.errors import DataError, NetworkError, SwiftError, did_you_mean, first_line
from swift.core.extras import require
from swift.core.logging import get_logger
from swift.core.network import is_offline, uses_hf
from swift.data.files import COMPRESSIONS, DOCUMENT_FORMATS, FORMATS, DataFile, format_of, is_data_file
from swift.data.patterns import path_pattern

log = get_logger("data")

_ID = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?)(@(?P<revision>[\w./-]+))?(:(?P<subset>[^:]*))?(:(?P<split>[^:]+))?"
)
_HUBS = {"hf": "Hugging Face", "ms": "ModelScope"}
_SPLITS = {  # names of files and folders -> split
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_WORD = re.compile(r"[A-Za-z]+")
_DEFAULT = "default"
Layout = dict[str, dict[str, list[str]]]  # subset -> split -> files


@dataclass(frozen=True)
class HubId:
    """A data set on a hub, and what of it is meant.

    Attributes:
        hub: `hf` or `ms`.
        name: `owner/name`.
        revision: branch, tag or commit; None for the main one.
        subset: as written behind the first colon: subsets with `/` between them, a split, `all`, or empty.
        split: as written behind the second colon.
    """

    hub: str
    name: str
    revision: str | None = None
    subset: str = ""
    split: str | None = None

    def __str__(self) -> str:
        return f"{self.hub}::{self.name}" + (f"@{self.revision}" if self.revision else "")


def parse_hub_id(text: str, *, bare: bool = False) -> HubId | None:
    """The id in `hf::…` or `ms::…`; with `bare`, also in `owner/name…`, on the hub that `--use_hf` chose.

    Returns:
        None if the text isn't meant as an id.

    Raises:
        DataError: it has a prefix, and what follows is no id.
    """
    hub, mark, rest = text.partition("::")
    if not mark or hub not in _HUBS:
        if not bare:
            return None
        hub, rest = "hf" if uses_hf() else "ms", text
    match = _ID.fullmatch(rest)
    if match is None or ".." in match["name"] or (bare and "/" not in match["name"]):
        if bare:
            return None
        raise DataError(
            f"{rest!r} is not the id of a data set", fix=f"write {hub}::owner/name, with :subset and #rows if you like"
        )
    return HubId(hub, match["name"], match["revision"], match["subset"] or "", match["split"])


def fetch_dataset(hub_id: HubId, notes: list[str]) -> list[DataFile]:
    """The data files that an id means, downloaded if need be.

    Args:
        hub_id: the id.
        notes: what the user should know of the choice is added here.

    Raises:
        DataError: the hub doesn't know the data set, or it has no such subset, split or data files.
        NetworkError: it isn't in the cache, and the network is forbidden or failed.
        DependencyError: ModelScope is asked for and isn't installed.
    """
    files, remarks = _fetch(hub_id, is_offline())
    notes.extend(remarks)
    return list(files)


@functools.lru_cache(maxsize=64)  # one process asks several times, and shall get the same answer
def _fetch(hub_id: HubId, offline: bool) -> tuple[tuple[DataFile, ...], tuple[str, ...]]:
    snapshot = _hf_snapshot(hub_id, offline) if hub_id.hub == "hf" else _ms_snapshot(hub_id, offline)
    names = [name for name in snapshot.names if is_data_file(name) and not _hidden(name)]
    if not names:
        raise _no_data(hub_id, snapshot.names)
    layout = card_layout(snapshot.card(), names) or named_layout(names)
    chosen, notes = choose_files(hub_id, layout, names)
    folder = snapshot.fetch(chosen)
    files = tuple(DataFile(str(folder / name), label=f"{hub_id.hub}::{hub_id.name}/{name}") for name in chosen)
    return files, (*snapshot.notes, *notes)


def _hidden(name: str) -> bool:
    return any(part.startswith((".", "_")) for part in PurePosixPath(name).parts)


def _no_data(hub_id: HubId, names: Iterable[str]) -> DataError:
    names = sorted(names)
    if any(name.endswith(".py") for name in names) and hub_id.hub == "hf":
        return DataError(
            f"{hub_id} is a program that makes its data, and programs from a hub aren't run",
            fix=f"its conversion, if the hub has made one: hf::{hub_id.name}@refs/convert/parquet",
        )
    return DataError(
        f"{hub_id} has no data file; it has {', '.join(names[:8]) or 'nothing'}",
        fix="data files end in " + ", ".join(FORMATS),
    )


# --- which files are meant ---


def card_layout(card: str, names: list[str]) -> Layout:
    """What the `configs` in the card of a data set (its README) say; empty if they say nothing."""
    match = re.match(r"---[ \t\r]*\n(.*?)\n---[ \t\r]*(\n|$)", card.lstrip("\ufeff"), re.DOTALL)
    try:
        head = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        return {}  # the names decide, as they do where there is no card
    configs = head.get("configs") if isinstance(head, dict) else None
    layout: Layout = {}
    for config in configs if isinstance(configs, list) else []:
        if not isinstance(config, dict):
            continue
        splits = _card_splits(config.get("data_files"), str(config.get("data_dir") or ""), names)
        if splits:
            layout[str(config.get("config_name") or _DEFAULT)] = splits
            if config.get("default") is True:
                layout.setdefault(_DEFAULT, splits)
    return layout


def _card_splits(data_files: Any, folder: str, names: list[str]) -> dict[str, list[str]]:
    def matching(patterns: Any) -> list[str]:
        wanted = [patterns] if isinstance(patterns, str) else [p for p in patterns or [] if isinstance(p, str)]
        full = [path_pattern((PurePosixPath(folder) / pattern).as_posix()) for pattern in wanted]
        return [name for name in names if any(pattern.fullmatch(name) for pattern in full)]

    if data_files is None:
        inside = [name for name in names if not folder or name.startswith(folder.rstrip("/") + "/")]
        return _by_split(inside)
    if isinstance(data_files, str):
        data_files = [data_files]
    if isinstance(data_files, dict):
        data_files = [{"split": split, "path": paths} for split, paths in data_files.items()]
    splits: dict[str, list[str]] = {}
    for entry in data_files if isinstance(data_files, list) else []:
        split, paths = (entry.get("split", "train"), entry.get("path")) if isinstance(entry, dict) else ("train", entry)
        splits.setdefault(str(split), []).extend(matching(paths))
    return {split: list(dict.fromkeys(files)) for split, files in splits.items() if files}


def named_layout(names: list[str]) -> Layout:
    """Without a card: splits by the words in names; a folder is a subset too, so that it can be asked for."""
    layout: Layout = {_DEFAULT: _by_split(names)}
    folders = {PurePosixPath(name).parts[0] for name in names if "/" in name}
    for folder in sorted(folders - set(_SPLITS) - {"data"}):
        layout[folder] = _by_split([name for name in names if name.startswith(folder + "/")])
    return layout


def _by_split(names: list[str]) -> dict[str, list[str]]:
    """Files that name no split are training data, if no file names one; else they belong to none."""
    rows = [name for name in names if format_of(name) not in DOCUMENT_FORMATS]
    splits: dict[str, list[str]] = {}
    unnamed: list[str] = []
    for name in rows or names:
        split = next((_SPLITS[w] for part in reversed(PurePosixPath(name).parts) if (w := _split_word(part))), None)
        (splits.setdefault(split, []) if split else unnamed).append(name)
    return splits or ({"train": unnamed} if unnamed else {})


def _split_word(part: str) -> str | None:
    return next((word.lower() for word in _WORD.findall(part) if word.lower() in _SPLITS), None)


def choose_files(hub_id: HubId, layout: Layout, names: list[str]) -> tuple[list[str], list[str]]:
    """The files of the wanted subsets and split, and notes on the choice.

    Raises:
        DataError: there is no such subset or split, or several and none was chosen.
    """
    split = hub_id.split
    wanted = [part for part in hub_id.subset.split("/") if part]
    if len(wanted) == 1 and wanted[0] not in layout and wanted[0] != "all" and split is None:
        if any(wanted[0] in splits for splits in layout.values()):
            wanted, split = [], wanted[0]  # `:test` names a split where no subset has that name
        elif wanted[0] in names:
            return wanted, []
    if wanted == ["all"]:
        wanted = [name for name in layout if name != _DEFAULT] or [_DEFAULT]
    if not wanted:
        wanted = [_only_subset(hub_id, layout)]
    files: list[str] = []
    notes: list[str] = []
    for name in wanted:
        if name not in layout:
            raise DataError(
                f"{hub_id} has no subset {name!r}",
                fix=" ".join(filter(None, [did_you_mean(name, layout), "there are: " + ", ".join(layout)])),
            )
        files += _files_of_split(hub_id, name, layout[name], split, notes)
    return list(dict.fromkeys(files)), notes


def _only_subset(hub_id: HubId, layout: Layout) -> str:
    if _DEFAULT in layout:
        return _DEFAULT
    if len(layout) == 1:
        return next(iter(layout))
    raise DataError(
        f"{hub_id} has several subsets: {', '.join(layout)}",
        fix=f"choose with {hub_id}:{next(iter(layout))}, several with / between them, or :all",
    )


def _files_of_split(
    hub_id: HubId, subset: str, splits: dict[str, list[str]], split: str | None, notes: list[str]
) -> list[str]:
    at = str(hub_id) if subset == _DEFAULT else f"{hub_id}:{subset}"
    if split == "all":
        return [name for files in splits.values() for name in files]
    chosen = split or ("train" if "train" in splits else next(iter(splits), ""))
    if split is None and "train" not in splits and len(splits) > 1:
        raise DataError(
            f"{at} has no training split, but {', '.join(splits)}", fix=f"choose one: {hub_id}:{subset}:{chosen}"
        )
    if chosen not in splits:
        raise DataError(
            f"{at} has no split {chosen!r}",
            fix=" ".join(filter(None, [did_you_mean(chosen, splits), "there are: " + (", ".join(splits) or "none")])),
        )
    others = [name for name in splits if name != chosen]
    if split is None and others:
        notes.append(f"{at}: the split {chosen!r} is read; there are also {', '.join(others)}")
    return splits[chosen]


# --- the two hubs ---


@dataclass
class _Snapshot:
    """What a hub or its cache has: the names of all files, the text of the card, and how to get files."""

    names: list[str]
    card: Callable[[], str]
    fetch: Callable[[list[str]], Path]
    notes: tuple[str, ...] = ()


def _hf_snapshot(hub_id: HubId, offline: bool) -> _Snapshot:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HTTPError,  # of the HTTP library it uses: the base of its connection errors too
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    down: tuple[type[Exception], ...] = (HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError)
    where: dict[str, Any] = {"repo_id": hub_id.name, "repo_type": "dataset", "revision": hub_id.revision}

    def unreachable(reason: str, error: BaseException | None) -> SwiftError:
        return NetworkError(
            f"{hub_id} is not (wholly) on this machine, and {reason}",
            fix=f"use local files, or fetch it once with network: hf download --repo-type dataset {hub_id.name}",
        )

    def card(local: bool) -> str:
        try:
            path = hf_hub_download(**where, filename="README.md", local_files_only=local)
        except EntryNotFoundError:  # also when the cache doesn't hold it
            return ""
        return Path(path).read_text(encoding="utf-8", errors="replace")

    def fetch(chosen: list[str], local: bool, reason: str) -> Path:
        try:
            patterns = [glob.escape(name) for name in chosen]
            folder = Path(snapshot_download(**where, allow_patterns=patterns, local_files_only=local))
        except down as error:
            raise unreachable(reason if local else f"downloading failed ({first_line(error)})", error) from error
        absent = [name for name in chosen if not (folder / name).is_file()]
        if absent:
            raise unreachable(f"{reason}; {absent[0]} is missing", None)
        return folder

    def cached(reason: str, notes: tuple[str, ...]) -> _Snapshot:
        try:
            folder = Path(snapshot_download(**where, local_files_only=True, allow_patterns=["README.md"]))
        except LocalEntryNotFoundError as error:
            raise unreachable(reason, error) from error
        names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        names |= set(_cached_tree(where))
        return _Snapshot(sorted(names), lambda: card(True), lambda chosen: fetch(chosen, True, reason), notes)

    if offline:
        return cached("the network is forbidden (--offline)", ())
    try:
        info = HfApi().dataset_info(hub_id.name, revision=hub_id.revision)
    except GatedRepoError as error:
        raise DataError(f"access to {hub_id} has to be asked for on its page", fix="then: hf auth login") from error
    except RevisionNotFoundError as error:
        raise DataError(f"{hub_id.name} has no revision {hub_id.revision!r}", fix="check it on the hub") from error
    except RepositoryNotFoundError as error:
        raise DataError(
            f"there is no file or folder {hub_id.name!r}, and the Hugging Face hub has no data set of that name (or it "
            "is private)",
            fix="check the spelling; private ones need: hf auth login; for ModelScope: ms::owner/name, --use_hf false",
        ) from error
    except down as error:
        reason = f"the Hugging Face hub could not be reached ({first_line(error)})"
        snapshot = cached(reason, (f"{reason}; the copy of {hub_id} in the cache is used",))
        log.warning("%s; using the copy of %s in the cache", reason, hub_id)
        return snapshot
    names = sorted(sibling.rfilename for sibling in info.siblings or [])
    return _Snapshot(names, lambda: card(False), lambda chosen: fetch(chosen, False, ""))


def _cached_tree(where: dict[str, Any]) -> list[str]:
    """The names of all files of the snapshot in the cache, as far as the library has kept them."""
    import huggingface_hub

    if not hasattr(huggingface_hub, "get_cached_repo_tree"):  # early versions keep none
        return []
    try:
        return [entry.path for entry in huggingface_hub.get_cached_repo_tree(**where)]
    except huggingface_hub.errors.CachedRepoTreeNotFoundError:
        return []


def _ms_snapshot(hub_id: HubId, offline: bool) -> _Snapshot:
    modelscope = require("modelscope", extra="modelscope", purpose="download data sets from ModelScope")
    import requests  # a dependency of modelscope, which raises its exceptions

    def asked(ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except (ValueError, OSError, requests.RequestException) as error:
            reason = "the network is forbidden (--offline)" if offline else f"ModelScope failed: {first_line(error)}"
            raise NetworkError(
                f"{hub_id} is not on this machine, and {reason}",
                fix=f"use local files, or fetch it once with network: modelscope download --dataset {hub_id.name}",
            ) from error

    def fetch(patterns: list[str]) -> Path:
        settings = {"revision": hub_id.revision, "allow_patterns": patterns, "local_files_only": offline}
        return Path(asked(lambda: modelscope.dataset_snapshot_download(hub_id.name, **settings)))

    def fetch_chosen(chosen: list[str]) -> Path:
        folder = fetch([glob.escape(name) for name in chosen])
        absent = next((name for name in chosen if not (folder / name).is_file()), None)
        if absent:
            raise NetworkError(f"{hub_id}: ModelScope was asked for {absent} and didn't give it", fix="try again")
        return folder

    def text_of(readme: Path) -> str:
        return readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""

    names = None if offline else asked(lambda: _ms_names(hub_id))
    if names is not None:
        has_card = "README.md" in names
        return _Snapshot(names, lambda: text_of(fetch(["README.md"]) / "README.md") if has_card else "", fetch_chosen)
    # from the cache, or by an early version, which can't list: all data files, whatever is wanted of them
    folder = fetch(["README.md", *(f"*{end}{pack}" for end in FORMATS for pack in ("", *COMPRESSIONS))])
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return _Snapshot(names, lambda: text_of(folder / "README.md"), lambda chosen: folder)


_MS_PAGE = 100


def _ms_names(hub_id: HubId) -> list[str] | None:
    """The names of all files of a data set; None where the library is too old to list them."""
    try:
        from modelscope.hub.api import HubApi
    except ImportError:
        return None
    if not hasattr(HubApi, "get_dataset_files"):
        return None
    names: set[str] = set()
    revision = {"revision": hub_id.revision} if hub_id.revision else {}
    for page in itertools.count(1):
        found = HubApi().get_dataset_files(
            repo_id=hub_id.name, recursive=True, page_number=page, page_size=_MS_PAGE, **revision
        )
        before = len(names)
        names |= {entry["Path"] for entry in found if entry.get("Type") != "tree"}
        if len(found) < _MS_PAGE or (page > 1 and len(names) == before):
            break
    return sorted(names)
