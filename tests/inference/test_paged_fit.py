"""Which models can be run over a paged cache, and that a wrong one is caught before it answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from architectures import COMMON, CONFIGS, build

from swift.core.errors import ModelError
from swift.inference.paged import attention
from swift.inference.paged.attention import PAGED
from swift.inference.paged.cache import LayerShape
from swift.inference.paged.fit import layer_shapes, paged_unsupported_reason, prove_paged

# two widths in one model: latent attention
SHAPES = {"deepseek-v3-mla": LayerShape(4, 24, 16)}


@pytest.mark.parametrize("name", CONFIGS)
def test_models_that_can_be_run(name: str) -> None:
    model: Any = build(name)
    before = model.config._attn_implementation
    assert paged_unsupported_reason(model) is None
    shapes = layer_shapes(model)
    assert model.config._attn_implementation == before
    assert shapes == dict.fromkeys(range(2), SHAPES.get(name, LayerShape(2, 16, 16)))
    model.set_attn_implementation(PAGED)
    prove_paged(model, shapes)
    assert model.config._attn_implementation == PAGED


def test_without_compiled_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_compiled", lambda: False)
    model: Any = build("gpt-oss-sinks")
    shapes = layer_shapes(model)
    model.set_attn_implementation(PAGED)
    prove_paged(model, shapes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    model: Any = build("llama", dtype)
    shapes = layer_shapes(model)
    model.set_attn_implementation(PAGED)
    prove_paged(model, shapes)


def test_soft_caps_that_matter() -> None:
    """Large weights, so that the cap bends the scores: only a reference that knows it agrees."""
    model: Any = build("gemma2-softcap-window")
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            parameter.data.mul_(30)
    shapes = layer_shapes(model)
    model.set_attn_implementation(PAGED)
    prove_paged(model, shapes)


@pytest.mark.parametrize("argument", ["sliding_window", "s_aux", "scaling"])
def test_what_is_left_out_is_noticed(argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose attention is given something that the engine's doesn't know."""

    def deaf(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        kwargs[argument] = None if argument != "scaling" else 0.9
        return attention.paged_attention(*args, **kwargs)

    model: Any = build("gpt-oss-sinks")
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            parameter.data.mul_(20)
    shapes = layer_shapes(model)
    monkeypatch.setitem(tf.AttentionInterface._global_mapping, PAGED, deaf)
    model.set_attn_implementation(PAGED)
    with pytest.raises(ModelError, match="other hidden states"):
        prove_paged(model, shapes)
    assert model.config._attn_implementation == PAGED


REFUSED: dict[str, tuple[Any, Any]] = {
    "mamba": (tf.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4), "linear_attention"),
    "hybrid": (
        tf.Qwen3NextConfig(
            **COMMON,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            layer_types=["linear_attention", "full_attention"],
        ),
        "linear_attention",
    ),
    "classifier": (tf.LlamaConfig(**COMMON, num_labels=3), "generates nothing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_are_refused(name: str) -> None:
    config, reason = REFUSED[name]
    make: Any = tf.AutoModelForSequenceClassification if name == "classifier" else tf.AutoModelForCausalLM
    assert reason in (paged_unsupported_reason(make.from_config(config)) or "")
