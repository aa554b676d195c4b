"""Run a few lines of Python on two ranks that talk by gloo."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

HEAD = """
import json, os, sys, time
from datetime import timedelta
from pathlib import Path
from swift.core.errors import SwiftError, UsageError
from swift.distributed import process_group, start_process_group

here, rank = Path(sys.argv[1]), int(os.environ["RANK"])
(here / f"ready-{rank}").touch()  # importing takes its time; only then the clock of a small timeout may run
while not (here / f"ready-{1 - rank}").exists():
    time.sleep(0.01)
"""


def on_two_ranks(body: str, folder: Path, **environment: str) -> list:
    """What each rank printed as JSON in its last line.

    Args:
        body: may use `here` (the folder) and `rank`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", HEAD + body, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                **environment,
            },
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]
