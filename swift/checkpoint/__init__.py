"""Floor 3: how the state of a run is kept, so that what can be read is always whole."""

from swift.checkpoint.lock import RunLock
from swift.checkpoint.state import RunState
from swift.checkpoint.store import (
    Checkpoint,
    clear,
    find_checkpoint,
    list_checkpoints,
    load_tensors,
    prune,
    remove_unfinished,
    save_checkpoint,
    save_tensors,
    set_aside,
    verify,
)

__all__ = [
    "Checkpoint",
    "RunLock",
    "RunState",
    "clear",
    "find_checkpoint",
    "list_checkpoints",
    "load_tensors",
    "prune",
    "remove_unfinished",
    "save_checkpoint",
    "save_tensors",
    "set_aside",
    "verify",
]
