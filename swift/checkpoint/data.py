"""The position in the data, as a file of its own in a checkpoint: a few numbers, or those and the open rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from swift.core.errors import CheckpointError

DATA_FILE = "data_state.json"


def write_data_state(path: Path, state: dict[str, Any]) -> None:
    """Write a loader's state: plain JSON values."""
    path.write_text(json.dumps(state, ensure_ascii=False) + "\n", encoding="utf-8")


def read_data_state(folder: Path) -> dict[str, Any]:
    """The loader's state in a checkpoint.

    Raises:
        CheckpointError: it isn't there: an older version wrote the checkpoint, whose rows came in another order.
    """
    try:
        return json.loads((folder / DATA_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint has no readable {DATA_FILE}, so the rows to come aren't known: {error}",
            where=str(folder),
            fix="an older version ordered rows differently; start from its weights with --resume_only_model true",
        ) from error
