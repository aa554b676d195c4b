"""What the tests share: a real small tokenizer, a tiny random Llama, rows on disk and small configurations.

Imported by `tests/conftest.py`, so every test can ask for the fixtures; plain helpers are fixtures too (they return
functions), because test folders are not a package.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

ASSETS = Path(__file__).parent / "assets"
TOKENIZER_DIR = ASSETS / "tokenizer"
TEMPLATES_DIR = ASSETS / "templates"


def make_tokenizer() -> Any:
    """A fresh copy of the fixture tokenizer: byte-level BPE, 2048 tokens, ChatML template, eos `<|im_end|>`."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TOKENIZER_DIR)


def build_tiny_model(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a tiny random Llama (2 layers, hidden 64, 4 heads, 2 kv heads) with the fixture tokenizer to `folder`.

    `overrides` go to `LlamaConfig`. Weights are fp32, the same for the same seed.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer()
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlamaConfig(**{**settings, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """One JSON object a line, UTF-8, LF."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def set_fields(config: Any, flags: dict[str, Any]) -> Any:
    """Set each flag on the one group of `config` that has a field of that name; an unknown name is an error."""
    from dataclasses import fields

    for name, value in flags.items():
        owners = [
            group
            for group in (getattr(config, field.name) for field in fields(config))
            if hasattr(group, "__dataclass_fields__") and name in group.__dataclass_fields__
        ]
        if not owners:
            raise KeyError(f"no setting {name!r} in {type(config).__name__}")
        setattr(owners[0], name, value)
    return config


@pytest.fixture
def tokenizer() -> Any:
    """A fresh fixture tokenizer with the ChatML template; free to be changed by the test."""
    return make_tokenizer()


@pytest.fixture
def base_tokenizer() -> Any:
    """The tokenizer of a base model: no chat template, eos `<|endoftext|>`."""
    loaded = make_tokenizer()
    loaded.chat_template = None
    loaded.eos_token = "<|endoftext|>"
    return loaded


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: tiny random Llama, the fixture tokenizer, a ChatML template. Read only; see `tiny_model_copy`."""
    return build_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture
def tiny_model_copy(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A copy of `tiny_model_dir` that the test may change."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "tiny-llama"))


@pytest.fixture
def write_rows() -> Callable[[Path, Iterable[dict[str, Any]]], Path]:
    """`write_rows(path, rows)`: rows as JSON lines; returns the path."""
    return write_jsonl


@pytest.fixture
def chat_rows() -> Callable[[int], list[dict[str, Any]]]:
    """`chat_rows(n)`: n different short conversations in the messages shape, of different lengths."""

    def make(count: int) -> list[dict[str, Any]]:
        words = ["paris", "rain", "seven", "music", "river", "stone", "cloud", "green", "table", "window"]
        rows = []
        for i in range(count):
            tail = " ".join(words[(i + k) % len(words)] for k in range(i % 7 + 1))
            rows.append(
                {
                    "messages": [
                        {"role": "user", "content": f"Question {i}: {tail}?"},
                        {"role": "assistant", "content": f"Answer {i}: {tail} " * (i % 3 + 1)},
                    ]
                }
            )
        return rows

    return make


@pytest.fixture
def tiny_config(tiny_model_dir: Path, tmp_path: Path) -> Callable[..., Any]:
    """`tiny_config(**flags)`: an `SftConfig` on the tiny model, fp32, few steps, output in this test's folder.

    `flags` are any flat settings (`max_steps=3, lora_rank=4`), set on the group that owns the name.
    """

    def make(**flags: Any) -> Any:
        from swift.config import SftConfig

        config = SftConfig()
        defaults = {
            "model": str(tiny_model_dir),
            "torch_dtype": "float32",
            "max_length": 256,
            "output_dir": str(tmp_path / "output"),
        }
        return set_fields(config, {**defaults, **flags})

    return make
