"""One run of DPO with TRL or ms-swift, in a process and an environment of its own; `speed.py` starts it.

    PYTHON benchmarks/preference/peers.py trl|ms-swift JOB

JOB is json: model, data, output (folders and a file), steps, pairs, uncounted, full. Both run with what is fastest on a
CPU among their own settings: fp32, no gradient checkpointing, no dropout, no worker processes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers as tf

sys.path.insert(0, str(Path(__file__).parent))
from meter import Meter

Job = dict[str, Any]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Watch(tf.TrainerCallback):
    """Tells the meter of each step."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._meter.step()

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        if "loss" in logs:
            self._meter.losses.append(float(logs["loss"]))


def run_trl(job: Job) -> None:
    from datasets import load_dataset
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer

    tokenizer = tf.AutoTokenizer.from_pretrained(job["model"])
    tokenizer.chat_template = CHATML
    arguments = DPOConfig(
        job["output"],
        max_steps=job["steps"],
        per_device_train_batch_size=job["pairs"],
        train_sampling_strategy="sequential",
        learning_rate=job["rate"],
        max_length=512,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    adapter = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = DPOTrainer(
        tf.AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        args=arguments,
        train_dataset=load_dataset("json", data_files=job["data"], split="train"),
        processing_class=tokenizer,
        peft_config=None if job["full"] else adapter,
    )
    trainer.train()


def run_ms_swift(job: Job) -> None:
    from swift import RLHFArguments, rlhf_main

    settings = {
        "rlhf_type": "dpo",
        "model": job["model"],
        "model_type": "llama",
        "template": "chatml",
        "tuner_type": "full" if job["full"] else "lora",
        "lora_rank": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "target_modules": ["all-linear"],
        "torch_dtype": "float32",
        "dataset": [job["data"]],
        "dataset_shuffle": False,
        "train_dataloader_shuffle": False,
        "dataloader_num_workers": 0,
        "max_length": 512,
        "max_steps": job["steps"],
        "per_device_train_batch_size": job["pairs"],
        "gradient_accumulation_steps": 1,
        "learning_rate": job["rate"],
        "gradient_checkpointing": False,
        "attn_impl": "sdpa",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": ["none"],
        "output_dir": job["output"],
    }
    rlhf_main(RLHFArguments(**settings))


def main() -> None:
    tool, job = sys.argv[1], json.loads(sys.argv[2])
    meter = Meter(job["pairs"], job["uncounted"])
    meter.watch_decoder()
    if tool == "ms-swift":
        import swift.trainers.patcher  # noqa: F401  it puts a list of its own there
    tf.trainer.DEFAULT_CALLBACKS = [*tf.trainer.DEFAULT_CALLBACKS, Watch(meter)]
    {"trl": run_trl, "ms-swift": run_ms_swift}[tool](job)
    meter.show()


if __name__ == "__main__":
    main()
