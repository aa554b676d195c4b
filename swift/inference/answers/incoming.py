"""Text that comes in pieces, and what a reader of it may look for: marks, texts up to a mark, JSON values.

Readers are generators. Where one needs more text it yields a test of what would be worth going on for, so a long value
isn't looked at again with every token. What is found doesn't depend on how the text was cut. Knows nothing of calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from swift.inference.answers.loose_json import Found, read_json

Wait = Callable[[str], bool]  # whether new text may decide what a reader waits for
Value = TypeVar("Value")
Reading = Generator[Wait, None, Value]

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')


def any_text(new: str) -> bool:
    """Something."""
    return bool(new)


def visible_text(new: str) -> bool:
    """Something other than white space."""
    return bool(new) and not new.isspace()


class Incoming:
    """An answer's text as far as it is there.

    Attributes:
        text: without what was dropped.
        at: where reading goes on.
        final: no more text comes.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.final = False
        self._more: list[str] = []
        self._wait: Wait = any_text

    def add(self, new: str) -> bool:
        """Take more text; tells whether the reader should go on."""
        self._more.append(new)
        return self._wait(new)

    def resume(self, reading: Generator[Wait, None, None]) -> None:
        """Let a reader go on with all that came."""
        self.text += "".join(self._more)
        self._more.clear()
        self._wait = next(reading, any_text)

    def drop(self, count: int | None = None) -> str:
        """Take the first characters away (default: those before `at`), and give them."""
        count = self.at if count is None else count
        taken, self.text = self.text[:count], self.text[count:]
        self.at = 0
        return taken

    def begin(self) -> Reading[int | None]:
        """Where the next visible character is; None if none comes."""
        place = self.at
        while True:
            rest = self.text[place:]
            place += len(rest) - len(rest.lstrip())
            if place < len(self.text):
                return place
            if self.final:
                return None
            yield visible_text

    def sees(self, marks: Sequence[str]) -> Reading[tuple[str, int] | None]:
        """Which of the marks is next, and where it ends; white space around marks doesn't matter."""
        marks = [mark.strip() for mark in marks]
        start = yield from self.begin()
        while start is not None:
            found = next((mark for mark in marks if self.text.startswith(mark, start)), None)
            if found is not None:
                return found, start + len(found)
            if self.final or not any(mark.startswith(self.text[start:]) for mark in marks):
                return None
            yield any_text
        return None

    def take(self, mark: str) -> Reading[bool]:
        """Go past a mark, if it is next; an empty mark always is."""
        if not mark.strip():
            return True
        found = yield from self.sees([mark])
        if found is not None:
            self.at = found[1]
        return found is not None

    def until(self, marks: Sequence[str], *, within: int | None = None) -> Reading[tuple[str, str] | None]:
        """The text before the first of the marks, and the mark; goes past both.

        Args:
            within: characters in which a mark has to begin.
        """
        marks = [mark.strip() for mark in marks]
        longest = max(map(len, marks))
        start = look = self.at
        while True:
            places = [(place, mark) for mark in marks if (place := self.text.find(mark, look)) >= 0]
            # a longer mark that begins earlier could still be coming in
            if places and (self.final or min(places)[0] + longest <= len(self.text) or len(marks) == 1):
                place, mark = min(places)
                if within is not None and place - start > within:
                    return None
                self.at = place + len(mark)
                return self.text[start:place], mark
            if self.final or (within is not None and len(self.text) - start > within + longest):
                return None
            look = max(start, len(self.text) - longest + 1) if not places else look
            yield any_text if places or within is not None else _Appears(marks, self.text[look:])

    def json(self) -> Reading[Any]:
        """The JSON object or list that is next; None if there is none."""
        start = yield from self.begin()
        if start is None or self.text[start] not in "{[":
            return None
        closing = _Closing()
        closing(self.text[start:])
        while True:
            found = read_json(self.text, start)
            if isinstance(found, Found):
                self.at = found.end
                return found.value
            if found is not None or self.final:
                return None
            yield closing


class _Appears:
    """Waits for one of some marks.

    Args:
        tail: what is there of one already, perhaps.
    """

    def __init__(self, marks: Sequence[str], tail: str) -> None:
        self._marks = marks
        self._keep = max(map(len, marks)) - 1
        self._tail = tail

    def __call__(self, new: str) -> bool:
        text = self._tail + new
        self._tail = text[max(0, len(text) - self._keep) :]
        return any(mark in text for mark in self._marks)


class _Closing:
    """Waits until a JSON value's last bracket may have come, or until there is twice as much of it: what can't become
    JSON any more is noticed then."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self._size = self._tried = 0

    def __call__(self, new: str) -> bool:
        closed, at = False, 0
        if self._escaped and new:
            self._escaped, at = False, 1
        while (match := (_INSIDE if self._in_string else _OUTSIDE).search(new, at)) is not None:
            at, char = match.end(), match[0]
            if char == "\\":
                self._escaped = at == len(new)
                at += 1
            elif char == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if char in "{[" else -1
                closed = closed or self._depth <= 0
        self._size += len(new)
        if not closed and self._size <= 2 * self._tried:
            return False
        self._tried = self._size
        return True
