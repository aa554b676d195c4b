"""The paged engine gives the answers of `generate`, whatever shares the batch, however prompts and memory are cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from architectures import CONFIGS, build
from engines import ask, backend_of, engine, generated, prompts, requests_for, submit
from fixtures import make_tokenizer

from swift.core.errors import DataError, SwiftError, UsageError
from swift.inference.paged.linear import pack
from swift.inference.requests import Request, SamplingParams, Structure

GREEDY = SamplingParams(max_new_tokens=20)
SAMPLED = SamplingParams(max_new_tokens=20, temperature=1.0, top_p=0.9, top_k=40, seed="7", logprobs=2)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_greedy_answers_are_those_of_generate(name, tokenizer):
    """Prompts in chunks, few blocks, sliding windows passed, requests that come while others run."""
    texts = prompts(6, longest=45)
    wanted = [generated(build(name), text, 20) for text in texts]
    with_limits = engine(name, tokenizer)
    try:
        answers = ask(with_limits, *requests_for(texts, GREEDY))
        assert [answer.tokens for answer in answers] == wanted
    finally:
        with_limits.close()


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - {"qwen3-moe", "gpt-oss-sinks", "deepseek-v3-mla"}))
def test_an_answer_is_the_same_alone_and_among_31_others(name, tokenizer):
    """Tokens and log-probabilities bit for bit, sampled and greedy."""
    texts = prompts(32)
    params = [replace(SAMPLED, seed=str(k)) if k % 2 else replace(GREEDY, logprobs=2) for k in range(32)]
    asked = [Request(f"r{k}", text, p) for k, (text, p) in enumerate(zip(texts, params, strict=True))]
    backend = engine(name, tokenizer, max_batch_tokens=200, enable_prefix_caching=False)
    try:
        together = ask(backend, *asked)
        for k in (0, 1, 15, 30, 31):
            (alone,) = ask(backend, asked[k])
            assert alone.tokens == together[k].tokens
            assert alone.logprobs == together[k].logprobs
    finally:
        backend.close()


def test_chunks_blocks_and_caching_change_nothing(tokenizer):
    texts = prompts(10)
    texts += [[*text, 5, 6] for text in texts]
    found = []
    for settings in (
        {"max_batch_tokens": 500},
        {"max_batch_tokens": 7},
        {"block_size": 16},
        {"enable_prefix_caching": False},
        {"kv_cache_gib": 40 * 4 * 2 * 2 * 2 * 16 * 4 / 2**30, "max_batch_size": 4},
        {"speculative": "prompt_lookup"},
    ):
        backend = engine("llama", tokenizer, **settings)
        try:
            answers = ask(backend, *requests_for(texts, SAMPLED))
            found.append([(answer.tokens, answer.logprobs) for answer in answers])
            stats = backend.stats()
            assert stats.blocks_used == 0 and stats.num_running == 0
            if "kv_cache_gib" in settings:
                assert stats.preemptions > 0
        finally:
            backend.close()
    assert all(other == found[0] for other in found[1:])


def test_logprobs_are_those_of_the_model_that_is_trained(tokenizer):
    text = prompts(1, longest=30, seed=3)[0]
    backend = engine("llama", tokenizer)
    try:
        (answer,) = ask(backend, Request("r", text, replace(SAMPLED, prompt_logprobs=0, ignore_eos=True)))
    finally:
        backend.close()
    tokens = text + answer.tokens
    with torch.no_grad():
        logits = build("llama")(torch.tensor([tokens])).logits[0].log_softmax(-1)
    wanted = [float(logits[at - 1, tokens[at]]) for at in range(1, len(tokens))]
    got = [entry.logprob for entry in answer.updates[0].prompt_logprobs[1:]] + [e.logprob for e in answer.logprobs]
    assert got == pytest.approx(wanted, abs=1e-5)
    for entry, at in zip(answer.logprobs, range(len(text), len(tokens)), strict=True):
        values, likeliest = logits[at - 1].topk(2)
        assert [token for token, _ in entry.top] == likeliest.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_the_first_prompt_token_has_no_logprob_and_chunks_leave_none_out(tokenizer):
    text = list(range(3, 50))
    backend = engine("llama", tokenizer, max_batch_tokens=8)
    try:
        params = SamplingParams(max_new_tokens=1, prompt_logprobs=1)
        first, again = ask(backend, Request("a", text, params)), ask(backend, Request("b", text, params))
    finally:
        backend.close()
    found = first[0].updates[0].prompt_logprobs
    assert found[0] is None and all(entry is not None for entry in found[1:])
    assert [entry.token for entry in found[1:]] == text[1:]
    assert again[0].updates[0].prompt_logprobs == found


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("penalty", [1.0, 0.5])
def test_beams_are_those_of_generate(width, penalty, tokenizer):
    texts = prompts(4, seed=5)
    model = build("llama")
    wanted = [generated(model, t, 12, num_beams=width, length_penalty=penalty) for t in texts]
    params = SamplingParams(max_new_tokens=12, num_beams=width, length_penalty=penalty)
    backend = engine("llama", tokenizer)
    try:
        answers = ask(backend, *requests_for(texts, params), Request("greedy", texts[0], GREEDY))
        assert [answer.tokens for answer in answers[:4]] == wanted
        assert answers[4].tokens == generated(build("llama"), texts[0], 20)
        assert backend.stats().blocks_used == 0
    finally:
        backend.close()


def test_beams_are_penalised_as_generate_penalises_them(tokenizer):
    texts = prompts(3, seed=6)
    wanted = [generated(build("llama"), t, 12, num_beams=3, repetition_penalty=1.5, min_new_tokens=4) for t in texts]
    params = SamplingParams(max_new_tokens=12, num_beams=3, repetition_penalty=1.5, min_new_tokens=4)
    backend = engine("llama", tokenizer)
    try:
        assert [answer.tokens for answer in ask(backend, *requests_for(texts, params))] == wanted
    finally:
        backend.close()


@pytest.mark.parametrize("settings", [{}, {"speculative": "prompt_lookup"}])
def test_an_answer_of_a_given_form_ends_with_it(settings, tokenizer, tiny_model_dir):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    backend = backend_of(model, tokenizer, stop=(tokenizer.eos_token_id,), **settings)
    choice = Structure("choice", '["alpha one", "beta two", "alpha three"]')
    params = SamplingParams(max_new_tokens=40, temperature=1.0, structure=choice)
    try:
        asked = [Request(f"r{k}", [5, 6, k + 3], replace(params, seed=str(k))) for k in range(12)]
        asked += [Request("endless", [5, 6], replace(params, ignore_eos=True))]
        answers = ask(backend, *asked)
        assert {answer.text for answer in answers} <= {"alpha one", "beta two", "alpha three"}
        assert len({answer.text for answer in answers}) > 1
        assert {answer.last.finish_reason for answer in answers} == {"stop"}
    finally:
        backend.close()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_a_draft_model_changes_nothing(params, tokenizer):
    texts = prompts(8, seed=9)
    plain = engine("llama", tokenizer)
    alike = backend_of(build("llama"), tokenizer, draft=build("llama"), speculative="draft", num_draft_tokens=3)
    other = backend_of(build("llama"), tokenizer, draft=build("llama-tied"), speculative="draft", num_draft_tokens=3)
    try:
        wanted = [(a.tokens, a.logprobs) for a in ask(plain, *requests_for(texts, params))]
        for backend in (alike, other):
            answers = ask(backend, *requests_for(texts, params))
            assert [(a.tokens, a.logprobs) for a in answers] == wanted
        if params is GREEDY:
            stats = alike.stats()
            assert stats.accepted_tokens == stats.draft_tokens > 0
            assert stats.steps < plain.stats().steps
    finally:
        for backend in (plain, alike, other):
            backend.close()


def test_a_draft_model_of_another_vocabulary_is_refused(tokenizer, tiny_model_dir):
    from transformers import AutoModelForCausalLM

    draft = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with pytest.raises(UsageError, match="draft model"):
        backend_of(build("llama"), tokenizer, draft=draft, speculative="draft")


def test_cancelled_requests_give_their_blocks_back(tokenizer):
    backend = engine("llama", tokenizer, max_batch_size=2)
    try:
        long = replace(GREEDY, max_new_tokens=200, ignore_eos=True)
        answers = submit(backend, *requests_for(prompts(4), long))
        for k in range(4):
            backend.cancel(f"r{k}")
            backend.cancel("nobody")
        reasons = [answer.wait().last.finish_reason for answer in answers]
        assert reasons == ["cancelled"] * 4
        stats = backend.stats()
        assert (stats.blocks_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
        assert ask(backend, Request("next", [5, 6], GREEDY))[0].tokens == generated(build("llama"), [5, 6], 20)
    finally:
        backend.close()


def test_members_of_a_group_share_their_prompt(tokenizer):
    prompt = list(range(3, 32))
    backend = engine("llama", tokenizer, max_batch_tokens=64)
    try:
        asked = [Request(f"r{k}", prompt, replace(SAMPLED, seed=str(k)), group="g") for k in range(4)]
        answers = ask(backend, *asked)
        assert [answer.last.num_cached_tokens for answer in answers] == [0, 28, 28, 28]
        (alone,) = ask(backend, asked[3])
        assert alone.tokens == answers[3].tokens
        assert len({tuple(answer.tokens) for answer in answers}) > 1
    finally:
        backend.close()


@pytest.fixture(scope="module")
def running():
    backend = engine("llama", make_tokenizer(), kv_cache_gib=0.1)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def endless(running):
    """A prompt's answer that nothing ends."""
    (answer,) = ask(running, Request("e", [5, 6, 7], replace(GREEDY, ignore_eos=True)))
    assert answer.last.finish_reason == "length" and len(answer.tokens) == 20
    return answer


