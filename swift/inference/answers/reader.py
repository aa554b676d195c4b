"""Takes an answer's text apart while it comes: thoughts, content, tool calls.

What comes out doesn't depend on how the text was cut into pieces: nothing is said before it is certain, so text that
may become a mark is held back, and a call is told when it is complete. What begins like a call and isn't one is
content, as it was written.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swift.inference.answers.calls import Call, read_calls
from swift.inference.answers.forms import CallForm
from swift.inference.answers.incoming import Incoming, Reading, any_text, visible_text
from swift.inference.answers.parts import CallPiece, Piece, Said
from swift.inference.answers.thoughts import ThoughtForm


@dataclass(frozen=True)
class AnswerForm:
    """What may be in an answer.

    Attributes:
        calls: how tool calls are written; None where none are looked for.
        thoughts: how thoughts are written; None where there are none.
        begins_in_thought: the prompt has opened the thought already.
        schemas: of each tool's parameters, by the tool's name.
        ignored: tokens that models write before calls without a mark; they may be there or not.
    """

    calls: CallForm | None = None
    thoughts: ThoughtForm | None = None
    begins_in_thought: bool = False
    schemas: Mapping[str, Mapping[str, Any]] | None = None
    ignored: Sequence[str] = ()

    def parse(self, text: str) -> Said:
        """Read a whole answer."""
        said, reader = Said(), AnswerReader(self)
        for piece in [*reader.feed(text), *reader.end()]:
            said.add(piece)
        return said


class AnswerReader:
    """Reads one answer.

    Args:
        form: what may be in it.
    """

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._source = Incoming()
        self._pieces: list[Piece] = []
        self._num_calls = 0
        self._reading = self._answer()
        self._source.resume(self._reading)

    def feed(self, text: str) -> list[Piece]:
        """What more text adds."""
        if self._source.add(text):
            self._source.resume(self._reading)
        return self._take_pieces()

    def end(self) -> list[Piece]:
        """What was held back, once no more text comes."""
        self._source.final = True
        self._source.resume(self._reading)
        return self._take_pieces()

    def _take_pieces(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _answer(self) -> Reading[None]:
        """The whole answer: a thought, if it begins with one, and then content and calls in any order."""
        source, thoughts = self._source, self._form.thoughts
        leading = ""
        if thoughts is not None:
            if self._form.begins_in_thought or (yield from source.take(thoughts.opening)):
                source.drop()
                yield from self._thought(thoughts)
                leading = "\n"
            if thoughts.heading and (yield from source.take(thoughts.heading)):
                source.drop()
                leading = "\n"
        calls = self._form.calls
        while True:
            if calls is None:
                yield from self._plain(leading)
            elif calls.begins:
                yield from self._marked(calls, leading)
            else:
                yield from self._unmarked(calls, leading)
            if source.final and not source.text:
                return
            leading = " \t\r\n"  # after a call

    def _thought(self, form: ThoughtForm) -> Reading[None]:
        """Everything up to the mark; line breaks around it aren't part of the thought."""
        source, mark = self._source, form.closing.strip()
        yield from self._skip("\n")
        while True:
            at = source.text.find(mark)
            if at >= 0:
                self._tell_thought(source.text[:at].rstrip("\n"))
                source.drop(at + len(mark))
                return
            if source.final:
                self._tell_thought(source.drop(len(source.text)))
                return
            ready = source.text[: _before_mark(source.text, mark)].rstrip("\n")
            self._tell_thought(source.drop(len(ready)))
            yield any_text

    def _plain(self, leading: str) -> Reading[None]:
        """Content to the end."""
        yield from self._skip(leading)
        while not self._source.final:
            self._tell(len(self._source.text))
            yield any_text
        self._tell(len(self._source.text))

    def _marked(self, form: CallForm, leading: str) -> Reading[None]:
        """Content up to a call and the calls, or content to the end."""
        source, mark = self._source, form.begins
        yield from self._skip(leading)
        while True:
            at = source.text.find(mark)
            if at >= 0:
                # white space before a call isn't content, but it is if this is no call
                self._tell(len(source.text[:at].rstrip()))
                gap = source.text.index(mark)
                source.at = gap
                if (yield from self._calls(form)):
                    return
                self._tell(gap + len(mark))  # another mark may be found behind this one
                continue
            if source.final:
                self._tell(len(source.text))
                return
            self._tell(len(source.text[: _before_mark(source.text, mark)].rstrip()))
            yield visible_text if source.text.isspace() else any_text

    def _unmarked(self, form: CallForm, leading: str) -> Reading[None]:
        """Calls from the beginning, or else content to the end."""
        source, opens = self._source, "[" if form.kind == "list" else "{"
        seen = yield from source.sees([*self._form.ignored, opens])
        if seen is not None:
            source.at = seen[1] - len(seen[0]) * (seen[0] == opens)
            if (yield from self._calls(form)):
                return
        yield from self._plain(leading)

    def _calls(self, form: CallForm) -> Reading[bool]:
        """One call, or all calls of a section; tells whether there was one."""
        source = self._source
        if not (yield from source.take(form.section[0])):
            source.at = 0
            return False
        goes_on = form.kind != "list" and bool(form.section[0].strip() or form.section[1].strip() or not form.begins)
        told = False
        while True:
            calls = yield from read_calls(form, source)
            if calls is None or not self._known(form, calls):
                source.at = 0
                return told
            self._tell_calls(calls)
            source.drop()
            told = True
            if not goes_on:
                return True
            if form.section[1].strip() and (yield from source.take(form.section[1])):
                source.drop()
                return True
            if not form.begins:
                yield from source.take(";")
            if (yield from source.sees([form.opening if form.opening.strip() else "{"])) is None:
                source.at = 0
                return True

    def _known(self, form: CallForm, calls: Sequence[Call]) -> bool:
        """Without a mark an object may be content as well, so only the name of a tool makes it a call."""
        known = self._form.schemas
        return bool(form.begins) or known is None or all(call.name in known for call in calls)

    def _tell_calls(self, calls: Sequence[Call]) -> None:
        for call in calls:
            shown = call.shown((self._form.schemas or {}).get(call.name))
            identity = call.id or f"call_{uuid.uuid4().hex[:24]}"
            self._pieces.append(Piece(call=CallPiece(self._num_calls, identity, call.name, shown)))
            self._num_calls += 1

    def _tell(self, count: int) -> None:
        """The first characters are content."""
        if count:
            self._pieces.append(Piece(content=self._source.drop(count)))

    def _tell_thought(self, text: str) -> None:
        if text:
            self._pieces.append(Piece(thought=text))

    def _skip(self, characters: str) -> Reading[None]:
        """Drop what comes of some characters, before anything else does."""
        source = self._source
        while characters:
            rest = source.text.lstrip(characters)
            source.drop(len(source.text) - len(rest))
            if rest or source.final:
                return
            yield any_text


def _before_mark(text: str, mark: str) -> int:
    """How much of a text can't be the beginning of a mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return len(text) - length
    return len(text)
