"""How fast, and how full, a million lengths are packed into rows of 4,096.

    python benchmarks/data/packing.py

Lengths are drawn from two distributions, like those of chats and of web documents. The bound is the least number of
rows that could hold the tokens.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from swift.data.loading.packing import pack, packing_efficiency


def lengths_of(kind: str, count: int, capacity: int) -> np.ndarray:
    """Deterministic lengths, at most `capacity`."""
    rng = np.random.default_rng(7)
    centre, spread = (6.2, 0.9) if kind == "chat" else (6.6, 1.1)
    return np.clip(rng.lognormal(centre, spread, count).astype(np.int64), 8, capacity)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--capacity", type=int, default=4096)
    options = parser.parse_args()
    print(f"{'lengths':10}{'CPU s':>8}{'rows':>10}{'bound':>10}{'full':>11}")
    for kind in ("chat", "web"):
        lengths = lengths_of(kind, options.count, options.capacity)
        start = time.process_time()
        rows = pack(lengths, np.arange(len(lengths)), options.capacity)
        seconds = time.process_time() - start
        bound = -(-int(lengths.sum()) // options.capacity)
        full = packing_efficiency(rows, lengths, options.capacity)
        print(f"{kind:10}{seconds:8.2f}{len(rows):10,}{bound:10,}{full:11.4%}")


if __name__ == "__main__":
    main()
