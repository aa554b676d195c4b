"""JSON at the beginning of a text that may not be complete yet."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


# models write line breaks into strings; NaN and its like are no JSON
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse)
# what a text may end with that more text would make valid
_BEGUN = re.compile(r"(?:t|tr|tru|f|fa|fal|fals|n|nu|nul|-|[.eE][+-]?)$")
_BEGUN_ESCAPE = re.compile(r"\\?(?:u[0-9a-fA-F]{0,4})?$")


@dataclass(frozen=True, slots=True)
class Found:
    """A value, and where the text goes on after it."""

    value: Any
    end: int


def read_json(text: str, start: int = 0) -> Found | ValueError | None:
    """The JSON value that begins at `start`.

    Returns:
        the value; None while more text could complete it; the error that no text can mend.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        rest = text[error.pos :]
        if error.msg.startswith("Unterminated string") or not rest.strip() or _BEGUN.match(rest):
            return None
        if error.msg.startswith("Invalid \\") and _BEGUN_ESCAPE.match(rest):
            return None
        return error
    except RecursionError:
        return ValueError("it is nested too deeply")
    except ValueError as error:
        return error
    return Found(value, end)
