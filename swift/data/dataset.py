"""From dataset arguments to the examples of training and evaluation.

`prepare_datasets` reads, checks, encodes, samples and splits; everything random in it is a function of the seed and the
place of the argument on the command line. What was prepared can be saved and mapped by the other processes of a node.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from swift.config.data import DataConfig, TemplateConfig
from swift.core.errors import DataError, UsageError, did_you_mean
from swift.core.files import write_atomic
from swift.core.version import __version__
from swift.data.ledger import SOFT_REASONS, Ledger, SourceTally
from swift.data.pipeline import Chunk, ChunkResult, Encoder, Task, chunked, run_chunks
from swift.data.readers import FileTally, RawRow, count_raw, parse_raw, read_raw
from swift.data.rows import Row, RowProblem, RowRef
from swift.data.selfcog import Identity, fill_identity, identity_from
from swift.data.shapes import RowOptions, normalise_row
from swift.data.sources import DataFile, Source, parse_source
from swift.data.token_store import TokenDataset

__all__ = ["Prepared", "TokenDataset", "data_fingerprint", "iter_rows", "load_prepared", "prepare_datasets"]

_TRAIN, _VALIDATION = "train", "validation"
_SPLIT_KEY = 2  # which random stream: 0 train sources, 1 validation sources, 2 the split


@dataclass
class Prepared:
    """Encoded examples, ready for the loader.

    Attributes:
        train: examples to train on, in file order.
        val: examples to evaluate on; None if there are none.
        ledger: what became of every row.
        fingerprint: of everything that decided the examples (`data_fingerprint`).
    """

    train: TokenDataset
    val: TokenDataset | None
    ledger: Ledger
    fingerprint: str

    def save(self, folder: Path) -> None:
        """Write everything to a folder, for `load_prepared`; the last file written marks it complete."""
        (folder / "prepared.json").unlink(missing_ok=True)
        self.train.save(folder / _TRAIN)
        if self.val is not None:
            self.val.save(folder / _VALIDATION)
        meta = {"fingerprint": self.fingerprint, "validation": self.val is not None, "ledger": self.ledger.summary()}
        write_atomic(folder / "prepared.json", json.dumps(meta, ensure_ascii=False))


def load_prepared(folder: Path, fingerprint: str) -> Prepared:
    """Map what `Prepared.save` wrote.

    Raises:
        DataError: it isn't there or incomplete, or it was made from other data or other settings.
    """
    try:
        meta = json.loads((folder / "prepared.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"there is no complete token cache: {error}", where=str(folder), fix="delete the folder; it is made again"
        ) from error
    if meta["fingerprint"] != fingerprint:
        raise DataError(
            "the token cache was made from other data, another template or other settings",
            where=str(folder),
            fix="delete the folder; it is made again",
        )
    val = TokenDataset.load(folder / _VALIDATION) if meta["validation"] else None
    return Prepared(TokenDataset.load(folder / _TRAIN), val, Ledger.restore(meta["ledger"]), fingerprint)


def prepare_datasets(
    data: DataConfig, template: TemplateConfig, encoder: Encoder, *, seed: int, run_dir: Path | None = None
) -> Prepared:
    """Read and encode `--dataset` and `--val_dataset`.

    Args:
        data: which rows.
        template: read for `max_length` and `truncation_strategy`, which name themselves in errors.
        encoder: row -> examples; pickled when `dataset_num_proc` is above 1.
        seed: of sampling and splitting, unless `data_seed` is set.
        run_dir: where `ledger.jsonl` goes.

    Raises:
        DataError: a bad row (or too many), or nothing to train on, with the cause.
        UsageError: an argument that can't be meant.
    """
    sources = _resolve(data)
    ledger = Ledger(
        run_dir / "ledger.jsonl" if run_dir else None,
        strict=data.strict,
        max_bad_rows=data.max_bad_rows,
        too_long_stops=template.truncation_strategy == "raise",
    )
    builder = _Builder(data, encoder, ledger, _seed(data, seed))
    try:
        train = builder.build(_TRAIN, sources[_TRAIN], template)
        val = builder.build(_VALIDATION, sources[_VALIDATION], template) if sources[_VALIDATION] else None
        ledger.check_share()
        _check_columns(data, builder.columns)
        if data.split_dataset_ratio > 0:
            train, val = builder.split(train)
        datasets = {_TRAIN: train.dataset, **({_VALIDATION: val.dataset} if val else {})}
        for name, dataset in datasets.items():
            ledger.totals[name] = {
                "examples": len(dataset),
                "tokens": dataset.num_tokens,
                "trained_tokens": dataset.trained_tokens(),
            }
    finally:
        ledger.close()
    fingerprint = data_fingerprint(data, template, encoder, seed)
    return Prepared(train.dataset, val.dataset if val else None, ledger, fingerprint)


def data_fingerprint(data: DataConfig, template: TemplateConfig, encoder: Encoder, seed: int) -> str:
    """A hash of everything that decides the examples: settings, encoder, and each file's path, size and time."""
    settings = asdict(data)
    settings.pop("dataset_num_proc")  # changes the time only
    files = []
    for group in _resolve(data).values():
        for source in group:
            for file in source.files:
                stat = file.path.stat()
                files.append([str(file.path.resolve()), file.part, stat.st_size, stat.st_mtime_ns])
    parts = [__version__, settings, asdict(template), encoder.fingerprint(), seed, files]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def iter_rows(
    datasets: list[str], data: DataConfig, *, need_answer: bool = False, seed: int = 42
) -> Iterator[tuple[RowRef, Row | RowProblem]]:
    """Each row of these dataset arguments in order, or what is wrong with it; `#n` as in training."""
    options = _options(data, need_answer)
    for number, text in enumerate(datasets):
        source = parse_source(text)
        identity = _identity(data) if source.self_cognition else None
        rng = np.random.default_rng([_seed(data, seed), 0, number])
        choice = _choose(source, data.dataset_shuffle, rng)
        found: list[tuple[RowRef, Row | RowProblem]] = []
        for chunk in _chunks(source, choice, SourceTally("", text), [], identity):
            for line, raw in chunk.rows:
                item = (ref := RowRef(chunk.file, line), _row_or_problem(raw, ref, options, identity))
                yield item
                if source.count:
                    found.append(item)
        if source.count:
            for index in choice.repetitions(len(found), rng):
                yield found[index]


