"""The row ledger: what became of every row that was read.

Counts always add up: rows read = rows kept + rows dropped. `ledger.jsonl` has one line for each row that was dropped,
truncated or split, and one summary line at the end. What stops a run because of bad rows is decided here.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from swift.core.errors import DataError
from swift.core.files import disk_errors
from swift.data.pipeline import ChunkResult
from swift.data.rows import RowProblem, RowRef

# these rows are well formed; the limits the user set leave no room for them
SOFT_REASONS = frozenset({"too_long", "masked_by_truncation"})
_EXAMPLES_PER_REASON = 3
# what the encoder counts, in words
_ENCODING_REMARKS = {
    "asked_thinking": "rows asked with thinking on, since their answers have thoughts",
    "asked_not_thinking": "rows asked with thinking off, since their answers have no thoughts",
    "own_examples": "answers made examples of their own, since the template shows them differently in the history",
    "masked_turns": "answers not trained, since the template shows them differently in the history",
    "merged_borders": "answers made examples of their own, since their first letters would merge with the prompt",
    "continued_prompts": "answers trained as prompt + answer, since the template can't show them otherwise",
    "special_text": "rows whose messages contain the text of special tokens",
    "added_in_text": "plain texts that contain the string of an added token, which is read as that token",
    "tokenised_fast": "texts tokenised by the fast path, equal to the reference on a sample of each part",
    "fast_path_differed": "texts tokenised by the reference, since the fast path differed on a sample of their part",
}


@dataclass
class SourceTally:
    """The counts of one dataset argument.

    Attributes:
        split: `train` or `validation`.
        source: the argument as the user wrote it.
        read, kept, truncated, cut_up: rows; `cut_up` became several examples each (truncation_strategy split).
        dropped: reason -> rows.
        blank: blank lines.
        repeated: rows added by `#n` above the number of rows.
        examples, tokens, trained_tokens, tokens_cut: after encoding; repetitions not counted.
        unused: column or message key -> rows that have it and nothing reads it.
    """

    split: str
    source: str
    read: int = 0
    kept: int = 0
    truncated: int = 0
    cut_up: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    blank: int = 0
    repeated: int = 0
    examples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    tokens_cut: int = 0
    unused: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        """The counts as plain values."""
        return {name: dict(v) if isinstance(v, Counter) else v for name, v in vars(self).items()}

    @property
    def bad(self) -> int:
        """Rows dropped for a fault of their own."""
        return sum(count for reason, count in self.dropped.items() if reason not in SOFT_REASONS)


class Ledger:
    """Collects the counts, writes the file, and stops the run when the rules say so.

    Args:
        path: where `ledger.jsonl` goes; None keeps counts and the first examples of each reason only.
        strict: stop at the first bad row.
        max_bad_rows: with `strict` false, bad rows allowed: a share of the rows read below 1, a number from 1 on.
    """

    def __init__(self, path: Path | None = None, *, strict: bool = True, max_bad_rows: float = 0.01) -> None:
        self.sources: list[SourceTally] = []
        self.notes: list[str] = []
        self.problems: dict[str, list[tuple[RowRef, str]]] = {}
        self.shortest_too_long: int | None = None
        self.totals: dict[str, dict[str, int]] = {}
        self.encoding: Counter[str] = Counter()
        self._path = path
        self._strict = strict
        self._max_bad_rows = max_bad_rows
        self._aside: Path | None = None
        self._file: IO[str] | None = None
        self._refused = False
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            with disk_errors(path):
                self._file = self._aside.open("w", encoding="utf-8")

    def begin(self, split: str, source: str) -> SourceTally:
        """Start counting another dataset argument."""
        self.sources.append(SourceTally(split, source))
        return self.sources[-1]

    def note(self, text: str) -> None:
        """Something to tell the user once."""
        if text not in self.notes:
            self.notes.append(text)

    def drop(self, tally: SourceTally, ref: RowRef, problem: RowProblem) -> None:
        """Count a dropped row.

        Raises:
            DataError: if this row stops the run.
        """
        tally.read += 1
        tally.dropped[problem.reason] += 1
        examples = self.problems.setdefault(problem.reason, [])
        if len(examples) < _EXAMPLES_PER_REASON:
            examples.append((ref, problem.message))
        if problem.reason == "too_long" and problem.tokens is not None:
            self.shortest_too_long = min(problem.tokens, self.shortest_too_long or problem.tokens)
        self._write(tally, ref, "dropped", reason=problem.reason, message=problem.message)
        if problem.reason in SOFT_REASONS:
            return
        if self._strict:
            fix = "--strict false drops and counts bad rows instead of stopping"
            raise DataError(
                f"bad row ({problem.reason}): {problem.message}",
                where=str(ref),
                fix=f"{problem.fix}; or {fix}" if problem.fix else fix,
            )
        if self._max_bad_rows >= 1 and self.bad > self._max_bad_rows:
            raise self.too_many_bad_rows()

    def keep(self, tally: SourceTally, ref: RowRef, *, examples: int, tokens_cut: int) -> None:
        """Count a row that is trained on."""
        tally.read += 1
        tally.kept += 1
        tally.examples += examples
        if examples > 1:
            tally.cut_up += 1
            self._write(tally, ref, "split", examples=examples)
        if tokens_cut:
            tally.truncated += 1
            tally.tokens_cut += tokens_cut
            self._write(tally, ref, "truncated", tokens_cut=tokens_cut)

    def take_totals(self, tally: SourceTally, result: ChunkResult) -> None:
        """Add what a chunk of rows came to as a whole."""
        tally.tokens += len(result.input_ids)
        tally.trained_tokens += int(np.count_nonzero(result.loss_weights))
        tally.unused.update(result.unused)
        self.encoding.update(result.encoding)
        for notice in result.notices:
            self.note(notice)

    @property
    def bad(self) -> int:
        """Bad rows of all sources."""
        return sum(tally.bad for tally in self.sources)

    @property
    def read(self) -> int:
        """Rows read of all sources."""
        return sum(tally.read for tally in self.sources)

    def check_share(self) -> None:
        """After all rows: stop if the share of bad ones is above what is allowed."""
        if self._max_bad_rows < 1 and self.bad > self._max_bad_rows * self.read:
            raise self.too_many_bad_rows()

    def too_many_bad_rows(self) -> DataError:
        """The error that names the reasons and where they first occurred."""
        allowed = f"{self._max_bad_rows:.3g}" if self._max_bad_rows >= 1 else f"{self._max_bad_rows:.2%}"
        reasons = Counter[str]()
        for tally in self.sources:
            reasons.update({reason: n for reason, n in tally.dropped.items() if reason not in SOFT_REASONS})
        lines = [
            f"\n    {reason}: {count}, first at {self.problems[reason][0][0]}: {self.problems[reason][0][1]}"
            for reason, count in reasons.most_common()
        ]
        return DataError(
            f"{self.bad} of {self.read} rows are bad; --max_bad_rows allows {allowed}" + "".join(lines),
            where=str(self.problems[reasons.most_common(1)[0][0]][0][0]),
            fix="repair or remove them (`swift data check FILE --report_dir DIR` writes them all), "
            "or raise --max_bad_rows",
        )

    def close(self) -> None:
        """Write the summary line and put the file in its place.

        After a refused write it only clears up: the error was told, and a ledger with holes replaces no whole one.
        """
        file, self._file = self._file, None
        if file is None or self._aside is None or self._path is None:
            return
        try:
            if not self._refused:
                with disk_errors(self._path):
                    file.write(json.dumps({"event": "summary", **self.summary()}, ensure_ascii=False) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
                    file.close()
                    self._aside.replace(self._path)
        finally:
            with suppress(OSError):  # what is still in the buffer is refused again
                file.close()
            self._aside.unlink(missing_ok=True)

    def _write(self, tally: SourceTally, ref: RowRef, event: str, **details: Any) -> None:
        if self._file is None or self._path is None:
            return
        line = {"event": event, "split": tally.split, **_place(ref), **details}
        self._refused = True
        with disk_errors(self._path):
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._refused = False

    # --- reports ---

    def summary(self) -> dict[str, Any]:
        """Everything counted, as plain JSON values; `restore` reads it back."""
        return {
            "sources": [tally.as_json() for tally in self.sources],
            "totals": self.totals,
            "encoding": dict(self.encoding),
            "notes": self.notes,
            "problems": {
                reason: [{**_place(ref), "message": text} for ref, text in found]
                for reason, found in self.problems.items()
            },
        }

    @classmethod
    def restore(cls, summary: dict[str, Any]) -> Ledger:
        """A ledger with these counts, for processes that didn't read the rows themselves."""
        ledger = cls()
        for values in summary["sources"]:
            counters = {"dropped": Counter(values["dropped"]), "unused": Counter(values["unused"])}
            ledger.sources.append(SourceTally(**{**values, **counters}))
        ledger.totals = summary["totals"]
        ledger.encoding = Counter(summary["encoding"])
        ledger.notes = list(summary["notes"])
        ledger.problems = {
            reason: [(_ref(found), found["message"]) for found in items]
            for reason, items in summary["problems"].items()
        }
        return ledger

    def table(self) -> list[list[str]]:
        """The summary as rows of text, the first one the header: for rich, or for `render`."""
        header = ["data", "read", "kept", "truncated", "split", "dropped", "examples", "tokens", "trained"]
        rows = [header]
        for tally in self.sources:
            name = tally.source if tally.split == "train" else f"{tally.source} ({tally.split})"
            counts = [tally.read, tally.kept, tally.truncated, tally.cut_up, sum(tally.dropped.values())]
            counts += [tally.examples, tally.tokens, tally.trained_tokens]
            rows.append([name, *(f"{count:,}" for count in counts)])
        if not any(tally.examples for tally in self.sources):  # nothing was encoded
            rows = [row[:-3] for row in rows]
        return rows

    def remarks(self) -> list[str]:
        """The lines below the table: dropped rows by reason, unused columns, blank lines, notes."""
        lines = []
        dropped = sum((tally.dropped for tally in self.sources), Counter[str]())
        for reason, count in dropped.most_common():
            ref, message = self.problems[reason][0]
            lines.append(f"dropped {count:,} {reason}: first {ref}: {message}")
        unused = sum((tally.unused for tally in self.sources), Counter[str]())
        if unused:
            shown = ", ".join(f"{name} ({count:,})" for name, count in unused.most_common(12))
            more = f" and {len(unused) - 12} more" if len(unused) > 12 else ""
            lines.append(f"unused columns: {shown}{more}")
        blank = sum(tally.blank for tally in self.sources)
        if blank:
            lines.append(f"blank lines skipped: {blank:,}")
        for tally in self.sources:
            if tally.repeated:
                lines.append(
                    f"{tally.source}: {tally.repeated:,} repetitions, since # asks for more rows than there are"
                )
        lines += [
            f"{_ENCODING_REMARKS.get(name, name)}: {count:,}"
            for name, count in self.encoding.items()
            if count and name != "tokenised_reference"
        ]
        return lines + self.notes

    def render(self) -> str:
        """The whole summary as plain text."""
        table = self.table()
        widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
        lines = [
            "  ".join(
                [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
            ).rstrip()
            for row in table
        ]
        return "\n".join(lines + self.remarks())


def _place(ref: RowRef) -> dict[str, Any]:
    """Where a row lies: `line`, or `byte` of rows in large files whose lines nobody counted."""
    return {"file": ref.file, "byte" if ref.by_offset else "line": ref.line}


def _ref(place: dict[str, Any]) -> RowRef:
    """What `_place` gave."""
    by_offset = "byte" in place
    return RowRef(place["file"], place["byte" if by_offset else "line"], by_offset)
