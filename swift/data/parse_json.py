"""JSON text to Python values, quickly when it is right and with a precise complaint when it is not.

orjson reads; the standard library's parser is asked only when orjson refuses, or when a key may occur twice, because it
can say where the fault is. Knows nothing of rows beyond "an object".
"""

from __future__ import annotations

import codecs
import json
import math
from typing import Any

import numpy as np
import orjson

from swift.data.rows import RowProblem, excerpt

_GUESS_BYTES = 1 << 14
_MOST_DIGITS = 4000  # of a whole number; Python refuses 4300


def parse_line(raw: bytes) -> dict[str, Any]:
    """The object in one line of JSON.

    NaN and Infinity, which Python writes and JSON forbids, and numbers as large as infinity are refused.

    Raises:
        RowProblem: `bad_encoding`, `nul_byte`, `not_json`, `not_an_object` or `duplicate_key`.
    """
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        value = _second_opinion(raw)
    if not isinstance(value, dict):
        raise RowProblem(
            "not_an_object",
            f"the line holds {_json_kind(value)}, not an object: {excerpt(raw.decode(errors='replace'))}",
            'each line is one row: {"messages": […]}',
        )
    colons = raw.count(b":")
    if colons != len(value) and colons != _count_colons(value):
        # a key is there twice; or a colon is written as an escape, and the slow parser finds nothing
        _loads_once(raw)
    return value


def _loads_once(text: bytes | str) -> Any:
    """The value by the slow parser, which refuses a key given twice.

    Raises:
        RowProblem: `duplicate_key`, or `not_json` for what is nested deeper than Python's stack.
        json.JSONDecodeError: it isn't JSON.
    """
    hooks: dict[str, Any] = {"parse_constant": _refuse_number, "parse_float": _finite, "parse_int": whole_number}
    try:
        return json.loads(text, object_pairs_hook=pairs_once, **hooks)
    except RecursionError as error:
        raise RowProblem("not_json", "the JSON is nested too deeply") from error


def number_problem(text: str) -> RowProblem:
    """For NaN, Infinity and numbers that are too large for one."""
    return RowProblem(
        "not_json",
        f"{text[:20]} is no number in JSON",
        "write null, or leave the key out: pandas' to_json does, json.dumps(…, allow_nan=False) says where one is",
    )


def _refuse_number(text: str) -> None:
    raise number_problem(text)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise number_problem(text)
    return value


def whole_number(text: str) -> int:
    """A `parse_int` that names a number of more digits than Python takes."""
    if len(text) > _MOST_DIGITS:
        raise wide_number_problem(text)
    return int(text)


def wide_number_problem(text: str) -> RowProblem:
    """For whole numbers that don't fit into 64 bits."""
    return RowProblem(
        "number_too_large",
        f"{text[:40]}{'…' if len(text) > 40 else ''} is a whole number of more than 64 bits, which most programs read "
        "as another number",
        "write it as a text, in quotes",
    )


def non_finite_field(value: Any) -> str | None:
    """The dotted name of the first field that holds NaN or infinity, which JSON can't; None if there is none."""
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        name, item = waiting.pop()
        if isinstance(item, dict):
            waiting.extend((f"{name}.{key}", inner) for key, inner in reversed(item.items()))
        elif isinstance(item, list | tuple):
            waiting.extend((f"{name}.{number}", inner) for number, inner in reversed(list(enumerate(item))))
        elif isinstance(item, np.ndarray):
            waiting.append((name, item.tolist()))
        elif isinstance(item, float | np.floating) and not math.isfinite(item):
            return name.removeprefix(".")
    return None


def _count_colons(value: Any) -> int:
    """The colons that the JSON of a value has: one for each key, and those in texts. Any more stood at a key that lost.

    Only a single byte is looked for, which is several times as fast as looking for `":`; without recursion, for rows
    may be nested deeper than Python's stack.
    """
    total = 0
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            total += item.count(":")
        elif isinstance(item, dict):
            total += len(item) + sum(key.count(":") for key in item)
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)
    return total


