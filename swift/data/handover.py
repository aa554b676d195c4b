"""Handing a large value to worker processes: by a file, not with the process's own arguments.

Python writes those into a pipe of which it holds both ends, so a child that dies before it has read them leaves the
parent waiting for ever. Every script without `if __name__ == "__main__":` makes such children.
"""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path
from typing import Any

from swift.core.files import disk_errors

UNGUARDED = "a Python script that starts it must guard its code with `if __name__ == '__main__':`"


class Handover:
    """A value in a file, until `close`. Only what this very program has written is ever read from it."""

    def __init__(self, value: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="swift-workers-", ignore_cleanup_errors=True)
        self.path = str(Path(self._folder.name) / "task.pickle")
        with disk_errors(Path(self.path)):
            Path(self.path).write_bytes(pickle.dumps(value))

    def close(self) -> None:
        """Remove the file."""
        self._folder.cleanup()


def handed_over(path: str) -> Any:
    """The value, in the other process."""
    return pickle.loads(Path(path).read_bytes())
