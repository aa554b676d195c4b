"""Checkpoint folders: written aside, made durable, then given their name in one rename.

`checkpoint-<step>` exists only when everything in it was written and fsynced; `complete.json`, the last file, lists
every file with its size and CRC-32. A kill at any moment leaves the earlier checkpoints as they were and at most a
folder under another name, which gets its name back if it is whole and needed, and else is removed by the next save. A
file changed after the fact is found by `verify`.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from swift.checkpoint.lock import alone
from swift.core.errors import CheckpointError, SwiftError
from swift.core.files import FULL_DISK_FIX, disk_error, fsync_dir, fsync_tree, human_bytes, is_disk_fault

MANIFEST = "complete.json"
SUPERSEDED = "superseded"
LINKS = ("last", "best")
_NAME = re.compile(r"checkpoint-(\d+)$")
_ASIDE = re.compile(r"\.checkpoint-\d+\.(writing|removing)$")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int


def save_checkpoint(
    run_dir: Path, step: int, writers: list[Callable[[Path], None]], *, needed_bytes: int = 0
) -> Checkpoint:
    """Write `run_dir/checkpoint-<step>` with everything the writers put into the folder they are given.

    Args:
        writers: called in turn with the unfinished folder.
        needed_bytes: about what they will write; checked against the free space first.

    Raises:
        CheckpointError: the file system refused; the unfinished folder is removed and earlier checkpoints are intact.
    """
    aside = begin_checkpoint(run_dir, step, needed_bytes=needed_bytes)
    try:
        for write in writers:
            write(aside)
        return finish_checkpoint(aside)
    except BaseException as error:
        told = give_up_checkpoint(aside, error, needed_bytes=needed_bytes)
        if told is error:
            raise
        raise told from error


def begin_checkpoint(run_dir: Path, step: int, *, needed_bytes: int = 0) -> Path:
    """Make the folder into which a checkpoint is written; `finish_checkpoint` or `give_up_checkpoint` must follow.

    Several processes may write into it in between; one process begins and finishes.

    Raises:
        CheckpointError: there is no room, or the folder can't be made.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    remove_unfinished(run_dir)
    aside = run_dir / f".checkpoint-{step}.writing"
    free = shutil.disk_usage(run_dir).free
    if needed_bytes > free:
        raise _full_disk(_unnamed(aside) or aside, needed_bytes, "not enough free space")
    try:
        aside.mkdir()
    except OSError as error:
        raise _full_disk(_unnamed(aside) or aside, needed_bytes, error) from error
    return aside


def finish_checkpoint(aside: Path, described: dict[str, dict[str, int]] | None = None) -> Checkpoint:
    """Make a written folder durable and give it its name.

    Args:
        described: files that their writers have described, by path inside the folder; the others are read once more.

    Raises:
        CheckpointError: a described file isn't there as its writer left it.
    """
    final = _unnamed(aside)
    assert final is not None
    step, described = int(final.name.rpartition("-")[2]), described or {}
    for name, entry in described.items():
        path = aside / name
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            raise CheckpointError(
                f"{name}, which another process wrote, can't be seen here",
                where=str(aside.parent),
                fix="choose an --output_dir on a file system that all machines share",
            )
    files = describe_files(aside, described)
    fsync_tree(aside)  # before the manifest, so that a folder with one is whole
    (aside / MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=1) + "\n")
    fsync_tree(aside)
    _put_in_place(aside, final)
    return Checkpoint(final, step)


def give_up_checkpoint(aside: Path, error: BaseException, *, needed_bytes: int = 0) -> BaseException:
    """Remove an unfinished folder; the error to raise, which for a full disk says what is intact."""
    shutil.rmtree(aside, ignore_errors=True)
    # a writer may have told it already, of the unfinished folder, which is gone
    cause = error.__cause__ if isinstance(error, SwiftError) and error.__cause__ else error
    if is_disk_fault(cause):
        return _full_disk(_unnamed(aside) or aside, needed_bytes, cause)
    return error


def _put_in_place(aside: Path, final: Path) -> None:
    """Give a finished folder its name; one of the same step (saved before a resume) is deleted only after that."""
    gone = final.with_name(f".{final.name}.removing")
    if final.exists():
        final.rename(gone)
    try:
        aside.rename(final)
    except BaseException:
        if gone.exists():
            gone.rename(final)
        raise
    fsync_dir(final.parent)
    shutil.rmtree(gone, ignore_errors=True)


