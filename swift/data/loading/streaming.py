"""`--streaming true`: files that are read and encoded while training.

Before step 1 only as much is read as it takes to say how long the run will be: rows are counted where that is cheap
(Parquet and Arrow know, small files are counted), else estimated from a sample and the files' sizes, and a sample is
encoded to learn how many tokens a row has. What was found, and each file's stamp, is saved with the position: a resumed
run keeps to it, and refuses files that were changed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swift.config.data import DataConfig, TemplateConfig
from swift.core.errors import DataError, UsageError
from swift.data.columns import MOST_SEQUENCES
from swift.data.columns import Layout as RowLayout
from swift.data.dataset import no_rows_left
from swift.data.files import DataFile, is_url, size_of, stamp_of
from swift.data.loading.batch import Layout
from swift.data.loading.flow import FileFlow, Reading
from swift.data.loading.loader import Loader, Outlook
from swift.data.loading.mixture import Documents
from swift.data.loading.order import ORDER_VERSION
from swift.data.loading.stream_intake import FileIntake
from swift.data.loading.stream_ledger import StreamLedger
from swift.data.loading.stream_loader import StreamLoader
from swift.data.loading.stream_task import StreamTask
from swift.data.loading.train_set import Place, mixture_of, packing_share, units_of
from swift.data.pipeline import Encoder, Workers
from swift.data.readers import EmptyFileError, FileTally, RowStream, count_raw, split_file
from swift.data.rows import RowRef
from swift.data.selection import row_options
from swift.data.selfcog import identity_from
from swift.data.sources import Source

# Large jsonl and Parquet files are read in pieces of this size, so that the rows of one file mix as well.
PIECE_BYTES = 64 << 20
# Files of a source are counted up to this size in all; above, rows are estimated.
COUNT_BYTES = 256 << 20
_SAMPLE_FILES = 3
_SAMPLE_ROWS = 128  # of each of these files


@dataclass
class SourceFacts:
    """What is known of a source before it is read.

    Attributes:
        rows: in a pass; None where nobody can know. exact: whether they were counted.
        examples_per_row: rows that are dropped count as none.
        lengths: tokens of the sample's examples.
        encoding: what the encoder counted in the sample.
    """

    rows: float | None
    exact: bool
    examples_per_row: float
    lengths: list[int]
    encoding: dict[str, int]


@dataclass
class StreamSet:
    """Rows that are read while training; see `open_stream`.

    Attributes:
        stamps: of each file, as the run knows them; `here`: as this machine does. A copy of a file on another machine
            has another time.
    """

    sources: list[Source]
    data: DataConfig
    template: TemplateConfig
    task: StreamTask
    seed: int
    stamps: dict[str, str]
    here: dict[str, str]
    facts: list[SourceFacts]
    ledger_path: Path | None = None

    @property
    def longest(self) -> int:
        """No sequence has more tokens."""
        return self.template.max_length

    @property
    def longest_example(self) -> int:
        """No example has more tokens, with all of its sequences; 0 where nobody knows how many it may have."""
        return self.longest * MOST_SEQUENCES.get(self.task.options.layout, 0)

    @property
    def encoding(self) -> Counter[str]:
        """What the encoder counted in the samples."""
        return sum((Counter(facts.encoding) for facts in self.facts), Counter())

    def saved_facts(self) -> dict[str, Any]:
        """What a resumed run must agree on; `open_stream` takes it back."""
        return {"sources": [asdict(one) for one in self.facts], "stamps": self.stamps}

    def digest(self) -> str:
        """Identifies the rows and their encoding: settings, and each file's place and stamp."""
        names = [[source.count, [[f.place, f.part] for f in source.files]] for source in self.sources]
        encoder = self.task.encoder
        rows = [repr(self.task.options), repr(self.task.identities)]
        parts = [names, self.stamps, rows, encoder.fingerprint() if encoder else None]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    def loader(self, layout: Layout, place: Place, facts: dict[str, Any] | None) -> Loader:
        """The loader. `facts` of an earlier process win over what was found now, since the schedule hangs on them."""
        known = [SourceFacts(**one) for one in facts["sources"]] if facts else self.facts
        sizes = [one.rows if one.rows is not None else 0.0 for one in known]
        if not all(sizes):  # nobody knows how large some source is: all weigh the same, unless shares are given
            sizes = [1.0] * len(sizes)
        per_step = (facts or {}).get("documents_per_step") or self._documents_per_step(layout, place, known)
        mixture = mixture_of(self.data, sizes, per_step)
        self._check_passes(mixture.passes, known)
        reading = Reading(
            self.seed, layout.shuffle, self.data.shuffle_buffer_size, self.data.on_bad_shard == "skip", self.here
        )
        flows = [
            FileFlow(
                number,
                _pieces(source, layout.shuffle),
                reading,
                limit=source.count,
                size=round(one.rows) if one.exact and one.rows is not None else None,
            )
            for number, (source, one) in enumerate(zip(self.sources, known, strict=True))
        ]
        texts = [source.text for source in self.sources]
        ledger = StreamLedger(self.ledger_path, texts, strict=self.data.strict, max_bad_rows=self.data.max_bad_rows)
        workers = Workers(self.task, place.workers, "--dataloader_num_workers")
        intake = FileIntake(
            Documents(flows, mixture),
            workers,
            ledger,
            lambda: no_rows_left("train", ledger, self.template),
            rank=place.rank,
            world_size=place.world_size,
            exchange=place.exchange,
            ahead=place.workers * place.prefetch,
        )
        saved = {**self.saved_facts(), "sources": [asdict(one) for one in known], "documents_per_step": per_step}
        return StreamLoader(
            intake,
            layout,
            identity=(ORDER_VERSION, self.seed, mixture.identity(), self.data.shuffle_buffer_size),
            longest=self.longest_example or self.longest,
            outlook=self._outlook(layout, known, mixture.documents([one.rows or 0.0 for one in known])),
            rank=place.rank,
            world_size=place.world_size,
            facts=saved,
        )

    def _documents_per_step(self, layout: Layout, place: Place, known: Sequence[SourceFacts]) -> float:
        units = layout.units_per_micro_batch * layout.micro_batches * place.world_size
        per_document = units_of(layout, _lengths(known), 1.0, _examples_per_row(known))
        return max(1.0, units / max(per_document, 1e-6))

    def _check_passes(self, passes: Sequence[float], known: Sequence[SourceFacts]) -> None:
        for source, times, one in zip(self.sources, passes, known, strict=True):
            if times < 1 and not one.exact and source.count is None:
                raise UsageError(
                    f"{times:g} of a pass over {source.text} can't be taken: nobody has counted its rows",
                    where="--mix_epochs",
                    fix=f"give the rows wanted: {source.text}#1000; or a whole number of passes",
                )

    def _outlook(self, layout: Layout, known: Sequence[SourceFacts], documents: float) -> Outlook:
        if any(one.rows is None for one in known) or math.isinf(documents):
            return Outlook(None, False, None, None, None, "how many rows there are can't be known before they are read")
        lengths, per_row = _lengths(known), _examples_per_row(known)
        units = max(1, math.ceil(units_of(layout, lengths, documents, per_row) - 1e-6))
        tokens = documents * per_row * float(lengths.mean()) if len(lengths) else 0
        how = "counted" if all(one.exact for one in known) else "estimated from a sample"
        words = (
            f"about {documents:,.0f} rows an epoch ({how}); their tokens are estimated from {len(lengths):,} examples"
        )
        share = packing_share(layout, lengths) if layout.packing_length or layout.padding_free else None
        return Outlook(units, False, round(documents * per_row), round(tokens), share, words)


