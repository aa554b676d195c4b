"""Tiny models, batches and reference numbers for "spread over ranks = one process".

A test builds the same model on each rank (`build` is a function of its arguments alone), spreads it, runs the same
batches, and compares losses, gradients and weights with `single_process`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.tensor import DTensor

from swift.config.training import ObjectiveConfig
from swift.data.loading.batch import Batch, Layout, make_batch
from swift.data.rows import RowRef
from swift.models.attention import VARLEN
from swift.models.head import OutputHead, find_decoder, find_head
from swift.objectives import build_objective
from swift.training.module import Objectives, TrainModule

VOCAB = 96
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "use_cache": False,
    "pad_token_id": 0,
}
KINDS = {
    "tied": lambda: tf.LlamaConfig(**COMMON, tie_word_embeddings=True),
    "untied": lambda: tf.LlamaConfig(**COMMON, tie_word_embeddings=False),
    "gqa": lambda: tf.Qwen2Config(**(COMMON | {"num_key_value_heads": 4}), tie_word_embeddings=False),
    "qk_norm": lambda: tf.Qwen3Config(**(COMMON | {"num_key_value_heads": 4}), tie_word_embeddings=False),
    "moe": lambda: tf.Qwen3MoeConfig(
        **(COMMON | {"num_key_value_heads": 4}),
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
}
TUNERS = ("full", "lora")
LAYOUTS = ("padded", "packed")


@dataclass
class Tiny:
    """A tiny model; `whole` is it with its adapters, `causal_lm` the Hugging Face model inside."""

    whole: nn.Module
    causal_lm: tf.PreTrainedModel

    @property
    def decoder(self) -> nn.Module:
        return find_decoder(self.causal_lm)

    @property
    def head(self) -> OutputHead:
        return find_head(self.causal_lm)

    def train_module(self, head: OutputHead | None = None) -> TrainModule:
        objective = build_objective(ObjectiveConfig())
        return TrainModule(
            self.whole,
            decoder=self.decoder,
            head=head or self.head,
            objectives=Objectives(objective, objective.evaluation()),
        )


def build(kind: str, tuner: str = "full", *, dtype: torch.dtype = torch.float32, attention: str = VARLEN) -> Tiny:
    """The same model with the same numbers on every rank. LoRA is on every linear layer of attention and MLP, with
    matrices B that aren't zero."""
    config = KINDS[kind]()
    extra = {"experts_implementation": "eager"} if kind == "moe" else {}
    causal_lm = tf.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention, **extra)
    whole: nn.Module = causal_lm
    if tuner == "lora":
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        targets += [] if kind == "moe" else ["gate_proj", "up_proj", "down_proj"]
        whole = get_peft_model(causal_lm, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    fill(whole)
    return Tiny(whole.train(), causal_lm)


def fill(model: nn.Module) -> None:
    """Numbers that depend on the parameters' names only."""
    for name, parameter in model.named_parameters():
        plain = name.removeprefix("base_model.model.").replace("base_layer.", "")
        generator = torch.Generator().manual_seed(sum(ord(c) * (i + 1) for i, c in enumerate(plain)))
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            parameter.copy_(1 + 0.1 * values if parameter.ndim == 1 else 0.08 * values)


def make_batches(layout: str, count: int, *, rows: int = 2, seed: int = 5) -> list[Batch]:
    """`count` micro-batches of `rows` examples with 9 to 24 tokens, about a fifth of them not trained on."""
    draw = np.random.default_rng(seed)
    batches = []
    for _ in range(count):
        examples = []
        for _ in range(rows):
            length = int(draw.integers(9, 25))
            weights = (draw.random(length) > 0.2).astype(np.float32)
            weights[-1] = 1.0
            examples.append((draw.integers(1, VOCAB, length).astype(np.int32), weights))
        refs = [RowRef("test", number) for number in range(rows)]
        batches.append(make_batch(examples, refs, Layout(padding_free=layout == "packed")))
    return batches


@dataclass
class Outcome:
    """Loss per step, gradients of step 1 and trained weights at the end, by parameter name, as whole tensors."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.01)


def single_process(kind: str, tuner: str, layout: str, *, count: int = 4, steps: int = 3, **options: object) -> Outcome:
    """What one process gets from `count` micro-batches a step, the same ones in each of `steps` steps."""
    tiny = build(kind, tuner, **options)  # type: ignore[arg-type]
    module = tiny.train_module()
    trained = {name: p for name, p in tiny.whole.named_parameters() if p.requires_grad}
    optimizer = make_optimizer(list(trained.values()))
    batches = make_batches(layout, count)
    weight = sum(batch.weight for batch in batches)
    outcome = Outcome()
    for step in range(steps):
        loss = 0.0
        for batch in batches:
            terms = module(batch)
            (terms.loss_sum / weight).backward()
            loss += terms.loss_sum.item() / weight
        outcome.losses.append(loss)
        if step == 0:
            outcome.gradients = {name: p.grad.detach().clone() for name, p in trained.items() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    outcome.weights = {name: p.detach().clone() for name, p in trained.items()}
    return outcome


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that may be spread; every rank of its mesh must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-12))


def assert_equal(ours: Outcome, theirs: Outcome, *, names: set[str] | None = None) -> None:
    """Losses to 1e-6, each gradient and each weight to 1e-5, relative.

    Args:
        names: parameters that must be there; default: all of the reference.
    """
    for number, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True)):
        assert abs(a - b) <= 1e-6 * abs(b), f"loss of step {number + 1}: {a} instead of {b}"
    for what, mine, reference in (
        ("gradient", ours.gradients, theirs.gradients),
        ("weight", ours.weights, theirs.weights),
    ):
        expected = set(reference) if names is None else names
        assert set(mine) == expected, f"{what}s of {sorted(set(mine) ^ expected)[:5]}"
        wrong = {name: error for name in expected if not (error := relative(mine[name], reference[name])) <= 1e-5}
        assert not wrong, f"{what}s differ: {dict(sorted(wrong.items(), key=lambda item: -item[1])[:5])}"
