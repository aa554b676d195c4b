"""llama.cpp as a backend: on the same weights, its answers are transformers' answers, whatever is asked for."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch
from engines import ask, generated, prompts, requests_for, submit
from gguf_files import write_gguf

from swift.cli import main
from swift.config import InferConfig, build_config
from swift.config.engine import EngineConfig
from swift.core.devices import detect_device
from swift.core.errors import DataError, DependencyError, ModelError, UsageError
from swift.inference.backends.choose import make_backend
from swift.inference.loading import prepare
from swift.inference.requests import Request, SamplingParams, Structure

GREEDY = SamplingParams(max_new_tokens=20)
KINDS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(max_new_tokens=20, temperature=1.2, top_k=40, top_p=0.9, min_p=0.01, seed="b"),
    "penalties": SamplingParams(max_new_tokens=20, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    "bias": SamplingParams(max_new_tokens=7, logit_bias=((77, 100.0),)),
    "min_new_tokens": SamplingParams(
        max_new_tokens=9, min_new_tokens=5, stop_token_ids=(77,), logit_bias=((77, 100.0),)
    ),
    "ignore_eos": SamplingParams(max_new_tokens=6, ignore_eos=True, logit_bias=((2, 100.0),)),
    "eos": SamplingParams(max_new_tokens=6, logit_bias=((2, 100.0),)),
    "choice": SamplingParams(max_new_tokens=8, structure=Structure("choice", '["yes", "no"]')),
    "schema": SamplingParams(
        max_new_tokens=40,
        structure=Structure(
            "json_schema", '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'
        ),
    ),
    "special": SamplingParams(max_new_tokens=6, skip_special_tokens=False, logit_bias=((2, 100.0),)),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SWIFT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def library():
    return pytest.importorskip("llama_cpp")


@pytest.fixture(scope="module")
def gguf(tiny_model_dir, tmp_path_factory, library):
    return write_gguf(tiny_model_dir, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def words(tiny_model_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_dir)


@pytest.fixture(scope="module")
def start(gguf, words):
    from swift.inference.backends.llamacpp import LlamaCppBackend

    backends = []

    def make(**settings):
        config = EngineConfig(**{"kv_cache_dtype": "float32", "kv_cache_gib": 0.01, "block_size": 4, **settings})
        backend = LlamaCppBackend(gguf, words, config, stop_token_ids=[2], device=detect_device(0, "cpu"))
        backend.start()
        backends.append(backend)
        return backend

    yield make
    for backend in backends:
        backend.close()


@pytest.fixture(scope="module")
def backend(start):
    return start(max_batch_tokens=24, max_batch_size=8)


@pytest.fixture(scope="module")
def other(tiny_model, words, library):
    """transformers' generate on the same weights."""
    from swift.inference.backends.transformers import TransformersBackend

    backend = TransformersBackend(tiny_model, words, [2])
    backend.start()
    yield backend
    backend.close()


def texts(count, **settings):
    return prompts(count, vocab=2000, **settings)


def told(answer):
    last = answer.last
    return answer.tokens, answer.text, last.finish_reason, last.stop_reason, last.num_prompt_tokens


