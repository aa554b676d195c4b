"""Training speed of SmolLM2-135M: real tokens per CPU second of one process with one thread, and its peak memory.

    OMP_NUM_THREADS=1 python benchmarks/train_speed.py --model smollm2 [--steps 24] [--only raw,default,compiled,...]

Settings of every row: LoRA rank 8 on all linear layers, batch 2, 512 tokens at most (longer rows cut), fp32, AdamW,
the same examples in the same order. `raw` is a plain Hugging Face loop with PEFT, padded to the longest of the batch.
Each row runs in a process of its own; the first steps (which compile, allocate and warm up) are not counted. CPU
seconds are the whole process's, so neither waiting nor other programs count; a real token is one that isn't padding.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

ROWS = {
    "raw": ["raw"],
    "default": ["swift"],
    "compiled": ["swift", "torch_compile=true"],
    "packing": ["swift", "packing=true"],
    "bfloat16": ["swift", "torch_dtype=bfloat16"],
    "raw-full": ["raw-full"],
    "full": ["swift", "tuner_type=full"],
}
UNCOUNTED = 4


class Meter:
    """CPU seconds and tokens after the uncounted steps."""

    def __init__(self) -> None:
        self.steps = self.tokens = 0
        self.started = 0.0

    def step(self, tokens: int) -> None:
        self.steps += 1
        if self.steps == UNCOUNTED:
            self.started = time.process_time()
        elif self.steps > UNCOUNTED:
            self.tokens += tokens

    def result(self) -> dict[str, float]:
        seconds = time.process_time() - self.started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return {"tokens_per_cpu_s": self.tokens / seconds, "peak_rss_mib": peak, "tokens": self.tokens}


def encoded_rows(model: str, data: str):
    """The examples both loops train on, encoded once by the framework."""
    from swift.config import SftConfig, build_config
    from swift.data.dataset import prepare_datasets
    from swift.data.encoding.encode import ChatEncoder
    from swift.models.loading import load_tokenizer, resolve_model

    config = build_config(SftConfig, settings(model, data, 1))
    path = resolve_model(config.model)
    encoder = ChatEncoder(load_tokenizer(path, config.model), config.template)
    return path, prepare_datasets(config.data, config.template, encoder, seed=42).train


def settings(model: str, data: str, steps: int) -> dict:
    return {
        "model": model,
        "dataset": [data],
        "max_length": 512,
        "truncation_strategy": "right",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "lora_rank": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "max_steps": steps,
        "logging_steps": 10,
        "save_strategy": "no",
        "torch_dtype": "float32",
        "report_to": ["none"],
    }


def run_raw(model: str, data: str, steps: int, full: bool) -> dict[str, float]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from swift.data.loading.loader import Layout, TrainLoader

    path, examples = encoded_rows(model, data)
    loader = TrainLoader(examples, Layout(2, padding_free=False), seed=42)
    torch.manual_seed(42)
    network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if not full:
        network = get_peft_model(network, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    network.train()
    trained = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5 if full else 1e-4, fused=True)
    meter = Meter()
    for number in range(steps):
        batch = loader.batches(0, 2 * number)[0]
        labels = torch.full_like(batch.input_ids, -100).flatten()
        labels[batch.target_index + 1] = batch.target_ids
        loss = network(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask.long(),
            labels=labels.view_as(batch.input_ids),
            use_cache=False,
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        meter.step(batch.num_tokens)
    return meter.result()


def run_swift(model: str, data: str, steps: int, options: dict[str, str]) -> dict[str, float]:
    from swift import sft
    from swift.training.trainer import Trainer

    meter = Meter()
    original = Trainer.train_step

    def measured(self, batches):
        original(self, batches)
        meter.step(sum(batch.num_tokens for batch in batches))
        if self.state.step == steps:
            result.update(meter.result())

    result: dict[str, float] = {}
    Trainer.train_step = measured
    with tempfile.TemporaryDirectory() as folder:
        sft(**{**settings(model, data, steps), "output_dir": folder, **options})
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data")
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--only", default=",".join(ROWS))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        kind, *options = ROWS[arguments.child]
        if kind == "swift":
            chosen = dict(option.split("=") for option in options)
            result = run_swift(arguments.model, arguments.data, arguments.steps, chosen)
        else:
            result = run_raw(arguments.model, arguments.data, arguments.steps, kind == "raw-full")
        print("RESULT " + json.dumps(result))
        return
    import sft_data

    with tempfile.TemporaryDirectory() as folder:
        data = arguments.data or str(sft_data.write(Path(folder) / "rows.jsonl"))
        print(f"{'row':<10} {'real tokens / CPU s':>20} {'peak RSS, MiB':>14}")
        for name in arguments.only.split(","):
            command = [sys.executable, __file__, "--child", name, "--model", arguments.model]
            command += ["--data", data, "--steps", str(arguments.steps)]
            environment = {"OMP_NUM_THREADS": "1", **os.environ}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if not found:
                sys.exit(f"{name} failed:\n{done.stdout}{done.stderr}")
            result = json.loads(found[0].removeprefix("RESULT "))
            print(f"{name:<10} {result['tokens_per_cpu_s']:>20.1f} {result['peak_rss_mib']:>14.0f}", flush=True)


if __name__ == "__main__":
    main()
