"""The items of a response and the events that tell of them: what /v1/responses makes of an answer's pieces.

Both forms of an answer, whole and streamed, come from here, so they can't differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swift.inference.answers.parts import Piece


class OutputItems:
    """Writes one answer.

    Args:
        answer_id: ids of items are made from it.

    Attributes:
        items: as they are so far; the last one may be unfinished.
    """

    def __init__(self, answer_id: str) -> None:
        self.items: list[dict[str, Any]] = []
        self._answer_id = answer_id
        self._open: tuple[str, int] | None = None  # kind, and number of the call

    def add(self, piece: Piece) -> list[dict[str, Any]]:
        """The events of a piece, without sequence numbers."""
        kind = ("call", piece.call.index) if piece.call else ("reasoning" if piece.thought else "message", 0)
        events = []
        if self._open != kind:
            events += self.close()
            events += self._begin(kind, piece)
        item = self.items[-1]
        where = {"item_id": item["id"], "output_index": len(self.items) - 1}
        if piece.call is not None:
            item["arguments"] += piece.call.arguments
            if piece.call.arguments:
                delta = piece.call.arguments
                events.append({"type": "response.function_call_arguments.delta", **where, "delta": delta})
        elif piece.thought:
            item["content"][0]["text"] += piece.thought
            place = {**where, "content_index": 0}
            events.append({"type": "response.reasoning_text.delta", **place, "delta": piece.thought})
        elif piece.content:
            item["content"][0]["text"] += piece.content
            place = {**where, "content_index": 0, "logprobs": []}
            events.append({"type": "response.output_text.delta", **place, "delta": piece.content})
        return events

    def close(self, status: str = "completed") -> list[dict[str, Any]]:
        """End the open item, if there is one."""
        if self._open is None:
            return []
        kind, self._open = self._open[0], None
        item = self.items[-1]
        item["status"] = status
        where = {"item_id": item["id"], "output_index": len(self.items) - 1}
        events: list[dict[str, Any]] = []
        if kind == "call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            events.append({"type": "response.function_call_arguments.done", **where, **done})
        else:
            part = item["content"][0]
            place = {**where, "content_index": 0}
            if kind == "reasoning":
                events.append({"type": "response.reasoning_text.done", **place, "text": part["text"]})
            else:
                events.append({"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []})
            events.append({"type": "response.content_part.done", **place, "part": dict(part)})
        events.append({"type": "response.output_item.done", "output_index": where["output_index"], "item": _copy(item)})
        return events

    def _begin(self, kind: tuple[str, int], piece: Piece) -> list[dict[str, Any]]:
        self._open = kind
        number = len(self.items)
        item: dict[str, Any]
        part: dict[str, Any] | None = None
        if piece.call is not None:
            call_id = piece.call.id or f"call_{self._answer_id}_{piece.call.index}"
            item = {
                "id": f"fc_{self._answer_id}_{number}", "type": "function_call", "status": "in_progress",
                "call_id": call_id, "name": piece.call.name or "", "arguments": "",
            }  # fmt: skip
        elif kind[0] == "reasoning":
            item = {
                "id": f"rs_{self._answer_id}_{number}", "type": "reasoning", "status": "in_progress", "summary": [],
                "content": [],
            }  # fmt: skip
            part = {"type": "reasoning_text", "text": ""}
        else:
            item = {
                "id": f"msg_{self._answer_id}_{number}", "type": "message", "role": "assistant",
                "status": "in_progress", "content": [],
            }  # fmt: skip
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.items.append(item)
        events = [{"type": "response.output_item.added", "output_index": number, "item": _copy(item)}]
        if part is not None:
            place = {"item_id": item["id"], "output_index": number, "content_index": 0}
            events.append({"type": "response.content_part.added", **place, "part": dict(part)})
            item["content"].append(part)
        return events

    def finish(self, pieces: Sequence[Piece], *, complete: bool) -> list[dict[str, Any]]:
        """Take the last pieces and end; an answer always has an item, an empty message where nothing was said."""
        events = [each for piece in pieces for each in self.add(piece)]
        if not self.items:
            events += self._begin(("message", 0), Piece())
        return events + self.close("completed" if complete else "incomplete")


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """As it is now: it goes on changing, and events are written later."""
    return {**item, "content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)