class TestEnds:
    """How answers end."""

    def test_a_stop_token(self, running, endless):
        token = endless.tokens[7]
        first = endless.tokens.index(token)
        params = replace(GREEDY, ignore_eos=True, stop_token_ids=(token,))
        (answer,) = ask(running, Request("r", [5, 6, 7], params))
        assert answer.tokens == endless.tokens[: first + 1]
        assert answer.last.finish_reason == "stop" and answer.last.stop_reason == token

    def test_a_stop_text(self, running, endless):
        word = endless.text[4:7]
        (answer,) = ask(running, Request("r", [5, 6, 7], replace(GREEDY, ignore_eos=True, stop=(word,))))
        assert answer.text == endless.text[: endless.text.index(word)]
        assert answer.last.finish_reason == "stop" and answer.last.stop_reason == word
        assert answer.tokens == endless.tokens[: len(answer.tokens)] and len(answer.tokens) < 20

    def test_texts_of_updates_are_the_text(self, running, endless, tokenizer):
        assert endless.text == tokenizer.decode(endless.tokens, skip_special_tokens=True)

    def test_the_models_end(self, tokenizer, endless):
        end = endless.tokens[5]
        backend = engine("llama", tokenizer, stop=(end,))
        try:
            (answer,) = ask(backend, Request("r", [5, 6, 7], GREEDY))
            assert answer.tokens == endless.tokens[: endless.tokens.index(end) + 1]
            assert answer.last.finish_reason == "stop" and answer.last.stop_reason is None
            (longer,) = ask(backend, Request("r", [5, 6, 7], replace(GREEDY, min_new_tokens=15)))
            assert len(longer.tokens) >= 15 and end not in longer.tokens[:15]
        finally:
            backend.close()

    def test_the_context(self, running):
        context = running.info.context_length
        assert context == 256
        (answer,) = ask(running, Request("r", [5] * 250, SamplingParams(ignore_eos=True)))
        assert len(answer.tokens) == 6 and answer.last.finish_reason == "length"

    @pytest.mark.parametrize("prompt", [[], [5] * 256, [97], [-1]])
    def test_prompts_that_cant_be_answered(self, running, prompt):
        with pytest.raises(DataError):
            running.submit(Request("r", prompt, GREEDY), lambda update: None)

    def test_settings_that_are_not_possible(self, running):
        with pytest.raises(UsageError, match="temperature"):
            running.submit(Request("r", [5], SamplingParams(temperature=float("nan"))), lambda update: None)

    def test_an_adapter_that_isnt_there(self, running):
        with pytest.raises(SwiftError, match="ghost"):
            running.submit(Request("r", [5], GREEDY, adapter="ghost"), lambda update: None)


