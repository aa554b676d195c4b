"""What `swift deploy` costs over the engine, what many connections do to it, and how long it takes to be ready.

    OMP_NUM_THREADS=1 python benchmarks/inference/server.py [--only overhead,connections,start] [--rounds 3]
        [--seconds 120] [--connections 200]

- overhead: 32 streams of 128 tokens from the server and from the embedded engine by turns, SmolLM2-135M, the same
  prompts; CPU seconds of the server's process against those of the engine's, best of the rounds. The client runs in a
  third process and isn't counted.
- connections: so many clients keep asking for `--seconds`, each again as soon as it has its answer of 16 tokens.
- start: from the start of the process until /ready says yes; then again without compiled loops in numba's cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from client import Connection, ask_together, deployed, percentile
from meter import cpu_seconds, memory_mib
from prompts import texts

CHAT = "/v1/chat/completions"
SETTINGS = ("--model", "smollm2", "--infer_backend", "swift", "--kv_cache_gib", "1", "--temperature", "0")


def chat(text: str, new: int) -> dict[str, Any]:
    """A request for so many tokens."""
    message = {"role": "user", "content": text}
    return {"model": "smollm2", "messages": [message], "max_tokens": new, "ignore_eos": True}


def run_engine() -> None:
    """The embedded engine, in a process of its own: a line in, 32 answers, CPU seconds out."""
    from engines import swift_answers
    from prompts import token_ids
    from transformers import AutoTokenizer

    answer = swift_answers("smollm2", "auto", enable_prefix_caching=True)
    from swift.config.model import ModelConfig
    from swift.models.loading import resolve_model

    prompts = token_ids(AutoTokenizer.from_pretrained(str(resolve_model(ModelConfig(model="smollm2")))))
    print("ready", flush=True)
    for _ in sys.stdin:
        started = cpu_seconds()
        answer(prompts, 128)
        print(cpu_seconds() - started, flush=True)


def overhead(rounds: int) -> None:
    command = [sys.executable, __file__, "--engine"]
    engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert engine.stdin is not None and engine.stdout is not None
    with deployed(*SETTINGS) as server:
        assert engine.stdout.readline() == "ready\n"
        bodies = [chat(text, 128) for text in texts()]
        embedded, served = [], []
        for number in range(rounds + 1):
            engine.stdin.write("go\n")
            engine.stdin.flush()
            alone = float(engine.stdout.readline())
            started = server.cpu_s
            answers = asyncio.run(ask_together(server.port, CHAT, bodies))
            spent = server.cpu_s - started
            assert all(status == 200 and text.endswith("[DONE]\n\n") for status, _, text in answers)
            if number:  # the first round warms up
                embedded.append(alone)
                served.append(spent)
                print(f"  engine {alone:.2f}, server {spent:.2f} CPU s", flush=True)
    engine.stdin.close()
    engine.wait()
    more = min(served) / min(embedded) - 1
    print(f"overhead at 32 streams: {more:+.1%} CPU ({min(served):.2f} against {min(embedded):.2f} s)", flush=True)


def connections(count: int, seconds: float) -> None:
    waits: list[float] = []
    errors: list[str] = []

    async def client(port: int, number: int, end: float) -> None:
        connection = Connection(port)
        for k in range(10**9):
            if time.monotonic() > end:
                break
            try:
                body = chat(texts()[(number + k) % 32] + f" ({number})", 16)
                status, first, text = await connection.stream(CHAT, body)
                if status != 200 or not text.endswith("[DONE]\n\n"):
                    errors.append(f"{status} {text[-200:]}")
                waits.append(first)
            except (OSError, asyncio.IncompleteReadError, ValueError) as error:
                errors.append(repr(error))
                connection = Connection(port)
        connection.close()

    async def everyone(port: int) -> None:
        end = time.monotonic() + seconds
        await asyncio.gather(*(client(port, number, end) for number in range(count)))

    with deployed(*SETTINGS) as server:
        started, began = server.cpu_s, time.monotonic()
        asyncio.run(everyone(server.port))
        cpu_s, wall_s = server.cpu_s - started, time.monotonic() - began
        peak = memory_mib("VmHWM", server.process.pid)
    print(
        f"{count} connections for {seconds:.0f} s: {len(waits)} answers of 16 tokens, {len(errors)} errors, "
        f"{16 * len(waits) / cpu_s:.0f} tokens/CPU s, {16 * len(waits) / wall_s:.0f} tokens/s; first token after "
        f"{percentile(waits, 0.5):.1f} s (median), {percentile(waits, 0.99):.1f} s (p99); peak {peak:.0f} MiB",
        flush=True,
    )
    for error in errors[:5]:
        print("  ", error)


def start(times: int) -> None:
    for _ in range(times):
        with deployed(*SETTINGS) as server:
            print(f"ready after {server.ready_cpu_s:.1f} CPU s, {server.ready_wall_s:.1f} s", flush=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        deployed(*SETTINGS, environment={"NUMBA_CACHE_DIR": folder}) as server,
    ):
        print(f"with loops to compile: {server.ready_cpu_s:.1f} CPU s, {server.ready_wall_s:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="start,overhead,connections")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        run_engine()
        return
    print(json.dumps({"load": os.getloadavg()[0]}))
    wanted = options.only.split(",")
    if "start" in wanted:
        start(2)
    if "overhead" in wanted:
        overhead(options.rounds)
    if "connections" in wanted:
        connections(options.connections, options.seconds)


if __name__ == "__main__":
    main()
