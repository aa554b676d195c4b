"""Whether all ranks see one folder: runs on several machines need a file system that they share."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from swift.core.errors import UsageError
from swift.core.files import disk_errors
from swift.distributed.process_group import ProcessGroup

_PATIENCE_S = 60.0  # NFS clients may take a new name for missing that long


def several_machines(group: ProcessGroup) -> bool:
    """Whether the launcher started fewer processes here (LOCAL_WORLD_SIZE) than there are."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(group.world_size))) < group.world_size


def check_shared_folder(group: ProcessGroup, run_dir: Path, *, patience_s: float = _PATIENCE_S) -> None:
    """On several machines, prove that all of them see the run folder. Every rank calls it.

    Rank 0 alone prepares the data and writes checkpoints; the others read them from the run folder.

    Raises:
        UsageError: on every rank, if a rank doesn't see what rank 0 wrote.
    """
    if several_machines(group) and not shared_folder(group, run_dir, patience_s=patience_s):
        raise UsageError(
            "the run folder is not the same on all machines",
            where=f"--output_dir {run_dir}",
            fix="set --output_dir to a folder on a file system that all machines share, under the same path",
        )


def shared_folder(group: ProcessGroup, run_dir: Path, *, patience_s: float = _PATIENCE_S) -> bool:
    """Whether every rank sees a file that rank 0 writes into `run_dir`; the same answer on every rank.

    Args:
        patience_s: how long a rank looks for it before it says no.
    """
    token = group.from_main(lambda: _leave_token(run_dir))
    path = run_dir / f".shared-{token}"
    try:
        return all(group.gather(_appears(path, token, patience_s)))
    finally:
        if group.main:
            path.unlink(missing_ok=True)


def _leave_token(run_dir: Path) -> str:
    token = secrets.token_hex(8)
    path = run_dir / f".shared-{token}"
    with disk_errors(path):
        run_dir.mkdir(parents=True, exist_ok=True)
        path.write_text(token)
    return token


def _appears(path: Path, token: str, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            if path.read_text() == token:
                return True
        except OSError:  # not there (yet), or a stale handle
            pass
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)
