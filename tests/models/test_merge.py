"""Merging: the files on disk answer like the unmerged model, or nothing is written."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from fixtures import build_tiny_model
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from swift.config.inference import MergeConfig
from swift.config.model import ModelConfig
from swift.config.tuner import TunerConfig
from swift.core.errors import ModelError, SwiftError, UsageError
from swift.models.adapters import Swift
from swift.models.loading import load_model, load_tokenizer
from swift.models.merge import compare, merge_adapter
from swift.models.tuners import apply_tuner

TOKENS = torch.tensor([[5, 9, 200, 31, 7, 7, 1000, 2000]])


def make_adapter(base, folder, *, model=None, **settings):
    """An adapter with weights that matter; returns the unmerged model's logits."""
    config = ModelConfig(**(model or {}))
    settings = {"lora_dropout": 0.0, "lora_rank": 4, **settings}
    torch.manual_seed(0)
    tuned = apply_tuner(load_model(base, config, dtype=torch.float32), TunerConfig(**settings), total_steps=10)
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    Swift.save(tuned, folder)
    with torch.no_grad():
        return tuned.eval()(TOKENS).logits


def merge(base, adapter, output, *, model=None, **settings):
    return merge_adapter(
        Path(base), adapter, output, model_config=ModelConfig(**(model or {})), merge_config=MergeConfig(**settings)
    )


def logits_of(folder, dtype=torch.float32):
    with torch.no_grad():
        return load_model(folder, ModelConfig(), dtype=dtype).float()(TOKENS).logits


def tree(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*"))


CASES = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "pissa": {"init_weights": "pissa"},
    "olora": {"init_weights": "olora"},
    "embedding": {"target_modules": ["all-linear", "all-embedding"]},
    "saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "bias": {"lora_bias": "all"},
    "ia3": {"tuner_type": "ia3"},
    "vera": {"tuner_type": "vera", "vera_rank": 16},
    "miss": {"tuner_type": "miss"},
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", CASES)
def test_merged_files_answer_like_the_adapter(name, tied, tmp_path):
    base = build_tiny_model(tmp_path / "base", tie_word_embeddings=tied, attention_bias=name == "bias")
    expected = make_adapter(base, tmp_path / "adapter", **CASES[name])
    assert not torch.allclose(expected, logits_of(base), atol=1e-2)
    report = merge(base, tmp_path / "adapter", tmp_path / "merged")
    torch.testing.assert_close(logits_of(tmp_path / "merged"), expected, atol=2e-4, rtol=1e-3)
    assert report.merged.relative < 1e-4 and report.written.relative < 1e-4 and report.written.top1 == 1
    assert report.dtype == "float32" and report.written.tokens > 100
    separate = name in ("embedding", "saved")
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] == (
        tied and not separate
    )
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter", "merged"}, "nothing is left lying about"


