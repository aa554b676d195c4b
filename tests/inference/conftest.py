"""Engines on the tiny model."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", params=["swift", "transformers"])
def tiny_engine(tiny_model_dir, request):
    """An engine on the tiny random model, fp32 on the CPU, by each backend of our own. Tests don't change it."""
    from swift.config import InferConfig
    from swift.inference.loading import load_engine

    config = InferConfig()
    config.model.model = str(tiny_model_dir)
    config.infer.device = "cpu"
    config.engine.infer_backend = request.param
    with load_engine(config) as engine:
        yield engine


@pytest.fixture
def engine_on():
    """Makes an engine on a model, by transformers' generate: engine_on(model, like, stop_token_ids=[...])."""
    from swift.inference.backends.transformers import TransformersBackend
    from swift.inference.engine import Engine

    engines = []

    def make(model, like, *, stop_token_ids=None, **settings):
        stops = like.stop_token_ids if stop_token_ids is None else stop_token_ids
        backend = TransformersBackend(model, like.tokenizer, stops, **settings)
        backend.start()
        engines.append(Engine(backend, like.tokenizer, like.encoder))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def tiny_model(tiny_model_dir):
    """The model of `tiny_engine`, as transformers has it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()


@pytest.fixture(scope="session")
def questions(tiny_engine):
    """Prompts of very different lengths."""
    texts = ["hi", "What is the capital of France?", "one two three " * 30, "雨 🤖", "Name a colour and say why."]
    return [tiny_engine.encoder.encode_prompt([{"role": "user", "content": text}]) for text in texts]
