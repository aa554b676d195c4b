"""Adapters on a model whose matrices are cut over ranks: LoRA in its plain forms is exact, other kinds are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from equality import KINDS, Outcome, Tiny, assert_equal, fill, make_batches
from pool import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from swift.config.degrees import Degrees
from swift.core.errors import UsageError
from swift.distributed.context.batches import cut_batch
from swift.distributed.mesh import Axis, Mesh, build_mesh
from swift.distributed.spread import Spread, finish_gradients
from swift.distributed.tensor import apply_tensor_parallel
from swift.models.attention import VARLEN
from swift.models.head import find_head
from swift.models.lora_kernel import enable_fast_lora

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
INWARD = [name for name in ALL if name not in ("o_proj", "down_proj")]


def lora(**settings: Any) -> Callable[[], peft.LoraConfig]:
    return lambda: peft.LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": ALL} | settings))


ADAPTERS: dict[str, tuple[str, Callable[[], peft.LoraConfig]]] = {
    "rslora": ("untied", lora(use_rslora=True)),
    "biases of the adapter": ("untied", lora(lora_bias=True)),
    "biases of the model": ("gqa", lora(bias="all")),
    "head and embedding beside it": ("untied", lora(modules_to_save=["lm_head", "embed_tokens"])),
    "tied head and embedding": ("tied", lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True)),
    "norms beside it": ("qk_norm", lora(modules_to_save=["q_norm", "input_layernorm"])),
    # outputs are cut: the input is whole, and equal seeds draw what one process draws
    "dropout": ("untied", lora(target_modules=INWARD, lora_dropout=0.3)),
    "attention of a model with experts": ("moe", lora(target_modules=["q_proj", "o_proj"])),
}


def build(name: str) -> Tiny:
    kind, config = ADAPTERS[name]
    extra = {"experts_implementation": "eager"} if kind == "moe" else {}
    causal_lm = AutoModelForCausalLM.from_config(
        KINDS[kind](), dtype=torch.float64, attn_implementation=VARLEN, **extra
    )
    whole = peft.get_peft_model(causal_lm, config())
    fill(whole)
    for parameter in whole.parameters():
        parameter.data = parameter.data.double()
    enable_fast_lora(whole)
    return Tiny(whole.train(), causal_lm)


def measure(name: str, ranks: int, sequence_parallel: bool = False) -> Outcome:
    """Loss and gradients of one step."""
    tiny = build(name)
    axis: Axis | None = None
    spread = Spread(build_mesh(Degrees(tp=ranks), "cpu"))
    if ranks > 1:
        apply_tensor_parallel(tiny.whole, tiny.causal_lm, spread, sequence_parallel=sequence_parallel)
        axis = spread.mesh["tp"]
    module = tiny.train_module(find_head(tiny.causal_lm, axis=axis))
    torch.manual_seed(7)
    batch = cut_batch(make_batches("packed", 1)[0], Mesh(), pad_token_id=0, multiple=4)
    terms = module(batch)
    terms.loss_sum.backward()
    trained = {n: p for n, p in tiny.whole.named_parameters() if p.requires_grad}
    finish_gradients(trained.items(), spread)
    gradients = {
        n: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()
        for n, p in trained.items()
        if p.grad is not None
    }
    return Outcome([terms.loss_sum.item()], gradients)


def on_two(_: int) -> dict[str, Outcome]:
    found = {name: measure(name, 2) for name in ADAPTERS}
    return found | {f"{name}, tokens shared": measure(name, 2, True) for name in ADAPTERS if name != "dropout"}


def test_equals_one_process():
    references = {name: measure(name, 1) for name in ADAPTERS}
    for rank in on_ranks(2, on_two, 0):
        for name, ours in rank.items():
            theirs = references[name.removesuffix(", tokens shared")]
            try:
                assert_equal(ours, theirs)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "dora": (lora(use_dora=True), "Dora"),
    "ia3": (lambda: peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "ia3"),
    "adalora": (lambda: peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10), "adalora"),
    "loha": (lambda: peft.LoHaConfig(target_modules=["q_proj"]), "loha"),
    "oft": (lambda: peft.OFTConfig(target_modules=["q_proj"], oft_block_size=4, r=0), "oft"),
    "vera": (lambda: peft.VeraConfig(target_modules=["q_proj"], r=4), "vera"),
    "embedding": (lora(target_modules=["embed_tokens"]), "embedding"),
    "trainable tokens": (lora(trainable_token_indices=[1, 2]), "trainable tokens"),
    "experts": (lora(target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"]), "paramwrapper"),
}


def refusals(_: int) -> dict[str, str]:
    found = {}
    for name, (config, _) in REFUSED.items():
        kind = "moe" if name == "experts" else "untied"
        causal_lm = AutoModelForCausalLM.from_config(KINDS[kind]())
        whole: nn.Module = peft.get_peft_model(causal_lm, config())
        before = [p.shape for p in whole.parameters()]
        try:
            apply_tensor_parallel(whole, causal_lm, Spread(build_mesh(Degrees(tp=2), "cpu")), sequence_parallel=False)
        except UsageError as error:
            found[name] = str(error)
        assert before == [p.shape for p in whole.parameters() if not isinstance(p, DTensor)], "cut before refused"
    dist.barrier()  # the first rank keeps the store that others still make groups with
    return found


@pytest.fixture(scope="module")
def refused() -> dict[str, str]:
    return on_ranks(2, refusals, 0)[0]


@pytest.mark.parametrize("name", REFUSED)
def test_other_adapters_are_refused_by_name(refused, name):
    instead = "--modules_to_save" if name == "trainable tokens" else "--tuner_type lora"
    assert REFUSED[name][1] in refused[name] and instead in refused[name]
