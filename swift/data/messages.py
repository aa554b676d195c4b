"""Message lists of every common tool, brought to the one form that chat templates expect.

Understood: OpenAI (`role`/`content`, content parts, `tool_calls` with JSON strings, the older `function_call`),
ShareGPT (`from`/`value`, and `{"human": …, "assistant": …}` pairs), Anthropic (`tool_use`, `tool_result`, `thinking`
blocks) and ms-swift (`tool_call` and `tool_response` roles). Knows nothing of columns, files or tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from swift.core.errors import did_you_mean
from swift.data.rows import ROLES, RowProblem, excerpt

# other tools' role -> ours; `tool_call` is an assistant turn that consists of one call
ROLE_ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "developer": "system",
    "function_call": "tool_call",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "function": "tool",
}
_KNOWN_ROLES = (*ROLES, "tool_call", *ROLE_ALIASES)
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_READ_KEYS = frozenset(
    {"role", "from", "content", "value", "tool_calls", "function_call", "name", "tool_call_id", "loss", "loss_scale"}
    | {"weight", "train", *REASONING_KEYS}
)
_MEDIA_PARTS = ("image", "image_url", "input_image", "video", "video_url", "audio", "audio_url", "input_audio", "file")
_TEXT_FIX = 'content must be text, or a list of {"type": "text", "text": …} parts'


def normalise_messages(raw: Any, unused: Callable[[str], None]) -> list[dict[str, Any]]:
    """The message list of a row in normal form.

    Args:
        raw: the column's value: a list of messages, or a JSON string that holds one.
        unused: called with the name of each message key that nothing reads.

    Raises:
        RowProblem: naming the message (counted from 1) and what is wrong with it.
    """
    raw = decode_nested(raw, "messages")
    if isinstance(raw, dict):
        raw = [raw]
    if not isinstance(raw, list):
        raise RowProblem("bad_messages", f"messages is {_kind(raw)}, not a list: {excerpt(raw)}")
    messages: list[dict[str, Any]] = []
    for number, message in enumerate(raw, 1):
        if not isinstance(message, dict):
            raise RowProblem("bad_messages", f"message {number} is {_kind(message)}, not an object: {excerpt(message)}")
        for turn in _turns_of(message, number, unused):
            _append(messages, turn, number)
    return messages


def decode_nested(value: Any, name: str) -> Any:
    """`value`, or what it means when it is a JSON string of a list or an object."""
    if not isinstance(value, str):
        return value
    try:
        decoded = json.loads(value)
    except ValueError as error:
        fix = None
        if value.lstrip()[:2] in ("[{", "{'", "['") and "'" in value:
            fix = "this looks like Python's print-out of a list: write the column with json.dumps, or use parquet"
        raise RowProblem(
            "bad_nested_json", f"{name} is a text that isn't JSON ({error}): {excerpt(value)}", fix
        ) from error
    return decode_nested(decoded, name) if isinstance(decoded, str) else decoded


def _turns_of(message: dict[str, Any], number: int, unused: Callable[[str], None]) -> list[dict[str, Any]]:
    """The normal messages that one foreign message stands for."""
    role = _pick(message, ("role", "from"), number)
    if role is None:
        pair = _pair_turns(message, number, unused)
        if pair:
            return pair
        raise RowProblem(
            "no_role",
            f"message {number} has no role; its keys are {', '.join(map(str, message)) or 'none'}",
            'each message needs "role" and "content" (or "from" and "value")',
        )
    kind = _role(role, number)
    for key, value in message.items():
        if value is not None and (key not in _READ_KEYS or key in _unread_by(kind)):
            unused(f"messages[].{key}")
    turn: dict[str, Any] = {"role": kind}
    content = _pick(message, ("content", "value"), number)
    if kind == "tool_call":
        turn = {"role": "assistant", "content": "", "tool_calls": _swift_calls(content, number)}
    else:
        calls = _openai_calls(message, number)
        if calls and kind != "assistant":
            raise RowProblem(
                "bad_tool_call", f"message {number} ({kind}) has tool_calls: only an assistant can call tools"
            )
        blocks = _blocks(content, number, kind) if isinstance(content, list) else None
        if blocks is not None:
            return _block_turns(blocks, message, kind, calls, number)
        turn["content"] = _text(content, kind, number, bool(calls), "content" in message or "value" in message)
        if calls:
            turn["tool_calls"] = calls
    _copy_marks(message, turn, number)
    return [turn]


def _unread_by(kind: str) -> tuple[str, ...]:
    """Known keys that mean nothing in a message of this role."""
    names = () if kind == "tool" else ("name", "tool_call_id")
    return names if kind == "assistant" else (*names, *REASONING_KEYS)


def _role(role: Any, number: int) -> str:
    if not isinstance(role, str):
        raise RowProblem("unknown_role", f"the role of message {number} is {_kind(role)}: {excerpt(role)}")
    known = role.strip().lower()
    known = ROLE_ALIASES.get(known, known)
    if known in ROLES or known == "tool_call":
        return known
    raise RowProblem(
        "unknown_role",
        f"message {number} has the role {excerpt(role)!r}",
        " ".join(
            filter(
                None,
                [did_you_mean(role, _KNOWN_ROLES), f"known: {', '.join(ROLES)}, tool_call and their usual aliases"],
            )
        ),
    )


def _pick(message: dict[str, Any], names: tuple[str, str], number: int) -> Any:
    """The value under either name; both with different values is a contradiction."""
    first, second = message.get(names[0]), message.get(names[1])
    if first is not None and second is not None and first != second:
        raise RowProblem(
            "contradiction", f"message {number} has both {names[0]!r} and {names[1]!r} with different values"
        )
    return second if first is None else first


def _pair_turns(message: dict[str, Any], number: int, unused: Callable[[str], None]) -> list[dict[str, Any]]:
    """ShareGPT pairs: one object per round, its keys the roles, in the order system, user, (tools), assistant."""
    turns = []
    for key, value in message.items():
        kind = ROLE_ALIASES.get(key.lower(), key.lower()) if isinstance(key, str) else ""
        if kind not in ("system", "user", "assistant"):
            continue
        if value is None and kind == "system":
            continue
        turns.append({"role": kind, "content": _text(value, kind, number, False, True)})
    if {turn["role"] for turn in turns} & {"user", "assistant"}:
        for key in message:
            if not isinstance(key, str) or ROLE_ALIASES.get(key.lower(), key.lower()) not in ROLES:
                unused(f"messages[].{key}")
        return sorted(turns, key=lambda turn: ROLES.index(turn["role"]))
    return []


def _text(content: Any, kind: str, number: int, has_calls: bool, present: bool) -> str:
    """Plain content; null only beside tool calls; numbers, booleans and objects are refused by name."""
    if isinstance(content, str):
        return content
    if content is None:
        if has_calls:
            return ""
        what = "content is null" if present else "there is no content"
        raise RowProblem(
            "no_content",
            f"message {number} ({kind}): {what}",
            "give it a text; null is allowed only beside tool_calls",
        )
    if kind == "tool" and isinstance(content, dict):
        return json.dumps(content, ensure_ascii=False)
    raise RowProblem(
        "content_type", f"message {number} ({kind}): content is {_kind(content)}: {excerpt(content)}", _TEXT_FIX
    )


# --- content parts (OpenAI) and blocks (Anthropic) ---


def _blocks(parts: list[Any], number: int, kind: str) -> list[dict[str, Any]]:
    blocks = []
    for part in parts:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, dict):
            raise RowProblem("content_type", f"message {number} ({kind}): a content part is {_kind(part)}", _TEXT_FIX)
        name = part.get("type") or next((key for key in ("text", *_MEDIA_PARTS) if part.get(key) is not None), None)
        if name in _MEDIA_PARTS:
            raise RowProblem(
                "multimodal",
                f"message {number} ({kind}) has a content part of type {name!r}: only text can be trained so far",
                "remove the part, or the row",
            )
        if name not in ("text", "input_text", "output_text", "tool_use", "tool_result", "thinking"):
            if kind == "tool":  # a tool that returned a list of objects
                return [{"type": "text", "text": json.dumps(parts, ensure_ascii=False)}]
            raise RowProblem("unknown_part", f"message {number} ({kind}): content part of type {name!r}", _TEXT_FIX)
        blocks.append(part if part.get("type") else {**part, "type": "text"})
    return blocks


def _block_turns(
    blocks: list[dict[str, Any]], message: dict[str, Any], kind: str, calls: list[dict[str, Any]], number: int
) -> list[dict[str, Any]]:
    """Text parts are joined by a newline, as serving engines do; calls, thoughts and results go where they belong."""
    texts: list[str] = []
    thoughts: list[str] = []
    results: list[dict[str, Any]] = []
    calls = list(calls)
    for block in blocks:
        name = block["type"]
        if name == "thinking":
            thoughts.append(_text(block.get("thinking"), kind, number, False, True))
        elif name == "tool_use":
            if kind != "assistant":
                raise RowProblem("bad_tool_call", f"message {number} ({kind}) has a tool_use block")
            calls.append(_call(block.get("name"), block.get("input"), block.get("id"), number))
        elif name == "tool_result":
            results.append(_tool_result(block, number))
        else:
            texts.append(_text(block.get("text"), kind, number, False, True))
    turns = results
    if texts or calls or thoughts or not results:
        turn: dict[str, Any] = {"role": kind, "content": "\n".join(texts)}
        if not texts and not calls and not thoughts:
            raise RowProblem("no_content", f"message {number} ({kind}): content is an empty list")
        if calls:
            turn["tool_calls"] = calls
        if thoughts:
            turn["reasoning_content"] = "\n".join(thoughts)
        turns.append(turn)
    for turn in turns:
        _copy_marks(message, turn, number)
    return turns


def _tool_result(block: dict[str, Any], number: int) -> dict[str, Any]:
    content = block.get("content")
    if isinstance(content, list):
        content = "\n".join(_text(p.get("text"), "tool", number, False, True) for p in _blocks(content, number, "tool"))
    turn = {"role": "tool", "content": _text(content if content is not None else "", "tool", number, False, True)}
    if block.get("tool_use_id"):
        turn["tool_call_id"] = str(block["tool_use_id"])
    return turn


# --- tool calls ---


def _call(name: Any, arguments: Any, call_id: Any, number: int) -> dict[str, Any]:
    if not isinstance(name, str) or not name:
        raise RowProblem("bad_tool_call", f"message {number}: a tool call has no name")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise RowProblem(
                "bad_tool_call",
                f"message {number}: the arguments of {name!r} aren't JSON ({error}): {excerpt(arguments)}",
            ) from error
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise RowProblem(
            "bad_tool_call", f"message {number}: the arguments of {name!r} are {_kind(arguments)}, not an object"
        )
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call_id:
        call["id"] = str(call_id)
    return call


def _openai_calls(message: dict[str, Any], number: int) -> list[dict[str, Any]]:
    raw = message.get("tool_calls")
    if raw is None or raw == []:
        raw = [message["function_call"]] if message.get("function_call") else []
    raw = decode_nested(raw, f"tool_calls of message {number}") if raw else []
    return [_any_call(item, number) for item in (raw if isinstance(raw, list) else [raw])]


def _swift_calls(content: Any, number: int) -> list[dict[str, Any]]:
    """A `tool_call` message: its content is one call (or a list of calls) as JSON."""
    try:
        raw = decode_nested(content, f"the tool_call in message {number}")
    except RowProblem as problem:
        raise RowProblem(
            "bad_tool_call", problem.message, 'write it as {"name": "f", "arguments": {"x": 1}}'
        ) from problem
    if not raw:
        raise RowProblem("bad_tool_call", f"message {number}: the tool_call is empty")
    return [_any_call(item, number) for item in (raw if isinstance(raw, list) else [raw])]


def _any_call(item: Any, number: int) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise RowProblem(
            "bad_tool_call", f"message {number}: a tool call is {_kind(item)}, not an object: {excerpt(item)}"
        )
    function = item.get("function")
    body = function if isinstance(function, dict) else item
    arguments = body.get("arguments")
    if arguments is None:
        arguments = body.get("parameters", body.get("input"))
    return _call(body.get("name"), arguments, item.get("id"), number)


# --- marks and merging ---


def _copy_marks(message: dict[str, Any], turn: dict[str, Any], number: int) -> None:
    """Reasoning, names, ids and the per-message loss settings."""
    kind = turn["role"]
    for key in REASONING_KEYS:
        thought = message.get(key)
        if thought is not None and kind == "assistant":
            turn["reasoning_content"] = _text(thought, kind, number, False, True)
            break
    if kind == "tool":
        for key in ("name", "tool_call_id"):
            if message.get(key) is not None:
                turn.setdefault(key, str(message[key]))
    for key in ("loss", "weight", "train"):
        flag = message.get(key)
        if flag is None:
            continue
        if flag not in (0, 1):
            raise RowProblem(
                "bad_loss", f"message {number} ({kind}): {key!r} is {excerpt(flag)}", f"{key} is true or false"
            )
        turn["loss"] = bool(flag)
        break
    scale = message.get("loss_scale")
    if scale is not None:
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 <= scale < float("inf"):
            raise RowProblem(
                "bad_loss",
                f"message {number} ({kind}): loss_scale is {excerpt(scale)}",
                "loss_scale is a number of at least 0",
            )
        turn["loss_scale"] = float(scale)


def _append(messages: list[dict[str, Any]], turn: dict[str, Any], number: int) -> None:
    """Add a turn; a call that follows an assistant turn belongs to it (several in a row are parallel calls)."""
    previous = messages[-1] if messages else None
    calls_only = "tool_calls" in turn and not turn["content"] and "reasoning_content" not in turn
    if previous and previous["role"] == "assistant" and turn["role"] == "assistant" and calls_only:
        for mark in ("loss", "loss_scale"):
            if previous.get(mark) != turn.get(mark):
                raise RowProblem(
                    "bad_loss",
                    f"message {number} is a tool call of the turn before it, but its {mark!r} differs",
                    f"give both the same {mark!r}",
                )
        previous.setdefault("tool_calls", []).extend(turn["tool_calls"])
        return
    messages.append(turn)


def _kind(value: Any) -> str:
    """`a number`, `a list`, ...: what JSON would call it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a text"
    return "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else type(value).__name__
