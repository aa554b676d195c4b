"""How much memory recipes take, and what the engine itself costs, on an input of any size.

    python benchmarks/data/engine_memory.py                              # 2 GB of jsonl in one file
    python benchmarks/data/engine_memory.py --megabytes 100 --recipes copy clean --shard_size 16MB

Each recipe runs in a process of its own with one task at a time. Printed are the peak resident size of that process,
and megabytes of input per second of its CPU time (user and system, start-up included).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from prose import prose

CLEAN = ["normalise", "gopher_quality", "c4_quality", "gopher_repetition", "pii"]
RECIPES = {
    "copy": {"steps": []},
    "sample": {"steps": [{"sample": {"share": 0.9}}]},
    "reshard": {"steps": [], "output": {"shard_bytes": "128MB"}},
    "parquet": {"steps": [], "output": {"format": "parquet"}},
    "clean": {"steps": CLEAN},
    "exact_dedup": {"steps": ["exact_dedup"]},
    "near_dedup": {"steps": ["near_dedup"]},
}
DEFAULT = ["copy", "reshard", "parquet", "exact_dedup"]

RUN = """
import json, resource, sys, time
from swift.data.engine.run import RunOptions, run_recipe
result = run_recipe(json.loads(sys.argv[1]), options=RunOptions(quiet=True))
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime, result.manifest["rows"]]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--recipes", nargs="+", default=DEFAULT, choices=list(RECIPES))
    parser.add_argument("--shard_size", default="256MB")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        size = write_corpus(corpus, options.megabytes * 1_000_000)
        print(f"{size / 1e6:.0f} MB of jsonl in one file")
        print(f"{'recipe':<14}{'peak MB':>9}{'CPU s':>9}{'MB/CPU-s':>10}{'rows':>11}{'wall s':>8}")
        for name in options.recipes:
            recipe = {"input": [str(corpus)], "shard_size": options.shard_size, "executor": {"num_proc": 1}}
            values = RECIPES[name]
            output = {"path": str(Path(folder) / "out"), **values.get("output", {})}
            recipe |= {"steps": values["steps"], "output": output, "on_bad_row": "drop"}
            start = time.monotonic()
            done = subprocess.run([sys.executable, "-c", RUN, json.dumps(recipe)], capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr)
            peak, cpu, rows = json.loads(done.stdout.splitlines()[-1])
            wall = time.monotonic() - start
            print(f"{name:<14}{peak / 1e6:>9.0f}{cpu:>9.1f}{size / 1e6 / cpu:>10.1f}{rows:>11}{wall:>8.0f}", flush=True)
            shutil.rmtree(output["path"])


def write_corpus(path: Path, target_bytes: int) -> int:
    """Documents of prose, each with a number in it so that no two are equal."""
    documents = prose(min(target_bytes, 20_000_000))
    draw = random.Random(0)
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < target_bytes:
            text = draw.choice(documents)
            row = {"text": f"{draw.random()} {text}", "url": f"https://site{draw.randrange(5000)}.org/{written}"}
            written += file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path.stat().st_size


if __name__ == "__main__":
    main()
