"""Rows with a better and a worse answer, rows with an answer and whether it is wanted, and rows of prompts.

The two answers of a pair come as texts, as messages, or as two whole conversations that share their beginning; the
normal form has the conversation with the better one, and of the worse ones what follows the part they share.
"""

from __future__ import annotations

import re
from typing import Any

from swift.data.chat_shapes import add_system, no_layout, read_chat, read_prompt
from swift.data.columns import (
    ANSWER_COLUMNS,
    CHOSEN_COLUMNS,
    MESSAGE_COLUMNS,
    REJECTED_COLUMNS,
    Columns,
    number_in,
    plain_text,
)
from swift.data.messages import decode_nested, normalise_messages
from swift.data.rows import Row, RowProblem, excerpt

Messages = list[dict[str, Any]]
LABEL_COLUMNS = ("label", "kto_tag")
_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}
_TRANSCRIPT = re.compile(r"\n\n(Human|Assistant):")


def read_pairs(row: Row, columns: Columns) -> None:
    """Fill in a preference row.

    Raises:
        RowProblem: `no_rejected`, `no_chosen`, `empty_chosen`, `empty_rejected`, `identical`, `prompt_mismatch`,
            `bad_margin`, or as for conversations.
    """
    rejected_name, rejected = columns.first(REJECTED_COLUMNS)
    if rejected_name is None or rejected is None or rejected == []:
        if rejected_name is None and not any(name in columns.values for name in (*CHOSEN_COLUMNS, *MESSAGE_COLUMNS)):
            raise no_layout(columns)
        raise RowProblem(
            "no_rejected",
            "the row has no rejected answer" if rejected_name is None else f"{rejected_name!r} is null or empty",
            'a pair needs one: "rejected", "rejected_response" or "rejected_messages"; rows with a label are for kto',
        )
    _refuse_other_tools(columns)
    prompt, chosen = _prompt_and_chosen(columns, rejected)
    others = _alternatives(rejected_name, rejected, columns)
    whole = _joined(prompt, chosen, columns, "the chosen answer")
    wholes = [_joined(prompt, other, columns, "the rejected answer") for other in others]
    _refuse_empty(whole, "chosen")
    for other in wholes:
        _refuse_empty(other, "rejected")
    row.answer_at = _shared(whole, wholes)
    row.messages = whole
    row.rejected = [other[row.answer_at :] for other in wholes]
    row.margins = _margins(columns, len(others))


def read_binary(row: Row, columns: Columns) -> None:
    """Fill in a row with an answer and its label.

    Raises:
        RowProblem: `label_missing`, `label_not_bool`, or as for conversations.
    """
    name, label = columns.first(LABEL_COLUMNS)
    if label is None:
        worse = any(columns.peek(other) is not None for other in REJECTED_COLUMNS)
        raise RowProblem(
            "label_missing",
            "the row has no label" if name is None else f"{name!r} is null",
            "these are pairs: `swift data convert IN --to binary --output_file OUT` makes two rows of each"
            if worse
            else 'give it "label": true where the answer is wanted, else false',
        )
    row.label = _boolean(name or "label", label)
    read_chat(row, columns, need_answer=True)
    if row.text is not None:
        raise RowProblem("no_assistant", "the row is a text without a prompt and an answer", "name the columns")


def read_prompts(row: Row, columns: Columns) -> None:
    """Fill in a conversation whose answer may be missing, and what the teacher is asked.

    Raises:
        RowProblem: as for conversations.
    """
    teacher = columns.take("teacher_prompt")
    read_chat(row, columns, need_answer=False)
    if row.text is not None:  # a prompt like any other
        row.messages, row.text = [{"role": "user", "content": row.text}], None
    if not any(message["role"] == "user" for message in row.messages):
        raise RowProblem("no_prompt", "the row has nothing that the user says", "give it a user message")
    if isinstance(teacher, list):
        row.teacher_prompt = normalise_messages(teacher, columns.unused.add)
    elif teacher is not None and teacher != "":
        row.teacher_prompt = [{"role": "user", "content": plain_text("teacher_prompt", teacher)}]


def conversation_start(messages: Messages) -> int:
    """The number of messages up to and with the last user message: what follows is the answer to it."""
    return max((number for number, message in enumerate(messages, 1) if message["role"] == "user"), default=0)


def _prompt_and_chosen(columns: Columns, rejected: Any) -> tuple[Messages, Messages]:
    """What comes before both answers (empty where they bring it along), and the better answer."""
    transcripts = _transcripts(columns, rejected)
    prompt = [] if transcripts else read_prompt(columns)
    add_system(prompt, columns)
    if transcripts:
        return prompt, transcripts
    name, chosen = columns.first(CHOSEN_COLUMNS)
    if name is None:
        answer_at = conversation_start(prompt)
        if prompt[answer_at:]:
            return prompt[:answer_at], prompt[answer_at:]
        name, chosen = columns.first(ANSWER_COLUMNS)
    if name is None or chosen is None:
        raise RowProblem(
            "no_chosen",
            "the row has no chosen answer" if name is None else f"{name!r} is null",
            'a pair needs one: "chosen", an answer in "messages", or "response" beside "query"',
        )
    found = _alternatives(name, chosen, columns)
    if len(found) != 1:
        raise RowProblem("no_chosen", f"{name!r} holds {len(found)} answers", "a pair has one better answer")
    return prompt, found[0]