def _full_disk(path: Path, needed_bytes: int, cause: object) -> SwiftError:
    refused = disk_error(path, needed_bytes, cause)
    intact = [c.path.name for c in list_checkpoints(path.parent)]
    kept = f"; intact: {', '.join(intact)}" if intact else "; there was no earlier checkpoint"
    fewer = "; --save_total_limit N keeps fewer checkpoints" if refused.fix == FULL_DISK_FIX else ""
    return CheckpointError(refused.message, where=f"{refused.where}{kept}", fix=f"{refused.fix}{fewer}")


def describe_files(folder: Path, known: dict[str, dict[str, int]] | None = None) -> dict[str, dict[str, int]]:
    """Size and CRC-32 of every file below `folder`, by relative path; those in `known` aren't read."""
    paths = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    known = known or {}
    return {name: known.get(name) or describe_file(path) for name, path in paths.items() if path.name != MANIFEST}


def describe_file(path: Path) -> dict[str, int]:
    """Size and CRC-32 of a file."""
    return {"bytes": path.stat().st_size, "crc32": _crc32(path)}


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def verify(folder: Path) -> None:
    """Check a checkpoint's files against its manifest.

    Raises:
        CheckpointError: names what is missing, shorter or changed.
    """
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise CheckpointError(
            "the checkpoint is incomplete: its last file was never written",
            where=str(folder),
            fix="resume from an earlier one, or use --resume_from_checkpoint latest to find the newest complete one",
        )
    try:
        files = json.loads(manifest.read_text())["files"]
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{MANIFEST} can't be read: {error}", where=str(folder)) from error
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            problem = "is missing"
        elif path.stat().st_size != expected["bytes"]:
            problem = f"has {human_bytes(path.stat().st_size)} instead of {human_bytes(expected['bytes'])}"
        elif _crc32(path) != expected["crc32"]:
            problem = "was changed after it was written (checksum differs)"
        else:
            continue
        raise CheckpointError(
            f"the checkpoint is damaged: {name} {problem}", where=str(folder), fix="resume from another checkpoint"
        )


def list_checkpoints(run_dir: Path) -> list[Checkpoint]:
    """Complete checkpoints of a run, oldest first."""
    if not run_dir.is_dir():
        return []
    found = [
        Checkpoint(path, int(match[1]))
        for path in run_dir.iterdir()
        if (match := _NAME.fullmatch(path.name)) and (path / MANIFEST).is_file()
    ]
    return sorted(found, key=lambda c: c.step)


def find_checkpoint(wanted: str, output_dir: Path) -> Checkpoint:
    """The checkpoint that `--resume_from_checkpoint` means.

    Args:
        wanted: a checkpoint folder, a run folder, or `latest`/`true`: the newest complete one below `output_dir`.

    Raises:
        CheckpointError: there is none, or the one named is incomplete.
    """
    latest = wanted.lower() in ("latest", "true", "last")
    place = output_dir if latest else Path(wanted).expanduser()
    if _NAME.fullmatch(place.name) and not latest:
        _give_names_back(place.parent)
        if not place.is_dir():
            raise CheckpointError(
                "there is no such checkpoint", where=str(place), fix=_offer(list_checkpoints(place.parent))
            )
        verify(place)
        return Checkpoint(place, int(place.name.rpartition("-")[2]))
    folders = [place]
    if place.is_dir():
        folders += [
            child
            for child in place.iterdir()
            if child.is_dir() and child.name != SUPERSEDED and not (_NAME.fullmatch(child.name) or _unnamed(child))
        ]
    candidates = []
    for folder in folders:
        _give_names_back(folder)
        candidates += list_checkpoints(folder)
    # The newest by the time it was finished: of several runs the last one, of one run the furthest.
    candidates.sort(key=_finished, reverse=True)
    problems = []
    for candidate in candidates:
        try:
            verify(candidate.path)
        except CheckpointError as error:
            problems.append(error.message)
            continue
        return candidate
    raise CheckpointError(
        "there is no complete checkpoint" + (": " + "; ".join(problems) if problems else ""),
        where=str(place),
        fix="check --output_dir, or leave --resume_from_checkpoint out to start afresh",
    )


def _offer(there: list[Checkpoint]) -> str:
    return "complete ones there: " + (", ".join(c.path.name for c in there) or "none")


def prune(run_dir: Path, keep: int | None, *, newest: int, best: int | None) -> list[Path]:
    """Remove all but `keep` checkpoints: those finished last stay, whatever their step numbers are.

    Args:
        keep: None keeps all.
        newest: step of the one just saved. It always stays, since it is what a resume needs.
        best: step of the best one. It always stays as well, so with keep=1 two may remain; without a folder it takes
            no place.

    Returns:
        The folders that were removed.
    """
    there = list_checkpoints(run_dir)
    if keep is None or len(there) <= keep:
        return []
    kept = {c.step for c in there if c.step in (newest, best)}
    for checkpoint in sorted(there, key=_finished, reverse=True):
        if len(kept) >= keep:
            break
        kept.add(checkpoint.step)
    removed = [c.path for c in there if c.step not in kept]
    for path in removed:
        _remove(path)
    return removed


