"""Engines on the tiny model."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def tiny_engine(tiny_model_dir):
    """An engine on the tiny random model, fp32 on the CPU. Tests don't change it."""
    from swift.config import InferConfig
    from swift.inference.loading import load_engine

    config = InferConfig()
    config.model.model = str(tiny_model_dir)
    config.infer.device = "cpu"
    return load_engine(config)


@pytest.fixture(scope="session")
def questions(tiny_engine):
    """Prompts of very different lengths."""
    texts = ["hi", "What is the capital of France?", "one two three " * 30, "雨 🤖", "Name a colour and say why."]
    return [tiny_engine.encoder.encode_prompt([{"role": "user", "content": text}]) for text in texts]
