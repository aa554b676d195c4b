"""From the columns of a row to the normal form, in the layout that the method of training needs.

The layouts themselves are in `chat_shapes`, `preference_shapes`, `labelled_shapes` and `document_shapes`.
"""

from __future__ import annotations

from typing import Any

from swift.data.chat_shapes import begin_row, read_chat
from swift.data.columns import Columns, RowOptions, rename
from swift.data.document_shapes import read_documents
from swift.data.labelled_shapes import read_labelled, read_token_labels
from swift.data.preference_shapes import REJECTED_COLUMNS, read_binary, read_pairs, read_prompts
from swift.data.rows import Row, RowProblem, RowRef

__all__ = ["RowOptions", "normalise_row"]

_NUL_FIX = r"remove it (in JSON it is written \u0000), or the row"


def normalise_row(record: dict[str, Any], ref: RowRef, options: RowOptions) -> tuple[Row, set[str]]:
    """The row in normal form, and the names of the columns and message keys that nothing reads.

    Raises:
        RowProblem: if the row has no known layout or a value in it is wrong.
    """
    columns = Columns(rename(record, options.columns), options.auto)
    row = begin_row(columns, ref)
    match options.layout:
        case "chat":
            read_chat(row, columns, need_answer=options.need_answer)
        case "pairs":
            if options.need_answer or any(columns.peek(name) is not None for name in REJECTED_COLUMNS):
                read_pairs(row, columns)
            else:  # an answer that is judged alone
                read_chat(row, columns, need_answer=True)
        case "binary":
            read_binary(row, columns)
        case "prompts":
            read_prompts(row, columns)
        case "labelled":
            read_labelled(row, columns, need_label=options.need_answer)
        case "tokens":
            read_token_labels(row, columns, need_labels=options.need_answer)
        case "embedding" | "rerank":
            read_documents(row, columns, answers=options.layout == "rerank", need_positive=options.need_answer)
    _refuse_nul(row)
    row.extra = columns.rest()
    return row, set(row.extra) | columns.unused


def _refuse_nul(row: Row) -> None:
    """NUL written as an escape (`\\u0000`) is as little a character of a text as the byte itself."""
    if row.text is not None and _has_nul(row.text):
        raise RowProblem("nul_byte", "the text holds a NUL character", _NUL_FIX)
    for number, message in enumerate(row.messages, 1):
        if _has_nul(message):
            raise RowProblem("nul_byte", f"message {number} ({message['role']}) holds a NUL character", _NUL_FIX)
    if _has_nul(row.tools):
        raise RowProblem("nul_byte", "the tools hold a NUL character", _NUL_FIX)
    for name in ("rejected", "positives", "negatives", "teacher_prompt", "words"):
        if _has_nul(getattr(row, name)):
            raise RowProblem("nul_byte", f"the {name} hold a NUL character", _NUL_FIX)


def _has_nul(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return any(_has_nul(key) or _has_nul(item) for key, item in value.items())
    return isinstance(value, list) and any(map(_has_nul, value))
