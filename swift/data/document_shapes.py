"""Rows of a text and the texts that are like it or answer it, and of those that don't: for embedding and reranking.

Understood are ms-swift's `positive_messages` and `negative_messages`, the columns of sentence-transformers and of MTEB,
pairs with a similarity, and queries whose documents have labels.
"""

from __future__ import annotations

from typing import Any

from swift.data.chat_shapes import add_system, read_prompt
from swift.data.columns import Columns, number_in, plain_text
from swift.data.messages import decode_nested, normalise_messages
from swift.data.rows import Row, RowProblem, excerpt

Messages = list[dict[str, Any]]
_ANCHORS = ("anchor", "sentence1", "sentence_1", "text1", "sentence")
POSITIVES = (
    "positive_messages",
    "positive",
    "positives",
    "positive_passages",
    "pos",
    "sentence2",
    "sentence_2",
    "text2",
)
NEGATIVES = ("negative_messages", "negative", "negatives", "negative_passages", "neg")
_DOCUMENTS = ("documents", "document", "passages", "passage")
_LABELS = ("label", "labels", "score", "similarity")


def read_documents(row: Row, columns: Columns, *, answers: bool, need_positive: bool = True) -> None:
    """Fill in the text, its positives and negatives, and the similarity of a pair that has one.

    Args:
        answers: the documents answer the text, so their messages are the assistant's (reranking); else the user's.
        need_positive: whether a row without a positive is refused; else documents without labels are negatives.

    Raises:
        RowProblem: `no_positives`, `empty`, `label_type`, `label_count`, or as for conversations.
    """
    role = "assistant" if answers else "user"
    row.messages = read_prompt(columns, *_ANCHORS)
    add_system(row.messages, columns)
    if not any(message["content"].strip() for message in row.messages):
        raise RowProblem("empty", "the row has no text to compare with", "name its column `query` or `anchor`")
    documents_name, documents = columns.first(_DOCUMENTS)
    label_name, label = columns.first(_LABELS)
    if documents_name is not None and documents is not None:
        texts = _texts(documents_name, documents, role, columns)
        if label is None and not need_positive:
            row.negatives = texts
        else:
            _sort_by_label(row, texts, label)
    else:
        row.positives = _column(POSITIVES, role, columns)
        row.negatives = _column(NEGATIVES, role, columns)
        numbered = sorted(
            (name for name in columns.values if name.startswith("negative_") and name[9:].isdigit()),
            key=lambda name: int(name[9:]),
        )
        for name in numbered if columns.auto else ():
            if columns.peek(name) is not None:
                row.negatives += _texts(name, columns.take(name), role, columns)
        if label is not None:
            row.label = number_in(label_name or "label", label, "label_type")
    if not row.positives and need_positive:
        raise RowProblem(
            "no_positives",
            "the row has no positive text" if not row.negatives else "the row has negative texts only",
            'give it "positive_messages": [[{"role": "' + role + '", "content": "…"}]], or "positive": "…"',
        )
    if row.label is not None and (len(row.positives) > 1 or row.negatives):
        raise RowProblem("contradiction", "a similarity is that of two texts, and the row has more", "leave it out")


def _column(names: tuple[str, ...], role: str, columns: Columns) -> list[Messages]:
    name, value = columns.first(names)
    return [] if name is None or value is None else _texts(name, value, role, columns)


def _texts(name: str, value: Any, role: str, columns: Columns) -> list[Messages]:
    """The texts of a column: a text, a list of texts, `{"text": …}` objects, messages, or lists of messages."""
    if isinstance(value, str) and (name.endswith("_messages") or value.lstrip().startswith("[")):
        value = decode_nested(value, name)
    items = value if isinstance(value, list) else [value]
    if items and all(isinstance(item, dict) and ("role" in item or "from" in item) for item in items):
        items = [items]  # the messages of one text
    return [_text(name, item, role, columns) for item in items]


def _text(name: str, item: Any, role: str, columns: Columns) -> Messages:
    if isinstance(item, dict) and isinstance(item.get("text"), str):
        item = f"{item['title']}\n{item['text']}" if item.get("title") else item["text"]
    if isinstance(item, list):
        messages = normalise_messages(item, columns.unused.add)
        if len(messages) == 1:  # whichever side it is written as
            messages = [{**messages[0], "role": role}]
    else:
        messages = [{"role": role, "content": plain_text(name, item)}]
    if not messages or not messages[-1]["content"].strip():
        raise RowProblem("empty", f"{name!r} holds an empty text: {excerpt(item)}", "remove it")
    return messages


def _sort_by_label(row: Row, documents: list[Messages], label: Any) -> None:
    """Documents whose label is above 0 are positive."""
    labels = label if isinstance(label, list) else [label]
    if label is None:
        raise RowProblem("label_missing", "the documents have no labels", 'give "labels", 1 or 0 for each')
    if len(labels) != len(documents):
        raise RowProblem("label_count", f"{len(documents)} documents have {len(labels)} label(s)", "give one for each")
    for document, each in zip(documents, labels):
        value = float(each) if isinstance(each, bool) else number_in("labels", each, "label_type")
        (row.positives if value > 0 else row.negatives).append(document)