def test_greedy_answers_are_those_of_generate_and_their_logprobs_too(backend, tiny_model):
    settings = SamplingParams(max_new_tokens=20, logprobs=3, prompt_logprobs=1)
    for prompt, answer in zip(texts(12), ask(backend, *requests_for(texts(12), settings)), strict=True):
        assert answer.tokens == generated(tiny_model, prompt, 20, eos_token_id=2)
        with torch.no_grad():
            scores = tiny_model(torch.tensor([prompt + answer.tokens])).logits[0].log_softmax(-1)
        for place, entry in enumerate(answer.logprobs, start=len(prompt) - 1):
            assert entry.logprob == pytest.approx(scores[place, entry.token].item(), abs=1e-5)
            values, tokens = scores[place].topk(3)
            assert [token for token, _ in entry.top] == tokens.tolist()
            assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-5)
        found = answer.updates[0].prompt_logprobs
        assert found[0] is None
        for place, entry in enumerate(found[1:]):
            assert entry.logprob == pytest.approx(scores[place, prompt[place + 1]].item(), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_settings_mean_what_they_mean_elsewhere(backend, other, kind):
    formed = KINDS[kind].structure is not None
    if formed:
        pytest.importorskip("xgrammar")
    requests = requests_for(texts(4), KINDS[kind], name=kind)
    for mine, theirs in zip(ask(backend, *requests), ask(other, *requests), strict=True):
        assert theirs.last.error is None
        # our engine ends an answer whose form is complete, `generate` lets the end token come
        assert told(mine)[formed:] == told(theirs)[formed:]


def test_stop_words_cut_the_text_where_they_do_elsewhere(backend, other, words):
    prompt = texts(1)[0]
    text = ask(other, Request("a", prompt, GREEDY))[0].text
    for k, word in enumerate((text[3:6], text[8:9], "<|im_end|>")):
        request = Request(f"stop{k}", prompt, SamplingParams(max_new_tokens=20, stop=(word,)))
        mine, theirs = ask(backend, request)[0], ask(other, request)[0]
        assert told(mine) == told(theirs)
        assert k == 2 or mine.last.stop_reason == word


def test_requests_of_all_kinds_at_once_are_answered_as_one_at_a_time(backend):
    pytest.importorskip("xgrammar")
    wanted = [Request(f"{k}", text, KINDS[kind]) for k, (text, kind) in enumerate(zip(texts(10), KINDS, strict=True))]
    together = ask(backend, *wanted)
    assert [told(ask(backend, request)[0]) for request in wanted] == [told(answer) for answer in together]


def test_prompts_that_begin_alike_are_computed_once(start, tiny_model):
    backend = start(max_batch_tokens=64, max_batch_size=8)
    begin = texts(1, longest=41, seed=3)[0] * 2
    wanted = [begin + text for text in texts(6, longest=8, seed=4)]
    first = ask(backend, Request("first", wanted[0], GREEDY))[0]
    assert first.last.num_cached_tokens == 0
    for k, prompt in enumerate(wanted):
        answer = ask(backend, Request(f"r{k}", prompt, GREEDY))[0]
        assert answer.updates[0].num_cached_tokens >= len(begin) // 4 * 4 - 4
        assert answer.tokens == generated(tiny_model, prompt, 20, eos_token_id=2)
    off = start(enable_prefix_caching=False)
    assert {ask(off, Request(f"o{k}", wanted[0], GREEDY))[0].last.num_cached_tokens for k in range(2)} == {0}


def test_answers_stay_right_when_the_cache_is_full(start, tiny_model):
    few = start(max_batch_tokens=32, max_batch_size=8, kv_cache_gib=130 * 512 / 2**30)  # a token takes 512 bytes
    assert few.stats().blocks_total == 32
    wanted = requests_for(texts(16, longest=60), GREEDY)
    for request, answer in zip(wanted, ask(few, *wanted), strict=True):
        assert answer.tokens == generated(tiny_model, request.prompt, 20, eos_token_id=2)
    stats = few.stats()
    assert stats.preemptions > 0
    assert stats.blocks_used == 0


def test_answers_stay_right_when_texts_that_ended_are_let_go(start, tiny_model):
    backend = start(max_batch_size=126)  # of llama.cpp's 256 texts 4 may stay after their end
    for k, prompt in enumerate(texts(12)):
        assert ask(backend, Request(f"r{k}", prompt, GREEDY))[0].tokens == generated(
            tiny_model, prompt, 20, eos_token_id=2
        )


def test_a_cancelled_request_ends_and_gives_its_blocks_back(backend):
    answer = submit(backend, Request("long", [5, 6, 7], SamplingParams(max_new_tokens=900, ignore_eos=True)))[0]
    while len(answer.updates) < 3:
        assert not answer.ended.wait(0.005)
    backend.cancel("long")
    assert answer.wait().last.finish_reason == "cancelled"
    assert len(answer.tokens) < 900
    assert backend.stats().blocks_used == 0


def test_close_ends_what_is_open(start):
    backend = start(max_batch_size=2)
    endless = SamplingParams(max_new_tokens=1000, ignore_eos=True)
    answers = submit(backend, *requests_for(texts(4), endless))
    while not answers[0].updates:
        assert not answers[0].ended.wait(0.005)
    backend.close()
    assert {answer.wait().last.finish_reason for answer in answers} == {"cancelled"}
    backend.close()


def test_sleep_gives_the_memory_back_and_wake_answers_as_before(start):
    backend = start()
    request = Request("r", texts(1)[0], GREEDY)
    before = ask(backend, request)[0].tokens
    backend.sleep()
    assert backend.stats().asleep
    with pytest.raises(UsageError, match="sleeps"):
        submit(backend, request)
    backend.wake()
    after = ask(backend, request)[0]
    assert after.tokens == before
    assert after.last.num_cached_tokens == 0, "what was computed is gone"
    with pytest.raises(UsageError, match="can't be given back"):
        backend.sleep(2)


def test_what_llama_cpp_has_not_is_refused_by_name(backend, tmp_path):
    for params, name in ((SamplingParams(num_beams=2), "num_beams"), (SamplingParams(logprobs=5000), "logprobs")):
        with pytest.raises(UsageError, match=name):
            submit(backend, Request("r", [5], params))
    with pytest.raises(UsageError, match="adapters"):
        submit(backend, Request("r", [5], adapter="mine"))
    with pytest.raises(UsageError, match="adapters"):
        backend.load_adapter("mine", tmp_path)
    with pytest.raises(UsageError, match="weights"):
        backend.update_weights([])
    with pytest.raises(DataError, match="2048 tokens"):
        submit(backend, Request("r", [2048]))
    with pytest.raises(DataError, match="context is 1024"):
        submit(backend, Request("r", [5] * 1024))


@pytest.mark.parametrize(
    ("flags", "where"),
    [
        ({"weight_format": "bfloat16"}, "--weight_format"),
        ({"speculative": "prompt_lookup"}, "--speculative"),
        ({"tensor_parallel_size": 2}, "--tensor_parallel_size"),
        ({"engine_args": ["--mlock"]}, "--engine_args"),
        ({"torch_dtype": "bfloat16"}, "--torch_dtype"),
        ({"attn_impl": "sdpa"}, "--attn_impl"),
        ({"max_model_len": 4096}, "--max_model_len"),
        ({"max_batch_size": 300}, "--max_batch_size"),
    ],
)
def test_settings_that_mean_nothing_here_are_refused_by_name(gguf, flags, where):
    config = build_config(InferConfig, {"model": str(gguf), "device": "cpu", "infer_backend": "llamacpp", **flags})
    with pytest.raises(UsageError) as caught:
        make_backend(prepare(config))
    assert where in (caught.value.where or "")


def test_an_adapter_is_refused_with_the_way_to_merge_it(gguf, tmp_path):
    config = build_config(InferConfig, {"model": str(gguf), "device": "cpu", "infer_backend": "llamacpp"})
    with pytest.raises(UsageError) as caught:
        make_backend(replace(prepare(config), adapter=tmp_path))
    assert caught.value.where == "--adapters"
    assert "swift merge-lora" in (caught.value.fix or "")


def test_a_file_that_is_cut_off_says_so(gguf, words, tmp_path):
    from swift.inference.backends.llamacpp import LlamaCppBackend

    cut = tmp_path / "cut.gguf"
    cut.write_bytes(gguf.read_bytes()[:-100_000])
    with pytest.raises(ModelError, match=r"can't read .*cut\.gguf: .*not within the file bounds"):
        LlamaCppBackend(cut, words, EngineConfig(), stop_token_ids=[2], device=detect_device(0, "cpu"))


def test_a_tokenizer_of_another_model_is_refused(gguf, words):
    from swift.inference.backends.llamacpp import LlamaCppBackend

    words = type(words).from_pretrained(words.name_or_path)
    words.add_tokens(["<new>"])
    with pytest.raises(ModelError, match="2049 tokens"):
        LlamaCppBackend(gguf, words, EngineConfig(), stop_token_ids=[2], device=detect_device(0, "cpu"))


def test_without_the_package_the_extra_is_named(tiny_model_dir, words, tmp_path, monkeypatch):
    from swift.inference.backends.llamacpp import LlamaCppBackend

    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(DependencyError) as caught:
        LlamaCppBackend(tmp_path / "m.gguf", words, EngineConfig(), stop_token_ids=[2], device=detect_device(0, "cpu"))
    assert "swift-llm[llamacpp]" in (caught.value.fix or "")


def test_swift_infer_answers_from_the_file_alone(gguf, tiny_model_dir, tmp_path, write_rows):
    rows = [{"messages": [{"role": "user", "content": text}]} for text in ("hi", "What is it? 雨", "one two " * 20)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    found = {}
    usual = ["--val_dataset", str(data), "--max_new_tokens", "12", "--device", "cpu"]
    for name, model in (("llamacpp", gguf), ("transformers", tiny_model_dir)):
        out = tmp_path / f"{name}.jsonl"
        words = ["infer", "--model", str(model), "--infer_backend", name, "--result_path", str(out), *usual]
        assert main(words + (["--kv_cache_dtype", "float32"] if name == "llamacpp" else [])) == 0
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        found[name] = [(line["response"], line["finish_reason"], line["num_prompt_tokens"]) for line in lines]
    assert found["llamacpp"] == found["transformers"]
    assert len(found["llamacpp"]) == 3
