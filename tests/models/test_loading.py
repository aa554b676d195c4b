"""Finding and loading models: what looks local stays local, what is missing is named, nothing is made up."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from swift.config.model import ModelConfig
from swift.core.errors import DependencyError, ModelError, NetworkError
from swift.models.hub import check_model_source, looks_local, resolve_model
from swift.models.loading import apply_context_settings, check_context, check_model_type, load_model, load_tokenizer


@pytest.fixture
def copy(tiny_model_dir, tmp_path):
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def resolve_error(name, kind=ModelError, **settings):
    with pytest.raises(kind) as caught:
        resolve_model(ModelConfig(model=str(name) if name is not None else None, **settings))
    assert len(caught.value.render().splitlines()) <= 3, "one screen: message, where, fix"
    return caught.value


@pytest.mark.parametrize(
    "name",
    [
        "./x",
        "../x",
        "/x",
        "~/x",
        "a\\b",
        "C:\\models\\x",
        "a/b/c",
        "x/",
        "model.safetensors",
        "out/model.gguf",
        "checkpoint-10",
        "run/checkpoint-10",
        "here/anything",
    ],
)
def test_what_looks_like_a_path_is_one(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert looks_local(name)
    error = resolve_error(name)  # and never a network error
    assert "no model folder" in error.message


def test_a_hub_id_is_not_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not looks_local("owner/name")
    check_model_source(ModelConfig(model="owner/Name-1.5B"))


def test_local_model_resolves_without_torch(tiny_model_dir):
    code = (
        "import sys\nfrom swift.config.model import ModelConfig\nfrom swift.models.hub import resolve_model\n"
        f"print(resolve_model(ModelConfig(model={str(tiny_model_dir)!r}, offline=True)))\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == tiny_model_dir


def test_missing_folder_names_its_nearest_siblings(copy):
    error = resolve_error(copy.parent / "modle")
    assert str(copy) in error.fix
    assert resolve_error("smolm2").fix.startswith("did you mean smollm2?")
    assert resolve_error(None).where == "--model"


def test_incomplete_folder_lists_what_is_missing(copy):
    (copy / "model.safetensors").unlink()
    assert "weights (model.safetensors" in resolve_error(copy).message
    (copy / "config.json").unlink()
    error = resolve_error(copy)
    assert "config.json" in error.message and "weights" in error.message


def test_file_instead_of_folder(copy):
    assert resolve_error(copy / "model.safetensors").fix == f"--model {copy}"


def test_adapter_folder_is_sent_to_adapters(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    error = resolve_error(tmp_path)
    assert "adapter" in error.message and f"--model some/base --adapters {tmp_path}" in error.fix


def test_run_folder_points_at_its_newest_checkpoint(copy, tmp_path):
    for step, age in ((10, 100), (20, 0)):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        shutil.copytree(copy, folder)
        os.utime(folder, (1e9 - age, 1e9 - age))
    assert "checkpoint-20" in resolve_error(tmp_path / "run").fix


def test_sharded_weights_must_all_be_there(copy):
    (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    error = resolve_error(copy)
    assert "model-00002-of-00002.safetensors" in error.message and "00001-of" not in error.message


@pytest.mark.parametrize("damage", ["truncated", "garbage", "lfs", "empty", "header"])
def test_damaged_weights_name_the_file(copy, damage):
    file = copy / "model.safetensors"
    whole = file.read_bytes()
    content = {
        "truncated": whole[:-100],
        "garbage": os.urandom(4096),
        "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
        "empty": b"",
        "header": whole[:8] + b"x" * (len(whole) - 8),
    }[damage]
    file.write_bytes(content)
    error = resolve_error(copy)
    assert str(file) in error.message
    assert ("Git LFS" in error.message) == (damage == "lfs")


def test_broken_config_json(copy):
    (copy / "config.json").write_text("{")
    assert str(copy / "config.json") in resolve_error(copy).message


def test_missing_tensor_is_an_error_and_not_random(copy):
    from safetensors.torch import load_file, save_file

    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks weights: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(copy, ModelConfig(), dtype=torch.float32)


def test_wrong_shape_is_an_error(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    with pytest.raises(ModelError, match=r"shape|size"):
        load_model(copy, ModelConfig(), dtype=torch.float32)


def test_unknown_architecture(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "no_such_model"}))
    with pytest.raises(ModelError, match="no_such_model"):
        load_model(copy, ModelConfig(), dtype=torch.float32)


def test_loading_is_quiet_and_keeps_generation_config(copy, capfd):
    (copy / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [3, 4], "temperature": 0.7, "do_sample": True})
    )
    model = load_model(copy, ModelConfig(), dtype=torch.float32)
    assert model.generation_config.eos_token_id == [3, 4] and model.generation_config.temperature == 0.7
    assert not model.training
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == ""


def test_dtype_and_attention(copy):
    model = load_model(copy, ModelConfig(), dtype=torch.bfloat16, attn_implementation="eager")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "eager"


def test_rope_scaling_and_length(copy):
    scaled = ModelConfig(rope_scaling={"rope_type": "yarn", "factor": 2.0})
    model = load_model(copy, scaled, dtype=torch.float32)
    assert model.config.rope_parameters["rope_type"] == "yarn"
    assert model.config.rope_parameters["original_max_position_embeddings"] == 1024
    assert model.config.max_position_embeddings == 2048
    plain = load_model(copy, ModelConfig(), dtype=torch.float32)
    tokens = torch.arange(20)[None]
    assert not torch.allclose(model(tokens).logits, plain(tokens).logits, atol=1e-4), "it must have an effect"
    assert load_model(copy, ModelConfig(max_model_len=77), dtype=torch.float32).config.max_position_embeddings == 77
    with pytest.raises(ModelError, match="'yarm'") as caught:
        load_model(copy, ModelConfig(rope_scaling={"rope_type": "yarm"}), dtype=torch.float32)
    assert "did you mean yarn?" in caught.value.fix


def test_new_special_tokens_get_rows_and_ids(copy, tmp_path):
    listed = tmp_path / "tokens.txt"
    listed.write_text("<b>\n\n<c>\n<a>\n", encoding="utf-8")
    config = ModelConfig(new_special_tokens=["<a>", str(listed)])
    tokenizer = load_tokenizer(copy, config)
    plain = load_tokenizer(copy, ModelConfig())
    assert len(tokenizer) == len(plain) + 3
    assert [len(tokenizer.encode(token, add_special_tokens=False)) for token in ("<a>", "<b>", "<c>")] == [1, 1, 1]
    assert set(plain.all_special_tokens) <= set(tokenizer.all_special_tokens), "the old special tokens stay special"

    old = load_model(copy, ModelConfig(), dtype=torch.float32).get_input_embeddings().weight
    rows = old.shape[0]
    grown = load_model(copy, config, dtype=torch.float32)
    table = grown.get_input_embeddings().weight
    assert table.shape[0] == len(tokenizer) == grown.config.vocab_size > rows
    assert grown.new_token_ids == list(range(rows, len(tokenizer)))
    torch.testing.assert_close(table[rows:], old.mean(0).expand(len(tokenizer) - rows, -1))
    again = load_model(copy, config, dtype=torch.float32)
    assert torch.equal(again.get_output_embeddings().weight, grown.get_output_embeddings().weight)


def test_embeddings_that_are_large_enough_stay(tmp_path):
    from fixtures import build_tiny_model

    build_tiny_model(tmp_path / "wide", vocab_size=4096)
    model = load_model(tmp_path / "wide", ModelConfig(new_special_tokens=["<a>"]), dtype=torch.float32)
    assert model.get_input_embeddings().weight.shape[0] == 4096


def test_missing_token_list(copy, tmp_path):
    with pytest.raises(ModelError, match="none\\.txt"):
        load_tokenizer(copy, ModelConfig(new_special_tokens=[str(tmp_path / "none.txt")]))


def edit_tokenizer(folder, **changes):
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    for key, value in changes.items():
        config.pop(key, None) if value is None else config.update({key: value})
    file.write_text(json.dumps(config))


def test_pad_token_rule(copy):
    edit_tokenizer(copy, pad_token="<|im_start|>")
    assert load_tokenizer(copy, ModelConfig()).pad_token == "<|im_start|>", "the tokenizer's own wins"
    edit_tokenizer(copy, pad_token=None, eos_token="<|im_end|>")
    first = load_tokenizer(copy, ModelConfig()).pad_token
    assert first not in (None, "<|im_end|>"), "a reserved token before the end-of-text token"


def test_pad_token_falls_back_to_eos(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({"a": 0, "<e>": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<e>").save_pretrained(tmp_path / "with")
    assert load_tokenizer(tmp_path / "with", ModelConfig()).pad_token == "<e>"
    PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(tmp_path / "without")
    with pytest.raises(ModelError, match="neither a pad token nor"):
        load_tokenizer(tmp_path / "without", ModelConfig())


def test_no_or_damaged_tokenizer(copy, tmp_path):
    with pytest.raises(ModelError, match=r"holds no tokenizer; missing: tokenizer\.json"):
        load_tokenizer(tmp_path, ModelConfig())
    (copy / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ModelError, match="tokenizer in"):
        load_tokenizer(copy, ModelConfig())


@pytest.mark.parametrize(
    ("given", "actual", "noted"),
    [
        ("qwen", "qwen2", False),
        ("qwen2_5", "qwen2", False),
        ("Qwen3-moe", "qwen3_moe", False),
        (None, "llama", False),
        ("llama3_1", "llama", False),
        ("qwen", "llama", True),
        ("gemma", "qwen3", True),
    ],
)
def test_model_type_of_older_scripts(given, actual, noted, caplog):
    import logging

    logging.getLogger("swift").propagate = True
    try:
        check_model_type(given, actual)
    finally:
        logging.getLogger("swift").propagate = False
    assert bool(caplog.records) == noted


def test_offline_hub_id_is_a_network_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = resolve_error("some-owner/some-model", NetworkError, offline=True)
    assert "some-owner/some-model is not on this machine" in error.message and "--offline" in error.message
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_modelscope_is_optional(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = resolve_error("some-owner/some-model", DependencyError, use_hf=False)
    assert "modelscope" in error.message and "swift-llm[modelscope]" in error.fix


@pytest.fixture
def hub(tiny_model_dir):
    """A server on this machine that speaks the little of the hub's protocol that a download needs."""
    files = {path.name: path.read_bytes() for path in tiny_model_dir.iterdir() if path.is_file()}
    files |= {"README.md": b"hello", "original.pth": b"x" * 10}
    sha = "1" * 40

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def send(self, body, kind="application/json", status=200, **headers):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", kind)
            for key, value in headers.items():
                self.send_header(key.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self):
            path = self.path.split("?")[0]
            if not path.startswith(("/api/models/owner/tiny", "/owner/tiny/resolve/")):
                return self.send(b"{}", status=404, X_Error_Code="RepoNotFound", X_Error_Message="no such repository")
            if "/tree/" in path:
                entries = [
                    {"type": "file", "path": name, "size": len(data), "oid": name} for name, data in files.items()
                ]
                return self.send(json.dumps(entries).encode())
            if path.startswith("/api/"):
                info = {"id": "owner/tiny", "sha": sha, "siblings": [{"rfilename": name} for name in files]}
                return self.send(json.dumps(info).encode())
            body = files[path.rsplit("/", 1)[-1]]
            return self.send(body, "application/octet-stream", ETag=f'"{path[-20:]}"', X_Repo_Commit=sha)

        do_HEAD = do_GET

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def in_a_process(name, endpoint, home, *, offline=False):
    """What a fresh process resolves `name` to: its standard output, or the error's text."""
    code = (
        "from swift.config.model import ModelConfig\nfrom swift.core.errors import SwiftError\n"
        "from swift.models.hub import resolve_model\n"
        f"try: print('FOLDER', resolve_model(ModelConfig(model={name!r}, offline={offline})))\n"
        "except SwiftError as error: print(type(error).__name__, error)"
    )
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    env.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=home)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_download_from_the_hub_then_offline_then_hub_down(hub, tmp_path):
    endpoint = f"http://127.0.0.1:{hub.server_address[1]}"
    first = in_a_process("owner/tiny", endpoint, tmp_path)
    assert first.startswith("FOLDER"), first
    folder = Path(first.split()[1])
    assert (folder / "model.safetensors").is_file() and (folder / "chat_template.jinja").is_file()
    assert not (folder / "original.pth").exists()
    assert "ModelError the Hugging Face hub has no model owner/other" in in_a_process("owner/other", endpoint, tmp_path)
    hub.shutdown()
    hub.server_close()
    nowhere = "http://127.0.0.1:9"
    assert in_a_process("owner/tiny", nowhere, tmp_path, offline=True).split()[1] == str(folder)
    assert in_a_process("owner/tiny", nowhere, tmp_path).split()[1] == str(folder), "unreachable: the cached copy"
    failed = in_a_process("owner/never-seen", nowhere, tmp_path)
    assert failed.startswith("NetworkError owner/never-seen is not on this machine") and len(failed.splitlines()) <= 4


