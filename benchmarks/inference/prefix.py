"""Time to the first token of prompts that begin with the same 512 tokens, with the prefix cache and without.

    OMP_NUM_THREADS=1 python benchmarks/inference/prefix.py [--prompts 16]

SmolLM2-135M, one thread, one request at a time. Each prompt goes on with 20 tokens of its own and gets one token; CPU
seconds of the whole process, the median of the prompts. With the cache, the first prompt fills it and isn't counted.
Both give the same tokens.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
from engines import swift_answers
from meter import cpu_seconds

SHARED, OWN = 512, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    options = parser.parse_args()
    draw = random.Random(0)
    shared = [draw.randrange(100, 40_000) for _ in range(SHARED)]
    prompts = [shared + [draw.randrange(100, 40_000) for _ in range(OWN)] for _ in range(options.prompts + 1)]
    found: dict[bool, tuple[float, list[list[int]]]] = {}
    for caching in (False, True):
        answer = swift_answers("smollm2", "auto", enable_prefix_caching=caching)
        times, tokens = [], []
        for prompt in prompts:
            started = cpu_seconds()
            tokens += answer([prompt], 1)
            times.append(cpu_seconds() - started)
        found[caching] = median(times[1:]), tokens
    (without, first), (cached, second) = found[False], found[True]
    assert first == second
    print(
        f"first token after {1000 * without:.0f} CPU ms without the cache, {1000 * cached:.0f} with it: "
        f"{without / cached:.1f} times; load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