def _row_or_problem(
    raw: bytes | dict | RowProblem, ref: RowRef, options: RowOptions, identity: Identity | None
) -> Row | RowProblem:
    try:
        row, _ = normalise_row(parse_raw(raw), ref, options)
        if identity:
            fill_identity(row, identity)
    except RowProblem as problem:
        return problem
    return row


# --- choosing rows ---


@dataclass
class Choice:
    """Which rows of a source count.

    Attributes:
        ordinals: row numbers (from 0, over all files) to take; None for all.
        limit: take this many from the beginning; None for all.
        count: rows wanted in all; None for as many as there are.
        shuffle: whether the incomplete last repetition is drawn at random.
    """

    ordinals: frozenset[int] | None = None
    limit: int | None = None
    count: int | None = None
    shuffle: bool = False

    def repetitions(self, read: int, rng: np.random.Generator) -> list[int]:
        """Row numbers to add after the first pass, when more rows are wanted than the `read` there are."""
        if self.count is None or read == 0 or self.count <= read:
            return []
        times, rest = divmod(self.count, read)
        chosen = sorted(rng.choice(read, rest, replace=False).tolist()) if self.shuffle else list(range(rest))
        return list(range(read)) * (times - 1) + chosen


def _choose(source: Source, shuffle: bool, rng: np.random.Generator) -> Choice:
    if source.count is None:
        return Choice()
    if not shuffle:
        return Choice(limit=source.count, count=source.count)
    total = sum(count_raw(file) for file in source.files)
    if source.count >= total:
        return Choice(count=source.count, shuffle=True)
    return Choice(frozenset(rng.choice(total, source.count, replace=False).tolist()), count=source.count, shuffle=True)


def _chunks(
    source: Source, choice: Choice, tally: SourceTally, notes: list[str], identity: Identity | None
) -> Iterator[Chunk]:
    """The chosen rows of a source's files; blank lines and notes are collected on the way."""
    ordinal = 0

    def chosen(rows: Iterator[RawRow]) -> Iterator[RawRow]:
        nonlocal ordinal
        for row in rows:
            if choice.limit is not None and ordinal >= choice.limit:
                return
            if choice.ordinals is None or ordinal in choice.ordinals:
                yield row
            ordinal += 1

    for file in source.files:
        if choice.limit is not None and ordinal >= choice.limit:
            return
        seen = FileTally()
        yield from chunked(chosen(read_raw(file, seen)), _name(file), identity=identity)
        tally.blank += seen.blank
        notes.extend(seen.notes)


