"""From the columns of a row to the normal form: finds out which known layout a row has.

In this order: a messages column; a prompt and an answer column (which covers query/response, Alpaca and TRL's
prompt/completion); an answer alone; plain text. A row that fits none is refused with its column names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swift.core.errors import did_you_mean
from swift.data.messages import ROLE_ALIASES, decode_nested, normalise_messages
from swift.data.rows import Row, RowProblem, RowRef, excerpt

MESSAGE_COLUMNS = ("messages", "conversations", "conversation")
PROMPT_COLUMNS = ("query", "prompt", "input", "instruction", "question", "problem")
ANSWER_COLUMNS = (
    "response",
    "answer",
    "output",
    "targets",
    "target",
    "answer_key",
    "answers",
    "solution",
    "completion",
)
TEXT_COLUMNS = ("text", "content")
SYSTEM_COLUMNS = ("system", "system_prompt")
MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")
# what --disable_auto_column_mapping leaves
_EXACT = {"messages", "query", "response", "system", "history", "tools", "text", "chat_template_kwargs"}
_ALL = (
    *MESSAGE_COLUMNS,
    *PROMPT_COLUMNS,
    *ANSWER_COLUMNS,
    *TEXT_COLUMNS,
    *SYSTEM_COLUMNS,
    *("history", "tools", "chat_template_kwargs"),
)


_NUL_FIX = r"remove it (in JSON it is written \u0000), or the row"
_PREFERENCE_FIX = 'this is a preference row; to train on the better answer: --columns \'{"chosen": "messages"}\''


@dataclass(frozen=True)
class RowOptions:
    """How rows are read.

    Attributes:
        columns: renames, `{"ask": "query"}`: the row's `ask` is read as `query`.
        auto: whether other tools' column names are understood.
        need_answer: whether a conversation without an assistant turn is refused (true for training).
    """

    columns: tuple[tuple[str, str], ...] = ()
    auto: bool = True
    need_answer: bool = True


def normalise_row(record: dict[str, Any], ref: RowRef, options: RowOptions) -> tuple[Row, set[str]]:
    """The row in normal form, and the names of the columns and message keys that nothing reads.

    Raises:
        RowProblem: if the row has no known layout or a value in it is wrong.
    """
    columns = _Columns(_rename(record, options.columns), options.auto)
    media = next((name for name in MEDIA_COLUMNS if columns.values.get(name)), None)
    if media:
        raise RowProblem("multimodal", f"the row has {media!r}: only text can be trained so far", f"remove {media!r}")
    row = Row(ref, [], template_kwargs=_template_kwargs(columns))
    row.tools = _tools(columns.take("tools"))
    row.messages, row.text = _body(columns, options.need_answer)
    if row.text is None:
        _add_system(row.messages, columns)
        _check_conversation(row.messages, set(columns.values), options.need_answer)
    elif not row.text.strip():
        raise RowProblem("empty", "the text is empty")
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


def _has_nul(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return any(_has_nul(key) or _has_nul(item) for key, item in value.items())
    return isinstance(value, list) and any(map(_has_nul, value))


class _Columns:
    """A row's columns, each taken at most once; a column that holds null counts as absent but for its name."""

    def __init__(self, values: dict[str, Any], auto: bool) -> None:
        self.values = values
        self.auto = auto
        self.taken: set[str] = set()
        self.unused: set[str] = set()

    def peek(self, name: str) -> Any:
        return self.values.get(name) if self.auto or name in _EXACT else None

    def take(self, name: str) -> Any:
        if not self.auto and name not in _EXACT:
            return None
        self.taken.add(name)
        return self.values.get(name)

    def first(self, names: tuple[str, ...]) -> tuple[str | None, Any]:
        """The first of these columns that has a value; else the first that exists (its value is null); else none."""
        names = tuple(name for name in names if self.auto or name in _EXACT)
        for name in names:
            if self.values.get(name) is not None:
                return name, self.take(name)
        for name in names:
            if name in self.values:
                return name, self.take(name)
        return None, None

    def rest(self) -> dict[str, Any]:
        return {name: v for name, v in self.values.items() if v is not None and name not in self.taken}


