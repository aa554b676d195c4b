"""A bursty trace answered by the engine in continuous batches and in static ones.

    OMP_NUM_THREADS=1 python benchmarks/inference/batching.py [--bursts 3] [--seed 0]

SmolLM2-135M, one thread, 32 places. Requests come in bursts, with answers of very different lengths. A static batch
takes those who wait, 32 at most, and the next one begins when all of it have ended; the engine is the same. The clock
is the engine's CPU time, so other programs change nothing: a request that is due is handed in when that much was spent,
and where nobody waits the clock moves on to the next one. Utilisation is rows computed over rows that were possible, as
the engine counts it.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from meter import cpu_seconds
from prompts import token_ids

PLACES = 32


def trace_of(bursts: int, seed: int) -> list[tuple[float, int, int]]:
    """Arrival in seconds, number of the prompt, tokens of the answer."""
    draw = random.Random(seed)
    trace, now = [], 0.0
    for _ in range(bursts):
        for _ in range(draw.randrange(24, 56)):
            length = 1 + min(int(draw.expovariate(1 / 60)), 400)
            trace.append((now + draw.random(), draw.randrange(PLACES), length))
        now += draw.expovariate(1 / 20)
    return sorted(trace)


def replay(backend: Any, prompts: list[list[int]], trace: list[tuple[float, int, int]], *, static: bool) -> str:
    """Let the requests arrive, and wait for all answers."""
    from swift.inference.requests import Request, SamplingParams, Update

    waits: list[float] = []
    open_answers: set[str] = set()
    began, skipped, before = cpu_seconds(), 0.0, backend.stats()

    def now() -> float:
        return cpu_seconds() - began + skipped

    def take(update: Update) -> None:
        if update.finish_reason is not None:
            waits.append(now() - trace[int(update.request_id)][0])
            open_answers.discard(update.request_id)

    coming = 0
    while coming < len(trace) or open_answers:
        if not open_answers and coming < len(trace):
            skipped += max(0.0, trace[coming][0] - now())
        room = len(trace) if not static else PLACES * (not open_answers)
        while room and coming < len(trace) and trace[coming][0] <= now():
            _, prompt, length = trace[coming]
            open_answers.add(str(coming))
            params = SamplingParams(max_new_tokens=length, ignore_eos=True)
            backend.submit(Request(str(coming), prompts[prompt], params), take)
            coming, room = coming + 1, room - 1
        time.sleep(0.002)
    spent, after = cpu_seconds() - began, backend.stats()
    steps = after.steps - before.steps
    rows = after.utilisation * after.steps - before.utilisation * before.steps
    tokens = sum(length for _, _, length in trace)
    name = "static" if static else "continuous"
    return (
        f"{name:<11} utilisation {rows / steps:.1%}, {tokens / spent:.0f} tokens/CPU s, "
        f"an answer after {mean(waits):.1f} s (mean), {max(waits):.1f} s (longest)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bursts", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    import torch

    from swift.config import InferConfig, build_config
    from swift.inference.loading import load_engine

    torch.set_num_threads(1)
    settings = {"infer_backend": "swift", "kv_cache_gib": 1.0, "enable_prefix_caching": False, "max_batch_size": PLACES}
    engine = load_engine(build_config(InferConfig, {"model": "smollm2", **settings}))
    prompts = token_ids(engine.tokenizer)
    trace = trace_of(options.bursts, options.seed)
    print(f"{len(trace)} requests, {sum(length for _, _, length in trace)} tokens; load {os.getloadavg()[0]:.1f}")
    for static in (True, False):
        print(replay(engine.backend, prompts, trace, static=static), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
