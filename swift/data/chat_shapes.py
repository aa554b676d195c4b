"""A conversation or a plain text, from the columns of a row.

In this order: a messages column; a prompt and an answer column (which covers query/response, Alpaca and TRL's
prompt/completion); an answer alone; plain text. A row that fits none is refused with its column names.
"""

from __future__ import annotations

from typing import Any

from swift.core.errors import did_you_mean
from swift.data.columns import (
    ANSWER_COLUMNS,
    EXACT_COLUMNS,
    MEDIA_COLUMNS,
    MESSAGE_COLUMNS,
    PROMPT_COLUMNS,
    SYSTEM_COLUMNS,
    TEXT_COLUMNS,
    Columns,
    plain_text,
)
from swift.data.messages import ROLE_ALIASES, decode_nested, normalise_messages
from swift.data.rows import Row, RowProblem, RowRef, excerpt

_ALL = (
    *MESSAGE_COLUMNS,
    *PROMPT_COLUMNS,
    *ANSWER_COLUMNS,
    *TEXT_COLUMNS,
    *SYSTEM_COLUMNS,
    *("history", "tools", "chat_template_kwargs"),
)
_PREFERENCE_FIX = (
    "this is a preference row, for `swift rlhf`; to train on the better answer alone: "
    '--columns \'{"chosen": "messages"}\''
)


def begin_row(columns: Columns, ref: RowRef) -> Row:
    """A row with what rows of every layout may have: tools and variables of the template.

    Raises:
        RowProblem: a value is wrong, or the row has images, video or sound.
    """
    media = next((name for name in MEDIA_COLUMNS if columns.values.get(name)), None)
    if media:
        raise RowProblem("multimodal", f"the row has {media!r}: only text can be trained so far", f"remove {media!r}")
    row = Row(ref, [], template_kwargs=_template_kwargs(columns))
    row.tools = _tools(columns.take("tools"))
    return row


def read_chat(row: Row, columns: Columns, *, need_answer: bool) -> None:
    """Fill in the conversation, or the text.

    Raises:
        RowProblem: there is none, or a value in it is wrong.
    """
    row.messages, row.text = _body(columns, need_answer)
    if row.text is None:
        add_system(row.messages, columns)
        _check_conversation(row.messages, set(columns.values), need_answer)
    elif not row.text.strip():
        raise RowProblem("empty", "the text is empty")


def read_prompt(columns: Columns, *more: str) -> list[dict[str, Any]]:
    """The messages of the messages column, or history and prompt; columns named in `more` may hold the prompt too.
    Without the system message of a column of its own (`add_system`); empty where there is nothing."""
    raw = messages_column(columns)
    if raw is not None:
        return normalise_messages(raw, columns.unused.add)
    name, prompt = _prompt(columns)
    if name is None:
        name, prompt = columns.first(more)
    messages = _history(columns.take("history"))
    if isinstance(prompt, list):
        messages += normalise_messages(prompt, columns.unused.add)
    elif name is not None:
        messages.append({"role": "user", "content": plain_text(name, prompt)})
    return messages


def messages_column(columns: Columns) -> Any:
    """What the messages column holds; None where the row has none.

    Raises:
        RowProblem: there are two.
    """
    present = [name for name in MESSAGE_COLUMNS if columns.peek(name) is not None]
    if len(present) > 1:
        raise RowProblem(
            "contradiction",
            f"the row has {' and '.join(map(repr, present))}: which one holds the conversation?",
            "rename the other with --columns '{\"" + present[1] + '": "unused"}\'',
        )
    return columns.take(present[0]) if present else None


def _body(columns: Columns, need_answer: bool) -> tuple[list[dict[str, Any]], str | None]:
    """The conversation, or the plain text. Where no answer is needed, one that is null is as good as none."""
    raw = messages_column(columns)
    if raw is not None:
        return normalise_messages(raw if need_answer else _without_null_answer(raw), columns.unused.add), None
    if any(name in columns.values for name in MESSAGE_COLUMNS if columns.auto or name in EXACT_COLUMNS):
        raise RowProblem("no_content", "the messages column is null")
    return _prompt_and_answer(columns, need_answer)


