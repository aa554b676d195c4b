"""Stands between this program and a server that it starts, and ends the server when this program is gone.

Run as a script by `process.py`: `minder.py PARENT REPORT PROGRAM [ARGUMENT ...]`. Also a program that is killed without
warning closes its end of the pipe that is this script's standard input, and is no longer its parent. Linux could end a
child with its parent, but not what the child started (an engine's workers), and other systems could neither.

Imports nothing of swift, so that it starts at once and needs little.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress

_LOOK_S = 1.0  # a process that our parent forked may hold the pipe open


def main(parent: int, report: int, command: list[str]) -> int:
    """Run a program as the head of a process group of its own, until it or the parent ends.

    Args:
        parent: process that this one lives for.
        report: file that is told the program's process id, or why it can't be run (`!` and the words).

    Returns:
        The program's status; 128 + n where signal n ended it.
    """
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    except OSError as error:
        os.write(report, f"!{error.strerror or error}\n".encode())
        return 127
    os.write(report, f"{server.pid}\n".encode())
    os.close(report)
    threading.Thread(target=_end_after, args=(parent, server.pid), daemon=True).start()
    status = server.wait()
    _kill(server.pid)  # what it left behind
    return status if status >= 0 else 128 - status


def _end_after(parent: int, group: int) -> None:
    while os.getppid() == parent and not select.select([0], [], [], _LOOK_S)[0]:
        pass
    _kill(group)


def _kill(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group that is gone
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
