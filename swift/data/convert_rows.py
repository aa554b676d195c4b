"""Rows of one layout rewritten as rows of another: pairs as labelled answers, labelled answers as pairs, and so on.

Every row that is read is accounted for: it is used in a row that is written, or dropped under a reason. Knows nothing
of tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import orjson

from swift.config.data import RowsConfig
from swift.core.errors import UsageError
from swift.data.columns import ANSWER_COLUMNS, CHOSEN_COLUMNS, MESSAGE_COLUMNS, REJECTED_COLUMNS, Layout, number_in
from swift.data.document_shapes import NEGATIVES, POSITIVES
from swift.data.messages import ROLE_ALIASES, decode_nested
from swift.data.pipeline import chunked
from swift.data.preference_shapes import LABEL_COLUMNS, conversation_start
from swift.data.readers import FileTally, parse_raw, read_raw
from swift.data.rows import Row, RowProblem, RowRef
from swift.data.selection import row_options
from swift.data.shapes import normalise_row
from swift.data.sources import parse_source
from swift.data.writers import RecordWriter

Target = Literal["pairs", "binary", "sft", "embedding", "rerank", "labelled"]
TARGETS: tuple[str, ...] = get_args(Target)
_EXAMPLES = 3  # places named for each reason


@dataclass
class Conversion:
    """What became of the rows.

    Attributes:
        read: rows of the input. used: those that are in the output. written: rows of the output.
        dropped: reason -> rows; `read` is `used` and these together.
        places: reason -> the first rows, with what is wrong.
        layouts: layout that rows were read in -> rows.
    """

    read: int = 0
    used: int = 0
    written: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)
    layouts: Counter[str] = field(default_factory=Counter)

    def drop(self, ref: RowRef, reason: str, message: str) -> None:
        """Count a row that isn't used."""
        self.dropped[reason] += 1
        places = self.places.setdefault(reason, [])
        if len(places) < _EXAMPLES:
            places.append(f"{ref}: {message}")

    def summary(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}

    def render(self) -> str:
        """As plain text."""
        lines = [f"read {self.read:,} rows, used {self.used:,}, wrote {self.written:,}"]
        for reason, count in self.dropped.most_common():
            lines.append(f"dropped {count:,} {reason}: first {self.places[reason][0]}")
        return "\n".join(lines)


def detect_layout(record: dict[str, Any]) -> Layout:
    """The layout that a row's columns look like; `chat` where nothing says otherwise."""
    present = {name for name, value in record.items() if value is not None}
    if present & {*REJECTED_COLUMNS, *CHOSEN_COLUMNS}:
        return "pairs"
    labels = next((record[name] for name in (*LABEL_COLUMNS, "labels") if name in present), None)
    if _has_answer(record):
        if "kto_tag" in present or (isinstance(labels, bool | int) and labels in (0, 1)):
            return "binary"
        return "prompts" if "teacher_prompt" in present else "chat"
    if present & {"spans", "entities"} or any(isinstance(record.get(name), list) for name in ("tokens", "words")):
        return "tokens"
    if present & {*POSITIVES, *NEGATIVES, "documents", "passages", "anchor"}:
        answers = _speaks(record.get("positive_messages") or record.get("negative_messages"))
        return "rerank" if answers or {"documents", "passages"} & present else "embedding"
    if labels is not None:
        return "labelled"
    return "prompts" if "teacher_prompt" in present else "chat"


def _has_answer(record: dict[str, Any]) -> bool:
    for name in MESSAGE_COLUMNS:
        if record.get(name) is not None:
            return _speaks(record[name])
    return any(record.get(name) is not None for name in ANSWER_COLUMNS)


def _speaks(raw: Any) -> bool:
    """Whether there is an assistant's message in these messages, or lists of messages."""
    if isinstance(raw, str):
        try:
            raw = orjson.loads(raw)
        except orjson.JSONDecodeError:
            return False
    if isinstance(raw, list):
        return any(map(_speaks, raw))
    if not isinstance(raw, dict):
        return False
    role = raw.get("role", raw.get("from"))
    role = ROLE_ALIASES.get(role, role) if isinstance(role, str) else role
    return role == "assistant" or (role is None and "assistant" in raw)


