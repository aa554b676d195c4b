"""Collectives of one step under each way of spreading a model: how many, and how many bytes, against the formula.

    python benchmarks/parallel/collectives.py --ranks 8 --layers 8 --tokens 4096

The step is traced as `--dry_run` does it, with the run's own strategies on tensors without numbers, so any number of
ranks takes one process and no time to speak of. A Llama of Llama 3 8B's sizes (but for the number of layers), fp32, one
micro-batch of one row a step. In the formulas, w is the number of ranks, L of layers, S the bytes of a row's hidden
states, K those of its keys and values, Q of its queries, P those of all parameters, E those of embedding, last norm
and head. The loss takes all tokens at once (in a run it takes some at a time, each with a small all-gather along `tp`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers as tf

from swift.config.degrees import Degrees
from swift.config.parallel import ParallelConfig
from swift.config.training import ObjectiveConfig, OptimizerConfig
from swift.data.loading.loader import Batch, Layout, make_batch
from swift.data.rows import RowRef
from swift.distributed.mesh import Mesh, build_mesh
from swift.distributed.trace_world import pretend
from swift.models.attention import VARLEN
from swift.optim import build_optimizer
from swift.training.dry_step import Stepping, trace_fake
from swift.training.dry_totals import Totals, totals_of
from swift.training.parallelize import Making, SpreadModel
from swift.training.precision import Precision

EXPERTS, CHOSEN = 8, 2


@dataclass(frozen=True)
class Sizes:
    """What formulas are made of; bytes in fp32."""

    ranks: int
    layers: int
    tokens: int
    states: int
    queries: int
    keys_values: int
    parameters: int
    ends: int

    @property
    def others(self) -> float:
        return (self.ranks - 1) / self.ranks


@dataclass(frozen=True)
class Line:
    """One kind of collective: its formulas in words, and what they come to."""

    axis: str
    kind: str
    count_words: str
    count: Callable[[Sizes], float]
    bytes_words: str
    num_bytes: Callable[[Sizes], float]


@dataclass(frozen=True)
class Way:
    name: str
    degrees: Callable[[int], Degrees]
    settings: dict[str, Any]
    lines: tuple[Line, ...]
    copies: bool = False
    experts: bool = False


WAYS = (
    Way(
        "copies (DDP)",
        lambda w: Degrees(dp_replicate=w),
        {},
        (Line("dp", "all_reduce", "1", lambda s: 1, "2 (w-1)/w P", lambda s: 2 * s.others * s.parameters),),
        copies=True,
    ),
    Way(
        "FSDP, stage 3",
        lambda w: Degrees(dp_shard=w),
        {"fsdp": "fsdp2"},
        (
            # embedding, last norm and head are gathered once: they stay for the backward pass
            Line(
                "fsdp",
                "all_gather",
                "2 L + 1",
                lambda s: 2 * s.layers + 1,
                "(w-1)/w (2 P - E)",
                lambda s: s.others * (2 * s.parameters - s.ends),
            ),
            Line(
                "fsdp",
                "reduce_scatter",
                "L + 1",
                lambda s: s.layers + 1,
                "(w-1)/w P",
                lambda s: s.others * s.parameters,
            ),
        ),
    ),
    Way(
        "FSDP, stage 2",
        lambda w: Degrees(dp_shard=w),
        {"fsdp": "fsdp2", "zero_stage": 2},
        (
            Line("fsdp", "all_gather", "L + 1", lambda s: s.layers + 1, "(w-1)/w P", lambda s: s.others * s.parameters),
            Line(
                "fsdp",
                "reduce_scatter",
                "L + 1",
                lambda s: s.layers + 1,
                "(w-1)/w P",
                lambda s: s.others * s.parameters,
            ),
        ),
    ),
    Way(
        "tensor parallel",
        lambda w: Degrees(tp=w),
        {},
        (
            Line(
                "tp",
                "all_reduce",
                "4 L + 2",
                lambda s: 4 * s.layers + 2,
                "2 (w-1)/w (4 L + 2) S",
                lambda s: 2 * s.others * (4 * s.layers + 2) * s.states,
            ),
        ),
    ),
    Way(
        "+ sequence parallel",
        lambda w: Degrees(tp=w),
        {"sequence_parallel": True},
        (
            Line(
                "tp",
                "all_gather",
                "4 L + 3",
                lambda s: 4 * s.layers + 3,
                "(w-1)/w (4 L + 2) S",
                lambda s: s.others * (4 * s.layers + 2) * s.states,
            ),
            Line(
                "tp",
                "reduce_scatter",
                "4 L + 1",
                lambda s: 4 * s.layers + 1,
                "(w-1)/w (4 L + 1) S",
                lambda s: s.others * (4 * s.layers + 1) * s.states,
            ),
        ),
    ),
    Way(
        "Ulysses",
        lambda w: Degrees(ulysses=w),
        {},
        (
            Line(
                "ulysses",
                "all_to_all",
                "8 L",
                lambda s: 8 * s.layers,
                "2 L (w-1)/w (2 Q + K) / w",
                lambda s: 2 * s.layers * s.others * (2 * s.queries + s.keys_values) / s.ranks,
            ),
        ),
    ),
    Way(
        "ring",
        lambda w: Degrees(ring=w),
        {},
        (
            Line(
                "ring",
                "send",
                "6 (w-1) L",
                lambda s: 6 * (s.ranks - 1) * s.layers,
                "3 (w-1) L K / w",
                lambda s: 3 * (s.ranks - 1) * s.layers * s.keys_values / s.ranks,
            ),
        ),
    ),
    Way(
        "experts",
        lambda w: Degrees(dp_shard=w, ep=w),
        {},
        (
            Line(
                "ep",
                "all_to_all",
                "5 L",
                lambda s: 5 * s.layers,
                f"4 L (w-1)/w {CHOSEN} S",
                lambda s: 4 * s.layers * s.others * CHOSEN * s.states,
            ),
        ),
        experts=True,
    ),
    Way(
        "pipeline, first stage",
        lambda w: Degrees(pp=w),
        {},
        (Line("pp", "send", "1", lambda s: 1, "S", lambda s: s.states),),
    ),
)


def model_config(layers: int, *, experts: bool) -> tf.PretrainedConfig:
    common = {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 1 << 20,
        "tie_word_embeddings": False,
    }
    if not experts:
        return tf.LlamaConfig(**common)
    return tf.Qwen3MoeConfig(**common, num_experts=EXPERTS, num_experts_per_tok=CHOSEN, moe_intermediate_size=2048)


def empty_model(config: tf.PretrainedConfig) -> tuple[tf.PreTrainedModel, tf.PreTrainedModel]:
    extra = {"experts_implementation": "grouped_mm"} if hasattr(config, "num_experts") else {}
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=VARLEN, **extra)
    return model, model


def trace(way: Way, ranks: int, config: tf.PretrainedConfig, tokens: int) -> Totals:
    degrees = way.degrees(ranks)
    settings = ParallelConfig(
        tensor_parallel_size=degrees.tp,
        pipeline_parallel_size=degrees.pp,
        sequence_parallel_size=degrees.cp,
        expert_parallel_size=degrees.ep,
        **way.settings,
    )
    making = Making(settings, ObjectiveConfig(loss_chunk_size=tokens), Precision(torch.float32, "cpu"))

    def batch() -> Batch:
        example = (np.ones(tokens, dtype=np.int32), np.ones(tokens, dtype=np.float32))
        return make_batch([example], [RowRef("row", 0)], Layout(padding_free=True))

    def make_optimizer(model: SpreadModel) -> torch.optim.Optimizer:
        return build_optimizer(model.local, OptimizerConfig(), tuner_type="full")

    stepping = Stepping(1, batch, make_optimizer, copies=way.copies)
    with pretend(0, ranks) if ranks > 1 else nullcontext():
        mesh = build_mesh(degrees, "cpu") if ranks > 1 else Mesh()
        return totals_of(trace_fake(lambda: empty_model(config), mesh, making, stepping)[0], 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args()
    print("| way | collective | count | formula | GiB a rank sends | formula | |")
    print("|---|---|---|---|---|---|---|")
    for way in WAYS:
        config = model_config(options.layers, experts=way.experts)
        parameters = sum(p.numel() for p in empty_model(config)[0].parameters())
        token = 4 * options.tokens
        sizes = Sizes(
            options.ranks,
            options.layers,
            options.tokens,
            states=token * config.hidden_size,
            queries=token * config.num_attention_heads * config.head_dim,
            keys_values=2 * token * config.num_key_value_heads * config.head_dim,
            parameters=4 * parameters,
            ends=4 * (2 * config.vocab_size + 1) * config.hidden_size,
        )
        totals = trace(way, options.ranks, config, options.tokens)
        for line in way.lines:
            key = line.axis, line.kind
            count, wanted = line.count(sizes), line.num_bytes(sizes)
            cells = [way.name, " ".join(key), f"{totals.calls[key]:.0f}", f"{line.count_words} = {count:.0f}"]
            cells += [f"{totals.bytes[key] / 2**30:.4f}", f"{line.bytes_words} = {wanted / 2**30:.4f}"]
            cells.append(f"{100 * (totals.bytes[key] / wanted - 1):+.2f} %")
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
