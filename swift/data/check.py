"""What `swift data check` finds out about data without training on it.

Goes through every row whatever it meets: the ledger, lengths, duplicates, turns and roles, all in one report. Prints
nothing; `CheckReport.render` is the text.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from swift.config.data import DataConfig, TemplateConfig
from swift.data.augment.rows import augmenting
from swift.data.check_units import UnitReport
from swift.data.columns import Layout
from swift.data.ledger import Ledger, SourceTally
from swift.data.pipeline import Chunk, ChunkResult, Encoder, RowResult, Task, Workers
from swift.data.rows import RowRef
from swift.data.selection import TRAIN, VALIDATION, data_rng, open_source, row_options
from swift.data.sources import Source, resolve_sources

QUANTILES = (0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1)
_BAR = 40  # columns of the longest bar
_PAIRS = 5  # duplicate pairs shown


@dataclass
class CheckReport:
    """The findings.

    Attributes:
        ledger: rows read, kept and dropped.
        unit: what lengths are counted in: `tokens`, or `characters` when there was no tokenizer.
        lengths: int64 [n], the length of every readable row (of each example, where a conversation became several)
            before any truncation.
        max_length: the limit that lengths were compared with; None without a tokenizer.
        over: rows above it.
        roles: role -> messages. turns: assistant turns in a row -> rows.
        num_duplicates: rows whose content occurred before.
        duplicates: examples of them: the row, and the earlier one that it equals.
        num_leaked: evaluation rows that are also training rows.
        units: of rows that are more than conversations.
    """

    ledger: Ledger
    unit: str
    lengths: np.ndarray
    max_length: int | None
    over: int = 0
    roles: Counter[str] = field(default_factory=Counter)
    turns: Counter[int] = field(default_factory=Counter)
    num_duplicates: int = 0
    duplicates: list[tuple[RowRef, RowRef]] = field(default_factory=list)
    num_leaked: int = 0
    units: UnitReport | None = None

    @property
    def exit_code(self) -> int:
        """1 if any row is bad, else 0."""
        return int(self.ledger.bad > 0)

    def quantiles(self) -> dict[str, int]:
        """Lengths by share of rows: min, p25, p50, ..., max."""
        if not len(self.lengths):
            return {}
        names = ["min", *(f"p{round(share * 100)}" for share in QUANTILES[1:-1]), "max"]
        values = np.quantile(self.lengths, QUANTILES, method="lower")
        return {name: int(value) for name, value in zip(names, values)}

    def histogram(self) -> list[tuple[int, int, int]]:
        """(from, up to and including, rows) for bins that double in width; empty outer bins left out."""
        if not len(self.lengths):
            return []
        top = max(4, int(self.lengths.max()).bit_length())
        edges = [0, *(1 << power for power in range(4, top + 1))]
        if edges[-1] < self.lengths.max():
            edges.append(edges[-1] * 2)
        counts = [int(((self.lengths > low) & (self.lengths <= high)).sum()) for low, high in pairwise(edges)]
        counts[0] += int((self.lengths == 0).sum())
        bins = [(low + 1, high, count) for low, high, count in zip(edges, edges[1:], counts)]
        used = [index for index, bin_ in enumerate(bins) if bin_[2]]
        return bins[used[0] : used[-1] + 1]

    def summary(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return {
            **self.ledger.summary(),
            "unit": self.unit,
            "lengths": self.quantiles(),
            "histogram": self.histogram(),
            "max_length": self.max_length,
            "over_max_length": self.over,
            "duplicates": self.num_duplicates,
            "leaked": self.num_leaked,
            "units": self.units.summary() if self.units else None,
            "roles": dict(self.roles),
            "turns": {str(turns): count for turns, count in sorted(self.turns.items())},
        }

    def render(self) -> str:
        """The report as plain text."""
        lines = [self.ledger.render(), ""]
        if len(self.lengths):
            lines += self._render_lengths()
        lines += self._render_content()
        lines += self.units.lines() if self.units else []
        bad = self.ledger.bad
        lines.append(f"{bad:,} bad row(s)" if bad else "no bad rows")
        return "\n".join(lines)

    def _render_lengths(self) -> list[str]:
        lines = [f"{self.unit} per row: " + "  ".join(f"{name} {value:,}" for name, value in self.quantiles().items())]
        bins = self.histogram()
        most = max(count for _, _, count in bins)
        width = max(len(f"{low:,}-{high:,}") for low, high, _ in bins)
        for low, high, count in bins:
            bar = "#" * (max(1, round(_BAR * count / most)) if count else 0)
            lines.append(f"  {f'{low:,}-{high:,}'.rjust(width)}  {bar.ljust(_BAR)} {count:,}")
        if self.max_length is not None:
            share = self.over / len(self.lengths)
            lines.append(f"over max_length {self.max_length:,}: {self.over:,} rows ({share:.1%})")
        tokens = sum(tally.tokens for tally in self.ledger.sources)
        trained = sum(tally.trained_tokens for tally in self.ledger.sources)
        if tokens:
            lines.append(f"kept tokens: {tokens:,}, of which trained: {trained:,} ({trained / tokens:.1%})")
        return lines

    def _render_content(self) -> list[str]:
        lines = []
        if self.roles:
            lines.append("messages: " + ", ".join(f"{role} {count:,}" for role, count in self.roles.most_common()))
            turns = sorted(self.turns.items())
            shown = ", ".join(f"{number}: {count:,}" for number, count in turns[:8])
            more = sum(count for _, count in turns[8:])
            lines.append(f"rows by assistant turns: {shown}" + (f", more: {more:,}" if more else ""))
        if self.num_duplicates:
            lines.append(f"exact duplicates: {self.num_duplicates:,} rows repeat an earlier one")
            lines += [f"  {row} = {earlier}" for row, earlier in self.duplicates]
        else:
            lines.append("exact duplicates: none")
        if self.num_leaked:
            lines.append(f"evaluation rows that are also training rows: {self.num_leaked:,}")
        return lines


def run_check(
    data: DataConfig,
    template: TemplateConfig,
    encoder: Encoder | None,
    *,
    seed: int = 42,
    run_dir: Path | None = None,
    layout: Layout = "chat",
) -> CheckReport:
    """Read all rows of `--dataset` and `--val_dataset` as training would, and report on them.

    Args:
        data: which rows; `strict` and `max_bad_rows` are not applied, for a check goes through to the end.
        template: read for `max_length`.
        encoder: counts tokens; None: characters. Its truncation strategy should not be `raise`.
        seed: of sampling by `#n`.
        run_dir: where `ledger.jsonl` goes; None writes none.
        layout: how rows are read; where it isn't `chat`, lengths are those of whole units, which max_length doesn't
            limit.

    Raises:
        DataError: a file that can't be read at all, or is empty.
    """
    train, validation = resolve_sources(data)
    ledger = Ledger(run_dir / "ledger.jsonl" if run_dir else None, strict=False, max_bad_rows=float("inf"))
    if encoder is not None:
        encoder = augmenting(encoder, data, seed=seed, train=train, validation=validation)
    check = _Check(data, ledger, Task(row_options(data, need_answer=True, layout=layout), encoder, facts=True))
    try:
        with check.workers:
            for number, source in enumerate(train):
                check.add(TRAIN, source, data_rng(data, seed, 0, number))
            for number, source in enumerate(validation):
                check.add(VALIDATION, source, data_rng(data, seed, 1, number))
    finally:
        ledger.close()
    return check.report(template.max_length if encoder and layout == "chat" else None)


class _Check:
    """Collects facts, chunk by chunk."""

    def __init__(self, data: DataConfig, ledger: Ledger, task: Task) -> None:
        self.data = data
        self.ledger = ledger
        self.workers = Workers(task, data.dataset_num_proc)
        self.lengths: list[int] = []
        self.digests: list[bytes] = []
        self.refs: list[tuple[int, int]] = []
        self.files: dict[str, int] = {}
        self.num_train = 0
        self.roles: Counter[str] = Counter()
        self.turns: Counter[int] = Counter()
        layout = task.options.layout
        self.units = UnitReport(layout) if layout != "chat" else None

    def add(self, split: str, source: Source, rng: np.random.Generator) -> None:
        """Read one source."""
        tally = self.ledger.begin(split, source.text)
        reading = open_source(source, self.data, rng)
        for chunk, result in self.workers.run(reading.chunks()):
            self._take(chunk, result, tally)
        tally.blank = reading.blank
        tally.repeated = len(reading.choice.repetitions(tally.read, rng))
        for note in reading.notes:
            self.ledger.note(note)
        if split == TRAIN:
            self.num_train = len(self.digests)

    def _take(self, chunk: Chunk, result: ChunkResult, tally: SourceTally) -> None:
        file_id = self.files.setdefault(chunk.file, len(self.files))
        for row in result.rows:
            ref = RowRef(chunk.file, row.line)
            if row.problem:
                self.ledger.drop(tally, ref, row.problem)
            else:
                self.ledger.keep(tally, ref, examples=len(row.lengths), tokens_cut=row.truncated)
            self._facts(row, file_id)
        self.ledger.take_totals(tally, result)

    def _facts(self, row: RowResult, file_id: int) -> None:
        facts = row.facts
        if facts is None:
            return
        self.digests.append(facts.digest)
        self.refs.append((file_id, row.line))
        self.roles.update(facts.roles)
        if self.units:
            self.units.add(facts.unit)
        if facts.roles:
            self.turns[facts.turns] += 1
        if self.workers.task.encoder is None:
            self.lengths.append(facts.characters)
        elif row.lengths and not facts.roles:  # a plain text, whole again
            self.lengths.append(sum(row.lengths) + row.truncated)
        elif row.lengths:
            self.lengths += [row.lengths[0] + row.truncated, *row.lengths[1:]]
        elif row.problem and row.problem.tokens is not None:
            self.lengths.append(row.problem.tokens)

    def report(self, max_length: int | None) -> CheckReport:
        """The finished report."""
        lengths = np.asarray(self.lengths, dtype=np.int64)
        report = CheckReport(self.ledger, "tokens" if self.workers.task.encoder else "characters", lengths, max_length)
        report.roles, report.turns, report.units = self.roles, self.turns, self.units
        if max_length is not None:
            report.over = int((lengths > max_length).sum())
        self._find_duplicates(report)
        return report

    def _find_duplicates(self, report: CheckReport) -> None:
        if not self.digests:
            return
        halves = np.frombuffer(b"".join(self.digests), dtype=np.uint64).reshape(-1, 2)
        order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: equal rows stay in the order of reading
        same = np.concatenate([[False], (halves[order[1:]] == halves[order[:-1]]).all(axis=1)])
        first = order[np.maximum.accumulate(np.where(same, 0, np.arange(len(order))))]
        repeats, originals = order[same], first[same]
        report.num_duplicates = len(repeats)
        report.num_leaked = int(((repeats >= self.num_train) & (originals < self.num_train)).sum())
        names = list(self.files)
        by_place = np.argsort(repeats, kind="stable")[:_PAIRS]
        for index in by_place:
            pair = [RowRef(names[self.refs[i][0]], self.refs[i][1]) for i in (repeats[index], originals[index])]
            report.duplicates.append((pair[0], pair[1]))
