"""What each way of exchanging gradients, or of doing without, sends and what is learnt with it.

    OMP_NUM_THREADS=1 python benchmarks/parallel/gradient_traffic.py [--steps 60]

Four processes on this machine stand for two nodes of two. A small llama (2 layers, width 64) learns a made-up language
in which nine letters of ten follow from the two before; all ways start from the same weights, see the same examples and
use the same learning rate. Bytes are those of a step after the first ones, sent by a rank; those between the nodes are
exact for ways with two stages, and for flat ones what a ring in the order of ranks sends over each node's border,
divided by the ranks of a node. One seed, untuned: the table shows that a way works, and ranks nothing.

With `--slow`: two processes, one of them twice as slow (it sleeps for as long as a micro-batch takes), with even and
with balanced micro-batches: seconds a step, and the best that a split of micro-batches could do.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).parents[2]))

from swift.config.communication import read_compression, read_local_updates
from swift.data.loading.loader import Layout, deal
from swift.distributed import ProcessGroup
from swift.distributed.compression import build_exchange
from swift.distributed.mesh import Axis
from swift.distributed.traffic import TRAFFIC
from swift.objectives import LossTerms
from swift.training.balance import MicroBatchBalance
from swift.training.local_updates import LocalSteps
from swift.training.precision import Precision
from swift.training.strategy import DataParallel

WORLD, NODE, LETTERS = 4, 2, 64
WAYS = {
    "all-reduce": ("grad_compression", ""),
    "bf16": ("grad_compression", "bf16"),
    "fp16": ("grad_compression", "fp16"),
    "hierarchical": ("grad_compression", '{"method": "hierarchical", "node_size": 2}'),
    "bf16 in node, fp16 across": ("grad_compression", '{"intra": "bf16", "inter": "fp16", "node_size": 2}'),
    "bf16 in node, top 10 % across": (
        "grad_compression",
        '{"intra": "bf16", "inter": "topk", "ratio": 0.1, "node_size": 2}',
    ),
    "top 1 %": ("grad_compression", '{"method": "topk", "ratio": 0.01}'),
    "top 1 %, no feedback": ("grad_compression", '{"method": "topk", "ratio": 0.01, "error_feedback": false}'),
    "PowerSGD rank 4": ("grad_compression", '{"method": "powersgd", "rank": 4, "start_step": 10}'),
    "ring 2 x 2": ("grad_compression", '{"method": "ring2d", "columns": 2}'),
    "local SGD, every 8": ("local_updates", '{"method": "local_sgd", "every": 8}'),
    "DiLoCo, every 20": ("local_updates", '{"method": "diloco", "every": 20}'),
    "DiLoCo, every 20, bf16": ("local_updates", '{"method": "diloco", "every": 20, "dtype": "bfloat16"}'),
    "streaming DiLoCo, 2 parts": ("local_updates", '{"method": "streaming_diloco", "every": 20, "fragments": 2}'),
    "the same, 2 steps late": (
        "local_updates",
        '{"method": "streaming_diloco", "every": 20, "fragments": 2, "delay": 2}',
    ),
}


class Letters(nn.Module):
    """A llama and its mean loss, as one module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=LETTERS,
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            use_cache=False,
        )
        self.model = AutoModelForCausalLM.from_config(config)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=letters[:, :-1]).logits
        return functional.cross_entropy(logits.flatten(0, 1), letters[:, 1:].flatten())


def sentences(rows: int, generator: torch.Generator) -> torch.Tensor:
    table = torch.randint(0, LETTERS, (LETTERS, LETTERS), generator=torch.Generator().manual_seed(1))
    letters = torch.randint(0, LETTERS, (rows, 33), generator=generator)
    for place in range(2, 33):
        follows = torch.rand(rows, generator=generator) < 0.9
        letters[follows, place] = table[letters[follows, place - 2], letters[follows, place - 1]]
    return letters