def _name(file: DataFile) -> str:
    return str(file.path)


# --- building ---


@dataclass
class _Part:
    """Examples of one split and, for each, the number of the row that it came from."""

    dataset: TokenDataset
    row_ids: np.ndarray


@dataclass
class _Collected:
    """Pieces of one split as they come."""

    ids: list[np.ndarray] = field(default_factory=list)
    weights: list[np.ndarray] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    file_ids: list[int] = field(default_factory=list)
    row_ids: list[int] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    rows: int = 0


class _Builder:
    """Runs the sources of both splits through the pipeline and into the ledger."""

    def __init__(self, data: DataConfig, encoder: Encoder, ledger: Ledger, seed: int) -> None:
        self.data = data
        self.task = Task(_options(data, need_answer=True), encoder)
        self.ledger = ledger
        self.seed = seed
        self.columns: set[str] = set()

    def build(self, split: str, sources: list[Source], template: TemplateConfig) -> _Part:
        """All sources of a split, one after another."""
        collected = _Collected()
        for number, source in enumerate(sources):
            rng = np.random.default_rng([self.seed, int(split == _VALIDATION), number])
            self._add(split, source, rng, collected)
        refs = (np.asarray(collected.file_ids), np.asarray(collected.lines), list(collected.files))
        if not collected.lengths:
            raise _nothing_left(split, self.ledger, template)
        dataset = TokenDataset.from_parts(collected.ids, collected.weights, np.asarray(collected.lengths), refs)
        row_ids = np.asarray(collected.row_ids)
        if len(collected.order) != len(dataset):  # something is repeated
            dataset, row_ids = dataset.select(collected.order), row_ids[collected.order]
        return _Part(dataset, row_ids)

    def _add(self, split: str, source: Source, rng: np.random.Generator, collected: _Collected) -> None:
        tally = self.ledger.begin(split, source.text)
        for note in source.notes:
            self.ledger.note(note)
        identity = _identity(self.data) if source.self_cognition else None
        choice = _choose(source, self.data.dataset_shuffle, rng)
        notes: list[str] = []
        chunks = _chunks(source, choice, tally, notes, identity)
        first, row_base = len(collected.lengths), collected.rows
        for chunk, result in run_chunks(chunks, self.task, self.data.dataset_num_proc):
            self._take(chunk, result, tally, collected)
        for note in notes:
            self.ledger.note(note)
        last = len(collected.lengths)
        collected.order.extend(range(first, last))
        again = choice.repetitions(collected.rows - row_base, rng)
        if again:
            tally.repeated = len(again)
            examples_of: dict[int, list[int]] = {}
            for index in range(first, last):
                examples_of.setdefault(collected.row_ids[index] - row_base, []).append(index)
            for row in again:
                collected.order.extend(examples_of.get(row, []))

    def _take(self, chunk: Chunk, result: ChunkResult, tally: SourceTally, collected: _Collected) -> None:
        file_id = collected.files.setdefault(chunk.file, len(collected.files))
        for row in result.rows:
            ref = RowRef(chunk.file, row.line)
            if row.problem:
                self.ledger.drop(tally, ref, row.problem)
            else:
                self.ledger.keep(tally, ref, examples=len(row.lengths), tokens_cut=row.truncated)
                for length in row.lengths:
                    collected.lengths.append(length)
                    collected.lines.append(row.line)
                    collected.file_ids.append(file_id)
                    collected.row_ids.append(collected.rows)
            collected.rows += 1
        tally.tokens += len(result.input_ids)
        tally.trained_tokens += int(np.count_nonzero(result.loss_weights))
        tally.unused.update(result.unused)
        self.columns |= result.columns
        collected.ids.append(result.input_ids)
        collected.weights.append(result.loss_weights)

    def split(self, train: _Part) -> tuple[_Part, _Part]:
        """Set a share of the rows aside; all examples and repetitions of a row stay on one side."""
        rows = np.unique(train.row_ids)
        wanted = max(1, round(len(rows) * self.data.split_dataset_ratio))
        if wanted >= len(rows):
            raise DataError(
                f"{len(rows)} row(s) can't be split: the evaluation part would take {wanted}",
                where=f"--split_dataset_ratio {self.data.split_dataset_ratio:g}",
                fix="give more rows, a smaller ratio, or a --val_dataset",
            )
        if self.data.dataset_shuffle:
            rng = np.random.default_rng([self.seed, _SPLIT_KEY])
            aside = rng.choice(rows, wanted, replace=False)
        else:
            aside = rows[-wanted:]
        is_aside = np.isin(train.row_ids, aside)
        keep = np.flatnonzero(~is_aside)
        # a repeated row is evaluated once: its first examples, those that start at a new place
        held = np.flatnonzero(is_aside)
        _, first = np.unique(train.dataset.starts[held], return_index=True)
        held = held[np.sort(first)]
        return (
            _Part(train.dataset.select(keep), train.row_ids[keep]),
            _Part(train.dataset.select(held), train.row_ids[held]),
        )


