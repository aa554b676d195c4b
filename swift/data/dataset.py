"""From dataset arguments to the examples of training and evaluation.

`prepare_datasets` reads, checks, encodes, samples and splits; everything random in it is a function of the seed and the
place of the argument on the command line. What was prepared can be saved and mapped by the other processes of a node.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from swift.config.curriculum import LENGTH
from swift.config.data import DataConfig, TemplateConfig
from swift.core.addresses import without_secrets
from swift.core.errors import DataError, UsageError, did_you_mean
from swift.core.files import write_atomic
from swift.core.version import __version__
from swift.data.augment.rows import augmenting
from swift.data.columns import Layout
from swift.data.files import stamp_of
from swift.data.ledger import SOFT_REASONS, Ledger, SourceTally
from swift.data.pipeline import Chunk, ChunkResult, Encoder, Task, Workers
from swift.data.rows import RowRef
from swift.data.selection import TRAIN, VALIDATION, Progress, data_rng, iter_rows, open_source, row_options
from swift.data.sources import Source, resolve_sources
from swift.data.token_files.cached import locate_cached, made_with, open_cached, validation_of
from swift.data.token_files.shards import MANIFEST, REF, Examples
from swift.data.token_files.store import TokenDataset
from swift.data.token_files.writer import ShardWriter

__all__ = ["Prepared", "Progress", "TokenDataset", "data_fingerprint", "iter_rows", "load_prepared", "prepare_datasets"]


@dataclass
class Prepared:
    """Encoded examples, ready for the loader.

    Attributes:
        train: examples to train on, in file order; none when they are streamed.
        val: examples to evaluate on; None if there are none.
        ledger: what became of every row.
        fingerprint: of everything that decided the examples (`data_fingerprint`).
        parts: training examples of each dataset, in order.
        difficulty: float64, of each training example, when a curriculum names a column.
    """

    train: TokenDataset
    val: TokenDataset | None
    ledger: Ledger
    fingerprint: str
    parts: list[int] = field(default_factory=list)
    difficulty: np.ndarray | None = None

    def save(self, folder: Path) -> None:
        """Write everything to a folder, for `load_prepared`; the last file written marks it complete.

        Tokens that lie in files already, stored by `prepare_datasets` or cached, aren't copied.
        """
        (folder / "prepared.json").unlink(missing_ok=True)
        for name, dataset in ((TRAIN, self.train), (VALIDATION, self.val)):
            if dataset is not None and all(shard.path is not None for shard, _ in dataset.shards):
                dataset.save_view(folder / name)
            elif dataset is not None:
                dataset.save(folder / name)
        meta = {"fingerprint": self.fingerprint, "validation": self.val is not None, "ledger": self.ledger.summary()}
        meta |= {"parts": self.parts, "difficulty": self.difficulty is not None}
        if self.difficulty is not None:
            np.save(folder / "difficulty.npy", self.difficulty)
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
    val = TokenDataset.load(folder / VALIDATION) if meta["validation"] else None
    difficulty = np.load(folder / "difficulty.npy", mmap_mode="r") if meta["difficulty"] else None
    ledger, train = Ledger.restore(meta["ledger"]), TokenDataset.load(folder / TRAIN)
    return Prepared(train, val, ledger, fingerprint, meta["parts"], difficulty)


def prepare_datasets(
    data: DataConfig,
    template: TemplateConfig,
    encoder: Encoder,
    *,
    seed: int,
    run_dir: Path | None = None,
    store: Path | None = None,
    progress: Callable[[Progress], None] | None = None,
    row_layout: Layout = "chat",
) -> Prepared:
    """Read and encode `--dataset` and `--val_dataset`.

    Args:
        data: which rows.
        template: read for `max_length` and `truncation_strategy`, which name themselves in errors.
        encoder: row -> examples; pickled when `dataset_num_proc` is above 1.
        seed: of sampling and splitting, unless `data_seed` is set.
        run_dir: where `ledger.jsonl` goes.
        store: a folder for the tokens, written as they come and mapped; None keeps them in memory. What is there of
            an earlier try is replaced.
        progress: called after each chunk of some hundred rows.
        row_layout: what a row must have (`RowOptions.layout`).

    Raises:
        DataError: a bad row (or too many), or nothing to train on, with the cause.
        UsageError: an argument that can't be meant.
    """
    sources, val_sources = resolve_sources(data)
    ledger = Ledger(
        run_dir / ("ledger-validation.jsonl" if data.streaming else "ledger.jsonl") if run_dir else None,
        strict=data.strict,
        max_bad_rows=data.max_bad_rows,
    )
    encoder = augmenting(encoder, data, seed=seed, train=sources, validation=val_sources)
    builder = _Builder(data, encoder, ledger, seed, store, row_layout)
    builder.progress = Progress(progress, [*sources, *val_sources])
    try:
        with builder.workers:
            train = TokenDataset([]) if data.streaming else builder.build(TRAIN, sources, data.cached_dataset, template)
            held = _cached_validation(data)
            val = builder.build(VALIDATION, val_sources, held, template) if val_sources or held else None
        _note_shared_files(sources, val_sources, ledger)
        ledger.check_share()
        if not data.streaming:
            _check_columns(data, builder.columns)
        if data.split_dataset_ratio > 0:
            train, val = builder.split(train)
        datasets = {TRAIN: train, **({VALIDATION: val} if val is not None else {})}
        datasets = {name: dataset for name, dataset in datasets.items() if len(dataset)}
        for name, dataset in datasets.items():
            ledger.totals[name] = {
                "examples": len(dataset),
                "tokens": dataset.num_tokens,
                "trained_tokens": dataset.trained_tokens(),
            }
    finally:
        ledger.close()
    fingerprint = data_fingerprint(data, template, encoder, seed)
    return Prepared(train, val, ledger, fingerprint, builder.parts, builder.difficulty)


def data_fingerprint(data: DataConfig, template: TemplateConfig, encoder: Encoder, seed: int) -> str:
    """A hash of everything that decides the examples: settings, encoder, and each file's place and stamp."""
    settings = asdict(data)
    settings.pop("dataset_num_proc")  # changes the time only
    for name in ("dataset", "val_dataset"):
        settings[name] = [without_secrets(text) for text in settings[name]]  # a URL that is signed anew is the same
    files = []
    for source in chain(*resolve_sources(data)):
        for file in source.files:
            files.append([file.place, file.part, stamp_of(file.location)])
    for split, texts in ((TRAIN, data.cached_dataset), (VALIDATION, _cached_validation(data))):
        for folder, _ in (locate_cached(text, split, "--cached_dataset") for text in texts):
            files.append([str(folder.resolve()), hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()])
    parts = [__version__, settings, asdict(template), encoder.fingerprint(), seed, files]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