def _lengths(known: Sequence[SourceFacts]) -> np.ndarray:
    return np.array([length for one in known for length in one.lengths], dtype=np.int64)


def _examples_per_row(known: Sequence[SourceFacts]) -> float:
    """Of all sources, by their rows."""
    rows = sum(one.rows or 1.0 for one in known)
    return sum((one.rows or 1.0) * one.examples_per_row for one in known) / rows


def _pieces(source: Source, shuffle: bool) -> list[DataFile]:
    if not shuffle:
        return list(source.files)
    return [piece for file in source.files for piece in split_file(file, PIECE_BYTES)]


def open_stream(
    sources: Sequence[Source],
    data: DataConfig,
    template: TemplateConfig,
    encoder: Encoder,
    *,
    seed: int,
    saved: dict[str, Any] | None = None,
    from_main: bool = False,
    row_layout: RowLayout = "chat",
) -> StreamSet:
    """Look at the files of a run that reads while it trains.

    Args:
        saved: what an earlier process found (`facts` of its position): then nothing is counted or sampled again.
        row_layout: what a row must have (`RowOptions.layout`).
        from_main: `saved` is what rank 0 found just now, perhaps on another machine with copies of the files.

    Raises:
        DataError: a file is missing, empty or damaged where the sample is taken; or was changed since the run began.
    """
    identities = {
        number: identity_from(data.model_name, data.model_author)
        for number, source in enumerate(sources)
        if source.self_cognition
    }
    task = StreamTask(row_options(data, need_answer=True, layout=row_layout), encoder, identities=identities)
    here = {file.place: stamp_of(file.location) for source in sources for file in source.files}
    if saved is None:
        facts = [
            _look_at(number, source, task, skip_bad=data.on_bad_shard == "skip")
            for number, source in enumerate(sources)
        ]
        return StreamSet(list(sources), data, template, task, seed, here, here, facts)
    if from_main:
        _refuse_other_copies(saved["stamps"], here)
    else:
        _refuse_changed(saved["stamps"], here)
    facts = [SourceFacts(**one) for one in saved["sources"]]
    return StreamSet(list(sources), data, template, task, seed, saved["stamps"], here, facts)