def _rename(record: dict[str, Any], renames: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    if not renames:
        return record
    renamed = dict(record)
    for old, new in renames:
        if old not in record:
            continue
        renamed.pop(old, None)
        if record.get(new) is not None and record[old] is not None and new not in dict(renames):
            raise RowProblem(
                "contradiction",
                f"--columns reads {old!r} as {new!r}, but the row has {new!r} as well",
                "rename one of them",
            )
    for old, new in renames:
        if old in record:
            renamed[new] = record[old]
    return renamed


def _body(columns: _Columns, need_answer: bool) -> tuple[list[dict[str, Any]], str | None]:
    """The conversation, or the plain text. Where no answer is needed, one that is null is as good as none."""
    present = [name for name in MESSAGE_COLUMNS if columns.peek(name) is not None]
    if len(present) > 1:
        raise RowProblem(
            "contradiction",
            f"the row has {' and '.join(map(repr, present))}: which one holds the conversation?",
            "rename the other with --columns '{\"" + present[1] + '": "unused"}\'',
        )
    if present:
        raw = columns.take(present[0])
        return normalise_messages(raw if need_answer else _without_null_answer(raw), columns.unused.add), None
    if any(name in columns.values for name in MESSAGE_COLUMNS if columns.auto or name in _EXACT):
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


def _prompt_and_answer(columns: _Columns, need_answer: bool) -> tuple[list[dict[str, Any]], str | None]:
    prompt_name, prompt = _prompt(columns)
    answer_name, answer = columns.first(ANSWER_COLUMNS)
    if answer_name is None or (answer is None and prompt_name is None):
        text_name, text = columns.first(TEXT_COLUMNS)
        if prompt_name is None and text_name is not None:
            return [], _plain(text_name, text)
        if text_name is not None:
            answer_name, answer = text_name, text
    if prompt_name is None and answer_name is None:
        raise _no_layout(columns)
    messages = _history(columns.take("history"))
    if isinstance(prompt, list):  # TRL's conversational prompt
        messages += normalise_messages(prompt, columns.unused.add)
    elif prompt_name is not None:
        messages.append({"role": "user", "content": _plain(prompt_name, prompt)})
    if isinstance(answer, list) and answer and isinstance(answer[0], dict):
        messages += normalise_messages(answer, columns.unused.add)
    elif answer is not None:
        messages.append({"role": "assistant", "content": _plain(answer_name or "response", answer)})
    elif answer_name is not None and (need_answer or not messages):
        raise RowProblem("no_content", f"{answer_name!r} is null or empty: there is no answer to train on")
    return messages, None


def _prompt(columns: _Columns) -> tuple[str | None, Any]:
    """The user's text. Alpaca's instruction and input are one text, two lines."""
    if columns.auto and "instruction" in columns.values and "input" in columns.values:
        parts = [columns.take("instruction"), columns.take("input")]
        for column, part in zip(("instruction", "input"), parts):
            if part is not None:
                _plain(column, part)
        if not any(parts):
            raise RowProblem("no_content", "'instruction' and 'input' are both empty")
        return "instruction", "\n".join(part for part in parts if part)
    return columns.first(PROMPT_COLUMNS)


def _plain(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        raise RowProblem("no_content", f"{name!r} is null or empty")
    raise RowProblem("content_type", f"{name!r} is not a text: {excerpt(value)}", "write it as a JSON string")


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


def _add_system(messages: list[dict[str, Any]], columns: _Columns) -> None:
    name, system = columns.first(SYSTEM_COLUMNS)
    if name is None or system is None or system == "":
        return
    system = _plain(name, system)
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


def _template_kwargs(columns: _Columns) -> dict[str, Any]:
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


def _no_layout(columns: _Columns) -> RowProblem:
    names = [str(name) for name in columns.values]
    if not names:
        return RowProblem("empty", "the row is an empty object")
    if "chosen" in names:
        fix = _PREFERENCE_FIX
    else:
        hints = [f"{name!r}: {hint}" for name in names if (hint := did_you_mean(name, _ALL))]
        fix = "; ".join([*hints, "name them with --columns, such as --columns '{\"" + names[0] + '": "query"}\''])
    return RowProblem("no_known_columns", f"no known column among {', '.join(names[:12])}", fix)