# --- building ---


def _ints() -> array[int]:
    return array("q")  # 8 bytes a row; a list would take 36


@dataclass
class _Collected:
    """Examples of one split as they come: into shards, or held in memory.

    Attributes:
        examples, rows: so far. row_ids: for each example of a source that has a `#n`, its row.
        order: pieces of the order in which examples count. difficulty: of each example, when a column gives it.
    """

    writer: ShardWriter | None = None
    pieces: list[Examples] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)
    examples: int = 0
    rows: int = 0
    row_ids: array[int] = field(default_factory=_ints)
    order: list[np.ndarray] = field(default_factory=list)
    difficulty: array[float] = field(default_factory=lambda: array("d"))

    def add(self, piece: Examples) -> None:
        if self.writer:
            self.writer.add(piece)
        else:
            self.pieces.append(piece)
        self.examples += len(piece.lengths)

    def dataset(self) -> TokenDataset:
        """All examples, in order."""
        if self.writer:
            self.writer.close(list(self.files), {})
            whole = TokenDataset.load(self.writer.folder)
        else:
            whole = TokenDataset.from_examples(self.pieces, list(self.files))
        order = np.concatenate(self.order)
        return whole if len(order) == len(whole) else whole.select(order)


class _Builder:
    """Runs the sources of both splits through the pipeline and into the ledger."""

    def __init__(
        self, data: DataConfig, encoder: Encoder, ledger: Ledger, seed: int, store: Path | None, row_layout: Layout
    ) -> None:
        self.data = data
        self.encoder = encoder
        self.column = difficulty_column(data)
        task = Task(row_options(data, need_answer=True, layout=row_layout), encoder, difficulty=self.column)
        self.workers = Workers(task, data.dataset_num_proc)
        self.ledger = ledger
        self.seed = seed
        self.store = store
        self.columns: set[str] = set()
        self.parts: list[int] = []
        self.difficulty: np.ndarray | None = None
        self.made_with: dict[str, Any] | None = None
        self.progress = Progress(None, [])

    def build(self, split: str, sources: list[Source], cached: Sequence[str], template: TemplateConfig) -> TokenDataset:
        """All sources of a split, one after another; those whose tokens are there already come last."""
        if split == TRAIN:
            self.parts = []
        parts = [self._encode(split, sources, template)] if sources else []
        parts += [self._take_cached(split, text, len(sources) + number) for number, text in enumerate(cached)]
        return parts[0] if len(parts) == 1 else TokenDataset.join(parts)

    def _take_cached(self, split: str, text: str, number: int) -> TokenDataset:
        source = open_cached(text, split, "--cached_val_dataset" if split == VALIDATION else "--cached_dataset")
        if self.made_with is None:
            self.made_with = made_with(self.encoder)
        for note in source.check(self.made_with):
            self.ledger.note(note)
        rng = data_rng(self.data, self.seed, int(split == VALIDATION), number)
        dataset, rows, repeated = source.chosen(shuffle=self.data.dataset_shuffle, rng=rng)
        if split == TRAIN:
            self.parts.append(len(dataset))
        tally = self.ledger.begin(split, text)
        tally.read = tally.kept = rows - repeated
        tally.repeated, tally.examples, tally.tokens = repeated, len(dataset), dataset.num_tokens
        tally.trained_tokens = dataset.trained_tokens()
        self.ledger.encoding.update(source.manifest.get("ledger", {}).get("encoding", {}))
        return dataset

    def _encode(self, split: str, sources: list[Source], template: TemplateConfig) -> TokenDataset:
        collected = _Collected()
        if self.store is not None:
            folder = self.store / f"{split}-tokens"
            shutil.rmtree(folder, ignore_errors=True)
            collected.writer = ShardWriter(folder, self.encoder.vocab_size)
        try:
            for number, source in enumerate(sources):
                rng = data_rng(self.data, self.seed, int(split == VALIDATION), number)
                self._add(split, source, rng, collected)
            if not collected.examples:
                raise no_rows_left(split, self.ledger, template)
            if split == TRAIN and self.column:
                self.difficulty = np.asarray(collected.difficulty)[np.concatenate(collected.order)]
            return collected.dataset()
        finally:
            if collected.writer:
                collected.writer.drop()

    def _add(self, split: str, source: Source, rng: np.random.Generator, collected: _Collected) -> None:
        tally = self.ledger.begin(split, source.text)
        reading = open_source(source, self.data, rng)
        counted = reading.choice.count is not None
        first, row_base = collected.examples, collected.rows
        collected.row_ids = _ints()
        for chunk, result in self.workers.run(reading.chunks()):
            self._take(chunk, result, tally, collected, counted=counted)
            self.progress.add(len(chunk.rows), reading)
        self.progress.finish(source)
        tally.blank = reading.blank
        for note in reading.notes:
            self.ledger.note(note)
        collected.order.append(np.arange(first, collected.examples, dtype=np.int64))
        again = reading.choice.repetitions(collected.rows - row_base, rng)
        if again:
            tally.repeated = len(again)
            examples_of: dict[int, list[int]] = {}
            for index, row in enumerate(collected.row_ids, first):
                examples_of.setdefault(row - row_base, []).append(index)
            repeated = [index for row in again for index in examples_of.get(row, [])]
            collected.order.append(np.array(repeated, dtype=np.int64))
        if split == TRAIN:
            self.parts.append(collected.examples - first + (len(collected.order[-1]) if again else 0))

    def _take(
        self, chunk: Chunk, result: ChunkResult, tally: SourceTally, collected: _Collected, *, counted: bool
    ) -> None:
        file_id = collected.files.setdefault(chunk.file, len(collected.files))
        lengths: list[int] = []
        refs: list[tuple[int, int]] = []
        for row in result.rows:
            ref = RowRef(chunk.file, row.line)
            if row.problem:
                self.ledger.drop(tally, ref, row.problem)
            else:
                self.ledger.keep(tally, ref, examples=len(row.lengths), tokens_cut=row.truncated)
                lengths += row.lengths
                collected.difficulty.extend([row.difficulty] * len(row.lengths) if self.column else ())
                refs += [(row.line, file_id)] * len(row.lengths)
                if counted:
                    collected.row_ids.extend([collected.rows] * len(row.lengths))
            collected.rows += 1
        self.ledger.take_totals(tally, result)
        self.columns |= result.columns
        rows = np.array(refs, dtype=REF)
        sizes = np.array(lengths, np.int64)
        collected.add(Examples(result.input_ids, result.loss_weights, sizes, rows, result.notes))

    def split(self, train: TokenDataset) -> tuple[TokenDataset, TokenDataset]:
        """Set a share of the rows aside; all examples and repetitions of a row stay on one side."""
        row_ids = train.row_numbers()
        rows = np.unique(row_ids)
        wanted = max(1, round(len(rows) * self.data.split_dataset_ratio))
        if wanted >= len(rows):
            raise DataError(
                f"{len(rows)} row(s) can't be split: the evaluation part would take {wanted}",
                where=f"--split_dataset_ratio {self.data.split_dataset_ratio:g}",
                fix="give more rows, a smaller ratio, or a --val_dataset",
            )
        if self.data.dataset_shuffle:
            rng = data_rng(self.data, self.seed, 2)
            aside = rng.choice(rows, wanted, replace=False)
        else:
            aside = rows[-wanted:]
        is_aside = np.isin(row_ids, aside)
        keep = np.flatnonzero(~is_aside)
        held = np.flatnonzero(is_aside)
        _, first = np.unique(train.places[held], return_index=True)  # a repeated row is evaluated once
        held = held[np.sort(first)]
        self.parts = np.diff(np.searchsorted(keep, np.cumsum([0, *self.parts]))).tolist()
        if self.difficulty is not None:
            self.difficulty = self.difficulty[keep]
        return train.select(keep), train.select(held)