def test_tokenizer_template_and_generation_config_come_along(tiny_model_copy, tmp_path):
    base = Path(tiny_model_copy)
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4], "max_new_tokens": 9}))
    make_adapter(base, tmp_path / "adapter")
    merge(base, tmp_path / "adapter", tmp_path / "first")
    generation = json.loads((tmp_path / "first" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [3, 4] and generation["max_new_tokens"] == 9
    assert load_tokenizer(tmp_path / "first", ModelConfig()).chat_template

    tokenizer = load_tokenizer(base, ModelConfig())
    tokenizer.chat_template = "{{ 'mine' }}"
    tokenizer.save_pretrained(tmp_path / "adapter")  # as checkpoints do
    merge(base, tmp_path / "adapter", tmp_path / "second")
    assert load_tokenizer(tmp_path / "second", ModelConfig()).chat_template == "{{ 'mine' }}"
    assert (tmp_path / "second" / "model.safetensors").stat().st_mode & 0o044, "others may read it as well"


@pytest.mark.parametrize(
    ("tied", "settings"),
    [
        (False, {}),
        (True, {}),
        (False, {"target_modules": ["all-linear", "all-embedding"]}),
        (True, {"target_modules": ["all-linear", "all-embedding"]}),
        (False, {"target_modules": ["all-linear", "lm_head"]}),
        (True, {"modules_to_save": ["embed_tokens"]}),
        (False, {"tuner_type": "ia3", "modules_to_save": ["embed_tokens", "lm_head"]}),
    ],
)
def test_new_tokens_survive(tied, settings, tmp_path):
    base = build_tiny_model(tmp_path / "base", tie_word_embeddings=tied)
    model = {"new_special_tokens": ["<a>", "<b>"]}
    make_adapter(base, tmp_path / "adapter", model=model, **settings)
    load_tokenizer(base, ModelConfig(**model)).save_pretrained(tmp_path / "adapter")
    merge(base, tmp_path / "adapter", tmp_path / "merged")
    tokenizer = load_tokenizer(tmp_path / "merged", ModelConfig())
    ids = torch.tensor([tokenizer.encode("<a> and <b>")])
    assert ids.max() >= 2048
    unmerged = Swift.from_pretrained(load_model(base, ModelConfig(**model), dtype=torch.float32), tmp_path / "adapter")
    merged = load_model(tmp_path / "merged", ModelConfig(), dtype=torch.float32)
    logits = unmerged(ids).logits
    torch.testing.assert_close(merged(ids).logits, logits, atol=1e-4, rtol=1e-3)
    assert (logits[..., -1] - logits[..., -2]).abs().min() > 1e-3, "the model can tell the new tokens apart"


def test_precision_and_shards(tmp_path):
    base = build_tiny_model(tmp_path / "base")
    expected = make_adapter(base, tmp_path / "adapter")
    report = merge(
        base, tmp_path / "adapter", tmp_path / "half", model={"torch_dtype": "bfloat16"}, max_shard_size="200KB"
    )
    assert report.dtype == "bfloat16" and report.tolerance == 5e-2
    assert report.merged.relative < 1e-4 < report.written.rms < 5e-2
    shards = sorted((tmp_path / "half").glob("model-*.safetensors"))
    assert len(shards) > 1
    assert {tensor.dtype for shard in shards for tensor in load_file(shard).values()} == {torch.bfloat16}
    gap = (logits_of(tmp_path / "half", torch.bfloat16) - expected).abs().max() / expected.std()
    assert 1e-4 < gap < 5e-2


def test_above_tolerance_nothing_is_written(tmp_path):
    base = build_tiny_model(tmp_path / "base")
    make_adapter(base, tmp_path / "adapter")
    with pytest.raises(ModelError, match=r"the model in torch\.bfloat16 would answer differently") as caught:
        merge(base, tmp_path / "adapter", tmp_path / "out", model={"torch_dtype": "bfloat16"}, merge_tolerance=1e-4)
    assert caught.value.where == "--merge_tolerance" and "nothing was written" in caught.value.fix
    with pytest.raises(ModelError, match="the merged model would answer differently"):
        merge(base, tmp_path / "adapter", tmp_path / "out", merge_tolerance=1e-12)
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}


def test_a_merge_that_loses_the_adapter_is_caught(tmp_path, monkeypatch):
    """The check sees what it is there to see: a merge that forgets a layer, and files that aren't what was merged."""
    base = build_tiny_model(tmp_path / "base")
    make_adapter(base, tmp_path / "adapter")
    from peft.tuners.lora.layer import Linear

    original = Linear.get_delta_weight
    calls = []

    def forgetful(self, adapter):
        calls.append(1)
        return original(self, adapter) * (0 if len(calls) == 3 else 1)

    with monkeypatch.context() as patch:
        patch.setattr(Linear, "get_delta_weight", forgetful)
        with pytest.raises(ModelError, match="the merged model would answer differently"):
            merge(base, tmp_path / "adapter", tmp_path / "out")
    from transformers import PreTrainedModel

    save = PreTrainedModel.save_pretrained

    def torn(self, folder, **settings):
        save(self, folder, **settings)
        file = Path(folder) / "model.safetensors"
        tensors = load_file(file)
        tensors["model.layers.0.mlp.up_proj.weight"].mul_(1.1)
        save_file(tensors, file, metadata={"format": "pt"})

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", torn)
    with pytest.raises(ModelError, match="the files as read back would answer differently"):
        merge(base, tmp_path / "adapter", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}


def test_output_in_the_way(tmp_path):
    base = build_tiny_model(tmp_path / "base")
    make_adapter(base, tmp_path / "adapter")
    out = tmp_path / "out"
    merge(base, tmp_path / "adapter", out)
    (out / "note.txt").write_text("old")
    before = tree(out)
    with pytest.raises(UsageError, match=re.escape(f"{out} exists")):
        merge(base, tmp_path / "adapter", out)
    with pytest.raises(ModelError):
        merge(base, tmp_path / "adapter", out, exist_ok=True, merge_tolerance=1e-12)
    assert tree(out) == before, "a failed merge leaves the older one"
    merge(base, tmp_path / "adapter", out, exist_ok=True)
    assert not (out / "note.txt").exists()
    for place in (base, tmp_path / "adapter"):
        with pytest.raises(UsageError, match="can't replace what it is made from"):
            merge(base, tmp_path / "adapter", place, exist_ok=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("precious")
    with pytest.raises(UsageError, match="is no model folder"):
        merge(base, tmp_path / "adapter", tmp_path / "home", exist_ok=True)
    assert (tmp_path / "home" / "thesis.tex").exists()


def test_what_cannot_be_merged_is_refused_by_name(tmp_path):
    import peft

    base = build_tiny_model(tmp_path / "base")
    model = load_model(base, ModelConfig(), dtype=torch.float32)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "prompt")
    with pytest.raises(ModelError, match="PROMPT_TUNING adapter works on the prompt"):
        merge(base, tmp_path / "prompt", tmp_path / "out")
    make_adapter(base, tmp_path / "adapter")
    other = build_tiny_model(tmp_path / "other", hidden_size=32)
    with pytest.raises(ModelError, match=r"size mismatch|shape"):
        merge(other, tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_not_a_number_never_agrees():
    good, bad = [torch.randn(4, 8)], [torch.full((4, 8), float("nan"))]
    assert compare(good, good).relative == 0
    assert compare(good, bad).relative == float("inf")


def test_the_base_is_not_touched(tmp_path):
    base = build_tiny_model(tmp_path / "base")
    make_adapter(base, tmp_path / "adapter")
    shutil.copytree(base, tmp_path / "kept")
    merge(base, tmp_path / "adapter", tmp_path / "out")
    assert all(
        (base / path).read_bytes() == (tmp_path / "kept" / path).read_bytes() for path in tree(tmp_path / "kept")
    )


def test_a_full_disk_is_an_error_with_advice(tmp_path, monkeypatch):
    base = build_tiny_model(tmp_path / "base")
    make_adapter(base, tmp_path / "adapter")
    real = shutil.disk_usage
    with monkeypatch.context() as small:
        small.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=1000))
        with pytest.raises(SwiftError, match="not enough free space") as caught:
            merge(base, tmp_path / "adapter", tmp_path / "merged")
        assert "free space" in caught.value.fix

    def refuse(*_, **__):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", refuse)
    with pytest.raises(SwiftError, match="could not write") as caught:
        merge(base, tmp_path / "adapter", tmp_path / "merged")
    assert "free space" in caught.value.fix
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]