def _alternatives(name: str, value: Any, columns: Columns) -> list[Messages]:
    """The answers in a column: a text, a message, a list of messages, or a list of any of those."""
    if isinstance(value, str) and (name.endswith("_messages") or value.lstrip()[:2] in ("[{", "[[")):
        value = decode_nested(value, name)
    if isinstance(value, str) and _TRANSCRIPT.match(value):
        return [_from_transcript(value)]
    if isinstance(value, str):
        return [[{"role": "assistant", "content": value}]]
    if isinstance(value, dict):
        return [normalise_messages(value, columns.unused.add)]
    if not isinstance(value, list) or not value:
        raise RowProblem("content_type", f"{name!r} is neither a text nor messages: {excerpt(value)}")
    if all(isinstance(item, dict) for item in value):
        return [normalise_messages(value, columns.unused.add)]
    if all(isinstance(item, str | list) for item in value):
        return [answer for item in value for answer in _alternatives(name, item, columns)]
    raise RowProblem("content_type", f"{name!r} mixes texts and messages: {excerpt(value)}")


def _joined(prompt: Messages, answer: Messages, columns: Columns, what: str) -> Messages:
    """The whole conversation: the prompt and the answer, or the answer alone where it brings the prompt along."""
    if not answer:
        return list(prompt)
    if answer[0]["role"] in ("assistant", "tool"):
        if not any(message["role"] == "user" for message in prompt):
            raise RowProblem(
                "no_prompt",
                f"{what} has no prompt before it",
                'name the column that holds it: --columns \'{"that_column": "prompt"}\'',
            )
        return [*prompt, *answer]
    whole = list(answer)
    if not prompt:
        return whole
    if prompt[0]["role"] == "system" and whole[0]["role"] != "system":
        whole.insert(0, prompt[0])
    given = prompt if prompt[0]["role"] == whole[0]["role"] else [whole[0], *prompt]
    if whole[: len(given)] != given:
        raise RowProblem(
            "prompt_mismatch",
            f"{what} is a whole conversation that doesn't begin with the row's prompt: {excerpt(answer[0]['content'])}",
            "leave the prompt out of one of them",
        )
    return whole


def _shared(whole: Messages, others: list[Messages]) -> int:
    """How many messages all conversations begin with; what comes next is the assistant's in each."""
    shared = min(_common(whole, other) for other in others)
    for number, other in enumerate(others, 1):
        which = f"rejected answer {number}" if len(others) > 1 else "the rejected answer"
        if _common(whole, other) == len(whole) == len(other) or _same_words(whole, other):
            raise RowProblem("identical", f"{which} is the chosen one, so nothing tells them apart", "remove the row")
        ends = whole if len(whole) == shared else other if len(other) == shared else None
        if ends is not None:
            side = "chosen" if ends is whole else "rejected"
            raise RowProblem(
                f"empty_{side}", f"the {side} conversation ends where the other one goes on", "give it an answer"
            )
        if whole[shared]["role"] != "assistant" or other[shared]["role"] != "assistant":
            raise RowProblem(
                "prompt_mismatch",
                f"the chosen and {which} answer different prompts: they differ first in message {shared + 1} "
                f"({whole[shared]['role']} and {other[shared]['role']})",
                "compare answers to one prompt",
            )
    return shared


def _common(first: Messages, second: Messages) -> int:
    return next((at for at, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))


def _same_words(first: Messages, second: Messages) -> bool:
    """Whether two conversations are one but for white space around their texts and for loss marks."""

    def bare(messages: Messages) -> Messages:
        kept = [{key: v for key, v in message.items() if key not in ("loss", "loss_scale")} for message in messages]
        return [{**message, "content": message["content"].strip()} for message in kept]

    return bare(first) == bare(second)


def _refuse_empty(conversation: Messages, side: str) -> None:
    last = conversation[-1] if conversation else None
    if last is None or last["role"] in ("user", "system"):
        raise RowProblem(f"empty_{side}", f"the {side} conversation has no answer at its end", "give it one")
    if not (last["content"].strip() or last.get("tool_calls") or last.get("reasoning_content")):
        raise RowProblem(f"empty_{side}", f"the {side} answer is empty", "remove the row, or give it an answer")


def _margins(columns: Columns, count: int) -> list[float]:
    value = columns.take("margin")
    if value is None:
        return []
    values = value if isinstance(value, list) else [value]
    if len(values) != count:
        raise RowProblem("bad_margin", f"'margin' has {len(values)} numbers for {count} rejected answer(s)")
    return [number_in("margin", each, "bad_margin") for each in values]


def _refuse_other_tools(columns: Columns) -> None:
    other = columns.values.get("rejected_tools")
    if other and other != columns.values.get("tools"):
        raise RowProblem(
            "prompt_mismatch", "'rejected_tools' differ from 'tools': the answers had different prompts", "remove them"
        )
    columns.taken.add("rejected_tools")


def _boolean(name: str, value: Any) -> bool:
    known = _BOOLEANS.get(str(value).strip().lower()) if isinstance(value, bool | int | str) else None
    if known is None:
        raise RowProblem(
            "label_not_bool", f"{name!r} is neither true nor false: {excerpt(value)}", "write true or false"
        )
    return known


# --- transcripts: `\n\nHuman: …\n\nAssistant: …` (Anthropic's hh-rlhf) ---


def _transcripts(columns: Columns, rejected: Any) -> Messages | None:
    """The chosen conversation, where both are such texts."""
    name = next((name for name in CHOSEN_COLUMNS if isinstance(columns.peek(name), str)), None)
    if name is None or not isinstance(rejected, str):
        return None
    chosen = columns.values[name]
    if not (_TRANSCRIPT.match(chosen) and _TRANSCRIPT.match(rejected)):
        return None
    return _from_transcript(columns.take(name))


def _from_transcript(text: str) -> Messages:
    pieces = _TRANSCRIPT.split(text)[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[who], "content": said.strip()} for who, said in zip(pieces[::2], pieces[1::2])]
