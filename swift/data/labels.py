"""Which labels a data set has, and the number that each stands for.

`collect_labels` reads the rows once, before anything is encoded; `LabelSpace` is what it finds, and turns the label of
a row into numbers. Knows nothing of tokens or models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from swift.config.data import RowsConfig
from swift.core.errors import DataError
from swift.data.columns import Layout
from swift.data.pipeline import chunked
from swift.data.readers import FileTally, parse_raw, read_raw
from swift.data.rows import Row, RowProblem, RowRef, excerpt
from swift.data.selection import row_options
from swift.data.shapes import normalise_row
from swift.data.sources import parse_source

Problem = Literal["single_label_classification", "multi_label_classification", "regression"]
OUTSIDE = "O"


@dataclass(frozen=True)
class LabelSpace:
    """What labels can be.

    Attributes:
        problem: one class for each text (or word), several, or numbers.
        num_labels: how many classes, or numbers for each text in regression.
        names: of the classes, in the order of their numbers; empty where rows give numbers.
        bio: spans give `B-` and `I-` labels; else the first and the other tokens of a span have one label.
    """

    problem: Problem
    num_labels: int
    names: tuple[str, ...] = ()
    bio: bool = True

    def values(self, label: Any) -> tuple[float, ...]:
        """The numbers of a row's label, as the unit keeps them.

        Raises:
            RowProblem: `label_unknown`, `label_out_of_range`, `label_not_a_number`, `label_count`.
        """
        items = label if isinstance(label, list) else [label]
        if self.problem == "regression":
            if len(items) != self.num_labels:
                raise RowProblem("label_count", f"the row has {len(items)} number(s), {self.num_labels} are expected")
            return tuple(map(_number, items))
        if self.problem == "single_label_classification" and isinstance(label, list):
            raise RowProblem(
                "label_count", f"the label is a list: {excerpt(label)}", "--problem_type multi_label_classification"
            )
        return tuple(float(number) for number in dict.fromkeys(map(self.number, items)))

    def number(self, label: Any) -> int:
        """The class that a name or a number stands for."""
        if isinstance(label, str) and label in self.names:
            return self.names.index(label)
        whole = _whole(label)
        if whole is None:
            known = ", ".join(self.names[:12]) or f"whole numbers from 0 to {self.num_labels - 1}"
            raise RowProblem("label_unknown", f"there is no label {excerpt(label)!r}", f"labels are {known}")
        if not 0 <= whole < self.num_labels:
            raise RowProblem(
                "label_out_of_range",
                f"the label is {whole}; with {self.num_labels} classes they are 0 to {self.num_labels - 1}",
                "correct the row, or --num_labels",
            )
        return whole


@dataclass
class LabelCounts:
    """What `collect_labels` found.

    Attributes:
        space: the labels.
        counts: label -> how many texts (or words, or spans) have it.
        rows: rows with a label. bad: rows that couldn't be read; they will be refused again when they are encoded.
        out_of_range: labels beyond `--num_labels` or `--label_names`, with where the first is.
    """

    space: LabelSpace
    counts: Counter[Any] = field(default_factory=Counter)
    rows: int = 0
    bad: int = 0
    out_of_range: dict[Any, str] = field(default_factory=dict)

    @property
    def all_same(self) -> bool:
        """Whether there is nothing to learn: every row has one and the same label."""
        return self.rows > 1 and len(self.counts) == 1


def collect_labels(
    datasets: Sequence[str],
    data: RowsConfig,
    *,
    layout: Layout = "labelled",
    label_names: Sequence[str] = (),
    num_labels: int | None = None,
    problem: Problem | None = None,
    bio: bool = True,
) -> LabelCounts:
    """Read the labels of all rows, whatever `#n` takes of them.

    Args:
        datasets: dataset arguments, those of evaluation too.
        layout: `labelled` or `tokens`.
        label_names: names of the classes; else those of the rows, sorted.
        num_labels: how many there are; else as many as are needed.
        problem: else found from the rows: lists are several classes, fractions are regression.
        bio: whether spans have `B-` and `I-` labels.

    Raises:
        DataError: no row has a label, or names and fractions are mixed.
    """
    options = row_options(data, need_answer=True, layout=layout)
    found = _Found()
    for text in datasets:
        for file in parse_source(text).files:
            for chunk in chunked(read_raw(file, FileTally()), file.name):
                for line, raw in chunk.rows:
                    ref = RowRef(chunk.file, line)
                    try:
                        row, _ = normalise_row(parse_raw(raw), ref, options)
                    except RowProblem:
                        found.bad += 1
                        continue
                    found.add(row, bio)
    if not found.rows:
        raise DataError("no row has a label", where=", ".join(datasets), fix="see `swift data check FILE`")
    space = found.space(tuple(label_names), num_labels, problem, bio)
    result = LabelCounts(space, found.counts, found.rows, found.bad)
    if space.problem != "regression":
        for label, place in found.first.items():
            try:
                space.number(label)
            except RowProblem:
                result.out_of_range[label] = place
    return result


@dataclass
class _Found:
    counts: Counter[Any] = field(default_factory=Counter)
    first: dict[Any, str] = field(default_factory=dict)
    rows: int = 0
    bad: int = 0
    lists: bool = False
    width: int = 1

    def add(self, row: Row, bio: bool) -> None:
        self.rows += 1
        if row.spans is not None:
            labels = [OUTSIDE]
            for _, _, name in row.spans:
                labels += [f"B-{name}", f"I-{name}"] if bio else [name]
        elif row.words is not None or isinstance(row.label, list):
            labels = list(row.label)
            if row.words is None:
                self.lists, self.width = True, len(labels)
        else:
            labels = [row.label]
        for label in labels:
            self.counts[label] += 1
            self.first.setdefault(label, str(row.ref))

    def space(self, names: tuple[str, ...], num_labels: int | None, problem: Problem | None, bio: bool) -> LabelSpace:
        labels = list(self.counts)
        fractions = [label for label in labels if _whole(label) is None and not isinstance(label, str)]
        if problem is None:
            problem = "regression" if fractions else "single_label_classification"
            if self.lists and not fractions:
                problem = "multi_label_classification"
        if problem == "regression":
            return LabelSpace(problem, num_labels or self.width)
        if fractions:
            raise DataError(
                f"the label {fractions[0]} is no class", where=self.first[fractions[0]], fix="--problem_type regression"
            )
        words = sorted({label for label in labels if isinstance(label, str) and _whole(label) is None})
        if not names and words:
            numbers = [label for label in labels if _whole(label) is not None]
            if numbers:
                raise DataError(
                    f"some labels are names ({words[0]}), others numbers ({numbers[0]})",
                    where=self.first[numbers[0]],
                    fix="write all of them as names, or say which name has which number with --label_names",
                )
            outside = [word for word in words if word == OUTSIDE]
            names = (*outside, *(word for word in words if word != OUTSIDE))
        highest = max((number for label in labels if (number := _whole(label)) is not None), default=-1)
        return LabelSpace(problem, num_labels or len(names) or max(2, highest + 1), names, bio)


def _whole(label: Any) -> int | None:
    """The whole number that a label is, also one written as text; None for others."""
    if isinstance(label, str):
        return int(label) if label.strip().lstrip("-").isdecimal() else None
    if isinstance(label, float):
        return int(label) if label.is_integer() else None
    return label if isinstance(label, int) else None


def _number(label: Any) -> float:
    try:
        return float(label)
    except (TypeError, ValueError):
        raise RowProblem("label_not_a_number", f"the label is {excerpt(label)}, not a number") from None
