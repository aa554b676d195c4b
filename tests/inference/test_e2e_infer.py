"""An adapter, the adapter merged in memory, and the merged model on disk give the same answers."""

from __future__ import annotations

import json

import pytest
import torch

from swift import LoRAConfig, Swift
from swift.config import InferConfig, build_config
from swift.config.inference import GenerationConfig
from swift.core.errors import ModelError
from swift.inference.loading import load_engine, prepare

KINDS = {
    "lora": {"r": 8, "lora_alpha": 32, "target_modules": "all-linear"},
    "dora": {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": ["q_proj", "down_proj"]},
    "rslora": {"r": 16, "lora_alpha": 16, "use_rslora": True, "target_modules": ["v_proj", "up_proj"]},
}


def make_adapter(model_dir, folder, kind="lora", *, seed=5):
    """An adapter with random weights, large enough to change what the model says."""
    from transformers import AutoModelForCausalLM

    model = Swift.prepare_model(AutoModelForCausalLM.from_pretrained(model_dir), LoRAConfig(**KINDS[kind]))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_" in name and "magnitude" not in name:
                parameter.normal_(std=0.1, generator=generator)
    return Swift.save(model, folder)


def engine_for(**flags):
    return load_engine(build_config(InferConfig, {"device": "cpu", **flags}))


def weights_for(**flags):
    return prepare(build_config(InferConfig, {"device": "cpu", **flags})).weights()


@pytest.mark.parametrize("kind", KINDS)
def test_adapter_and_merged_answer_alike(tiny_model_dir, tiny_engine, questions, tmp_path, kind):
    adapter = make_adapter(tiny_model_dir, tmp_path / "adapter", kind)
    flags = {"model": str(tiny_model_dir), "adapters": [str(adapter)]}
    separate, merged = engine_for(**flags), engine_for(**flags, merge_lora=True)
    assert Swift.adapters(weights_for(**flags)) and not Swift.adapters(weights_for(**flags, merge_lora=True))
    for settings in ({}, {"temperature": 0.8, "top_p": 0.9}):
        config = GenerationConfig(max_new_tokens=24, **settings)
        answers = separate.generate(questions, config)
        assert [a.tokens for a in answers] == [a.tokens for a in merged.generate(questions, config)]
        base = tiny_engine.generate(questions, config)
        assert any(a.tokens != b.tokens for a, b in zip(answers, base, strict=True)), "the adapter does something"


def test_merged_on_disk_answers_alike(tiny_model_dir, questions, tmp_path):
    from swift.config import MergeLoraConfig
    from swift.models.merge import merge_adapter

    adapter = make_adapter(tiny_model_dir, tmp_path / "adapter")
    config = MergeLoraConfig()
    merge_adapter(tiny_model_dir, adapter, tmp_path / "merged", model_config=config.model, merge_config=config.merge)
    separate = engine_for(model=str(tiny_model_dir), adapters=[str(adapter)])
    merged = engine_for(model=str(tmp_path / "merged"))
    assert merged.stop_token_ids == separate.stop_token_ids
    config = GenerationConfig(max_new_tokens=24)
    assert separate.generate(questions, config) == merged.generate(questions, config)


def test_the_whole_command_with_and_without_merging(tiny_model_dir, tmp_path, write_rows, chat_rows):
    """The base model is not named: the adapter knows it."""
    from swift import infer

    adapter = make_adapter(tiny_model_dir, tmp_path / "adapter")
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tiny_model_dir)
    rows = write_rows(tmp_path / "rows.jsonl", chat_rows(7))
    flags = {"adapters": [str(adapter)], "val_dataset": [str(rows)], "max_new_tokens": 12, "device": "cpu"}
    separate = infer(**flags, result_path=str(tmp_path / "separate.jsonl"))
    merged = infer(**flags, merge_lora=True, result_path=str(tmp_path / "merged.jsonl"))
    assert separate == merged
    assert [r["status"] for r in separate] == ["ok"] * 7


def test_a_merge_that_changes_the_answers_is_refused(tiny_model_dir, tmp_path, monkeypatch):
    adapter = make_adapter(tiny_model_dir, tmp_path / "adapter")
    honest = Swift.merge_and_unload

    def damaged(model):
        merged = honest(model)
        with torch.no_grad():
            merged.model.layers[0].mlp.down_proj.weight.mul_(1.01)
        return merged

    monkeypatch.setattr(Swift, "merge_and_unload", staticmethod(damaged))
    with pytest.raises(ModelError) as caught:
        engine_for(model=str(tiny_model_dir), adapters=[str(adapter)], merge_lora=True)
    assert "differently" in str(caught.value) and "--merge_lora" in str(caught.value)