def _cached_validation(data: DataConfig) -> list[str]:
    """The cached evaluation rows: those asked for, else the parts of exports that were named as a whole."""
    if data.cached_val_dataset or data.val_dataset or data.split_dataset_ratio > 0:
        return data.cached_val_dataset
    return [part for text in data.cached_dataset if (part := validation_of(text))]


def _note_shared_files(train: list[Source], validation: list[Source], ledger: Ledger) -> None:
    shared = {file for source in train for file in source.files} & {f for source in validation for f in source.files}
    for file in sorted(shared, key=lambda file: file.name):
        ledger.note(f"{file.name} is used both for training and for evaluation")


def difficulty_column(data: DataConfig) -> str | None:
    """The column that a curriculum takes the difficulty from, if it takes it from one."""
    named = (data.curriculum or {}).get("difficulty")
    return named if named != LENGTH else None


def no_rows_left(split: str, ledger: Ledger, template: TemplateConfig) -> DataError:
    """Every row was dropped: say why, and which flag to change."""
    tallies = [tally for tally in ledger.sources if tally.split == split]
    read = sum(tally.read for tally in tallies)
    dropped = sum((tally.dropped for tally in tallies[1:]), tallies[0].dropped.copy())
    reason, count = dropped.most_common(1)[0]
    where = ", ".join(tally.source for tally in tallies)
    what = f"no row is left for {'training' if split == TRAIN else 'evaluation'}: "
    if reason == "too_long":
        shortest = f" (the shortest has {ledger.shortest_too_long} tokens)" if ledger.shortest_too_long else ""
        return DataError(
            f"{what}{count} of {read} rows are longer than {template.max_length} tokens{shortest}",
            where=where,
            fix="raise --max_length, or cut rows with --truncation_strategy left or right",
        )
    if reason in SOFT_REASONS or reason == "all_masked":
        return DataError(
            f"{what}in {count} of {read} rows no token is trained (all labels are masked)",
            where=where,
            fix='raise --max_length if answers are cut off; else check --loss_scale and the rows\' "loss" marks',
        )
    ref, message = ledger.problems[reason][0]
    return DataError(f"{what}{count} of {read} rows were dropped as {reason}", where=str(ref), fix=message)


def _check_columns(data: DataConfig, seen: set[str]) -> None:
    for name in data.columns or {}:
        if name not in seen:
            raise UsageError(
                f"--columns renames {name!r}, but no row has that column",
                where="--columns",
                fix=" ".join(filter(None, [did_you_mean(name, seen), "columns: " + ", ".join(sorted(seen))])),
            )
