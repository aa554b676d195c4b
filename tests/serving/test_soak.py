"""A thousand short requests, good and bad, against a server in a process of its own."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from soaking import KEY, Soak

LIMITS = ["--api_key", KEY, "--max_request_bytes", "65536", "--kv_cache_gib", "0.02", "--max_batch_size", "8"]


@pytest.mark.slow
def test_whatever_is_sent_answers_are_right_and_nothing_stays(tiny_model_dir: Path) -> None:
    command = [sys.executable, "-m", "swift.cli", "deploy", "--model", str(tiny_model_dir), "--port", "0", *LIMITS]
    server = subprocess.Popen(
        [*command, "--infer_backend", "swift", "--access_log", "false"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert server.stderr is not None
    try:
        said = ""
        while "ready after" not in said:
            line = server.stderr.readline()
            assert line, said
            said += line
        port = int(re.findall(r"http://127\.0\.0\.1:(\d+)", said)[0])
        soak = Soak(port, random.Random(0))
        asyncio.run(soak.learn())
        asyncio.run(soak.run(300, 8))
        before = _resident_mib(server.pid)
        asyncio.run(soak.run(700, 8))
        assert asyncio.run(soak.blocks_left()) == 0
        assert _resident_mib(server.pid) < 1.03 * before
        assert soak.wrong == []
        assert len(soak.counts) == 9, "every kind of request was sent"
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


def _resident_mib(pid: int) -> float:
    found = re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[0]) / 1024