def set_aside(run_dir: Path, after_step: int) -> list[Path]:
    """Move the complete checkpoints above `after_step` into `superseded/`: the run goes on from an earlier one.

    Nothing is deleted, and `latest` doesn't look there. A name that is taken gets a number: `checkpoint-8.2`.

    Returns:
        Where they are now.
    """
    moved = []
    for checkpoint in list_checkpoints(run_dir):
        if checkpoint.step <= after_step:
            continue
        name, place, count = checkpoint.path.name, run_dir / SUPERSEDED, 1
        place.mkdir(exist_ok=True)
        while (target := place / (name if count == 1 else f"{name}.{count}")).exists():
            count += 1
        checkpoint.path.rename(target)
        moved.append(target)
    if moved:
        fsync_dir(run_dir / SUPERSEDED)
        fsync_dir(run_dir)
        _drop_dead_links(run_dir)
    return moved


def clear(run_dir: Path) -> None:
    """Remove every checkpoint, set-aside one and leftover of a folder, so that another run can take its place.

    Other files stay.
    """
    if not run_dir.is_dir():
        return
    for path in sorted(run_dir.iterdir()):
        if path.is_symlink() or not path.is_dir():
            continue
        if _NAME.fullmatch(path.name):
            _remove(path)
        elif _ASIDE.fullmatch(path.name) or path.name == SUPERSEDED:
            shutil.rmtree(path, ignore_errors=True)
    _drop_dead_links(run_dir)


def _drop_dead_links(run_dir: Path) -> None:
    for name in LINKS:
        path = run_dir / name
        if path.is_symlink() and not path.exists():
            path.unlink()


def _finished(checkpoint: Checkpoint) -> tuple[int, int]:
    """Sorts by the time at which a checkpoint was finished, then by step."""
    return (checkpoint.path / MANIFEST).stat().st_mtime_ns, checkpoint.step


def _remove(path: Path) -> None:
    """Take a checkpoint away so that a kill in between can't leave half of it under its name."""
    aside = path.with_name(f".{path.name}.removing")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    fsync_dir(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def remove_unfinished(run_dir: Path) -> None:
    """Clear what a killed save or removal left behind; what is whole and has lost its name gets it back.

    Only the process that writes to the folder may call it.
    """
    for path in _leftovers(run_dir):
        if not _give_name_back(path):
            shutil.rmtree(path, ignore_errors=True)


def _unnamed(path: Path) -> Path | None:
    """The checkpoint that a folder is the unfinished or half-removed form of."""
    return path.with_name(path.name[1:].rpartition(".")[0]) if _ASIDE.fullmatch(path.name) else None


def _leftovers(run_dir: Path) -> list[Path]:
    """Unfinished saves, then unfinished removals: of the same step the save is the newer one."""
    found = [path for path in run_dir.iterdir() if _unnamed(path)] if run_dir.is_dir() else []
    return sorted(found, key=lambda path: path.name.endswith(".removing"))


def _give_names_back(run_dir: Path) -> None:
    """Restore what a kill left without its name, unless another process is at work there."""
    lost = [path for path in _leftovers(run_dir) if not _exists_named(path)]
    if lost:
        with alone(run_dir) as free:
            for path in lost if free else []:
                _give_name_back(path)


def _exists_named(path: Path) -> bool:
    final = _unnamed(path)
    return final is not None and final.exists()


def _give_name_back(path: Path) -> bool:
    """Rename a leftover to the checkpoint that it is, if it is whole and there is none of that name."""
    final = _unnamed(path)
    if final is None or final.exists():
        return False
    try:
        verify(path)
    except CheckpointError:
        return False
    fsync_tree(path)
    path.rename(final)
    fsync_dir(path.parent)
    return True


def save_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors as safetensors, each its own copy (shared storage is not preserved)."""
    save_file({name: t.detach().contiguous().cpu().clone() for name, t in tensors.items()}, str(path))


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read tensors written by `save_tensors`."""
    try:
        return load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"can't read {path.name}: {error}", where=str(path.parent)) from error


def link(run_dir: Path, name: str, target: Path) -> None:
    """Point the symbolic link `name` in the run folder at a checkpoint, replacing what was there."""
    aside = run_dir / f".{name}.link"
    aside.unlink(missing_ok=True)
    aside.symlink_to(target.name)
    aside.replace(run_dir / name)
