"""A row's messages as the template gets them, and what each is worth in the loss."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from swift.core.errors import UsageError
from swift.data.encoding.probe import TemplateFacts
from swift.data.encoding.spans import split_thoughts
from swift.data.rows import RowProblem


def turn_weights(messages: list[dict], mode: str) -> dict[int, float]:
    """Weight of each assistant message that has one of its own, by message index.

    Args:
        mode: `loss_scale`: default (every turn), last_round (the turns after the last user message) or all (every token
            has weight 1, so only messages that say otherwise are listed). `loss` and `loss_scale` of a message win.

    Raises:
        RowProblem: a message that isn't the assistant's asks for loss.
    """
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    first = users[-1] if users and mode == "last_round" else -1
    weights: dict[int, float] = {}
    for index, message in enumerate(messages):
        flag, scale = message.get("loss"), message.get("loss_scale")
        if message["role"] != "assistant":
            if (flag or scale) and mode != "all":
                raise RowProblem(
                    "loss_on_prompt",
                    f"message {index + 1} ({message['role']}) asks for loss; only assistant messages are trained",
                    'remove "loss" there, or train every token with --loss_scale all',
                )
            continue
        weight = 1.0 if mode != "all" and (index > first or flag) else 0.0
        if scale is not None and (weight or mode == "all"):
            weight = float(scale)
        if flag is False:
            weight = 0.0
        if weight or (mode == "all" and (flag is False or scale is not None)):
            weights[index] = weight
    return weights


def read_system(system: str | None) -> str | None:
    """The system prompt: the text itself, or the content of the .txt file that it names."""
    if not system or not system.endswith(".txt") or "\n" in system:
        return system or None
    path = Path(system).expanduser()
    if not path.is_file():
        raise UsageError(
            f"the file {path} doesn't exist", where="--system", fix="give a text, or an existing .txt file"
        )
    return path.read_text(encoding="utf-8-sig").strip()


def without_marks(message: dict[str, Any]) -> dict[str, Any]:
    """The message as the template gets it: without our own keys and without nulls, as transformers does."""
    return {k: v for k, v in message.items() if v is not None and k not in ("loss", "loss_scale")}


def shape_calls(messages: list[dict], facts: TemplateFacts) -> list[dict]:
    """Tool calls in the form that the template was observed to want: JSON text for arguments, ids it accepts.

    A tool result follows its call's id; one that names none answers the calls in order.
    """
    shaped: list[dict] = []
    renamed: dict[str, str] = {}
    open_calls: list[str] = []
    count = 0
    for message in messages:
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                call = {**call, "function": dict(call["function"])}
                arguments = call["function"].get("arguments")
                if facts.arguments_as_text and not isinstance(arguments, str):
                    call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
                given = call.get("id")
                if facts.call_ids and not _id_fits(given, facts):
                    call["id"] = f"{count:09d}"
                    count += 1
                    if given:
                        renamed[given] = call["id"]
                if facts.call_ids:
                    open_calls.append(call["id"])
                calls.append(call)
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool" and facts.call_ids:
            given = message.get("tool_call_id")
            answers = renamed.get(given, given) if given else (open_calls[0] if open_calls else None)
            if answers in open_calls:
                open_calls.remove(answers)
            message = {**message, "tool_call_id": answers} if answers else message
        shaped.append(message)
    return shaped


def _id_fits(call_id: Any, facts: TemplateFacts) -> bool:
    if not call_id:
        return False
    return facts.call_ids == "any" or re.fullmatch("[A-Za-z0-9]{9}", str(call_id)) is not None


def last_round_thinks(messages: list[dict]) -> bool:
    """Whether an assistant message after the last user message has thoughts."""
    for message in reversed(messages):
        if message["role"] == "user":
            return False
        if message["role"] == "assistant" and split_thoughts(message)[0]:
            return True
    return False
