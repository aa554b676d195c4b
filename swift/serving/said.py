"""What an answer's text says, as OpenAI writes it: content, thoughts, tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swift.inference.requests import Structure
from swift.serving.errors import ApiError
from swift.serving.served import Talker


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A part of a tool call: its beginning has id and name, more of its arguments follow."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of an answer; one of the three."""

    content: str = ""
    thought: str = ""
    call: CallPiece | None = None

    def delta(self) -> dict[str, Any]:
        """The `delta` of a chunk."""
        if self.call is not None:
            function: dict[str, Any] = {"arguments": self.call.arguments}
            call: dict[str, Any] = {"index": self.call.index, "function": function}
            if self.call.id is not None:
                call |= {"id": self.call.id, "type": "function"}
                function["name"] = self.call.name
            return {"tool_calls": [call]}
        return {"reasoning_content": self.thought} if self.thought else {"content": self.content}


class Reading:
    """Takes one answer's text apart while it comes.

    Args:
        talker: whose model speaks.
        prompt: ids of the prompt, which may have begun a thought.
        tools: that it was shown.
    """

    def __init__(self, talker: Talker, prompt: list[int], tools: list[dict[str, Any]] | None) -> None:
        self._talker, self._prompt, self._tools = talker, prompt, tools

    def feed(self, text: str) -> list[Piece]:
        """What more text adds."""
        return [Piece(content=text)] if text else []

    def end(self) -> list[Piece]:
        """What was held back."""
        return []


def tool_structure(talker: Talker, tools: list[dict[str, Any]], *, parallel: bool) -> Structure:
    """The form of an answer that calls one of the tools.

    Raises:
        ApiError: 400, the model's way to call tools isn't known.
    """
    raise ApiError(400, "the model can't be made to call a tool", param="tool_choice")
