"""Rows whose text has a label, and rows whose words have one each.

A label stays as the row has it, a name or a number: which ones there are is known only when all rows are.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from swift.data.chat_shapes import add_system, no_layout, read_prompt
from swift.data.columns import TEXT_COLUMNS, Columns, plain_text
from swift.data.messages import decode_nested
from swift.data.rows import Row, RowProblem, excerpt

LABELS = ("label", "labels", "label_text")
WORDS = ("tokens", "words")
WORD_LABELS = ("labels", "tags", "ner_tags", "label", "pos_tags", "chunk_tags")
SPANS = ("spans", "entities", "label", "labels")
_SENTENCES = (*TEXT_COLUMNS, "sentence")


def read_labelled(row: Row, columns: Columns, *, need_label: bool = True) -> None:
    """Fill in a text and its label: a name, a number, or a list of either where a text can have several.

    Args:
        need_label: whether a text without one is refused; else it has None.

    Raises:
        RowProblem: `label_missing`, `label_type`, `label_nan`, or as for conversations.
    """
    name, label = columns.first(LABELS)
    if isinstance(label, str) and label.lstrip().startswith("["):
        label = decode_nested(label, name or "label")
    if need_label or not (label is None or label == ""):
        row.label = checked_label(name or "label", label)
    row.messages = _text_of(columns)


def read_token_labels(row: Row, columns: Columns, *, need_labels: bool = True) -> None:
    """Fill in words and their labels, or a text and the spans of characters that have one.

    Args:
        need_labels: whether words without labels, or a text without spans, are refused; else they have None.

    Raises:
        RowProblem: `label_missing`, `label_type`, `label_count`, `bad_span`, `empty`, or as for conversations.
    """
    name, words = columns.first(WORDS)
    if name is None or words is None:
        row.messages = _text_of(columns)
        if need_labels or any(columns.peek(each) is not None for each in SPANS):
            row.spans = _spans(columns, row.messages[-1]["content"])
        return
    words = decode_nested(words, name)
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise RowProblem("content_type", f"{name!r} is not a list of words: {excerpt(words)}")
    if not words:
        raise RowProblem("empty", f"{name!r} is an empty list", "remove the row")
    label_name, labels = columns.first(WORD_LABELS)
    if labels is None and not need_labels:
        row.words = words
        return
    if labels is None:
        raise RowProblem("label_missing", "the words have no labels", f"give one for each word in {WORD_LABELS[0]!r}")
    labels = decode_nested(labels, label_name or "labels")
    if not isinstance(labels, list) or len(labels) != len(words):
        count = len(labels) if isinstance(labels, list) else 1
        raise RowProblem("label_count", f"{len(words)} words have {count} label(s)", "give one for each word")
    for label in labels:
        if isinstance(label, bool) or not isinstance(label, int | str):
            raise RowProblem(
                "label_type", f"{label_name!r} holds {excerpt(label)}", "labels are names or whole numbers"
            )
    row.words, row.label = words, labels


def checked_label(name: str, label: Any) -> Any:
    """The label as rows keep it: a text, an int or a float, or a list of those; true and false are 1 and 0.

    Raises:
        RowProblem: it is missing, NaN, or something else.
    """
    if label is None or label == "":
        raise RowProblem("label_missing", "the row has no label", 'give it one: "label": 2, a name, or a list of them')
    if isinstance(label, list):
        return [checked_label(name, each) for each in label]
    if isinstance(label, bool):
        return int(label)
    if isinstance(label, float) and not math.isfinite(label):
        raise RowProblem("label_nan", f"{name!r} is {label}, which is no number", "remove the row, or give it a number")
    if isinstance(label, int | float | str):
        return label
    raise RowProblem("label_type", f"{name!r} is neither a name nor a number: {excerpt(label)}")


def _text_of(columns: Columns) -> list[dict[str, Any]]:
    """The messages; a plain text is what a user says."""
    messages = read_prompt(columns, *_SENTENCES)
    if not messages:
        raise no_layout(columns)
    add_system(messages, columns)
    if not messages[-1]["content"].strip():
        raise RowProblem("empty", "the text is empty", "remove the row")
    return messages


def _spans(columns: Columns, text: str) -> list[tuple[int, int, str]]:
    """`[{"start": 0, "end": 5, "label": "PER"}]`, or `[[0, 5, "PER"]]`, in the order of the text."""
    name, raw = columns.first(SPANS)
    if raw is None:
        raise RowProblem(
            "label_missing", "the text has no spans", 'give it "spans", an empty list where there are none'
        )
    raw = decode_nested(raw, name or "spans")
    if not isinstance(raw, list):
        raise RowProblem("bad_span", f"{name!r} is not a list: {excerpt(raw)}")
    spans: list[tuple[int, int, str]] = []
    for number, span in enumerate(raw, 1):
        if isinstance(span, dict):
            label = next(
                (span[key] for key in ("label", "entity", "type", "labels") if span.get(key) is not None), None
            )
            span = [span.get("start"), span.get("end"), label[0] if isinstance(label, list) and label else label]
        if not isinstance(span, list | tuple) or len(span) != 3:
            raise RowProblem("bad_span", f"span {number} is not start, end and label: {excerpt(span)}")
        start, end, label = span
        whole = all(isinstance(at, int) and not isinstance(at, bool) for at in (start, end))
        if not whole or not 0 <= start < end <= len(text):
            raise RowProblem(
                "bad_span",
                f"span {number} is [{excerpt(start)}, {excerpt(end)}), the text has {len(text)} characters",
                "start and end count characters; end is behind the last one",
            )
        spans.append((start, end, plain_text("label", label)))
    spans.sort()
    for before, after in pairwise(spans):
        if after[0] < before[1]:
            raise RowProblem(
                "bad_span", f"the spans {before} and {after} overlap, and a token has one label", "keep one of them"
            )
    return spans
