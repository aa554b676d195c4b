"""Which backend runs a model: asked for, chosen, gone round, or refused."""

from __future__ import annotations

import logging

import pytest

from swift.config import InferConfig, build_config
from swift.config.inference import GenerationConfig
from swift.core.errors import ModelError, UsageError
from swift.inference.loading import load_engine, prepare

HYBRID = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def hybrid_dir(tiny_model_dir, tmp_path_factory):
    """A model with a recurrent state beside its attention, which a paged cache doesn't hold."""
    import torch
    from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig

    folder = tmp_path_factory.mktemp("hybrid")
    torch.manual_seed(0)
    Qwen3_5ForCausalLM(Qwen3_5TextConfig(**HYBRID)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(folder)
    return folder


def config_of(folder, **flags):
    return build_config(InferConfig, {"model": str(folder), "device": "cpu", **flags})


def test_a_model_that_paging_cannot_run_is_generated_with_transformers_and_that_is_said(hybrid_dir, caplog):
    with caplog.at_level(logging.INFO, logger="swift"), load_engine(config_of(hybrid_dir)) as engine:
        assert engine.backend.name == "transformers"
        (line,) = [r.message for r in caplog.records if "paged" in r.message]
        assert "linear_attention" in line
        answers = engine.generate([[5, 6, 7], [8] * 20], GenerationConfig(max_new_tokens=4))
        assert [len(answer.tokens) for answer in answers] == [4, 4]


def test_the_paged_engine_is_refused_where_it_was_asked_for(hybrid_dir):
    with pytest.raises(ModelError, match="linear_attention") as caught:
        load_engine(config_of(hybrid_dir, infer_backend="swift"))
    assert "--infer_backend transformers" in str(caught.value)
    with pytest.raises(UsageError, match="weight_format"):
        load_engine(config_of(hybrid_dir, weight_format="bfloat16"))


def test_the_choice(tiny_model_dir):
    for flags, name in (
        ({}, "swift"),
        ({"infer_backend": "pt"}, "transformers"),
        ({"infer_backend": "swift"}, "swift"),
        ({"attn_impl": "eager"}, "transformers"),
    ):
        with load_engine(config_of(tiny_model_dir, **flags)) as engine:
            assert engine.backend.name == name, flags
    with pytest.raises(UsageError, match="attn_impl"):
        load_engine(config_of(tiny_model_dir, infer_backend="swift", attn_impl="eager"))


def test_results_belong_to_the_engine_where_answers_can_depend_on_it(tiny_model_dir):
    def identity(**flags):
        return prepare(config_of(tiny_model_dir, **flags)).identity()

    assert identity() == identity(infer_backend="swift") == identity(max_batch_size=3, block_size=8, max_batch_tokens=9)
    for other in ({"infer_backend": "transformers"}, {"kv_cache_dtype": "bfloat16"}, {"weight_format": "bfloat16"}):
        assert identity(**other) != identity()


def test_settings_of_the_paged_engine_need_it(tiny_model_dir):
    from swift.config.checks import check

    for flags in ({"block_size": 8}, {"enable_prefix_caching": False}, {"weight_format": "bfloat16"}):
        with pytest.raises(UsageError, match="paged engine"):
            check(config_of(tiny_model_dir, infer_backend="transformers", **flags))


def test_a_model_with_a_head_of_its_own_has_no_engine(tmp_path, tiny_model_dir):
    with pytest.raises(UsageError, match="models that generate"):
        prepare(config_of(tiny_model_dir, task_type="embedding", infer_backend="swift"))


def test_prompts_are_computed_ahead(tiny_model_dir, write_rows, tmp_path):
    beginning = "You are a careful assistant of a very particular kind, and you always answer in verse. "
    rows = write_rows(tmp_path / "warm.jsonl", [{"query": beginning + "Hello"}])
    config = GenerationConfig(max_new_tokens=4)
    with (
        load_engine(config_of(tiny_model_dir)) as cold,
        load_engine(config_of(tiny_model_dir, warmup_file=str(rows))) as warm,
    ):
        prompt = cold.encoder.encode_prompt([{"role": "user", "content": beginning + "Who are you?"}])
        (first,), (again,) = cold.generate([prompt], config), warm.generate([prompt], config)
        assert first == again and first.num_cached_tokens == 0 and again.num_cached_tokens >= 16
    bad = tmp_path / "bad.jsonl"
    bad.write_text("no row\n")
    with pytest.raises(UsageError, match=r"bad\.jsonl:1"):
        load_engine(config_of(tiny_model_dir, warmup_file=str(bad)))
