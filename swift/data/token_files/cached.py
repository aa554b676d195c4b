"""Token shards that `swift export` or a recipe left: what they were made of, and whether they may be trained on here.

Shards made with another tokenizer, another template or other settings are refused, and so are those whose source files
have changed since; the message names what differs and what to type. A folder is either one data set (`manifest.json`)
or an export (`cached_dataset.json`, with `train/` and maybe `val/` in it).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from swift.core.errors import DataError, UsageError, nearest
from swift.data.files import DataFile, is_url, size_of, stamp_of
from swift.data.selection import TRAIN, VALIDATION, Choice
from swift.data.token_files.identity import combined, differing
from swift.data.token_files.shards import MANIFEST, open_folder, read_manifest
from swift.data.token_files.store import TokenDataset

EXPORT_FILE = "cached_dataset.json"
FOLDERS = {TRAIN: "train", VALIDATION: "val"}
# settings that stand as hashes in a manifest, in words
_HASHED = {
    "template": "the chat template's text",
    "system": "the system prompt",
    "special_tokens": "the special tokens",
    "eos_token": "the eos token",
    "version": "the version of the encoding",
    "unit": "labels, or what else decides how a row becomes several sequences",
}
# layout of rows -> what they are, in words; no layout: conversations
_KINDS = {
    "pairs": "pairs of answers",
    "binary": "answers with a label",
    "prompts": "prompts to distil on",
    "labelled": "labelled texts",
    "tokens": "texts with labelled words",
    "embedding": "texts with ones that are like them",
    "rerank": "queries with documents",
}
_CONVERSATIONS = "conversations or texts"
_MADE_FOR = {"sft": _CONVERSATIONS, "rlhf": _KINDS["pairs"], "kto": _KINDS["binary"]}  # `swift export --cached_for`


class Encoding(Protocol):
    """What an encoder tells of itself (`swift.data.encoding.encode.ChatEncoder`)."""

    def tokenizer_parts(self) -> dict[str, str]: ...
    def settings(self) -> dict[str, Any]: ...
    def dated(self) -> list[list[str]]: ...


def made_with(encoder: Encoding) -> dict[str, Any]:
    """What a manifest says of the encoder: hashes of tokenizer and template, and their parts."""
    parts, settings, dated = (
        encoder.tokenizer_parts(),
        encoder.settings(),
        [p for group in encoder.dated() for p in group],
    )
    return {
        "tokenizer_hash": combined(parts),
        "template_hash": combined(settings),
        "tokenizer": parts,
        "encoding": settings,
        "dated": combined({"prompts": dated}) if dated else None,
    }


def source_records(files: Iterable[DataFile]) -> list[dict[str, Any]]:
    """What a manifest says of each source file: size, stamp and, of local files, the SHA-256 of the content."""
    records = []
    for location, address in {file.location: file.address for file in files}.items():
        record = {"location": address, "bytes": size_of(location), "stamp": stamp_of(location), "sha256": None}
        if not is_url(location):
            record["location"] = str(Path(location).resolve())
            record["sha256"] = _sha256(Path(location))
            if stamp_of(location) != record["stamp"]:
                raise DataError(
                    "the file changes while it is read", where=location, fix="try again when it is complete"
                )
        records.append(record)
    return records


@dataclass
class CachedSource:
    """One `--cached_dataset` argument, opened.

    Attributes:
        text: as the user wrote it; folder: the data set's; count: rows wanted, None for all.
        dataset: all its examples; manifest: what they were made of.
    """

    text: str
    folder: Path
    count: int | None
    dataset: TokenDataset
    manifest: dict[str, Any]

    def check(self, made: Mapping[str, Any]) -> list[str]:
        """Refuse what wasn't made for this run.

        Args:
            made: `made_with` of the run's encoder.

        Returns:
            What the user should know.

        Raises:
            DataError: another tokenizer, template or setting, or a source file that has changed.
        """
        _check_tokenizer(self.folder, self.manifest, made)
        _check_settings(self.folder, self.manifest, made)
        notes = _check_sources(self.folder, self.manifest)
        if self.manifest.get("dated") != made["dated"]:
            notes.append(f"{self.text}: the template writes the date, and the shards have that of their export")
        return notes

    def chosen(self, *, shuffle: bool, rng: np.random.Generator) -> tuple[TokenDataset, int, int]:
        """The examples of the rows that `#n` asks for, the rows, and how many of those are repetitions."""
        numbers = self.dataset.row_numbers()
        _, rows = np.unique(numbers, return_inverse=True)
        total = int(rows.max()) + 1
        count = total if self.count is None else self.count
        if count < total:
            taken = np.sort(rng.choice(total, count, replace=False)) if shuffle else np.arange(count)
            return self.dataset.select(np.flatnonzero(np.isin(rows, taken))), count, 0
        again = Choice(count=count, shuffle=shuffle).repetitions(total, rng)
        if not again:
            return self.dataset, total, 0
        examples_of: dict[int, list[int]] = {}
        for example, row in enumerate(rows.tolist()):
            examples_of.setdefault(row, []).append(example)
        order = [*range(len(rows)), *(example for row in again for example in examples_of[row])]
        return self.dataset.select(order), count, len(again)


def open_cached(text: str, split: str, flag: str) -> CachedSource:
    """Open one argument.

    Args:
        text: `folder` or `folder#rows`.
        split: which part of an export is meant, train or validation.
        flag: for messages.

    Raises:
        DataError, UsageError: it isn't there, unfinished, damaged, or `#` is followed by something else than rows.
    """
    folder, count = locate_cached(text, split, flag)
    opened = open_folder(folder)
    dataset = TokenDataset([(shard, opened.files_of(shard)) for shard in opened.shards], opened.order)
    if not len(dataset):
        raise DataError("the data set holds no examples", where=str(folder), fix="export it again from other rows")
    return CachedSource(text, folder, count, dataset, opened.manifest)


def locate_cached(text: str, split: str, flag: str) -> tuple[Path, int | None]:
    """The folder of a data set, and the rows wanted of it; opens nothing.

    Raises:
        DataError, UsageError: as `open_cached`.
    """
    path, count = Path(text).expanduser(), None
    match = re.fullmatch(r"(.+)#(.*)", text)
    if match and not path.exists():
        path = Path(match[1]).expanduser()
        if not match[2].isascii() or not match[2].isdigit() or int(match[2]) < 1:
            raise UsageError(f"# is followed by {match[2]!r}", where=f"{flag} {text}", fix="#rows, such as folder#1000")
        count = int(match[2])
    if not path.is_dir():
        close = nearest(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else []
        fix = f"did you mean {path.parent / close[0]}?" if close else "`swift export --to_cached_dataset true` makes it"
        raise DataError(f"there is no folder {path}", where=f"{flag} {text}", fix=fix)
    if (path / MANIFEST).is_file():
        return path, count
    if (path / EXPORT_FILE).is_file():
        inside = path / FOLDERS[split]
        if (inside / MANIFEST).is_file():
            return inside, count
        raise DataError(f"the export has no {FOLDERS[split]} part", where=f"{flag} {text}", fix="name another folder")
    read_manifest(path)  # says what is the matter
    raise AssertionError(path)


def validation_of(text: str) -> str | None:
    """The evaluation part of an export that was named as a whole; None if there is none."""
    path = Path(text.partition("#")[0] if not Path(text).exists() else text).expanduser()
    part = path / FOLDERS[VALIDATION]
    return str(part) if (path / EXPORT_FILE).is_file() and (part / MANIFEST).is_file() else None


# --- refusals ---


def _check_tokenizer(folder: Path, manifest: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    differ = differing(manifest["tokenizer"], made["tokenizer"])
    if differ:
        raise DataError(
            f"the token shards were made with another tokenizer: {', '.join(differ)} "
            f"{'differs' if len(differ) == 1 else 'differ'}",
            where=str(folder),
            fix=f"train the model whose tokenizer it is, or make them again: {_command(manifest)}",
        )


def _check_settings(folder: Path, manifest: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    mine, asked = manifest["encoding"], made["encoding"]
    differ = differing(mine, asked)
    if not differ:
        return
    kinds = [_kind_of_rows(each) for each in (mine, asked)]
    if kinds[0] != kinds[1]:  # the other differences follow from it
        command = next((f"--cached_for {name}" for name, kind in _MADE_FOR.items() if kind == kinds[1]), "")
        again = f"`swift export --to_cached_dataset true {command}`" if command else "the rows themselves: --dataset"
        raise DataError(
            f"the token shards were made of {kinds[0]}, and {kinds[1]} are trained on here",
            where=str(folder),
            fix=f"make shards for it: {again}" if command else f"there are no shards for it; give {again}",
        )
    if "use_chat_template" in differ:  # what matters follows from it, so the rest would only confuse
        differ = [name for name in differ if name in ("use_chat_template", "max_length", "truncation_strategy")]
    words = []
    flags = []
    for name in differ:
        if name in _HASHED:
            words.append(_HASHED[name])
            continue
        words.append(f"{name} is {_shown(mine.get(name))} in the shards and {_shown(asked.get(name))} here")
        if mine.get(name) is not None:
            flags.append(f"--{name} {_shown(mine[name])}")
    again = f"make them again: {_command(manifest)}"
    if _command(manifest).startswith("swift data run"):
        keys = {"max_length": "length"} if manifest.get("packed") else {}  # as pack_tokens calls it
        settings = [name for name in differ if name not in _HASHED and asked.get(name) is not None]
        wanted = [f"{keys.get(name, name)}: {_shown(asked[name])}" for name in settings]
        again = f"write {', '.join(wanted)} into the recipe's last step and {again}" if wanted else again
    raise DataError(
        "the token shards were made with another template or other settings: " + "; ".join(words),
        where=str(folder),
        fix=f"{' '.join(flags)}, or {again}" if flags else again,
    )


def _kind_of_rows(settings: Mapping[str, Any]) -> str:
    unit = settings.get("unit")
    return _KINDS.get(unit["layout"], unit["layout"]) if unit else _CONVERSATIONS


def _check_sources(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Compare the source files that can be reached with what they were; returns notes on those that can't."""
    gone = 0
    for record in manifest.get("sources", []):
        location = record["location"]
        if is_url(location) or not Path(location).is_file():
            gone += 1
            continue
        if stamp_of(location) == record["stamp"]:
            continue
        if size_of(location) == record["bytes"] and _sha256(Path(location)) == record["sha256"]:
            continue  # touched, or copied: the same content
        raise DataError(
            f"a source file has changed since the token shards in {folder} were made "
            f"({record['bytes']} bytes then, {size_of(location)} now)",
            where=location,
            fix=f"make them again: {_command(manifest)}",
        )
    return [f"{folder}: {gone} source file(s) not at hand, so not compared with what they were"] if gone else []


def _command(manifest: Mapping[str, Any]) -> str:
    return manifest.get("command") or "`swift export --to_cached_dataset true`"


def _shown(value: Any) -> str:
    return "not given" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_export(folder: Path) -> dict[str, Any] | None:
    """What an export says of itself; None where there is no finished one."""
    try:
        return json.loads((folder / EXPORT_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"the export can't be read: {error}", where=str(folder / EXPORT_FILE)) from error