def pairs_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` that refuses a key given twice (every other parser would silently keep the last)."""
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise RowProblem("duplicate_key", f"the key {twice!r} occurs twice in one object", "keep one of them")
    return value


def _second_opinion(raw: bytes) -> Any:
    text = decode_utf8(raw)
    if "\x00" in text:
        raise nul_problem(text)
    try:
        value = _loads_once(text)
    except json.JSONDecodeError as error:
        raise json_problem(text, error) from error
    refuse_lone_surrogates(value)
    return value


def refuse_lone_surrogates(value: Any) -> None:
    """Half of a surrogate pair (`\\ud83d` alone) is no character and can't be tokenised."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RowProblem(
            "bad_encoding",
            f"a text holds half a character (\\u{ord(error.object[error.start]):04x} without its other half)",
            "the text was cut inside an emoji or another rare character; remove that escape",
        ) from error


def decode_utf8(raw: bytes) -> str:
    """The text, or a `bad_encoding` problem that names the byte and a guess at what the encoding is."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise RowProblem("bad_encoding", *encoding_complaint(raw, error)) from error


def encoding_complaint(raw: bytes, error: UnicodeDecodeError) -> tuple[str, str]:
    """What to say of bytes that aren't UTF-8, and how to convert them; what follows the fault gives the guess."""
    byte, value = error.start + 1, raw[error.start]
    if len(raw) > _GUESS_BYTES:
        raw = raw[error.start : error.start + _GUESS_BYTES]
    guess = "LATIN1"
    for name in ("gb18030", "cp1252"):
        try:
            text = codecs.getincrementaldecoder(name)().decode(raw)  # the last character may be cut
        except UnicodeDecodeError:
            continue
        guess = name.upper()
        if name == "gb18030" and not any("\u4e00" <= c <= "\u9fff" for c in text):
            continue
        if name == "gb18030" and _mostly_ascii_accents(raw):
            continue
        break
    return (
        f"byte {byte} (0x{value:02x}) is not UTF-8",
        f"convert the file: iconv -f {guess} -t UTF-8 FILE > FILE.utf8 ({guess} is a guess)",
    )


def _mostly_ascii_accents(raw: bytes) -> bool:
    """Whether high bytes stand alone among ASCII letters, as accents do in Latin-1; Chinese comes in runs."""
    high = [i for i, byte in enumerate(raw) if byte >= 0x80]
    lone = [i for i in high if (i == 0 or raw[i - 1] < 0x80) and (i + 1 == len(raw) or raw[i + 1] < 0x80)]
    return len(lone) * 2 > len(high)


def nul_problem(text: str) -> RowProblem:
    """NUL characters come from UTF-16 without a mark, or from a file that was cut off by a crash."""
    count = text.count("\x00")
    if count * 3 > len(text) and len(text) > 3 and count < len(text):
        return RowProblem(
            "bad_encoding",
            "every other byte is NUL: this looks like UTF-16 without a byte-order mark",
            "convert the file: iconv -f UTF-16LE -t UTF-8 FILE > FILE.utf8",
        )
    return RowProblem(
        "nul_byte",
        f"{count} NUL byte(s), the first at column {text.index(chr(0)) + 1}",
        "the file may be damaged; to remove them: tr -d '\\000' < FILE > FILE.clean",
    )


def json_problem(text: str, error: json.JSONDecodeError) -> RowProblem:
    """A `not_json` problem with the column and what stands there."""
    at_end = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
    what = "the JSON ends too early" if at_end else f"invalid JSON: {error.msg[0].lower()}{error.msg[1:]}"
    fix = "the line was cut off: write the row again" if at_end else None
    if error.msg.startswith("Extra data"):
        what, fix = "more follows after the end of the object", "put each row on a line of its own"
    elif "'" in text[error.pos : error.pos + 1]:
        fix = "JSON needs double quotes: write rows with json.dumps"
    elif text[error.pos : error.pos + 4] in ("None", "True") or text[error.pos : error.pos + 5] == "False":
        fix = "this is Python, not JSON: write rows with json.dumps"
    return RowProblem("not_json", f"{what} (column {error.colno}): {excerpt(text, around=error.pos)}", fix)


def _json_kind(value: Any) -> str:
    if value is None:
        return "null"
    kinds = ((bool, "a boolean"), (str, "a text"), (int | float, "a number"), (list, "a list"))
    return next((name for kind, name in kinds if isinstance(value, kind)), type(value).__name__)
