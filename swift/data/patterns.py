"""Shell patterns of paths as regular expressions: `*`, `?`, `[…]`, and `**` for any number of folders."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

_PIECES = re.compile(r"\*+|\?|\[!?\]?[^\]]*\]|.", re.DOTALL)


def path_pattern(pattern: str) -> re.Pattern[str]:
    """What matches a whole path with `/` between its parts; as in a shell, no mark matches a hidden name's dot."""
    text = ""
    parts = pattern.split("/")
    parts = [part for part, before in zip(parts, ["", *parts]) if not part == before == "**"]
    groups = itertools.count()
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if part == "**":
            text += r"(?:[^/.][^/]*/)*" + (r"[^/.][^/]*" if last else "")
            continue
        hidden = "" if part.startswith(".") else r"(?!\.)"
        text += hidden + _part(part, groups) + ("" if last else "/")
    return re.compile(text, re.DOTALL)


def _part(part: str, groups: Iterator[int]) -> str:
    """A part without `**`. What stands between two stars is taken where it comes first, and not looked for again: many
    stars would take for ever."""
    fixed = [""]
    for piece in _PIECES.findall(part):
        if piece[0] == "*":
            fixed.append("")
        else:
            fixed[-1] += _piece(piece)
    if len(fixed) == 1:
        return fixed[0]
    first, *middle, last = fixed
    once = [f"(?=(?P<g{number}>[^/]*?{text}))(?P=g{number})" for text, number in zip(filter(None, middle), groups)]
    return first + "".join(once) + "[^/]*" + last


def _piece(piece: str) -> str:
    if piece == "?":
        return "[^/]"
    if len(piece) < 3:
        return re.escape(piece)
    negated = piece[1] == "!"
    body = piece[2 if negated else 1 : -1].replace("\\", "\\\\").replace("[", "\\[")
    return f"[{'^/' if negated else ''}{body}]"
