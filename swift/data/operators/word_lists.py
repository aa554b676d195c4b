"""Lists that users keep in files, one entry a line: words, phrases, domains; and finding words of a list in a text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from swift.core.errors import UsageError

_TOKEN = re.compile(r"\w+")
# letters from here on mostly belong to scripts without spaces: there a word has no borders
_UNSPACED = "\u0e00"


def read_list(path: str, setting: str) -> list[str]:
    """The entries of a file: UTF-8, one a line; blank lines and lines that begin with `#` are left out.

    Args:
        path: of the file. setting: that named it, for the message.

    Raises:
        UsageError: the file can't be read, isn't UTF-8 or holds no entry.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} can't be read: {error}", where=setting, fix="name a UTF-8 text file") from error
    entries = [line.strip() for line in text.splitlines()]
    entries = [entry for entry in entries if entry and not entry.startswith("#")]
    if not entries:
        raise UsageError(f"{path} holds no entry", where=setting, fix="write one entry a line")
    return entries


class WordList:
    """Words and phrases that are looked for in any case, as whole words: `ass` isn't found in `class`.

    Single words are looked up in a set, and of the phrases only those are searched for whose first word is there: so a
    list of many thousand costs little more than a short one.
    """

    def __init__(self, words: Iterable[str]) -> None:
        lowered = {word.lower() for word in words}
        self._single = {word for word in lowered if _TOKEN.fullmatch(word) and word < _UNSPACED}
        self._phrases: dict[str, list[re.Pattern[str]]] = {}  # by their first word
        others = []  # without a border before them
        for word in sorted(lowered - self._single, key=lambda word: (-len(word), word)):
            first = _TOKEN.match(word) if _has_border(word[0]) else None
            if first and first.end() < len(word):
                self._phrases.setdefault(first.group(), []).append(re.compile(_bordered(word)))
            else:
                others.append(_bordered(word))
        self._others = [re.compile("|".join(others))] if others else []

    def first(self, text: str) -> str | None:
        """A word of the list that the text holds, or None: the first single word by name, else the first phrase."""
        lowered = text.lower()
        patterns = self._others
        if self._single or self._phrases:
            tokens = set(_TOKEN.findall(lowered))
            found = self._single & tokens
            if found:
                return min(found)
            patterns = [*patterns, *(p for word in sorted(self._phrases.keys() & tokens) for p in self._phrases[word])]
        matches = [match for pattern in patterns if (match := pattern.search(lowered))]
        return min(matches, key=lambda match: (match.start(), -match.end())).group() if matches else None


def _bordered(word: str) -> str:
    before = r"(?<!\w)" if _has_border(word[0]) else ""
    after = r"(?!\w)" if _has_border(word[-1]) else ""
    return before + re.escape(word) + after


def _has_border(character: str) -> bool:
    """Whether a word that ends with it ends there."""
    return character.isalnum() and character < _UNSPACED