def _without_null_answer(raw: Any) -> Any:
    """A message list without the assistant message at its end, if that holds nothing but nulls."""
    messages = decode_nested(raw, "messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict):
        return raw
    role = last.get("role", last.get("from"))
    speaks = role == "assistant" or (isinstance(role, str) and ROLE_ALIASES.get(role) == "assistant")
    empty = all(value is None for key, value in last.items() if key not in ("role", "from"))
    return messages[:-1] if speaks and empty else raw


def _prompt_and_answer(columns: Columns, need_answer: bool) -> tuple[list[dict[str, Any]], str | None]:
    prompt_name, prompt = _prompt(columns)
    answer_name, answer = columns.first(ANSWER_COLUMNS)
    if answer_name is None or (answer is None and prompt_name is None):
        text_name, text = columns.first(TEXT_COLUMNS)
        if prompt_name is None and text_name is not None:
            return [], plain_text(text_name, text)
        if text_name is not None:
            answer_name, answer = text_name, text
    if prompt_name is None and answer_name is None:
        raise no_layout(columns)
    messages = _history(columns.take("history"))
    if isinstance(prompt, list):  # TRL's conversational prompt
        messages += normalise_messages(prompt, columns.unused.add)
    elif prompt_name is not None:
        messages.append({"role": "user", "content": plain_text(prompt_name, prompt)})
    if isinstance(answer, list) and answer and isinstance(answer[0], dict):
        messages += normalise_messages(answer, columns.unused.add)
    elif answer is not None:
        messages.append({"role": "assistant", "content": plain_text(answer_name or "response", answer)})
    elif answer_name is not None and (need_answer or not messages):
        raise RowProblem("no_content", f"{answer_name!r} is null or empty: there is no answer to train on")
    return messages, None


def _prompt(columns: Columns) -> tuple[str | None, Any]:
    """The user's text. Alpaca's instruction and input are one text, two lines."""
    if columns.auto and "instruction" in columns.values and "input" in columns.values:
        parts = [columns.take("instruction"), columns.take("input")]
        for column, part in zip(("instruction", "input"), parts):
            if part is not None:
                plain_text(column, part)
        if not any(parts):
            raise RowProblem("no_content", "'instruction' and 'input' are both empty")
        return "instruction", "\n".join(part for part in parts if part)
    return columns.first(PROMPT_COLUMNS)


def _history(raw: Any) -> list[dict[str, Any]]:
    """Earlier rounds, `[[user, assistant], …]`."""
    if raw is None or raw == "":
        return []
    raw = decode_nested(raw, "history")
    messages = []
    for number, pair in enumerate(raw if isinstance(raw, list) else [raw], 1):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise RowProblem(
                "bad_history",
                f"history round {number} is not a pair of texts: {excerpt(pair)}",
                'write [["user", "assistant"]]',
            )
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return messages


def add_system(messages: list[dict[str, Any]], columns: Columns) -> None:
    """Put the text of the system column first."""
    name, system = columns.first(SYSTEM_COLUMNS)
    if name is None or system is None or system == "":
        return
    system = plain_text(name, system)
    if messages and messages[0]["role"] == "system":
        if messages[0]["content"] != system:
            raise RowProblem("contradiction", f"the {name!r} column and the conversation's own system message differ")
        return
    messages.insert(0, {"role": "system", "content": system})


def _tools(raw: Any) -> list[dict[str, Any]] | None:
    """Function descriptions, from a list or a JSON string, wrapped the way chat templates expect."""
    if raw is None or raw == "" or raw == []:
        return None
    raw = decode_nested(raw, "tools")
    tools = []
    for number, tool in enumerate(raw if isinstance(raw, list) else [raw], 1):
        tool = decode_nested(tool, f"tool {number}")
        if not isinstance(tool, dict):
            raise RowProblem("bad_tools", f"tool {number} is not an object: {excerpt(tool)}")
        if isinstance(tool.get("function"), dict):
            tools.append({"type": "function", **tool})
            body = tool["function"]
        else:
            body = {key: value for key, value in tool.items() if key not in ("type", "input_schema")}
            if "input_schema" in tool:  # Anthropic's name for parameters
                body["parameters"] = tool["input_schema"]
            tools.append({"type": "function", "function": body})
        if not isinstance(body.get("name"), str):
            raise RowProblem("bad_tools", f"tool {number} has no name: {excerpt(tool)}")
    return tools or None


def _template_kwargs(columns: Columns) -> dict[str, Any]:
    raw = columns.take("chat_template_kwargs")
    if raw is None or raw == "":
        return {}
    raw = decode_nested(raw, "chat_template_kwargs")
    if not isinstance(raw, dict):
        raise RowProblem("bad_template_kwargs", f"chat_template_kwargs is not an object: {excerpt(raw)}")
    return {key: value for key, value in raw.items() if value is not None}  # parquet fills absent keys with null


def _check_conversation(messages: list[dict[str, Any]], names: set[str], need_answer: bool) -> None:
    turns = [message for message in messages if message["role"] == "assistant"]
    if not any(message["role"] != "system" for message in messages):
        raise RowProblem("empty", "the conversation has no messages" if not messages else "only a system message")
    if not need_answer:
        return
    if not turns:
        raise RowProblem(
            "no_assistant",
            "the conversation has no assistant turn, so there is nothing to train on",
            _PREFERENCE_FIX
            if "chosen" in names
            else 'add an answer; if it is in another column, name it: --columns \'{"that_column": "response"}\'',
        )
    for number, message in enumerate(messages, 1):
        silent = message["role"] == "assistant" and message.get("loss") is not False
        if silent and not (message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content")):
            raise RowProblem(
                "empty_answer",
                f"message {number} (assistant) is empty: it would teach the model to say nothing",
                'remove the row, or mark the message with "loss": false',
            )


def no_layout(columns: Columns) -> RowProblem:
    """The refusal of a row none of whose columns is known."""
    names = [str(name) for name in columns.values]
    if not names:
        return RowProblem("empty", "the row is an empty object")
    if "chosen" in names:
        fix = _PREFERENCE_FIX
    else:
        hints = [f"{name!r}: {hint}" for name in names if (hint := did_you_mean(name, _ALL))]
        fix = "; ".join([*hints, "name them with --columns, such as --columns '{\"" + names[0] + '": "query"}\''])
    return RowProblem("no_known_columns", f"no known column among {', '.join(names[:12])}", fix)
