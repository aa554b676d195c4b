"""The input of a recipe cut into shards: what a task reads. A shard is a piece of a large file, or small files that are
neighbours, so that neither one file nor one task costs more than it is worth. Reads no rows.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swift.core.errors import DataError, SwiftError, UsageError
from swift.data.engine.recipe import Recipe
from swift.data.files import DataFile, is_url, size_of, stamp_of
from swift.data.readers import split_file
from swift.data.readers.base import EmptyFileError
from swift.data.sources import Source, parse_source

_MOST_PARTITIONS = 1024
# what opening a file costs, in bytes that could be read in that time
_OPEN_BYTES, _OPEN_FAR_BYTES = 4 << 10, 256 << 10


@dataclass(frozen=True)
class Picks:
    """`#n`: which rows of a source are taken, told by their numbers over all its files.

    Attributes:
        first: number of the first row of the file. total: rows of the source. count: rows wanted. key: of the draw.
    """

    first: int
    total: int
    count: int
    key: int


@dataclass(frozen=True)
class Piece:
    """A file of the input, or a piece of one.

    Attributes:
        file: what is read. input: which dataset argument of the recipe it belongs to.
        stamp: changes when the file's content may have changed. size: bytes of the whole file.
        key: what random keys call the file, see `_keys`.
    """

    file: DataFile
    input: int
    stamp: str
    size: int
    key: str
    picks: Picks | None = None

    def as_json(self) -> dict[str, Any]:
        """For manifests and fingerprints."""
        values: dict[str, Any] = {"location": self.file.address, "stamp": self.stamp, "bytes": self.size}
        for name in ("part", "span"):
            if getattr(self.file, name) is not None:
                values[name] = getattr(self.file, name)
        if self.picks is not None:
            values["picks"] = [self.picks.first, self.picks.total, self.picks.count, self.picks.key]
        return values

    @property
    def num_bytes(self) -> int:
        """Of what is read, as far as that is known."""
        if self.file.span is None or self.file.format == "parquet":  # whose spans are row groups
            return self.size
        return self.file.span[1] - self.file.span[0]


@dataclass(frozen=True)
class Shard:
    """What one task reads: a piece of a file, or several small files one after the other."""

    pieces: tuple[Piece, ...]


def pieces_of(shards: list[Shard]) -> list[Piece]:
    """The pieces of all shards, in order."""
    return [piece for shard in shards for piece in shard.pieces]


def num_partitions(recipe: Recipe, shards: list[Shard]) -> int:
    """How many tasks should share work that isn't divided by shards: a function of the input's bytes."""
    size = sum({piece.file.location: piece.size for piece in pieces_of(shards)}.values())
    return max(1, min(len(shards), _MOST_PARTITIONS, -(-4 * size // recipe.shard_size_bytes)))


def list_shards(recipe: Recipe) -> list[Shard]:
    """The input of a recipe, cut into shards, in the order in which its rows count.

    Raises:
        UsageError: an argument that can't be meant. DataError: a file that isn't there.
    """
    sources = [_source(recipe, number) for number in range(len(recipe.input))]
    _refuse_twice(recipe, sources)
    keys = _keys(sources)
    pieces: list[Piece] = []
    for number, source in enumerate(sources):
        whole = [
            Piece(file, number, stamp_of(file.location), size_of(file.location), key)
            for file, key in zip(source.files, keys[number])
        ]
        if source.count is not None:
            pieces += _picked(whole, source.count, recipe)
            continue
        for piece in whole:
            pieces += [replace(piece, file=part) for part in _parts(piece.file, recipe)]
    return _joined(pieces, min(recipe.join_files_bytes, recipe.shard_size_bytes))


def _source(recipe: Recipe, number: int) -> Source:
    """A dataset argument's files; what is wrong with it is told with its place in the recipe."""
    spec = recipe.input[number]
    place = recipe.places[number] if number < len(recipe.places) else "input"
    try:
        source = parse_source(spec.path)
    except SwiftError as error:
        where = ", ".join(filter(None, [place, error.where]))
        fix = error.fix
        if not is_url(spec.path) and not Path(spec.path).expanduser().is_absolute() and "::" not in spec.path:
            here = f"paths are taken from the current folder, {Path.cwd()}"
            fix = here if fix is None or "is taken from" in fix else f"{fix}; {here}"
        raise type(error)(error.message, where=where, fix=fix) from error
    if source.self_cognition:
        raise UsageError(
            "self-cognition rows are templates that training fills in", where=place, fix="give it to --dataset"
        )
    return source


