"""Every architecture that the invariance tests know is cut over two ranks exactly, and further ones are or are refused.

The further ones stand for what plans can contain: gathered projections, packed ones, latent attention, experts with and
without shared ones, norms inside of attention, other names, and no plan at all.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.distributed as dist
import transformers as tf
from architectures import COMMON, CONFIGS, build
from equality import fill, make_batches, relative, whole_tensor
from pool import on_ranks

from swift.config.degrees import Degrees
from swift.config.training import ObjectiveConfig
from swift.core.errors import ModelError, SwiftError
from swift.data.loading.batch import Batch
from swift.distributed.context.batches import cut_batch
from swift.distributed.mesh import Axis, Mesh, build_mesh
from swift.distributed.spread import Spread, finish_gradients
from swift.distributed.tensor import apply_tensor_parallel
from swift.distributed.tensor.plan import plan_blocks
from swift.distributed.tensor.prove import prove_blocks
from swift.models.attention import VARLEN
from swift.models.head import find_decoder, find_head
from swift.objectives import build_objective
from swift.training.module import Objectives, TrainModule

HEADS = COMMON | {"head_dim": 16}
MLA = {
    **(COMMON | {"num_key_value_heads": 4}),
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
GPT = {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4}
MORE = {
    "one-kv-head": lambda: tf.LlamaConfig(**(COMMON | {"num_key_value_heads": 1})),
    "olmo2-gathered": lambda: tf.Olmo2Config(**COMMON),
    "glm4-packed": lambda: tf.Glm4Config(**HEADS),
    "gemma3": lambda: tf.Gemma3TextConfig(**HEADS),
    "qwen2-moe-shared": lambda: tf.Qwen2MoeConfig(
        **COMMON,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
    ),
    "olmoe-gathered": lambda: tf.OlmoeConfig(**COMMON, num_experts=4, num_experts_per_tok=2),
    "mixtral": lambda: tf.MixtralConfig(**COMMON, num_local_experts=4),
    "minicpm3-mla": lambda: tf.MiniCPM3Config(**MLA),
    "gpt-neox": lambda: tf.GPTNeoXConfig(**COMMON),
    "phi-bias": lambda: tf.PhiConfig(**COMMON),
    "starcoder2": lambda: tf.Starcoder2Config(**COMMON),
    "gptj": lambda: tf.GPTJConfig(**GPT, rotary_dim=8, n_positions=128),
    "hunyuan-by-names": lambda: tf.HunYuanDenseV1Config(**HEADS),
}
REFUSED = {
    "gpt2": (lambda: tf.GPT2Config(**GPT), "h.0.attn.c_attn"),
    "opt": (lambda: tf.OPTConfig(**COMMON, ffn_dim=96, word_embed_proj_dim=64), "layers.0.fc1"),
    "mpt": (lambda: tf.MptConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=97), "blocks.0.attn.Wqkv"),
    "mamba": (lambda: tf.MambaConfig(**COMMON), "layers.0.mixer"),
    "diffllama": (lambda: tf.DiffLlamaConfig(**COMMON), "layers.0.self_attn"),
}
# a half of what can be combined; the other half is slow
QUICK = [(name, True) for name in CONFIGS] + [(name, False) for name in MORE]
SLOW = [(name, not shared) for name, shared in QUICK]


def batches() -> list[Batch]:
    return [cut_batch(batch, Mesh(), pad_token_id=0, multiple=4) for batch in make_batches("packed", 2)]


def build_any(name: str) -> tf.PreTrainedModel:
    if name not in MORE:
        return build(name, torch.float64)
    config = MORE[name]()
    experts = {"experts_implementation": "eager"} if hasattr(config, "num_experts_per_tok") else {}
    return tf.AutoModelForCausalLM.from_config(config, dtype=torch.float64, **experts).eval()


def measure(name: str, spread: Spread | None, sequence_parallel: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss, and gradients by name, of a model of architecture `name`."""
    model = build_any(name)
    model.set_attn_implementation(VARLEN)
    fill(model)
    axis: Axis | None = None
    if spread is not None:
        apply_tensor_parallel(model, model, spread, sequence_parallel=sequence_parallel)
        axis = spread.mesh["tp"]
    objective = build_objective(ObjectiveConfig())
    head = find_head(model, axis=axis)
    module = TrainModule(model, decoder=find_decoder(model), head=head, objectives=Objectives(objective, objective))
    loss = 0.0
    for batch in batches():
        terms = module(batch)
        (terms.loss_sum / 50).backward()
        loss += terms.loss_sum.item() / 50
    if spread is not None:
        finish_gradients(model.named_parameters(), spread)
    return loss, {name: whole_tensor(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


@cache
def reference(name: str) -> tuple[float, dict[str, torch.Tensor]]:
    return measure(name, None, False)


def on_two(names: list[str], sequence_parallel: bool) -> dict:
    found: dict = {}
    for name in names:
        spread = Spread(build_mesh(Degrees(tp=2), "cpu"))
        try:
            found[name] = measure(name, spread, sequence_parallel)
        except SwiftError as error:
            found[name] = str(error)
    return found


@cache
def cut(sequence_parallel: bool, quick: bool) -> list[dict]:
    names = [name for name, shared in (QUICK if quick else SLOW) if shared == sequence_parallel]
    return on_ranks(2, on_two, names, sequence_parallel)


def compare(name: str, ranks: list[dict]) -> None:
    loss, gradients = reference(name)
    for rank in ranks:
        assert not isinstance(rank[name], str), rank[name]
        ours, found = rank[name]
        assert abs(ours - loss) <= 1e-6 * abs(loss)
        assert set(found) == set(gradients)
        wrong = {key: error for key in found if not (error := relative(found[key], gradients[key])) <= 1e-5}
        assert not wrong, wrong


@pytest.mark.parametrize(("name", "sequence_parallel"), QUICK)
def test_equals_one_process(name, sequence_parallel):
    compare(name, cut(sequence_parallel, True))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sequence_parallel"), SLOW)
def test_equals_one_process_the_other_way(name, sequence_parallel):
    compare(name, cut(sequence_parallel, False))


def refusals(_: int) -> dict[str, str]:
    found = {}
    for name, (config, _) in REFUSED.items():
        model = tf.AutoModelForCausalLM.from_config(config())
        try:
            apply_tensor_parallel(model, model, Spread(build_mesh(Degrees(tp=2), "cpu")), sequence_parallel=False)
        except ModelError as error:
            found[name] = str(error)
    dist.barrier()  # the first rank keeps the store that others still make groups with
    return found


def test_what_is_not_known_is_refused_by_name():
    found = on_ranks(2, refusals, 0)[0]
    for name, (_, part) in REFUSED.items():
        assert part in found.get(name, "nothing"), name
        assert "--fsdp fsdp2" in found[name]


class Residual(tf.models.llama.modeling_llama.LlamaMLP):
    """Names that look like a sum over ranks, and code that isn't one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


def test_a_guess_from_names_is_proven():
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**COMMON))
    model.config.base_model_tp_plan = None
    assert all(block.guessed for block in plan_blocks(model, skip_experts=False))
    prove_blocks(model, 2)
    for layer in model.model.layers:
        layer.mlp.__class__ = Residual
    with pytest.raises(ModelError, match=r"layers\.0\.mlp.*don't add up"):
        prove_blocks(model, 2)


def test_an_unknown_style_is_refused_by_name():
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**COMMON))
    model.config.base_model_tp_plan = {"layers.*.mlp.up_proj": "diagonal"}
    with pytest.raises(ModelError, match="style diagonal"):
        plan_blocks(model, skip_experts=False)
