"""Peak memory of each rank when a sequence is shared: one forward and backward pass of a two-layer model.

    python benchmarks/parallel/context_memory.py --tokens 8192 16384 --ranks 1 2 4 --impl ring

Two numbers per rank: the most bytes of tensors that were alive at once during the pass, weights and gradients
included, and what the process grew by meanwhile (resident set, Linux only). A long row takes long to attend to, while
its memory is the same however it is divided: `--document 4096` fills it with documents of that length.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers as tf
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swift.config.context import resolve_context
from swift.config.degrees import Degrees
from swift.config.training import ObjectiveConfig
from swift.data.loading.loader import Batch, Layout, make_batch
from swift.data.rows import RowRef
from swift.distributed.context.attention import use_context_attention
from swift.distributed.context.batches import cut_batch
from swift.distributed.mesh import build_mesh
from swift.distributed.spread import Spread
from swift.models.head import find_decoder, find_head
from swift.objectives import build_objective
from swift.training.module import Objectives, TrainModule

HEADS, KV_HEADS = 8, 4
MIB = 1 << 20


class LiveBytes(TorchDispatchMode):
    """Counts the storage of every tensor that operations make, until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, Any] = {}

    def hold(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self._known.get(key)
        if known is not None and known() is storage:
            return

        def freed(_: Any) -> None:
            self._known.pop(key, None)
            self.now -= size

        self._known[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.hold(leaf)
        return result


@dataclass
class Case:
    impl: str
    ranks: int
    tokens: int
    document: int
    hidden: int

    @property
    def degrees(self) -> Degrees:
        ring, ulysses = resolve_context(self.impl, self.ranks, HEADS, KV_HEADS)
        return Degrees(ring=ring, ulysses=ulysses)


def resident_mib(field: str) -> float:
    """`VmRSS` (now) or `VmHWM` (the most) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise KeyError(field)


def row_of(case: Case) -> Batch:
    draw = np.random.default_rng(0)
    lengths = [case.document] * (case.tokens // case.document)
    examples = [(draw.integers(0, 1024, n).astype(np.int32), np.ones(n, dtype=np.float32)) for n in lengths]
    return make_batch(examples, [RowRef("row", i) for i in range(len(lengths))], Layout())


def measure(pipe: Any, case: Case, rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=case.ranks)
    mesh = build_mesh(case.degrees, "cpu")
    config = tf.LlamaConfig(
        vocab_size=1024, hidden_size=case.hidden, intermediate_size=2 * case.hidden, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=case.tokens,
    )  # fmt: skip
    model = tf.LlamaForCausalLM(config)
    use_context_attention(model, Spread(mesh), gather_kv=case.impl == "allgather")
    objective = build_objective(ObjectiveConfig())
    module = TrainModule(
        model, decoder=find_decoder(model), head=find_head(model), objectives=Objectives(objective, objective)
    )
    batch = cut_batch(row_of(case), mesh, pad_token_id=0)
    live = LiveBytes()
    for parameter in model.parameters():
        live.hold(parameter)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before, started = resident_mib("VmRSS"), time.process_time()
    with live:
        module(batch).loss_sum.backward()
    pipe.send((live.peak / MIB, resident_mib("VmHWM") - before, time.process_time() - started))
    dist.destroy_process_group()


def run(case: Case) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")  # this process itself computes nothing
    pipes, processes = [], []
    for rank in range(case.ranks):
        ours, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=measure, args=(theirs, case, rank, port)))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    results = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    columns = (" ".join(f"{value:.0f}" for value in column) for column in zip(*results, strict=True))
    print(
        f"| {case.tokens} | {case.ranks} | {case.impl}: {case.degrees.words()} | " + " | ".join(columns) + " |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768, 65536])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--impl", choices=["auto", "ring", "ulysses", "allgather"], default="ring")
    parser.add_argument("--document", type=int, default=0, help="tokens of each document; 0: one that fills the row")
    parser.add_argument("--hidden", type=int, default=256)
    options = parser.parse_args()
    print("| tokens | ranks | impl: axes | tensors, MiB per rank | growth, MiB per rank | CPU s per rank |")
    print("|---|---|---|---|---|---|")
    for tokens in options.tokens:
        for ranks in options.ranks:
            run(Case(options.impl, ranks, tokens, options.document or tokens, options.hidden))


if __name__ == "__main__":
    main()
