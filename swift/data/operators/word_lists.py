"""Lists that users keep in files, one entry a line: words, phrases, domains."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from swift.core.errors import UsageError


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
        raise UsageError(
            f"{setting}: {path} can't be read: {error}", where=setting, fix="name a UTF-8 text file"
        ) from error
    entries = [line.strip() for line in text.splitlines()]
    entries = [entry for entry in entries if entry and not entry.startswith("#")]
    if not entries:
        raise UsageError(f"{setting}: {path} holds no entry", where=setting, fix="write one entry a line")
    return entries


def words_pattern(words: Iterable[str]) -> re.Pattern[str]:
    """A pattern for any of the words or phrases, in any case; where a word begins or ends with a letter or digit of a
    script with spaces, the text must have a border of a word there, so `ass` isn't found in `class`."""
    return re.compile("|".join(map(_bordered, sorted(set(words), key=lambda word: (-len(word), word)))), re.IGNORECASE)


def _bordered(word: str) -> str:
    before = r"(?<!\w)" if word[0].isalnum() and word[0] < "\u0e00" else ""
    after = r"(?!\w)" if word[-1].isalnum() and word[-1] < "\u0e00" else ""
    return before + re.escape(word) + after
