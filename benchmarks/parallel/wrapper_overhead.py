"""What our strategy costs over a bare FSDP2 loop, and the memory per rank as ranks are added.

    OMP_NUM_THREADS=1 python benchmarks/parallel/wrapper_overhead.py [--repeats 5] [--steps 4] [--only cost|memory]

Cost: CPU seconds per step, summed over 2 gloo ranks, of the same Llama (8 layers, hidden 256), the same batches and
AdamW (fused), two micro-batches a step. `bare` is `fully_shard` on layers and root, the library's clipping, and an
optimizer over DTensors; `ours` is `apply_fsdp`, `Sharded` and the optimizer over local parts. Both run the same
`TrainModule`. Runs alternate, each in fresh processes; the first step of each isn't counted. CPU seconds don't count
waiting for the processor, but gloo's threads poll, so a loaded machine adds noise: compare the least.

Memory: bytes of all live tensors between steps (weights, optimizer state) and at the end of a backward pass (gradients
too), on 1, 2 and 4 ranks, as a share of those on one rank. Storage is counted once.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import transformers as tf
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tests" / "distributed"))

from equality import Tiny, make_batches
from pool import on_ranks

from swift.config.degrees import Degrees
from swift.config.parallel import ParallelConfig
from swift.config.training import OptimizerConfig
from swift.data.loading.loader import Batch
from swift.distributed.mesh import build_mesh
from swift.distributed.sharding import apply_fsdp
from swift.distributed.spread import Spread
from swift.models.attention import VARLEN
from swift.optim import build_optimizer, local_parameters
from swift.training.precision import Precision
from swift.training.sharded import Sharded

MICRO_BATCHES = 2
OPTIMIZER = OptimizerConfig(learning_rate=1e-3)


def make_model() -> Tiny:
    config = tf.LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        pad_token_id=0,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation=VARLEN)
    return Tiny(model.train(), model)


class Ours:
    """Our strategy and optimizer."""

    def __init__(self) -> None:
        self.tiny = make_model()
        module = self.tiny.train_module()
        config = ParallelConfig(fsdp="fsdp2")
        spread = Spread(build_mesh(Degrees(dp_shard=dist.get_world_size()), "cpu"))
        apply_fsdp(module, self.tiny.causal_lm, spread, config, compute=torch.float32)
        local = local_parameters(self.tiny.whole.named_parameters())
        self.optimizer = build_optimizer(local, OPTIMIZER, tuner_type="full")
        self.strategy = Sharded(module, spread, local, Precision(torch.float32, "cpu"), config)

    def backward(self, batches: list[Batch], weight: float) -> None:
        portions = self.strategy.prepare(batches)
        for number, portion in enumerate(portions):
            last = number == len(portions) - 1
            terms = self.strategy.forward(portion, lambda loss: loss / weight, last)
            self.strategy.backward(terms, lambda loss: loss / weight, last)

    def step(self) -> None:
        self.strategy.clip(1.0)
        self.strategy.step(self.optimizer, None)
        self.optimizer.zero_grad(set_to_none=True)


class Bare:
    """FSDP2 as its documentation shows it."""

    def __init__(self) -> None:
        self.tiny = make_model()
        self.module: nn.Module = self.tiny.train_module()
        for layer in self.tiny.decoder.layers:
            fully_shard(layer)
        fully_shard(self.module)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3, weight_decay=0.1, fused=True)

    def backward(self, batches: list[Batch], weight: float) -> None:
        for number, batch in enumerate(batches):
            self.module.set_is_last_backward(number == len(batches) - 1)
            (self.module(batch).loss_sum / weight * dist.get_world_size()).backward()

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def cpu_seconds(kind: str, steps: int, rows: int) -> float:
    """CPU seconds per step of this rank."""
    warnings.simplefilter("ignore")
    run = Ours() if kind == "ours" else Bare()
    batches = make_batches("packed", MICRO_BATCHES, rows=rows)
    started = 0.0
    for number in range(steps + 1):
        if number == 1:
            dist.barrier()
            started = time.process_time()
        run.backward(batches, 100.0)
        run.step()
    return (time.process_time() - started) / steps


def live_bytes(tensors: list[torch.Tensor]) -> int:
    """Of the storages behind tensors, each once."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())


def memory(_: str) -> dict[str, int]:
    warnings.simplefilter("ignore")
    run = Ours()
    batches = make_batches("packed", MICRO_BATCHES)
    run.backward(batches, 100.0)
    run.step()
    run.backward(batches, 100.0)
    gc.collect()
    parameters = list(run.tiny.whole.parameters())
    states = [v for state in run.optimizer.state.values() for v in state.values() if v.ndim]
    return {
        "weights": live_bytes([p.detach() for p in parameters]),
        "gradients": live_bytes([p.grad for p in parameters if p.grad is not None]),
        "optimizer": live_bytes(states),
    }


def show_cost(repeats: int, steps: int, rows: int) -> None:
    seconds: dict[str, list[float]] = {"bare": [], "ours": []}
    for _ in range(repeats):
        for kind, found in seconds.items():
            found.append(sum(on_ranks(2, cpu_seconds, kind, steps, rows, timeout_s=900)))
    print(f"CPU seconds per step, 2 ranks together, {rows} rows a micro-batch")
    least = {kind: min(found) for kind, found in seconds.items()}
    median = {kind: statistics.median(found) for kind, found in seconds.items()}
    for kind, found in seconds.items():
        shown = " ".join(f"{x:.3f}" for x in found)
        print(f"  {kind}  least {least[kind]:.3f}  median {median[kind]:.3f}  all {shown}")
    over = {name: x["ours"] / x["bare"] - 1 for name, x in (("least", least), ("median", median))}
    print(f"  ours over bare: least {over['least']:+.1%}, median {over['median']:+.1%}")


def show_memory() -> None:
    print("MiB per rank (share of one rank's)")
    alone: dict[str, int] = {}
    for world in (1, 2, 4):
        found = on_ranks(world, memory, "", timeout_s=900)
        worst = {name: max(rank[name] for rank in found) for name in found[0]}
        alone = alone or worst
        shown = "  ".join(f"{name} {value / 2**20:.2f} ({value / alone[name]:.3f})" for name, value in worst.items())
        print(f"  {world} ranks  {shown}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rows", type=int, default=32, help="examples of 9 to 24 tokens in a micro-batch")
    parser.add_argument("--only", choices=["cost", "memory"])
    options = parser.parse_args()
    if options.only != "memory":
        show_cost(options.repeats, options.steps, options.rows)
    if options.only != "cost":
        show_memory()


if __name__ == "__main__":
    main()
