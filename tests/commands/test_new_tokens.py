"""New tokens from training to serving: the model learns which of them to say, and still knows after a merge."""

from __future__ import annotations

import pytest
from fixtures import build_tiny_model

from swift.commands.merge_lora import merge_lora
from swift.commands.sft import sft
from swift.config import InferConfig, build_config
from swift.config.inference import GenerationConfig
from swift.inference.loading import load_engine


@pytest.mark.parametrize("tied", [False, True])
def test_new_tokens_are_told_apart_when_served(tied, tmp_path, write_rows):
    base = build_tiny_model(tmp_path / "base", tie_word_embeddings=tied)
    question, answer = {"role": "user", "content": "Yes or no?"}, {"role": "assistant", "content": "<no>"}
    trained = sft(
        model=str(base),
        dataset=[str(write_rows(tmp_path / "rows.jsonl", [{"messages": [question, answer]}]))],
        new_special_tokens=["<yes>", "<no>"],  # of equal logits, the first one would win
        output_dir=str(tmp_path / "out"),
        max_steps=20,
        learning_rate=2e-3,
        report_to=["none"],
    )
    merge_lora(adapters=[str(trained.last_checkpoint)], output_dir=str(tmp_path / "merged"))
    for source in {"adapters": [str(trained.last_checkpoint)]}, {"model": str(tmp_path / "merged")}:
        engine = load_engine(build_config(InferConfig, {**source, "device": "cpu"}))
        prompt = engine.encoder.encode_prompt([question])
        reply = engine.generate([prompt], GenerationConfig(max_new_tokens=1, temperature=0.0))[0]
        assert engine.tokenizer.decode(reply.tokens) == "<no>"