def test_examples_beyond_the_models_positions():
    import transformers as tf

    learnt = [tf.GPT2Config(n_positions=16), tf.OPTConfig(max_position_embeddings=16), tf.GPTJConfig(n_positions=16)]
    for config in learnt:
        assert check_context(config, 16) is None
        with pytest.raises(ModelError, match=r"17 tokens, and a .* model has 16 positions") as caught:
            check_context(config, 17)
        assert caught.value.where == "--max_length" and caught.value.fix == "--max_length 16"
    rotary = tf.LlamaConfig(max_position_embeddings=16)
    assert check_context(rotary, 16) is None
    assert "17 tokens; the model was made for 16" in check_context(rotary, 17)
    apply_context_settings(rotary, ModelConfig(rope_scaling={"rope_type": "yarn", "factor": 2.0}))
    assert check_context(rotary, 32) is None and "made for 32" in check_context(rotary, 33)
    own = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
    assert check_context(tf.Qwen2Config(max_position_embeddings=16, rope_parameters=own), 64) is None
    layers = {"full_attention": {**own, "factor": 2.0}, "sliding_attention": {"rope_type": "default"}}
    gemma = tf.Gemma3TextConfig(max_position_embeddings=16, rope_parameters=layers)
    assert check_context(gemma, 32) is None and "made for 32" in check_context(gemma, 33)
    for free in (tf.MambaConfig(), tf.BloomConfig(), tf.JambaConfig(max_position_embeddings=16)):
        assert check_context(free, 10**6) is None


def test_stored_positions_are_a_hard_limit():
    """What `check_context` prevents: a lookup past the end of the table."""
    import transformers as tf

    torch.manual_seed(0)
    model = tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(IndexError):
        model(torch.zeros(1, 17, dtype=torch.long))


@pytest.mark.parametrize("kind, usual", [("Gemma2", "eager"), ("Llama", "sdpa")])
def test_a_model_without_sdpa_loads_with_its_own_attention(kind, usual, tmp_path):
    import transformers

    from swift.models.empty import build_empty_model

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = getattr(transformers, f"{kind}Config")(**sizes, vocab_size=64, num_key_value_heads=2, head_dim=16)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(tmp_path)
    for load in (load_model, build_empty_model):
        model = load(tmp_path, ModelConfig(), dtype=torch.float32)
        assert model.config._attn_implementation == usual
