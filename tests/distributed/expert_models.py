"""Tiny mixtures of experts of several architectures, and what a group of ranks makes of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import transformers as tf
from equality import COMMON, KINDS, VOCAB, Outcome, Tiny, fill, make_optimizer, whole_tensor
from peft import LoraConfig, get_peft_model
from torch import nn

from swift.config.degrees import Degrees
from swift.config.parallel import ParallelConfig
from swift.config.training import ObjectiveConfig
from swift.data.loading.batch import Batch, Layout, make_batch
from swift.data.rows import RowRef
from swift.distributed.context.batches import cut_batch
from swift.distributed.experts import apply_expert_parallel, expert_parameters
from swift.distributed.mesh import Mesh, build_mesh
from swift.distributed.sharding import apply_fsdp
from swift.distributed.spread import Spread, finish_gradients
from swift.distributed.tensor import apply_tensor_parallel
from swift.models.attention import VARLEN
from swift.models.head import find_head
from swift.models.prepare import enable_checkpointing
from swift.models.router import build_router_loss
from swift.objectives import build_objective
from swift.training.module import Objectives, TrainModule

FOUR = COMMON | {"num_hidden_layers": 2, "num_key_value_heads": 4}
MLA = FOUR | {"num_key_value_heads": 8}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
MIXTURES = {
    "qwen3_moe": KINDS["moe"],
    "qwen2_moe": lambda: tf.Qwen2MoeConfig(
        **FOUR,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        decoder_sparse_step=2,  # a layer with experts, one without
    ),
    "mixtral": lambda: tf.MixtralConfig(**FOUR, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": lambda: tf.OlmoeConfig(**FOUR, num_experts=4, num_experts_per_tok=2),
    "gpt_oss": lambda: tf.GptOssConfig(**FOUR, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v2": lambda: tf.DeepseekV2Config(
        **MLA, **LATENT, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1
    ),
    "deepseek_v3": lambda: tf.DeepseekV3Config(
        **MLA,
        **LATENT,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "glm4_moe": lambda: tf.Glm4MoeConfig(
        **FOUR, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1
    ),
    "ernie4_5_moe": lambda: tf.Ernie4_5_MoeConfig(
        **FOUR, moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_num_shared_experts=1
    ),
    "granitemoe": lambda: tf.GraniteMoeConfig(**FOUR, num_local_experts=4, num_experts_per_tok=2),
}


def build(kind: str, tuner: str = "full", *, implementation: str = "eager", device: str = "cpu") -> Tiny:
    """The same numbers on every rank; LoRA is on attention."""
    with torch.device(device):
        causal_lm = tf.AutoModelForCausalLM.from_config(
            MIXTURES[kind](), attn_implementation=VARLEN, experts_implementation=implementation
        )
    whole: nn.Module = causal_lm
    if tuner == "lora":
        whole = get_peft_model(causal_lm, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"]))
    if device != "meta":
        fill(whole)
    return Tiny(whole.train(), causal_lm)


def micro_batch(turn: int, ranks: list[int], layout: str) -> Batch:
    """What these ranks run in their `turn`-th micro-batch, as one: two examples from each."""
    examples = []
    for rank in ranks:
        draw = np.random.default_rng((turn, rank))
        for _ in range(2):
            length = int(draw.integers(5, 20)) + 4 * rank
            weights = (draw.random(length) > 0.2).astype(np.float32)
            weights[-1] = 1.0
            examples.append((draw.integers(1, VOCAB, length).astype(np.int32), weights))
    refs = [RowRef("test", number) for number in range(len(examples))]
    return make_batch(examples, refs, Layout(padding_free=layout == "packed"))


def train_module(tiny: Tiny, mesh: Mesh, coefficient: float) -> TrainModule:
    objective = build_objective(ObjectiveConfig())
    return TrainModule(
        tiny.whole,
        decoder=tiny.decoder,
        head=find_head(tiny.causal_lm, axis=mesh["tp"]),
        objectives=Objectives(objective, objective.evaluation()),
        router_loss=build_router_loss(tiny.causal_lm, coefficient, mesh),
    )


def train(module: TrainModule, batches: list[Batch], spread: Spread, *, steps: int = 3) -> tuple[Outcome, list[float]]:
    """Losses, gradients, weights, and the auxiliary loss of each step, the batches being the same in each."""
    trained = {name: p for name, p in module.model.named_parameters() if p.requires_grad}
    optimizer = make_optimizer(list(trained.values()))
    outcome, balance = Outcome(), []
    weight = over_ranks(sum(batch.weight for batch in batches), spread.mesh)
    for number in range(steps):
        loss = aux = aux_weight = 0.0
        for batch in batches:
            terms = module(batch)
            (terms.loss_sum / weight).backward()
            loss += terms.loss_sum.item() / weight
            aux += float(terms.sums.get("router_aux_loss", 0.0))
            aux_weight += terms.counts.get("router_aux_loss", 0.0)
        finish_gradients(trained.items(), spread)
        outcome.losses.append(over_ranks(loss, spread.mesh))
        balance.append(over_ranks(aux, spread.mesh) / max(over_ranks(aux_weight, spread.mesh), 1e-9))
        if number == 0:
            outcome.gradients = {n: whole_tensor(p.grad).clone() for n, p in trained.items() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    outcome.weights = {name: whole_tensor(p.detach()).clone() for name, p in trained.items()}
    return outcome, balance


def over_ranks(value: float, mesh: Mesh) -> float:
    """The sum over data ranks, in fp64."""
    if not mesh["loss"]:
        return value
    tensor = torch.tensor(value, dtype=torch.float64)
    torch.distributed.all_reduce(tensor, group=mesh["loss"].group)
    return float(tensor)


def mark_gradients(whole: nn.Module, spread: Spread) -> None:
    """Without sharding: whose gradients are to be added up along what."""
    experts = expert_parameters(whole)
    for name, _ in whole.named_parameters():
        for axis in ("efsdp", "dp_replicate") if name in experts else ("loss",):
            spread.mark_partial(name, axis)


@dataclass(frozen=True)
class Case:
    """One training: three steps of two micro-batches a rank."""

    kind: str = "qwen3_moe"
    tuner: str = "full"
    layout: str = "packed"
    coefficient: float = 0.0
    implementation: str = "eager"
    fsdp: bool = False
    sequence_parallel: bool = False
    recompute: bool = False
    same_choice: bool = False  # every token chooses the same two experts, so other ranks' get none

    def build(self) -> Tiny:
        tiny = build(self.kind, self.tuner, implementation=self.implementation)
        for name, parameter in tiny.whole.named_parameters():
            if self.same_choice and name.endswith("gate.weight"):
                parameter.data.zero_()
        return tiny


def spread_run(case: Case, degrees: Degrees) -> tuple[Outcome, list[float]]:
    """What this rank gets, each data rank with examples of its own."""
    mesh = build_mesh(degrees, "cpu")
    spread = Spread(mesh)
    tiny = case.build()
    apply_tensor_parallel(tiny.whole, tiny.causal_lm, spread, sequence_parallel=case.sequence_parallel)
    apply_expert_parallel(tiny.whole, tiny.causal_lm, spread)
    module = train_module(tiny, mesh, case.coefficient)
    if case.recompute:
        enable_checkpointing(tiny.causal_lm)
    if case.fsdp:
        apply_fsdp(module, tiny.causal_lm, spread, ParallelConfig(fsdp="fsdp2"), compute=torch.float32)
    else:
        mark_gradients(tiny.whole, spread)
    batches = [micro_batch(turn, [mesh["dp"].rank], case.layout) for turn in range(2)]
    if mesh["tp"]:
        multiple = mesh["tp"].size if case.sequence_parallel else 1
        batches = [cut_batch(batch, mesh, pad_token_id=0, multiple=multiple) for batch in batches]
    return train(module, batches, spread)


def one_process(case: Case, data_ranks: int) -> tuple[Outcome, list[float]]:
    """The same in one process, with the ranks' micro-batches joined."""
    batches = [micro_batch(turn, list(range(data_ranks)), case.layout) for turn in range(2)]
    tiny = case.build()
    return train(train_module(tiny, Mesh(), case.coefficient), batches, Spread(Mesh()))
