"""The parts of an answer, as they come."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A part of a tool call: its beginning has id and name, more of its arguments may follow.

    Attributes:
        index: which of the answer's calls.
        arguments: JSON text.
    """

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


@dataclass(slots=True)
class Said:
    """A whole answer.

    Attributes:
        calls: name and arguments (JSON text) of each.
        ids: of each call.
    """

    content: str = ""
    thoughts: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """Take a piece."""
        self.content += piece.content
        self.thoughts += piece.thought
        if piece.call is None:
            return
        if piece.call.index == len(self.calls):
            self.calls.append((piece.call.name or "", ""))
            self.ids.append(piece.call.id or "")
        name, arguments = self.calls[piece.call.index]
        self.calls[piece.call.index] = name, arguments + piece.call.arguments
