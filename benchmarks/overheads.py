"""What the framework costs beside the arithmetic: per step, at the start, and for preparing data.

    OMP_NUM_THREADS=1 python benchmarks/overheads.py --model smollm2 [--only step,start,data,import]

- step: CPU ms a step of our loop on a tiny model, against a plain loop over the same batches and the same model.
- start: CPU seconds from process start to the end of the first forward pass, against a plain script that does the same.
- data: tokens read, rendered, tokenised and masked per CPU second, one process.
- import: CPU seconds of `import swift`, `swift --help` and `swift sft --help`, less an empty Python's.
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

sys.path.insert(0, str(Path(__file__).parent))

RAW_START = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig, get_peft_model
path, data = sys.argv[1:3]
tokenizer = AutoTokenizer.from_pretrained(path)
rows = [json.loads(line) for line in open(data)]
texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows]
encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
ids = torch.tensor([min(encoded, key=len)])
model(input_ids=ids, labels=ids)
"""

SWIFT_START = """
import sys
import swift.training.module as module
original = module.TrainModule.forward
def once(self, batch):
    terms = original(self, batch)
    import os, time
    print("CPU", time.process_time(), flush=True)
    os._exit(0)
module.TrainModule.forward = once
from swift.cli import main
main(["sft", "--model", sys.argv[1], "--dataset", sys.argv[2], "--max_length", "8192", "--output_dir", sys.argv[3],
      "--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "1",
      "--train_dataloader_shuffle", "false"])
"""


def cpu_of(command: list[str], repeats: int = 3) -> float:
    """Median CPU seconds (user and system) of a whole command."""
    taken = []
    for _ in range(repeats):
        before = os.times()
        subprocess.run(command, capture_output=True, check=False)
        after = os.times()
        taken.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return sorted(taken)[len(taken) // 2]


def measure_import() -> None:
    empty = cpu_of([sys.executable, "-c", "pass"])
    swift = str(Path(sys.executable).parent / "swift")
    for name, command in {
        "import swift": [sys.executable, "-c", "import swift"],
        "swift --help": [swift, "--help"],
        "swift sft --help": [swift, "sft", "--help"],
        "swift sft --lerning_rate 1": [swift, "sft", "--lerning_rate", "1"],
    }.items():
        print(f"{name:<34} {cpu_of(command) - empty:8.3f} CPU s")


def measure_start(model: str, data: Path, folder: Path) -> None:
    short = folder / "short.jsonl"
    rows = data.read_text().splitlines(keepends=True)
    short.write_text("".join(sorted(rows, key=len)))  # the shortest row comes first, so that the forward is small
    from swift.config.model import ModelConfig
    from swift.models.loading import resolve_model

    path = str(resolve_model(ModelConfig(model=model)))
    raw = cpu_of([sys.executable, "-c", RAW_START, path, str(short)])
    ours = cpu_of([sys.executable, "-c", SWIFT_START, path, str(short), str(folder / "run")])
    print(f"{'start to first forward, plain':<34} {raw:8.2f} CPU s")
    print(f"{'start to first forward, swift':<34} {ours:8.2f} CPU s  ({ours / raw:.2f} x)")


def measure_data(model: str, data: Path) -> None:
    from train_speed import encoded_rows

    encoded_rows(model, str(data))  # load and warm up
    start = time.process_time()
    _, examples = encoded_rows(model, str(data))
    seconds = time.process_time() - start
    tokens = int(examples.lengths.sum())
    print(f"{'read, render, tokenise, mask':<34} {tokens / seconds:8.0f} tokens/CPU s (loading the tokenizer included)")


def measure_step(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from swift import sft
    from swift.config.model import ModelConfig
    from swift.models.loading import load_tokenizer, resolve_model
    from swift.training.trainer import Trainer

    source = resolve_model(ModelConfig(model="smollm2"))
    tokenizer = load_tokenizer(source, ModelConfig())
    tiny = folder / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tiny)
    tokenizer.save_pretrained(tiny)
    rows = folder / "tiny.jsonl"
    message = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}]
    rows.write_text((json.dumps({"messages": message}) + "\n") * 400)
    marks: list[float] = []
    batches_seen = []
    original = Trainer.train_step

    def marked(self, batches):
        original(self, batches)
        marks.append(time.process_time())
        batches_seen.append(batches)

    Trainer.train_step = marked
    sft(
        model=str(tiny), dataset=[str(rows)], tuner_type="full", per_device_train_batch_size=1, max_steps=300,
        gradient_accumulation_steps=1, output_dir=str(folder / "steps"), save_strategy="no", report_to=["none"],
        logging_steps=50, torch_dtype="float32",
    )  # fmt: skip
    ours = (marks[-1] - marks[49]) / (len(marks) - 50)

    network = LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-5, fused=True)
    times = []
    for (batch,) in batches_seen:
        labels = torch.full_like(batch.input_ids, -100)
        labels[0, batch.target_index + 1] = batch.target_ids
        network(input_ids=batch.input_ids, labels=labels, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.process_time())
    plain = (times[-1] - times[49]) / (len(times) - 50)
    print(f"{'a step on a tiny model, plain':<34} {1000 * plain:8.2f} CPU ms")
    print(f"{'a step on a tiny model, swift':<34} {1000 * ours:8.2f} CPU ms  ({1000 * (ours - plain):+.2f} ms)")


def main() -> None:
    import sft_data

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--only", default="import,start,data,step")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = sft_data.write(folder / "rows.jsonl")
        wanted = arguments.only.split(",")
        if "import" in wanted:
            measure_import()
        if "start" in wanted:
            measure_start(arguments.model, data, folder)
        if "data" in wanted:
            measure_data(arguments.model, data)
        if "step" in wanted:
            measure_step(folder)


if __name__ == "__main__":
    main()
