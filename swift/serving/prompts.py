"""Conversations of requests as the chat encoding takes them: plain messages and tools, then token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from swift.core.errors import SwiftError
from swift.data.rows import RowProblem
from swift.serving.errors import ApiError, from_swift
from swift.serving.schema import ChatMessage, Tool
from swift.serving.served import Talker
from swift.serving.services import Services

_IMAGES = frozenset({"image_url", "input_image", "image"})


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages with their contents as texts.

    Raises:
        ApiError: 400, a part that the model can't read, or a call whose arguments are no JSON object.
    """
    return [_plain(message, f"messages[{number}]") for number, message in enumerate(messages)]


def plain_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """The tools as chat templates take them; None for none."""
    if not tools:
        return None
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]


async def encode_chat(
    services: Services,
    talker: Talker,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    template_kwargs: dict[str, Any] | None = None,
) -> list[int]:
    """The ids of the generation prompt after a conversation.

    Raises:
        ApiError: 400, the template refuses it.
    """
    try:
        return await services.run(lambda: talker.encoder.encode_prompt(messages, tools, template_kwargs))
    except (SwiftError, RowProblem) as error:
        raise from_swift(error, param="messages") from error


def _plain(message: ChatMessage, where: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    content: Any = message.content
    if isinstance(content, list):
        content = "".join(_text(part, f"{where}.content[{number}]") for number, part in enumerate(content))
    plain: dict[str, Any] = {"role": role, "content": content or message.refusal or ""}
    if message.name is not None:
        plain["name"] = message.name
    thoughts = message.reasoning_content or message.reasoning
    if thoughts:
        plain["reasoning_content"] = thoughts
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                **({} if call.id is None else {"id": call.id}),
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, f"{where}.tool_calls[{number}]"),
                },
            }
            for number, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _text(part: Any, where: str) -> str:
    if part.type in ("text", "input_text", "output_text"):
        if part.text is None:
            raise ApiError(400, f"{where}: a text part needs text", param=where)
        return part.text
    if part.type == "refusal":
        return str((part.model_extra or {}).get("refusal", ""))
    kind = "an image" if part.type in _IMAGES else f"a part of type {part.type!r:.60}"
    raise ApiError(400, f"{where} is {kind}, and the model reads text only", param=where, code="unsupported_content")


def _arguments(given: str | dict[str, Any], where: str) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        found = orjson.loads(given or "{}")
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"{where}: the arguments are not JSON: {error}", param=where) from error
    if not isinstance(found, dict):
        raise ApiError(400, f"{where}: the arguments have to be a JSON object", param=where)
    return found
