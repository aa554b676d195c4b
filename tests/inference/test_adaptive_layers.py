"""Layers left out: nothing left out changes nothing, and what stays computes as a shorter model would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import CONFIGS, build
from engines import ask, backend_of, generated, prompts, requests_for
from torch import nn

from swift.core.errors import ModelError, UsageError
from swift.inference.adaptive.layers import leave_out
from swift.inference.paged.fit import layer_shapes
from swift.inference.requests import SamplingParams
from swift.models.head import find_decoder

PARAMS = SamplingParams(max_new_tokens=12, logprobs=0)


def shorter(name: str, kept: int) -> Any:
    """The model with one of its two layers, put together by hand and numbered anew."""
    model: Any = build(name)
    decoder: Any = find_decoder(model)
    layer = decoder.layers[kept]
    for part in layer.modules():
        if hasattr(part, "layer_idx"):
            part.layer_idx = 0
    decoder.layers = nn.ModuleList([layer])
    text = model.config.get_text_config()
    text.num_hidden_layers = 1
    if getattr(text, "layer_types", None):
        text.layer_types = [text.layer_types[kept]]
    return model


@pytest.mark.parametrize("skipped", [0, 1])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_answers_are_those_of_a_shorter_model(name: str, skipped: int, tokenizer: Any) -> None:
    texts = prompts(3, longest=20)
    reference = shorter(name, 1 - skipped)
    expected = [generated(reference, text, 12) for text in texts]
    model: Any = build(name)
    leave_out(model, [skipped])
    assert list(layer_shapes(model)) == [1 - skipped]
    backend = backend_of(model, tokenizer)
    try:
        assert [answer.tokens for answer in ask(backend, *requests_for(texts, PARAMS))] == expected
    finally:
        backend.close()


def test_nothing_left_out_changes_nothing(tokenizer: Any) -> None:
    texts = prompts(4)
    found = []
    for skipped in (None, []):
        model: Any = build("llama")
        if skipped is not None:
            leave_out(model, skipped)
        backend = backend_of(model, tokenizer)
        try:
            found.append([(a.tokens, a.logprobs) for a in ask(backend, *requests_for(texts, PARAMS))])
        finally:
            backend.close()
    assert found[0] == found[1]


def test_what_stays_keeps_its_name(tokenizer: Any) -> None:
    """So that new weights go to the layer that they are of, and those of a layer that is gone are refused."""
    model: Any = build("llama")
    leave_out(model, [0])
    names = [name for name, _ in model.named_parameters() if "layers." in name]
    assert names and all(name.startswith("model.layers.1.") for name in names)
    backend = backend_of(model, tokenizer)
    try:
        weight = torch.zeros(64)
        backend.update_weights([("model.layers.1.input_layernorm.weight", weight)])
        with pytest.raises(ModelError, match=r"layers\.0\."):
            backend.update_weights([("model.layers.0.input_layernorm.weight", weight)])
    finally:
        backend.close()


@pytest.mark.parametrize(("skipped", "words"), [([2], "no 2"), ([-1], "no -1"), ([0, 1], "all 2 layers")])
def test_layers_that_cannot_be_left_out(skipped: list[int], words: str) -> None:
    model: Any = build("llama")
    with pytest.raises(UsageError, match=words):
        leave_out(model, skipped)
    assert len(find_decoder(model).layers) == 2
