"""Whether this process may use the network, and which hub a bare `owner/name` means.

Two answers that a command gives once, from its flags (`--offline`, `--use_hf`), and that all rooms ask for. `--offline`
is told to the hub libraries and to child processes through `HF_HUB_OFFLINE`, which they know; a user may set it too.
"""

from __future__ import annotations

import os
import sys

from swift.core.errors import NetworkError

_TRUE = {"1", "on", "yes", "true"}
_uses_hf = True


def set_offline() -> None:
    """Forbid network access in this process and in those it starts, to the hub libraries too."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants = sys.modules.get("huggingface_hub.constants")
    if constants is not None:  # it reads the variable once, at import
        constants.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]


def is_offline() -> bool:
    """Whether the network is forbidden: `set_offline` was called, or HF_HUB_OFFLINE is set."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE


def choose_hub(use_hf: bool) -> None:
    """Say which hub an id without `hf::` or `ms::` means in this process: Hugging Face, or ModelScope."""
    global _uses_hf
    _uses_hf = use_hf


def uses_hf() -> bool:
    """Whether an id without a prefix means the Hugging Face hub."""
    return _uses_hf


def follow_flags(*, offline: bool, use_hf: bool) -> None:
    """Do what a command's flags say; `offline` false leaves a prohibition by the environment as it is."""
    if offline:
        set_offline()
    choose_hub(use_hf)


def require_network(what: str) -> None:
    """Refuse to fetch `what` when the network is forbidden.

    Raises:
        NetworkError: it is.
    """
    if is_offline():
        raise NetworkError(
            "it would have to be fetched, and the network is forbidden (--offline, or HF_HUB_OFFLINE)",
            where=what,
            fix="fetch it where there is a network and give the local path, or leave out --offline",
        )