def _nothing_left(split: str, ledger: Ledger, template: TemplateConfig) -> DataError:
    """Every row was dropped: say why, and which flag to change."""
    tallies = [tally for tally in ledger.sources if tally.split == split]
    read = sum(tally.read for tally in tallies)
    dropped = sum((tally.dropped for tally in tallies[1:]), tallies[0].dropped.copy())
    reason, count = dropped.most_common(1)[0]
    where = ", ".join(tally.source for tally in tallies)
    what = f"no row is left for {'training' if split == _TRAIN else 'evaluation'}: "
    if reason == "too_long":
        shortest = f" (the shortest has {ledger.shortest_too_long} tokens)" if ledger.shortest_too_long else ""
        return DataError(
            f"{what}{count} of {read} rows are longer than {template.max_length} tokens{shortest}",
            where=where,
            fix="raise --max_length, or cut rows with --truncation_strategy right",
        )
    if reason in SOFT_REASONS or reason == "all_masked":
        return DataError(
            f"{what}in {count} of {read} rows no token is trained (all labels are masked)",
            where=where,
            fix='raise --max_length if answers are cut off; else check --loss_scale and the rows\' "loss" marks',
        )
    ref, message = ledger.problems[reason][0]
    return DataError(f"{what}{count} of {read} rows were dropped as {reason}", where=str(ref), fix=message)


def _resolve(data: DataConfig) -> dict[str, list[Source]]:
    """The sources of both splits; refuses what can't be meant."""
    if not data.dataset:
        raise UsageError("no data was given", where="--dataset", fix="--dataset FILE.jsonl (or `self-cognition`)")
    if not 0 <= data.split_dataset_ratio < 1:
        raise UsageError(
            f"--split_dataset_ratio {data.split_dataset_ratio:g} is not a share",
            where="--split_dataset_ratio",
            fix="a number from 0 up to (not including) 1, such as 0.05",
        )
    if data.val_dataset and data.split_dataset_ratio > 0:
        raise UsageError(
            "--val_dataset and --split_dataset_ratio both give evaluation rows", fix="leave out one of them"
        )
    sources = {
        _TRAIN: [parse_source(text) for text in data.dataset],
        _VALIDATION: [parse_source(text) for text in data.val_dataset],
    }
    if any(source.self_cognition for group in sources.values() for source in group):
        _identity(data)
    return sources


def _check_columns(data: DataConfig, seen: set[str]) -> None:
    for name in data.columns or {}:
        if name not in seen:
            raise UsageError(
                f"--columns renames {name!r}, but no row has that column",
                where="--columns",
                fix=" ".join(filter(None, [did_you_mean(name, seen), "columns: " + ", ".join(sorted(seen))])),
            )


def _options(data: DataConfig, need_answer: bool) -> RowOptions:
    return RowOptions(tuple((data.columns or {}).items()), not data.disable_auto_column_mapping, need_answer)


def _identity(data: DataConfig) -> Identity:
    return identity_from(data.model_name, data.model_author)


def _seed(data: DataConfig, seed: int) -> int:
    return seed if data.data_seed is None else data.data_seed
