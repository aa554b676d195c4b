"""Whether a template shows everything that a row holds. What it leaves out would be lost without a word."""

from __future__ import annotations

import json
from typing import Any

from swift.data.encoding.spans import Conversation, split_thoughts
from swift.data.encoding.template import Refusal, Renderer
from swift.data.rows import RowProblem


def check_shown(render: Renderer, talk: Conversation, text: str, name: str, *, thoughts: bool = False) -> None:
    """Refuse a row whose tools, tool calls or messages aren't in `text`.

    Args:
        text: the rendering of `talk`.
        name: the template's name, for messages.
        thoughts: also look for the thoughts of the last message. (Turns trained one by one are checked for theirs when
            they are found; in earlier turns templates drop thoughts on purpose.)

    Raises:
        RowProblem: `tools_dropped`, `calls_dropped`, `message_dropped` or `thoughts_dropped`.
    """
    for tool in talk.tools or []:
        function = tool.get("function", tool)
        if isinstance(function, dict) and str(function.get("name", "")) not in text:
            raise RowProblem(
                "tools_dropped",
                f"{name} doesn't show the tools of the row ({function.get('name')} isn't in its rendering)",
                "use a template that takes tools (--template FILE.jinja), or remove the tools from the row",
            )
    for index, message in enumerate(talk.messages):
        for call in message.get("tool_calls") or []:
            if str(call["function"]["name"]) not in text:
                raise RowProblem(
                    "calls_dropped",
                    f"message {talk.number(index)}: {name} doesn't show its call of {call['function']['name']}",
                    "use a template that takes tool calls: --template FILE.jinja",
                )
        if not _has_text(message, text) and _changes_nothing(render, talk, index):
            raise RowProblem(
                "message_dropped",
                f"message {talk.number(index)} ({message['role']}): {name} doesn't show it",
                "remove the message, or use a template that takes its role: --template FILE.jinja",
            )
    if thoughts and talk.messages:
        last = split_thoughts(talk.messages[-1])[0].strip()
        if talk.messages[-1]["role"] == "assistant" and last not in text:
            raise RowProblem(
                "thoughts_dropped",
                f"message {talk.number(len(talk.messages) - 1)}: {name} doesn't show the message's thoughts",
                "write them into `content` as <think>…</think>, or use a template that shows them",
            )


def _has_text(message: dict[str, Any], text: str) -> bool:
    """A quick yes: the content stands in the text as it is, or escaped as JSON. A no may be a template's rewriting."""
    content = message.get("content")
    if not isinstance(content, str):
        return True
    if message["role"] == "assistant":
        content = split_thoughts(message)[1]
    content = content.strip()
    return content in text or json.dumps(content, ensure_ascii=False)[1:-1] in text


def _changes_nothing(render: Renderer, talk: Conversation, index: int) -> bool:
    """Whether the rendering stays the same when the message says something else."""
    messages = list(talk.messages)
    messages[index] = {**messages[index], "content": "\ue0f5Zq\ue0f6"}
    try:
        return render(messages, talk.tools, talk.kwargs) == render(talk.messages, talk.tools, talk.kwargs)
    except Refusal:
        return False
