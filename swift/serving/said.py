"""What is new of an answer, as OpenAI writes it in the chunks of a stream."""

from __future__ import annotations

from typing import Any

from swift.inference.answers.parts import Piece


def delta_of(piece: Piece) -> dict[str, Any]:
    """The `delta` of a chunk."""
    if piece.call is not None:
        function: dict[str, Any] = {"arguments": piece.call.arguments}
        call: dict[str, Any] = {"index": piece.call.index, "function": function}
        if piece.call.id is not None:
            call |= {"id": piece.call.id, "type": "function"}
            function["name"] = piece.call.name
        return {"tool_calls": [call]}
    return {"reasoning_content": piece.thought} if piece.thought else {"content": piece.content}