def _refuse_other_copies(main: dict[str, str], here: dict[str, str]) -> None:
    """Sizes must agree between machines; times needn't."""
    for name in {**main, **here}:
        sizes = [stamps.get(name, "").partition("-")[0] for stamps in (main, here)]
        if sizes[0] != sizes[1]:
            raise DataError(
                "the file is not the same on all machines",
                where=name,
                fix="put the data on a file system that all machines share, or copy it again",
            )


def _refuse_changed(before: dict[str, str], now: dict[str, str]) -> None:
    changed = [name for name, stamp in now.items() if name in before and before[name] != stamp]
    gone = [name for name in before if name not in now]
    new = [name for name in now if name not in before]
    for names, what in ((changed, "was changed"), (gone, "is no longer part of the data"), (new, "was added")):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise DataError(
                f"a file {what} since the run began{more}, so the rows to come aren't known",
                where=names[0],
                fix="put the files back as they were, or start a new run from the weights: --resume_only_model true",
            )


def _look_at(number: int, source: Source, task: StreamTask, *, skip_bad: bool) -> SourceFacts:
    """Count a source's rows if that is cheap, and encode a sample of them."""
    documents: list[tuple[int, RowRef, Any]] = []
    empty: EmptyFileError | None = None
    rows = share_bytes = 0.0
    step = max(1, len(source.files) // _SAMPLE_FILES)
    for file in source.files[::step][:_SAMPLE_FILES]:
        tally = FileTally()
        found = 0
        try:
            for line, raw in RowStream(file, tally):
                documents.append((number, file.ref(line), raw))
                found += 1
                if found == _SAMPLE_ROWS:
                    break
            else:
                tally.share = 1.0
        except EmptyFileError as error:
            if len(source.files) == 1:
                raise
            empty = error
            tally.share = 1.0
        except DataError:  # told when it is read, and counted there
            if not skip_bad:
                raise
            if not found:  # says nothing of how many rows a byte holds
                continue
        rows += found
        share_bytes += tally.share * size_of(file.location)
    total, exact = _count(source, rows / share_bytes if share_bytes else None)
    if exact and not total and empty is not None:  # no file has any
        raise empty
    if source.count is not None:
        total, exact = float(source.count), True
    result = task.run(documents)
    lengths = [length for row in result.rows for length in row.lengths]
    return SourceFacts(total, exact, len(lengths) / max(1, len(documents)), lengths, dict(result.encoding))


def _count(source: Source, rows_per_byte: float | None) -> tuple[float | None, bool]:
    """A source's rows, and whether they were counted; None if nobody can know."""
    sizes = [size_of(file.location) for file in source.files]
    told = all(size or not is_url(file.location) for size, file in zip(sizes, source.files))  # servers may say nothing
    known = {file.format for file in source.files} <= {"parquet", "arrow"}
    if known or (told and sum(sizes) <= COUNT_BYTES):
        total = 0
        for file in source.files:
            try:
                total += count_raw(file)
            except EmptyFileError:
                continue
            except DataError:  # a file that breaks off is dealt with when it is read
                return (sum(sizes) * rows_per_byte if rows_per_byte else None), False
        return float(total), True
    if not told or not rows_per_byte:
        return None, False
    return sum(sizes) * rows_per_byte, False
