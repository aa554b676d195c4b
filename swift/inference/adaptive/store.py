"""A decision on disk, so that the same model on the same machine with the same settings isn't measured again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from swift.core.errors import UsageError
from swift.core.files import require_writable, write_atomic

_KIND = "swift adaptive decision"


def key_of(identity: dict[str, Any]) -> str:
    """A name for all that a decision depends on, which are plain JSON values."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def check_report(path: Path) -> None:
    """Make sure, before anything is measured, that the decision can be written, and over nothing else.

    Raises:
        UsageError: the file is something else.
        SwiftError: the folder can't be written to.
    """
    if path.exists() and _read(path) is None:
        raise UsageError(
            f"{path} is there and holds something else", where="--adaptive_report", fix="take another name"
        )
    require_writable(path)


def stored(path: Path, key: str) -> dict[str, Any] | None:
    """The decision in a file, if it is the one for `key`."""
    found = _read(path) if path.exists() else None
    return found if found is not None and found.get("key") == key else None


def store(path: Path, key: str, decision: dict[str, Any]) -> None:
    """Write a decision."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps({"kind": _KIND, "key": key, **decision}, indent=1, ensure_ascii=False) + "\n")


def _read(path: Path) -> dict[str, Any] | None:
    """A decision file's contents; None for any other file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("kind") == _KIND else None
