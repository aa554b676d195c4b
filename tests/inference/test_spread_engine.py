"""One model over several processes answers as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pool import on_ranks

from swift.config.engine import EngineConfig
from swift.config.model import ModelConfig
from swift.core.errors import UsageError
from swift.inference.backends.swift import SwiftBackend
from swift.inference.paged.spread import gather_crew, spread_model, start_of
from swift.inference.requests import Request, SamplingParams

PROMPTS = [[5, 6, 7], list(range(3, 40)), [9], list(range(50, 62)) * 2]
SETTINGS = {"kv_cache_gib": 0.01, "block_size": 4, "max_batch_tokens": 24}


def requests() -> list[Request]:
    greedy = SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=1)
    sampled = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=1.0, top_p=0.9, seed="3", logprobs=1)
    beams = SamplingParams(max_new_tokens=8, num_beams=3)
    kinds = {"greedy": greedy, "sampled": sampled, "beams": beams}
    return [Request(f"{name}{k}", text, params) for name, params in kinds.items() for k, text in enumerate(PROMPTS)]


def answers_of(backend: SwiftBackend) -> dict[str, tuple[list[int], list[float]]]:
    from engines import ask

    asked = requests()
    found = ask(backend, *asked)
    return {r.id: (a.tokens, [entry.logprob for entry in a.logprobs]) for r, a in zip(asked, found, strict=True)}


def on_a_rank(folder: str, size: int) -> dict[str, tuple[list[int], list[float]]] | None:
    """What one process does: the first one answers, the others follow."""
    from transformers import AutoTokenizer

    crew = gather_crew(size, "cpu")
    start = start_of(Path(folder), ModelConfig(model=folder), torch.float32)
    model = spread_model(crew, start, torch.device("cpu"))
    held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
    assert held < 0.75 * sum(p.numel() for p in model.parameters())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    backend = SwiftBackend(model, tokenizer, EngineConfig(**SETTINGS), stop_token_ids=(2,), crew=crew)
    if not crew.leads:
        backend.follow()
        return None
    backend.start()
    try:
        with pytest.raises(UsageError, match="spread"):
            backend.load_adapter("a", Path(folder))
        return answers_of(backend)
    finally:
        backend.close()


@pytest.mark.parametrize("size", [2])
def test_answers_are_those_of_one_process(size, tiny_model_dir):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    backend = SwiftBackend(model, tokenizer, EngineConfig(**SETTINGS), stop_token_ids=(2,))
    backend.start()
    try:
        wanted = answers_of(backend)
    finally:
        backend.close()
    got = on_ranks(size, on_a_rank, str(tiny_model_dir), size)[0]
    assert got.keys() == wanted.keys()
    for name, (tokens, logprobs) in wanted.items():
        assert got[name][0] == tokens, name
        assert got[name][1] == pytest.approx(logprobs, abs=1e-5)