def convert_rows(
    datasets: Sequence[str], data: RowsConfig, target: Target, output: str | Path, *, layout: Layout | None = None
) -> Conversion:
    """Rewrite the rows of these dataset arguments (all, whatever `#n` says) into one file, which is there as a whole or
    not at all.

    Args:
        output: its ending says the format (`swift.data.writers.FORMATS`).
        layout: how rows are read; None: each as its columns look. Rows with `responses` and `scores` become pairs of
            the best answer and each that scored lower.

    Raises:
        UsageError: rows of that layout can't become rows of `target`, or the ending of `output` isn't known.
        DataError: a file can't be read.
    """
    report = Conversion()
    waiting = _Partners()
    with RecordWriter(output) as writer:
        for ref, raw in _raw_rows(datasets):
            report.read += 1
            try:
                record = parse_raw(raw)
                rows = list(_rows(record, ref, data, target, layout, report))
                records = [made for row, kind in rows for made in _converter(kind, target)(row, waiting)]
            except RowProblem as problem:
                report.drop(ref, problem.reason, problem.message)
                continue
            if rows and rows[0][1] == "binary" and target == "pairs":
                waiting.add(rows[0][0])
                continue
            report.used += 1
            writer.write(records)
        for record, refs in waiting.pairs():
            report.used += len(refs)
            writer.write([record])
        for ref in waiting.single():
            report.drop(ref, "no_partner", "no answer of the other kind to this prompt is left")
        report.written = writer.rows
    return report


def _raw_rows(datasets: Sequence[str]) -> Iterator[tuple[RowRef, Any]]:
    for text in datasets:
        for file in parse_source(text).files:
            for chunk in chunked(read_raw(file, FileTally()), file.name):
                for line, raw in chunk.rows:
                    yield RowRef(chunk.file, line), raw


def _rows(
    record: dict[str, Any], ref: RowRef, data: RowsConfig, target: Target, layout: Layout | None, report: Conversion
) -> Iterator[tuple[Row, Layout]]:
    """The rows that a record stands for, with their layout."""
    ranked = record.get("responses") is not None and record.get("scores") is not None
    kind: Layout = "pairs" if ranked else layout or detect_layout(record)
    report.layouts["ranked" if ranked else kind] += 1
    for each in [_from_ranks(record)] if ranked else [record]:
        yield normalise_row(each, ref, row_options(data, need_answer=True, layout=kind))[0], kind


def _from_ranks(record: dict[str, Any]) -> dict[str, Any]:
    """The best answer as chosen, each that scored lower as rejected, with the differences as margins."""
    responses, scores = decode_nested(record["responses"], "responses"), decode_nested(record["scores"], "scores")
    if not isinstance(responses, list) or not isinstance(scores, list) or len(responses) != len(scores):
        raise RowProblem("bad_scores", "'responses' and 'scores' are not lists of one length")
    values = [number_in("scores", score, "bad_scores") for score in scores]
    best = max(range(len(values)), key=values.__getitem__, default=None)
    worse = [] if best is None else [at for at, value in enumerate(values) if value < values[best]]
    if best is None or not worse:
        raise RowProblem("tied", "no answer scored lower than the best one")
    rest = {name: value for name, value in record.items() if name not in ("responses", "scores")}
    return {
        **rest,
        "chosen": responses[best],
        "rejected": [responses[at] for at in worse],
        "margin": [values[best] - values[at] for at in worse],
    }


# --- one layout to another ---


def _common(row: Row) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    if row.tools:
        kept["tools"] = row.tools
    if row.template_kwargs:
        kept["chat_template_kwargs"] = row.template_kwargs
    return kept


def _pairs(row: Row, _: _Partners) -> list[dict[str, Any]]:
    records = []
    for number, answer in enumerate(row.rejected):
        record = {"messages": row.messages, "rejected_messages": [*row.messages[: row.answer_at], *answer]}
        margin = {"margin": row.margins[number]} if row.margins else {}
        records.append({**record, **margin, **_common(row)})
    return records


def _pairs_to_binary(row: Row, _: _Partners) -> list[dict[str, Any]]:
    worse = [[*row.messages[: row.answer_at], *answer] for answer in row.rejected]
    labelled = [(row.messages, True), *((messages, False) for messages in worse)]
    return [{"messages": messages, "label": label, **_common(row)} for messages, label in labelled]


