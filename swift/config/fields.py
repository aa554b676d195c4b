"""How a setting is declared: a dataclass field with its help text, its other names and the section it is shown in."""

from __future__ import annotations

from dataclasses import MISSING, field
from typing import Any


def setting(default: Any = MISSING, *, help: str, aliases: tuple[str, ...] = (), factory: Any = MISSING) -> Any:
    """A dataclass field for one setting.

    Args:
        default: value when the user says nothing. `None` usually means "decided from the rest"; the help says how.
        help: one sentence for `--help` and the reference; units included.
        aliases: older or other tools' spellings with the same meaning.
        factory: for mutable defaults.
    """
    metadata = {"help": help, "aliases": aliases}
    if factory is not MISSING:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)
