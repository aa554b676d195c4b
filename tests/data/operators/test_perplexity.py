"""Perplexity against an independent computation in float64, layer by layer free of the operator's own path."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swift.core.errors import NumericsError, SwiftError, UsageError
from swift.data.engine.document import document_from
from swift.data.engine.operator import Context
from swift.data.engine.tally import Tally
from swift.data.operators.perplexity import Perplexity

TEXTS = [
    "The river is wide.",
    "a",
    "",
    "Seven green tables stand by the window, and the rain falls on each of them. " * 4,
]


def opened(model: Path, **settings: Any) -> Perplexity:
    operator = Perplexity(model=str(model), device="cpu", **settings)
    operator.check()
    operator.open(Context(offline=True))
    return operator


def expected(model_dir: Path, text: str, max_tokens: int) -> float | None:
    """exp of the mean of -log softmax, in float64 throughout."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][:max_tokens]
    if len(ids) < 2:
        return None
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].numpy()
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probability = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    picked = [log_probability[place, ids[place + 1]] for place in range(len(ids) - 1)]
    return math.exp(-sum(picked) / len(picked))


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("max_tokens", [8, 512])
def test_values(tiny_model_dir: Path, batch_size: int, max_tokens: int) -> None:
    operator = opened(tiny_model_dir, batch_size=batch_size, max_tokens=max_tokens)
    tally = Tally()
    kept = operator.run([document_from({"text": text}, text or "empty") for text in TEXTS], tally)
    assert len(kept) == len(TEXTS)
    found = [document.meta.get("perplexity") for document in kept]
    wanted = [expected(tiny_model_dir, text, max_tokens) for text in TEXTS]
    assert [value is None for value in found] == [value is None for value in wanted] == [False, True, True, False]
    for value, right in zip(found, wanted):
        if right is not None:
            assert value == pytest.approx(right, rel=1e-5)
    assert tally.histograms["perplexity"].count == 2
    assert tally.labels["perplexity"]["less than two tokens"] == 2


def test_bounds(tiny_model_dir: Path) -> None:
    rows = [document_from({"text": text}, f"f:{i}") for i, text in enumerate(TEXTS)]
    operator = opened(tiny_model_dir)
    values = [document.meta.get("perplexity") for document in operator.run(rows, Tally())]
    low, high = sorted((values[0], values[3]))
    middle = (low + high) / 2
    for settings, reason, bound in (
        ({"min": middle}, "too_predictable", low),
        ({"max": middle}, "too_surprising", high),
    ):
        tally = Tally()
        kept = opened(tiny_model_dir, **settings).run(rows, tally)
        assert dict(tally.dropped) == {reason: 1}
        assert bound not in [document.meta.get("perplexity") for document in kept]


def test_a_model_that_gives_nan_is_named(tiny_model_dir: Path) -> None:
    import torch

    operator = opened(tiny_model_dir)
    with torch.no_grad():
        operator._model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(NumericsError, match="tiny-llama"):
        operator.run([document_from({"text": TEXTS[0]}, "f:1")], Tally())


def test_a_missing_model_and_settings_that_cant_be_meant(tmp_path: Path) -> None:
    with pytest.raises(SwiftError, match="nowhere"):
        opened(tmp_path / "nowhere")
    for settings, said in (
        ({"max_tokens": 1}, "max_tokens"),
        ({"batch_size": 0}, "batch_size"),
        ({"min": 2, "max": 1}, "min"),
        ({"max": -1}, "max is -1"),
        ({"max": 0.5}, "max is 0.5"),
        ({"min": -3}, "min is -3"),
    ):
        with pytest.raises(UsageError, match=said):
            Perplexity(**settings).check()
