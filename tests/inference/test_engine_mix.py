"""Everything at once in a cache that is too small: each answer is the one that the request gets alone."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
from engines import Answer, ask, engine, prompts
from test_served_layers import make_adapter

from swift.inference.requests import Request, SamplingParams, Structure

PLAIN = SamplingParams(max_new_tokens=14, logprobs=1)
CHOICE = Structure("regex", "[a-h]{2,6}")


def some_request(name: str, draw: random.Random, texts: list[list[int]]) -> Request:
    """A request of a random kind; texts begin alike, so that the prefix cache is used."""
    prompt = draw.choice(texts)[: draw.randrange(1, 40)] + [draw.randrange(3, 97) for _ in range(draw.randrange(1, 6))]
    kinds = [
        PLAIN,
        replace(PLAIN, temperature=1.0, top_p=0.8, seed=name),
        replace(PLAIN, temperature=0.7, top_k=5, min_p=0.05, seed=name, repetition_penalty=1.2),
        replace(PLAIN, ignore_eos=True, presence_penalty=1.0, logit_bias=((7, 2.0),)),
        replace(PLAIN, stop=("a", "on"), min_new_tokens=2),
        replace(PLAIN, stop_token_ids=tuple(range(30, 60)), ignore_eos=True),
        replace(PLAIN, prompt_logprobs=1),
        SamplingParams(max_new_tokens=6, num_beams=2),
        replace(PLAIN, temperature=1.0, seed=name, max_new_tokens=60, ignore_eos=True),
    ]
    adapter = draw.choice([None, None, "one", "two"])
    return Request(name, prompt, draw.choice(kinds), adapter=adapter, priority=draw.choice([0, 0, 1]))


def told(answer: Answer) -> tuple:
    """All that an owner sees, but for what the prefix cache held."""
    first = answer.updates[0]
    return answer.tokens, answer.text, answer.logprobs, first.prompt_logprobs, answer.last.finish_reason


@pytest.mark.parametrize("speculative", ["none", "prompt_lookup"])
def test_answers_in_a_crowd_are_those_alone(speculative, tokenizer, tmp_path):
    draw = random.Random(5)
    settings = {"speculative": speculative, "max_batch_tokens": 40, "max_batch_size": 9}
    crowd = engine("llama", tokenizer, kv_cache_gib=42 * 4 * 2 * 2 * 2 * 16 * 4 / 2**30, **settings)
    alone = engine("llama", tokenizer, enable_prefix_caching=False, max_batch_tokens=500)
    try:
        for seed, name in enumerate(("one", "two")):
            folder = make_adapter(tmp_path / name, seed)
            for backend in (crowd, alone):
                backend.load_adapter(name, folder)
        texts = prompts(4, longest=60, seed=8)
        asked = [some_request(f"r{k}", draw, texts) for k in range(90)]
        answers: dict[str, Answer] = {}
        cancelled = set()
        for request in asked:
            answers[request.id] = Answer()
            crowd.submit(request, answers[request.id].take)
            if draw.random() < 0.3:
                time.sleep(0.002)
            if draw.random() < 0.15:
                gone = draw.choice(list(answers))
                crowd.cancel(gone)
                cancelled.add(gone)
        for request in asked:
            got = answers[request.id].wait()
            if request.id in cancelled and got.last.finish_reason == "cancelled":
                (whole,) = ask(alone, request)
                assert whole.tokens[: len(got.tokens)] == got.tokens
                continue
            (wanted,) = ask(alone, request)
            assert told(got) == told(wanted), request
        stats = crowd.stats()
        assert (stats.blocks_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
        assert stats.preemptions > 0 and stats.cached_tokens > 0
        assert (stats.accepted_tokens > 0) == (speculative != "none")
    finally:
        crowd.close()
        alone.close()


def test_structures_in_a_crowd(tokenizer, tiny_model_dir):
    from engines import backend_of
    from transformers import AutoModelForCausalLM

    def started(**settings):
        model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
        return backend_of(model, tokenizer, stop=(tokenizer.eos_token_id,), **settings)

    crowd, alone = started(max_batch_size=12, speculative="prompt_lookup"), started()
    try:
        params = SamplingParams(max_new_tokens=12, temperature=1.0, structure=CHOICE, logprobs=1)
        plain = replace(params, structure=None)
        asked = [Request(f"r{k}", [5, 6, k + 3], replace(plain if k % 3 else params, seed=str(k))) for k in range(24)]
        together = ask(crowd, *asked)
        for request, got in zip(asked, together, strict=True):
            assert told(got) == told(ask(alone, request)[0])
    finally:
        crowd.close()
        alone.close()
