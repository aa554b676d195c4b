"""A model on the meta device, filled, is the model that `load_model` gives: every number, buffer and logit."""

import json
from pathlib import Path

import pytest
import torch
from training.architectures import CONFIGS, build

from swift.config.model import ModelConfig
from swift.config.tuner import TunerConfig
from swift.core.errors import ModelError, UsageError
from swift.models.empty import build_empty_model
from swift.models.fill import Start, fill_model
from swift.models.loading import load_model, load_tokenizer

ROPES = {
    "yarn": {"rope_type": "yarn", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def filled(path: Path, config: ModelConfig, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    model = build_empty_model(path, config, dtype=dtype, attn_implementation="eager")
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    fill_model(model, model, Start(path, config, TunerConfig(tuner_type="full"), 1, dtype), device="cpu")
    return model


def loaded(path: Path, config: ModelConfig, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return load_model(path, config, dtype=dtype, attn_implementation="eager")


def assert_same_model(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    for kind in ("named_parameters", "named_buffers"):
        mine, reference = dict(getattr(ours, kind)()), dict(getattr(theirs, kind)())
        assert mine.keys() == reference.keys()
        for name, tensor in reference.items():
            assert mine[name].dtype == tensor.dtype, name
            assert torch.equal(mine[name], tensor), name
    ids = torch.arange(3, 20)[None]
    assert torch.equal(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_a_loaded_model(name, tmp_path):
    build(name).save_pretrained(tmp_path)
    config = ModelConfig(model=str(tmp_path))
    assert_same_model(filled(tmp_path, config), loaded(tmp_path, config))


@pytest.mark.parametrize("name", ["llama-tied", "deepseek-v3-mla", "gpt-oss-sinks"])
def test_equals_a_loaded_model_in_bf16(name, tmp_path):
    build(name).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    config = ModelConfig(model=str(tmp_path))
    for dtype in (torch.bfloat16, torch.float32):
        assert_same_model(filled(tmp_path, config, dtype), loaded(tmp_path, config, dtype))


@pytest.mark.parametrize("rope", ROPES)
def test_rope_settings_reach_the_buffers(rope, tmp_path):
    build("llama").save_pretrained(tmp_path)
    config = ModelConfig(model=str(tmp_path), rope_scaling=ROPES[rope], max_model_len=512)
    ours = filled(tmp_path, config)
    assert_same_model(ours, loaded(tmp_path, config))
    assert ours.config.max_position_embeddings == 512
    plain = filled(tmp_path, ModelConfig(model=str(tmp_path)))
    assert not torch.equal(ours.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)


def test_the_weights_of_a_bin_file(tmp_path):
    model = build("llama")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    config = ModelConfig(model=str(tmp_path))
    assert_same_model(filled(tmp_path, config), loaded(tmp_path, config))


def test_new_tokens_that_need_rows_are_refused(tiny_model_dir):
    tokens = [f"<extra_{number}>" for number in range(5000)]
    config = ModelConfig(model=str(tiny_model_dir), new_special_tokens=tokens)
    with pytest.raises(UsageError, match="more rows") as caught:
        build_empty_model(tiny_model_dir, config, dtype=torch.float32)
    assert caught.value.where == "--new_special_tokens"
    assert len(load_tokenizer(tiny_model_dir, config)) > 5000


def test_quantized_weights_are_refused(tmp_path):
    build("llama").save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="quantized"):
        build_empty_model(tmp_path, ModelConfig(model=str(tmp_path)), dtype=torch.float32)