def _refuse_twice(recipe: Recipe, sources: list[Source]) -> None:
    """A file is read once, whatever paths and links lead to it.

    Raises:
        UsageError: naming the paths.
    """
    seen: dict[tuple[str, str | None], tuple[str, str]] = {}
    for spec, source in zip(recipe.input, sources):
        for file in source.files:
            real = _real_path(file)
            before = seen.get((real, file.part))
            if before is None:
                seen[real, file.part] = file.address, spec.path
                continue
            path, argument = before
            also = "" if path == file.address else f" ({path} is the same file)"
            raise UsageError(
                f"{file.address} is read twice{also}: each of its rows would be there two times",
                where=f"input {argument}" + ("" if argument == spec.path else f" and {spec.path}"),
                fix="name it once; weights of sources belong to the mixing of a training",
            )


def _real_path(file: DataFile) -> str:
    """What is the same for all paths that lead to a file."""
    if is_url(file.location):
        return file.address
    real = os.path.realpath(file.location)
    if "/snapshots/" in file.location and "/blobs/" in real:
        # the cache of a hub: files of a data set that happen to be equal are links to one blob there
        folder, name = os.path.split(file.location)
        return f"{os.path.realpath(folder)}/{name}"
    return real


def _keys(sources: list[Source]) -> list[list[str]]:
    """What random keys call each file: its path below the folder that all files of its argument lie in.

    So draws depend neither on how a path is spelt nor on where the folder lies. Of several files that would be called
    the same, the second is `name~2`.
    """
    names: Counter[str] = Counter()
    keys = []
    for source in sources:
        paths = [file.address.replace(os.sep, "/").split("/") for file in source.files]
        folders = [path[:-1] for path in paths]
        shared = sum(1 for _ in itertools.takewhile(lambda level: len(set(level)) == 1, zip(*folders)))
        found = []
        for path, file in zip(paths, source.files):
            name = "/".join(path[shared:]) + ("" if file.part is None else f":{file.part}")
            names[name] += 1
            found.append(name if names[name] == 1 else f"{name}~{names[name]}")
        keys.append(found)
    return keys


def _joined(pieces: list[Piece], most_bytes: int) -> list[Shard]:
    """Small whole files that are neighbours together, everything else by itself."""
    shards: list[Shard] = []
    waiting: list[Piece] = []
    total = 0
    for piece in pieces:
        far = is_url(piece.file.location)
        cost = max(piece.size, _OPEN_FAR_BYTES if far else _OPEN_BYTES)
        unknown = far and not piece.size
        alone = unknown or piece.file.span is not None or cost > most_bytes
        if waiting and (alone or total + cost > most_bytes):
            shards.append(Shard(tuple(waiting)))
            waiting, total = [], 0
        if alone:
            shards.append(Shard((piece,)))
        else:
            waiting.append(piece)
            total += cost
    return [*shards, Shard(tuple(waiting))] if waiting else shards


def _parts(file: DataFile, recipe: Recipe) -> list[DataFile]:
    try:
        return split_file(file, recipe.shard_size_bytes)
    except DataError as error:
        if recipe.on_bad_shard == "stop":
            raise with_skip_hint(error) from error
        return [file]  # its task will find the same and skip it


def with_skip_hint(error: DataError) -> DataError:
    """The error about a file that can't be read, with what a recipe can do about it."""
    fix = "leave it out of the input" if isinstance(error, EmptyFileError) else error.fix
    fix = "; or ".join(filter(None, [fix, "on_bad_shard: skip leaves it out"]))
    return DataError(error.message, where=error.where, fix=fix)


def _picked(whole: list[Piece], count: int, recipe: Recipe) -> list[Piece]:
    from swift.data.readers import count_raw

    if not whole:
        return []
    number = whole[0].input
    rows = [count_raw(piece.file) for piece in whole]
    total = sum(rows)
    if count > total:
        raise UsageError(
            f"{count} rows are wanted, there are {total}",
            where=f"input {number + 1}",
            fix="a recipe takes each row at most once: leave out the number, or lower it",
        )
    return [
        replace(piece, picks=Picks(sum(rows[:index]), total, count, recipe.seed + number))
        for index, piece in enumerate(whole)
    ]
