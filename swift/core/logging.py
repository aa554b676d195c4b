"""One logger for the whole package. Rank 0 speaks; other ranks speak only to warn."""

from __future__ import annotations

import logging
import os
import sys

_NAME = "swift"


def rank() -> int:
    """This process's global rank as set by the launcher; 0 when there is none."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Number of processes started by the launcher; 1 when there is none."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Rank within this node."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_logger(name: str = _NAME) -> logging.Logger:
    """The package's logger, or a child of it: messages go to stderr, without decoration, at INFO on rank 0."""
    root = logging.getLogger(_NAME)
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        prefix = f"[rank {rank()}] " if world_size() > 1 and rank() else ""
        handler.setFormatter(logging.Formatter(prefix + "%(message)s"))
        root.addHandler(handler)
        root.propagate = False
        level = os.environ.get("LOG_LEVEL", "INFO").upper()
        root.setLevel(level if rank() == 0 else max(logging.WARNING, logging.getLevelName(level)))
    return root if name == _NAME else root.getChild(name.removeprefix(_NAME + "."))
