"""What a run of the inference benchmark is measured by. It runs in every tool's environment, without our package.

Linux only: processes are read from /proc.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int | None = None) -> float:
    """CPU seconds of a process, all its threads and all its children, those that ended included; default: this one."""
    if pid is None:
        own = os.times()
        return time.process_time() + own.children_user + own.children_system + _of_children(os.getpid())
    fields = _stat(pid)
    return sum(int(fields[at]) for at in range(11, 15)) / _TICKS + _of_children(pid)


def _of_children(pid: int) -> float:
    """CPU seconds of the children that are alive."""
    children: set[int] = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            children.update(int(child) for child in (thread / "children").read_text().split())
        except OSError:  # it has just ended
            continue
    return sum(cpu_seconds(child) for child in children)


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third one on; of a process that has just ended, zeros."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["0"] * 50


def memory_mib(what: str = "VmRSS", pid: int | str = "self") -> float:
    """Memory of a process: `VmRSS` now, `VmHWM` at its peak."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(what + ":"))


def measure(job: dict[str, Any], answer: Callable[[list[list[int]], int], list[list[int]]], began: float) -> None:
    """Ask for answers at each concurrency, and print the result for the process that started this one.

    Args:
        job: prompts (token ids), new (tokens of an answer), concurrency, repeats (the best one counts).
        answer: of prompts, all at once, so many new tokens each: the tokens.
        began: CPU seconds before the model was loaded.
    """
    prompts, new = job["prompts"], job["new"]
    answer(prompts[:1], 4)
    result: dict[str, Any] = {"start_cpu_s": cpu_seconds() - began, "start_rss_mib": memory_mib(), "rates": {}}
    answers: list[list[int]] = []
    for count in job["concurrency"]:
        times = []
        for _ in range(job["repeats"]):
            started = cpu_seconds()
            answers = answer(prompts[:count], new)
            times.append(cpu_seconds() - started)
            assert [len(tokens) for tokens in answers] == [new] * count, [len(tokens) for tokens in answers]
        result["rates"][str(count)] = count * new / min(times)
    result |= {"peak_rss_mib": memory_mib("VmHWM"), "answers": answers}
    print("RESULT " + json.dumps(result), flush=True)