def test_scores_that_are_not_numbers_end_one_request_only(tokenizer):
    model = build("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[50] = float("nan")
    backend = backend_of(model, tokenizer)
    try:
        bad, good = ask(backend, Request("bad", [5, 50, 6], GREEDY), Request("good", [5, 6], GREEDY))
        assert bad.last.finish_reason == "error" and "NaN" in bad.last.error.message
        assert good.tokens == generated(build("llama"), [5, 6], 20)
        assert backend.stats().blocks_used == 0
    finally:
        backend.close()


def test_closing_ends_everything(tokenizer):
    backend = engine("llama", tokenizer, max_batch_size=1)
    answers = submit(backend, *requests_for(prompts(3), replace(GREEDY, max_new_tokens=200, ignore_eos=True)))
    backend.close()
    assert {answer.wait().last.finish_reason for answer in answers} <= {"cancelled", "length"}
    with pytest.raises(SwiftError, match="closed"):
        backend.submit(Request("r", [5], GREEDY), lambda update: None)
    backend.close()


def test_a_failing_engine_tells_everyone(tokenizer):
    backend = engine("llama", tokenizer)

    def broken(*args, **kwargs):
        raise RuntimeError("the device is gone")

    backend._runner.model.model.layers[1].forward = broken
    answers = ask(backend, *requests_for(prompts(3), GREEDY))
    assert all(a.last.finish_reason == "error" and "the device is gone" in a.last.error.message for a in answers)
    with pytest.raises(SwiftError, match="the device is gone"):
        backend.submit(Request("r", [5], GREEDY), lambda update: None)
    backend.close()


def test_new_weights_are_used_and_old_texts_forgotten(tokenizer):
    text = list(range(3, 30))
    backend = engine("llama", tokenizer)
    try:
        before = ask(backend, Request("a", text, GREEDY))[0].tokens
        torch.manual_seed(5)
        weights = {name: torch.randn_like(p) * 0.2 for name, p in build("llama").named_parameters()}
        backend.update_weights(weights.items())
        after = ask(backend, Request("b", text, GREEDY))[0]
        fresh = build("llama")
        fresh.load_state_dict(weights)
        assert after.tokens == generated(fresh, text, 20) != before
        assert after.last.num_cached_tokens == 0
    finally:
        backend.close()


def test_a_sleeping_engine_wakes_with_the_same_answers(tokenizer):
    text = list(range(3, 30))
    backend = engine("llama", tokenizer)
    try:
        before = ask(backend, Request("a", text, GREEDY))[0].tokens
        backend.sleep(1)
        assert backend.stats().asleep
        with pytest.raises(UsageError, match="sleeps"):
            backend.submit(Request("b", text, GREEDY), lambda update: None)
        backend.wake()
        after = ask(backend, Request("c", text, GREEDY))[0]
        assert after.tokens == before and after.last.num_cached_tokens == 0
    finally:
        backend.close()


def test_memory_stays_within_the_budget(tokenizer):
    backend = engine("llama", tokenizer, kv_cache_gib=0.001)
    try:
        cache = backend._runner.cache
        held = sum(t.numel() * t.element_size() for t in (*cache.keys, *cache.values))
        one = held // (cache.num_blocks + 1)
        assert cache.num_blocks * one <= 0.001 * 2**30 < (cache.num_blocks + 1) * one
    finally:
        backend.close()
    with pytest.raises(SwiftError, match="kv_cache_gib"):
        engine("llama", tokenizer, kv_cache_gib=1e-9)


def test_bfloat16_weights_answer_alike_in_every_batch(tokenizer):
    if pack(torch.zeros(8, 8, dtype=torch.bfloat16)) is None:
        pytest.skip("this processor has no bfloat16 products")
    texts = prompts(12)
    backend = engine("llama", tokenizer, weight_format="bfloat16", max_batch_tokens=100)
    try:
        together = ask(backend, *requests_for(texts, SAMPLED))
        for k in (0, 5, 11):
            (alone,) = ask(backend, Request("alone", texts[k], SAMPLED))
            assert alone.logprobs == together[k].logprobs
    finally:
        backend.close()
