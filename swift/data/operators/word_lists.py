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

    Single words are looked up in a set, so a list of many thousand costs no more than a short one.
    """

    def __init__(self, words: Iterable[str]) -> None:
        lowered = {word.lower() for word in words}
        self._single = {word for word in lowered if _TOKEN.fullmatch(word) and word < _UNSPACED}
        others = sorted(lowered - self._single, key=lambda word: (-len(word), word))
        self._others = re.compile("|".join(map(_bordered, others))) if others else None

    def first(self, text: str) -> str | None:
        """A word of the list that the text holds, or None."""
        lowered = text.lower()
        if self._single:
            found = self._single.intersection(_TOKEN.findall(lowered))
            if found:
                return min(found)
        match = self._others.search(lowered) if self._others else None
        return match.group() if match else None


def _bordered(word: str) -> str:
    before = r"(?<!\w)" if word[0].isalnum() and word[0] < _UNSPACED else ""
    after = r"(?!\w)" if word[-1].isalnum() and word[-1] < _UNSPACED else ""
    return before + re.escape(word) + after
