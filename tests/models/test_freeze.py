"""Freezing rules of full tuning."""

from __future__ import annotations

import pytest
import torch

from swift.config.model import ModelConfig
from swift.config.tuner import TunerConfig
from swift.core.errors import ModelError
from swift.models.freeze import trainable_summary
from swift.models.loading import load_model
from swift.models.tuners import apply_tuner


def tuned(folder, **settings):
    model = load_model(folder, ModelConfig(), dtype=torch.float32)
    return apply_tuner(model, TunerConfig(tuner_type="full", **settings))


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_everything_by_default(tiny_model_dir):
    model = tuned(tiny_model_dir)
    assert trained(model) == {name for name, _ in model.named_parameters()}
    assert model.training
    assert trainable_summary(model)["percent"] == 100


def test_ratio_freezes_from_the_bottom(tiny_model_dir):
    model = tuned(tiny_model_dir, freeze_parameters_ratio=0.6)
    order = [name for name, _ in model.named_parameters()]
    left = trained(model)
    assert order[-1] in left and "model.embed_tokens.weight" not in left
    frozen = [name for name in order if name not in left]
    assert frozen == order[: len(frozen)], "a bottom part and nothing else"
    sizes = dict(model.named_parameters())
    total = sum(p.numel() for p in sizes.values())
    count = sum(sizes[name].numel() for name in frozen)
    assert count <= 0.6 * total < count + sizes[order[len(frozen)]].numel()


def test_prefixes_patterns_and_thawing(tiny_model_dir):
    assert trained(tuned(tiny_model_dir, freeze_parameters=["model."])) == {"lm_head.weight"}
    only_attention = tuned(tiny_model_dir, freeze_parameters_regex=r"mlp|norm|embed|lm_head")
    assert trained(only_attention) and all("self_attn" in name for name in trained(only_attention))
    thawed = tuned(
        tiny_model_dir,
        freeze_parameters_ratio=1.0,
        trainable_parameters=["model.layers.1.mlp"],
        trainable_parameters_regex=r"\.norm\.weight$",
    )
    assert trained(thawed) == {
        "model.norm.weight",
        *(f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    }


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"freeze_parameters_ratio": 1.0}, "--freeze_parameters_ratio 1.0"),
        ({"freeze_parameters": ["model", "lm_head"]}, "--freeze_parameters"),
        ({"freeze_parameters_regex": "."}, "--freeze_parameters_regex"),
    ],
)
def test_nothing_left_names_the_flag(settings, flag, tiny_model_dir):
    with pytest.raises(ModelError, match="nothing is left to train") as caught:
        tuned(tiny_model_dir, **settings)
    assert flag in caught.value.where


@pytest.mark.parametrize(
    ("settings", "flag", "fix"),
    [
        ({"freeze_parameters": ["model.layer.0"]}, "--freeze_parameters", "did you mean model.layers.0?"),
        ({"trainable_parameters": ["head"]}, "--trainable_parameters", "lm_head"),
        ({"freeze_parameters_regex": "xyz"}, "--freeze_parameters_regex", "model.layers"),
        ({"trainable_parameters_regex": "("}, "--trainable_parameters_regex", ""),
        ({"freeze_parameters_ratio": 1.5}, "--freeze_parameters_ratio", ""),
    ],
)
def test_rules_that_match_nothing(settings, flag, fix, tiny_model_dir):
    with pytest.raises(ModelError) as caught:
        tuned(tiny_model_dir, **settings)
    assert caught.value.where == flag and fix in (caught.value.fix or "")


def test_tied_parameters_count_once(tmp_path):
    from fixtures import build_tiny_model

    build_tiny_model(tmp_path, tie_word_embeddings=True)
    model = tuned(tmp_path)
    assert trainable_summary(model)["total"] == sum(p.numel() for p in model.parameters())
    assert "lm_head.weight" not in trained(model)