def _binary(row: Row, _: _Partners) -> list[dict[str, Any]]:
    return [{"messages": row.messages, "label": row.label, **_common(row)}]


def _chat(row: Row, _: _Partners) -> list[dict[str, Any]]:
    return [{"text": row.text} if row.text is not None else {"messages": row.messages, **_common(row)}]


def _binary_to_sft(row: Row, partners: _Partners) -> list[dict[str, Any]]:
    if not row.label:
        raise RowProblem("undesirable", "its answer isn't wanted")
    return _chat(row, partners)


def _labelled_to_sft(row: Row, _: _Partners) -> list[dict[str, Any]]:
    labels = row.label if isinstance(row.label, list) else [row.label]
    said = {"role": "assistant", "content": ", ".join(map(str, labels)) or "none"}
    return [{"messages": [*row.messages, said], **_common(row)}]


def _labelled(row: Row, _: _Partners) -> list[dict[str, Any]]:
    return [{"messages": row.messages, "label": row.label, **_common(row)}]


def _documents(role: str) -> Callable[[Row, _Partners], list[dict[str, Any]]]:
    def convert(row: Row, _: _Partners) -> list[dict[str, Any]]:
        record: dict[str, Any] = {"messages": row.messages}
        for name, texts in (("positive_messages", row.positives), ("negative_messages", row.negatives)):
            if texts:
                record[name] = [[*text[:-1], {**text[-1], "role": role}] for text in texts]
        if row.label is not None:
            record["label"] = row.label
        return [{**record, **_common(row)}]

    return convert


def _later(_: Row, __: _Partners) -> list[dict[str, Any]]:
    return []  # written when all rows are known


_CONVERTERS: dict[tuple[str, str], Callable[[Row, _Partners], list[dict[str, Any]]]] = {
    ("pairs", "pairs"): _pairs,
    ("pairs", "binary"): _pairs_to_binary,
    ("pairs", "sft"): _chat,
    ("binary", "binary"): _binary,
    ("binary", "pairs"): _later,
    ("binary", "sft"): _binary_to_sft,
    ("labelled", "labelled"): _labelled,
    ("labelled", "sft"): _labelled_to_sft,
    ("chat", "sft"): _chat,
    **{(kind, "embedding"): _documents("user") for kind in ("embedding", "rerank")},
    **{(kind, "rerank"): _documents("assistant") for kind in ("embedding", "rerank")},
}


def _converter(kind: Layout, target: Target) -> Callable[[Row, _Partners], list[dict[str, Any]]]:
    found = _CONVERTERS.get((kind, target))
    if found is None:
        possible = [to for start, to in _CONVERTERS if start == kind]
        raise UsageError(
            f"rows of the layout {kind} can't become {target}",
            where="--to",
            fix=f"they can become {', '.join(possible)}" if possible else "say how to read them with --layout",
        )
    return found


class _Partners:
    """Rows with a label that wait for one of the other kind to the same prompt; each is used once, in order."""

    def __init__(self) -> None:
        self.rows: dict[bytes, tuple[list[Row], list[Row]]] = {}

    def add(self, row: Row) -> None:
        """Keep a row."""
        start = conversation_start(row.messages)
        key = orjson.dumps([row.messages[:start], row.tools, row.template_kwargs], option=orjson.OPT_SORT_KEYS)
        self.rows.setdefault(key, ([], []))[0 if row.label else 1].append(row)

    def pairs(self) -> Iterator[tuple[dict[str, Any], list[RowRef]]]:
        """A pair for each wanted answer with one that isn't, and the two rows it is made of."""
        for good, bad in self.rows.values():
            for better, worse in zip(good, bad):
                record = {"messages": better.messages, "rejected_messages": worse.messages}
                yield {**record, **_common(better)}, [better.ref, worse.ref]

    def single(self) -> Iterator[RowRef]:
        """The rows that are in no pair."""
        for good, bad in self.rows.values():
            used = min(len(good), len(bad))
            for row in (*good[used:], *bad[used:]):
                yield row.ref
