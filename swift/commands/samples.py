"""Files with drawn answers, as `swift sample` writes and reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swift.core.errors import DataError


def beside(path: Path, word: str) -> Path:
    """A file that belongs to another one: `new.jsonl` -> `new.WORD.jsonl`."""
    return path.with_name(f"{path.stem}.{word}{path.suffix or '.jsonl'}")


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Result lines of `swift infer`, or rows of `--output_format all`.

    Raises:
        DataError: a line is neither.
    """
    with path.open(encoding="utf-8") as lines:
        for number, text in enumerate(lines, 1):
            try:
                line = json.loads(text)
                known = isinstance(line, dict) and ("status" in line or "answers" in line)
            except ValueError:
                known = False
            if not known:
                raise DataError(
                    "this line holds no drawn answers", where=f"{path}:{number}", fix="name a .samples.jsonl"
                )
            yield line


def asked(line: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation up to the answer that was drawn."""
    messages: list[dict[str, Any]] = line.get("messages") or [{"role": "user", "content": line.get("text") or ""}]
    return messages[:-1] if messages[-1]["role"] == "assistant" else messages


def answers_of(line: dict[str, Any]) -> list[str]:
    """The texts that were drawn; none for a row that has no answer."""
    if "answers" in line:
        return [each["response"] for each in line["answers"]]
    if line["status"] != "ok":
        return []
    return [each["response"] for each in line.get("responses") or [line]]


def reference_of(line: dict[str, Any]) -> str | None:
    """What verifiers compare with."""
    found = (line.get("extra") or {}).get("solution", line.get("labels"))
    return None if found is None else str(found)