def train(name: str, steps: int) -> tuple[float, float, float]:
    """Loss at the end; MiB a step that a rank sent; of these between nodes."""
    setting, value = WAYS[name]
    axis = Axis("dp", WORLD, dist.get_rank(), dist.group.WORLD)
    module, generator = Letters(), torch.Generator().manual_seed(100 + dist.get_rank())
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    local = None
    wrapped: nn.Module = module
    if setting == "local_updates":
        local = LocalSteps(read_local_updates(value), dict(module.named_parameters()), optimizer, axis)
    else:
        wrapped = DistributedDataParallel(module, bucket_cap_mb=0.25, gradient_as_bucket_view=True)
        build_exchange(read_compression(value) if value else None, axis, "cpu").register(wrapped)
    sent: dict[str, float] = {}
    skipped = steps // 3 // 20 * 20 if local is not None else steps // 3  # a whole number of periods
    for step in range(steps):
        TRAFFIC.reset()
        wrapped(sentences(8, generator)).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if local is not None:
            local.after_step(step + 1, ending=step + 1 == steps)
        if step >= skipped:
            for along, num_bytes in TRAFFIC.per_axis().items():
                sent[along] = sent.get(along, 0.0) + num_bytes / (steps - skipped)
    total = sum(sent.values())
    between = sent.get("inter", sent.get("column", sent.get("dp", 0.0) / NODE))
    with torch.no_grad():
        loss = float(module(sentences(64, torch.Generator().manual_seed(7))))
    return loss, total / 2**20, between / 2**20


class Sleepy(nn.Module):
    """Sleeps `pause_s` instead of computing, with one parameter to exchange."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1000))
        self.pause_s = pause_s

    def forward(self, batch: Slot) -> LossTerms:
        time.sleep(self.pause_s)
        return LossTerms(self.weight.sum() * 0.0, 0.0, {}, {})


class Slot:
    """As much of a micro-batch as the strategy asks for."""

    input_ids = torch.zeros(1, 100)

    def to(self, device: torch.device) -> Slot:
        return self


def balance(micro_batches: int, pause_s: float, steps: int) -> dict[str, float]:
    """Seconds a step, even and balanced, where rank 0 takes twice as long for a micro-batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    exchange = build_exchange(None, Axis("dp", world, rank, dist.group.WORLD), "cpu")
    exchange.timed = True
    group = ProcessGroup(rank, world, rank)
    module = Sleepy(pause_s * (2 if rank == 0 else 1))
    strategy = DataParallel(module, group, Precision(torch.float32, "cpu"), exchange=exchange)
    settings, units = Layout(), [[number] for number in range(world * micro_batches)]

    def seconds(shares: list[int]) -> float:
        group.barrier()
        start = time.perf_counter()
        portions = strategy.prepare([Slot() for _ in deal(units, settings, rank, world, shares)])  # type: ignore[misc]
        for number, portion in enumerate(portions):
            last = number == len(portions) - 1
            strategy.backward(strategy.forward(portion, torch.sum, last), torch.sum, last)
        group.barrier()
        return time.perf_counter() - start

    even = sum(seconds([micro_batches] * world) for _ in range(4)) / 4
    balanced = MicroBatchBalance(strategy, world, micro_batches)
    for _ in range(steps):
        seconds(balanced.shares)
        balanced.learn(group.gather(strategy.busy_s / strategy.busy_tokens))
    after = sum(seconds(balanced.shares) for _ in range(4)) / 4
    total = world * micro_batches
    ideal = min(max(2 * share, total - share) for share in range(1, total)) * pause_s
    return {"even": even, "balanced": after, "ideal": ideal, "shares": balanced.shares}  # type: ignore[dict-item]


def worker(rank: int, world: int, port: int, run: Callable[[], None]) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", LOCAL_WORLD_SIZE=str(NODE)
    )
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # torch's new names
    dist.init_process_group("gloo", rank=rank, world_size=world)
    run()
    dist.destroy_process_group()


class Table:
    """Runs all ways and prints a line for each."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self) -> None:
        for name in WAYS:
            results = torch.tensor(train(name, self.steps))
            dist.all_reduce(results)
            loss, total, between = (results / WORLD).tolist()
            if dist.get_rank() == 0:
                print(f"| {name:30s} | {loss:.3f} | {total:.4f} | {between:.4f} |", flush=True)


class SlowRank:
    """Runs the balance and prints what came of it."""

    def __call__(self) -> None:
        found = balance(6, 0.1, 8)
        if dist.get_rank() == 0:
            print({name: round(v, 3) if isinstance(v, float) else v for name, v in found.items()}, flush=True)
            print(f"above the ideal: {100 * (found['balanced'] / found['ideal'] - 1):.1f} %", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--port", type=int, default=29571)
    arguments = parser.parse_args()
    world = 2 if arguments.slow else WORLD
    run: Callable[[], None] = SlowRank() if arguments.slow else Table(arguments.steps)
    if not arguments.slow:
        print("| way | loss | MiB a step and rank | between nodes |\n|---|---|---|---|")
    mp.spawn(worker, (world, arguments.port, run), nprocs=world)


if __name__ == "__main__":
    main()
