"""Shell patterns of paths as regular expressions: `*`, `?`, `[…]`, and `**` for any number of folders."""

from __future__ import annotations

import re

_PIECES = re.compile(r"\*+|\?|\[!?\]?[^\]]*\]|.", re.DOTALL)


def path_pattern(pattern: str) -> re.Pattern[str]:
    """What matches a whole path with `/` between its parts; as in a shell, no mark matches a hidden name's dot."""
    text = ""
    parts = pattern.split("/")
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if part == "**":
            text += r"(?:[^/.][^/]*/)*" + (r"[^/.][^/]*" if last else "")
            continue
        hidden = "" if part.startswith(".") else r"(?!\.)"
        text += hidden + "".join(map(_piece, _PIECES.findall(part))) + ("" if last else "/")
    return re.compile(text, re.DOTALL)


def _piece(piece: str) -> str:
    if piece[0] == "*":
        return "[^/]*"
    if piece == "?":
        return "[^/]"
    if len(piece) < 3:
        return re.escape(piece)
    negated = piece[1] == "!"
    body = piece[2 if negated else 1 : -1].replace("\\", "\\\\").replace("[", "\\[")
    return f"[{'^' if negated else ''}{body}]"
