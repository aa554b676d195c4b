"""Many short requests, good and bad, against one server: no wrong answer, no error of its own, no memory that stays.

    OMP_NUM_THREADS=1 python benchmarks/inference/soak.py [--requests 10000] [--clients 16] [--seconds 600] [--seed 0]

A tiny random model with a real tokenizer behind the real server, in a process of its own. Most requests are greedy ones
whose answers are known: asked once each at the start. The others leave in the midst of an answer or of their own body,
send a body that is too large or no JSON, a value that can't be, a prompt over the context, a wrong key. Memory is read
after a tenth of the requests (warm-up) and at every tenth from then on; at the end, /metrics tells the blocks in use.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "serving"))
from client import deployed
from meter import memory_mib
from soaking import KEY, Soak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=600, help="end after this long")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--model", str(_tiny_model(Path(folder))), "--kv_cache_gib", "0.02", "--max_batch_size", "8")
        limits = ("--api_key", KEY, "--max_request_bytes", "65536", "--temperature", "0", "--infer_backend", "swift")
        with deployed(*flags, *limits) as server:
            _run(options, server.port, server.process.pid)


def _tiny_model(folder: Path) -> Path:
    from fixtures import build_tiny_model

    return Path(build_tiny_model(folder / "tiny"))


def _run(options: argparse.Namespace, port: int, pid: int) -> None:
    soak = Soak(port, random.Random(options.seed))
    asyncio.run(soak.learn())
    sizes: list[float] = []
    began = time.monotonic()
    done = 0
    for part in range(10):
        until = options.requests * (part + 1) // 10
        asyncio.run(soak.run(until - done, options.clients))
        done = until
        sizes.append(memory_mib(pid=pid))
        print(f"  {done} requests, {sizes[-1]:.0f} MiB, {time.monotonic() - began:.0f} s", flush=True)
        if time.monotonic() - began > options.seconds:
            break
    left = asyncio.run(soak.blocks_left())
    after = sizes[1:] or sizes
    spread = max(abs(size / sizes[0] - 1) for size in after)
    print(json.dumps(dict(Counter(soak.counts).most_common())))
    print(
        f"{done} requests, {len(soak.wrong)} wrong; RSS {sizes[0]:.0f} MiB after warm-up, {sizes[-1]:.0f} at the end "
        f"(at most {spread:.1%} off); {left} blocks in use at the end; load {os.getloadavg()[0]:.1f}"
    )
    for wrong in soak.wrong[:5]:
        print("  ", wrong)
    sys.exit(bool(soak.wrong or left))


if __name__ == "__main__":
    main()
