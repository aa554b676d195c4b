"""What a run leaves beside its rows: the manifest, the ledger, the list of dropped rows.

Files get their places in an order that a kill can interrupt anywhere: what is about to be moved is written down first,
and the manifest, which says that the output is complete, comes last.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
import zstandard

from swift.core.errors import SwiftError
from swift.core.files import disk_errors, fsync_dir, write_atomic
from swift.core.version import __version__
from swift.data.engine.chain import Record
from swift.data.engine.operator import OPERATORS
from swift.data.engine.recipe import TOKENS, Recipe
from swift.data.engine.task import BAD_SHARDS, DROPPED_NAME, OUTPUT, READ, RESULTS, Job, make_sink, read_records

# names that begin with _ or . aren't data to anything that reads a folder
MANIFEST, LEDGER, REPORT, DROPPED = "_manifest.json", "_ledger.json", "_report.html", "_dropped.jsonl.zst"
WORK = ".work"
_MOST_LABELS = 20_000
_MOST_LINES = 8  # about operators, when a run ends


def read_manifest(output: Path) -> dict[str, Any] | None:
    """The manifest of a complete output; None if there is none.

    Raises:
        SwiftError: it is damaged.
    """
    path = output / MANIFEST
    try:
        value = orjson.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except orjson.JSONDecodeError as error:
        raise SwiftError(f"the manifest is damaged: {error}", where=str(path), fix="--restart makes it anew") from None
    return value


def missing_files(output: Path, manifest: dict[str, Any]) -> list[str]:
    """Files of a complete output that are gone or have another size."""
    wrong = []
    for file in manifest["files"]:
        try:
            size = (output / file["name"]).stat().st_size
        except OSError:
            size = -1
        if size != file["bytes"]:
            wrong.append(file["name"])
    return wrong


def remove_output(output: Path) -> None:
    """Remove what a run has left: the files that its manifest names, its reports, and its work folder; nothing else."""
    manifest = read_manifest_or_none(output) or {"files": []}
    with disk_errors(output):
        for name in [MANIFEST, *(file["name"] for file in manifest["files"]), LEDGER, REPORT, DROPPED]:
            (output / name).unlink(missing_ok=True)
        foreign = _foreign(output / WORK)
        if foreign is not None:  # killed while it published: what wasn't there before is the run's
            for path in _visible_files(output):
                if str(path.relative_to(output)) not in foreign:
                    path.unlink()
        shutil.rmtree(output / WORK, ignore_errors=True)


def read_manifest_or_none(output: Path) -> dict[str, Any] | None:
    """The manifest; None also if it is damaged."""
    try:
        return read_manifest(output)
    except SwiftError:
        return None


def merged_records(job: Job, tasks: Iterable[tuple[str, int]]) -> dict[str, Record]:
    """The records of all tasks (stage and number), by operator; read one task after the other."""
    records: dict[str, Record] = {}
    for stage, index in tasks:
        for record in read_records(job, stage, index):
            if record.label in records:
                records[record.label].merge(record)
                records[record.label].tally.trim(_MOST_LABELS)
            else:
                records[record.label] = record
    return records


def ledger_of(recipe: Recipe, records: dict[str, Record], notes: list[str]) -> dict[str, Any]:
    """What every operator did, in order, as plain values."""
    labels = [READ, *(step.label for step in recipe.steps), OUTPUT]
    read = records.get(READ, Record(READ))
    bytes_each = read.bytes / max(1, read.tally.characters_in)  # of UTF-8 for each character
    names = {step.label: step.name for step in recipe.steps}
    entries = []
    for label in labels:
        if label not in records:
            continue
        record = records[label]
        tally = record.tally
        size = record.bytes or tally.characters_in * bytes_each
        unaccounted = tally.read - tally.kept - tally.dropped.total() if label in names else 0
        entry = {
            "label": label,
            "does": _does(names[label]) if label in names else "",
            "settings": next((step.settings for step in recipe.steps if step.label == label), {}),
            "tally": tally.as_json(),
            "cpu_s": round(record.cpu_s, 3),
            "mb_per_cpu_s": round(size / 1e6 / record.cpu_s, 2) if record.cpu_s > 0.001 else None,
        }
        if unaccounted > 0:
            entry["unaccounted"] = unaccounted
        entries.append(entry)
    return {
        "recipe": recipe.name,
        "swift": __version__,
        "operators": entries,
        "bad_shards": dict(read.tally.labels.get(BAD_SHARDS, {})),
        "notes": notes,
    }


def closing_lines(ledger: dict[str, Any], manifest: dict[str, Any], output: Path) -> list[str]:
    """What a user wants to know at the end of a run: what became of the rows, and what to do next."""
    entries = {entry["label"]: entry["tally"] for entry in ledger["operators"]}
    read = entries.get(READ, {"kept": 0, "dropped": {}})
    lines = []
    bad_shards = sum(ledger["bad_shards"].values())
    if bad_shards:
        lines.append(f"  {bad_shards} file(s) skipped: {_some(list(ledger['bad_shards']))}")
    if read["dropped"]:
        lines.append(f"  {sum(read['dropped'].values())} bad row(s) left out: {_counts(read['dropped'])}")
    droppers = [(label, tally["dropped"]) for label, tally in entries.items() if label != READ and tally["dropped"]]
    for label, dropped in droppers[:_MOST_LINES]:
        lines.append(f"  {label} dropped {sum(dropped.values())}: {_counts(dropped)}")
    if len(droppers) > _MOST_LINES:
        rest = sum(sum(dropped.values()) for _, dropped in droppers[_MOST_LINES:])
        lines.append(f"  {len(droppers) - _MOST_LINES} other operators dropped {rest}")
    lines.append(f"report: {output / REPORT}")
    folder = shlex.quote(str(output))
    if not manifest["rows"]:
        lines.append("warning: no row is left, so there is nothing to train on; the report shows where rows went")
    elif manifest["output_format"] == TOKENS:
        settings = next(iter(manifest["recipe"]["steps"][-1].values()))
        lines.append(f"next:   swift {settings.get('cached_for', 'pt')} --cached_dataset {folder}")
    else:
        lines.append(f"next:   swift data check {folder}")
        lines.append(f"        swift pt --dataset {folder}   (conversations: swift sft)")
    return lines


def _counts(dropped: dict[str, int]) -> str:
    ordered = sorted(dropped.items(), key=lambda item: (-item[1], item[0]))
    return _some([f"{reason} {count}" for reason, count in ordered])


def _some(words: list[str]) -> str:
    return ", ".join(words[:4]) + (f" and {len(words) - 4} more" if len(words) > 4 else "")


def _does(name: str) -> str:
    return (OPERATORS[name].__doc__ or "").strip().splitlines()[0]


def publish(job: Job, output: Path, final: str, markers: list[dict[str, Any]], manifest: dict[str, Any]) -> None:
    """Move the files of the last stage into the output folder.

    Args:
        job: of the run. output: the folder. final: the last stage. markers: of its tasks, in order.
        manifest: completed here with files and rows; not written yet.
    """
    files: list[dict[str, Any]] = []
    sources: dict[str, Path] = {}
    for index, marker in enumerate(markers):
        for file in marker["files"]:
            if file["name"] == DROPPED_NAME:
                continue
            name = file["name"].removeprefix(f"{RESULTS}/")
            rows = marker["facts"]["rows"] if marker["facts"].get("file") == name else None
            files.append({"name": name, **({} if rows is None else {"rows": rows}), **_rest(file)})
            sources[name] = job.results(final, index) / name
    manifest["rows"] = sum(marker["facts"].get("rows", 0) for marker in markers)
    manifest["files"] = files
    manifest["sha256"] = hashlib.sha256(orjson.dumps([[f["name"], f["sha256"]] for f in files])).hexdigest()
    old = {file["name"] for file in (read_manifest_or_none(output) or {"files": []})["files"]}
    with disk_errors(output):
        foreign = _foreign(job.work)
        if foreign is None:
            there = {str(path.relative_to(output)) for path in _visible_files(output)}
            foreign = there - old - set(sources) - {MANIFEST, LEDGER, REPORT, DROPPED}
            write_atomic(job.work / "finish", json.dumps(sorted(foreign)))
        (output / MANIFEST).unlink(missing_ok=True)
        for name, source in sources.items():
            target = output / name
            if source.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                source.replace(target)
            elif not target.exists():
                raise SwiftError(f"the file {name} of the work folder is gone", where=str(source), fix="--restart")
        for path in _visible_files(output):  # of an earlier result, or of a sink's earlier attempt
            if str(path.relative_to(output)) not in foreign | set(sources):
                path.unlink()
        fsync_dir(output)
    manifest["sink"] = make_sink(job.recipe).finish(output, [marker["facts"] for marker in markers])
    for path in _visible_files(output):  # what the sink has added belongs to the output as well
        name = str(path.relative_to(output))
        if name not in foreign | set(sources):
            files.append({"name": name, "bytes": path.stat().st_size, "sha256": _sha256(path)})


def _foreign(work: Path) -> set[str] | None:
    """Files that were in the output folder before this run published anything; None if it hasn't begun to."""
    try:
        return set(json.loads((work / "finish").read_text()))
    except (OSError, ValueError):
        return None


def _visible_files(output: Path) -> list[Path]:
    """The files below the output folder, without hidden ones and the work folder."""
    found = []
    for path in sorted(output.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(output).parts)
        if path.is_file() and not hidden:
            found.append(path)
    return found


def _rest(file: dict[str, Any]) -> dict[str, Any]:
    return {"bytes": file["bytes"], "sha256": file["sha256"]}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_dropped(folders: Iterable[Path], output: Path) -> None:
    """The lists of dropped rows of all tasks as one file, in the order of stages and tasks."""
    aside = output / WORK / DROPPED
    path = output / DROPPED
    with disk_errors(path):
        with aside.open("wb") as file:
            empty = zstandard.ZstdCompressor().compress(b"")
            file.write(empty)  # a list of nothing is a valid file as well
            for folder in folders:
                part = folder / DROPPED_NAME
                if part.exists():
                    with part.open("rb") as source:
                        shutil.copyfileobj(source, file)  # zstd frames may follow each other
        aside.replace(path)
