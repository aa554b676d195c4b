"""Speed of DPO on SmolLM2-135M: CPU seconds a pair of one process with one thread, share of padding, peak memory.

    OMP_NUM_THREADS=1 python benchmarks/preference/speed.py [--steps 7] [--quoted 0] [--only swift,swift-full,...]
        [--trl PYTHON_WITH_TRL] [--ms-swift PYTHON_WITH_MS_SWIFT]

Every row trains on the same pairs (`pairs.py`) in the same order, two a step, rendered as plain ChatML: LoRA of rank 8
on all linear layers, or all weights, in fp32, AdamW, beta 0.1. Rows run one after another, each in a process of its
own; the first step isn't counted. CPU seconds are the whole process's, so neither waiting nor other programs count.
Where the reference is asked before step 1, its time is part of a pair's. Rows of other tools (`peers.py`) need an
environment with them; those not named are left out. The losses show that all do the same work.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

PAIRS, UNCOUNTED = 2, 1
ROWS: dict[str, tuple[str, bool, dict[str, str]]] = {  # tool, all weights, our settings
    "trl": ("trl", False, {}),
    "ms-swift": ("ms-swift", False, {}),
    "swift": ("swift", False, {}),
    "swift-unshared": ("swift", False, {"share_prompts": "false"}),
    "swift-precomputed": ("swift", False, {"reference": "precompute"}),
    "trl-full": ("trl", True, {}),
    "ms-swift-full": ("ms-swift", True, {}),
    "swift-full": ("swift", True, {}),
    "swift-full-unshared": ("swift", True, {"share_prompts": "false"}),
    "swift-full-copy": ("swift", True, {"reference": "copy"}),
}


def run_swift(job: dict[str, Any]) -> None:
    """One run of this process; `job` as for the others, with `settings`."""
    from meter import Meter

    from swift import rlhf
    from swift.training.strategy import DataParallel
    from swift.training.trainer import Trainer

    meter = Meter(job["pairs"], job["uncounted"])
    meter.watch_decoder()
    step, measure = Trainer.train_step, DataParallel.measure
    in_step = False

    def counted_step(self, batches):
        nonlocal in_step
        in_step = True
        step(self, batches)
        meter.step()

    def counted_measure(self, *arguments):
        started = time.process_time()
        result = measure(self, *arguments)
        meter.before += 0.0 if in_step else time.process_time() - started
        return result

    Trainer.train_step, DataParallel.measure = counted_step, counted_measure
    settings = {
        "rlhf_type": "dpo",
        "model": job["model"],
        "template": "chatml",
        "dataset": [job["data"]],
        "dataset_shuffle": False,
        "train_dataloader_shuffle": False,
        "max_length": 512,
        "max_steps": job["steps"],
        "per_device_train_batch_size": job["pairs"],
        "gradient_accumulation_steps": 1,
        "tuner_type": "full" if job["full"] else "lora",
        "lora_rank": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "learning_rate": job["rate"],
        "torch_dtype": "float32",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": ["none"],
        "output_dir": job["output"],
    }
    rlhf(**settings | job["settings"])
    for log in Path(job["output"]).rglob("logging.jsonl"):
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        meter.losses += [line["loss"] for line in lines if "loss" in line]
    meter.show()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--quoted", type=float, default=0.0)
    parser.add_argument("--only", default=",".join(ROWS))
    parser.add_argument("--trl", help="python of an environment with TRL")
    parser.add_argument("--ms-swift", help="python of an environment with ms-swift")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_swift(json.loads(options.child))
        return
    import pairs

    from swift.config.model import ModelConfig
    from swift.models.loading import resolve_model

    model = str(resolve_model(ModelConfig(model="smollm2")))
    print(f"{'row':<20} {'CPU s / pair':>13} {'pairs / CPU min':>16} {'padding':>8} {'peak RSS, MiB':>14}  losses")
    for name in options.only.split(","):
        tool, full, settings = ROWS[name]
        python = {"swift": sys.executable, "trl": options.trl, "ms-swift": options.ms_swift}[tool]
        if python is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            form = "prompt" if tool == "trl" else "messages"
            data = pairs.write(Path(folder) / "pairs.jsonl", PAIRS * options.steps, options.quoted, form=form)
            job = {
                "model": model, "data": str(data), "output": str(Path(folder) / "run"), "steps": options.steps,
                "pairs": PAIRS, "uncounted": UNCOUNTED, "full": full, "rate": 1e-5 if full else 1e-4,
                "settings": settings,
            }  # fmt: skip
            script = [__file__, "--child"] if tool == "swift" else [str(Path(__file__).parent / "peers.py"), tool]
            result = _run([python, *script, json.dumps(job)])
        losses = " ".join(f"{loss:.4f}" for loss in result["losses"][: options.steps])
        print(
            f"{name:<20} {result['cpu_s_per_pair']:>13.2f} {60 / result['cpu_s_per_pair']:>16.1f} "
            f"{result['padding']:>8.1%} {result['peak_rss_mib']:>14.0f}  {losses}",
            flush=True,
        )


def _run(command: list[str]) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        sys.exit(f"{' '.join(command[:3])} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return json.loads(found[-1].removeprefix("RESULT "))


if __name__ == "__main__":
    main()
