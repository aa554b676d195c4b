"""transformers' generate as a backend: requests of all kinds in one batch, streamed, cancelled, refused by name."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
from engines import ask, generated, prompts, requests_for, submit

from swift.core.errors import DataError, SwiftError, UsageError
from swift.inference.backends.transformers import TransformersBackend
from swift.inference.requests import Request, SamplingParams, Structure

GREEDY = SamplingParams(max_new_tokens=12)


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()


@pytest.fixture
def backend(model, tokenizer):
    backend = TransformersBackend(model, tokenizer, [2], max_batch_size=8)
    backend.start()
    yield backend
    backend.close()


def texts(count):
    return prompts(count, vocab=2000)


def test_requests_of_different_settings_share_a_batch_and_change_nothing(model, tokenizer):
    kinds = [
        GREEDY,
        SamplingParams(max_new_tokens=5, temperature=1.0, seed="a", logprobs=2),
        SamplingParams(max_new_tokens=20, temperature=1.3, top_k=40, top_p=0.9, min_p=0.01, seed="b"),
        SamplingParams(max_new_tokens=9, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
        SamplingParams(max_new_tokens=7, logit_bias=((77, 100.0),)),
        SamplingParams(max_new_tokens=9, min_new_tokens=9, stop_token_ids=(77,), logit_bias=((77, 100.0),)),
        SamplingParams(max_new_tokens=8, structure=Structure("choice", '["yes", "no"]')),
    ]
    wanted = [Request(f"m{k}", text, params) for k, (text, params) in enumerate(zip(texts(7), kinds, strict=True))]
    backend = TransformersBackend(model, tokenizer, [2])
    together = submit(backend, *wanted)
    backend.start()  # when all of them are there
    together = [answer.wait() for answer in together]
    assert backend.stats().steps == 1, "they are one batch"
    for request, answer in zip(wanted, together, strict=True):
        alone = ask(backend, request)[0]
        assert (alone.tokens, alone.text, alone.last.finish_reason) == (
            answer.tokens,
            answer.text,
            answer.last.finish_reason,
        )
        assert [(entry.token, len(entry.top)) for entry in answer.logprobs] == (
            [(token, 2) for token in answer.tokens] if request.params.logprobs else []
        )
    assert together[0].tokens == generated(model, wanted[0].prompt, 12, eos_token_id=2)
    assert together[4].tokens == [77] * 7
    assert 77 not in together[5].tokens[:-1] and len(together[5].tokens) == 9
    assert together[6].text in ("yes", "no") and together[6].last.finish_reason == "stop"
    backend.close()


def test_answers_come_token_by_token_also_in_a_batch(backend):
    answers = ask(backend, *requests_for(texts(4), SamplingParams(max_new_tokens=15, ignore_eos=True)))
    for answer in answers:
        assert [len(update.tokens) for update in answer.updates] == [1] * 15
        assert [update.finish_reason for update in answer.updates] == [None] * 14 + ["length"]


def test_a_request_is_cancelled_alone(backend, model):
    long = SamplingParams(max_new_tokens=900, ignore_eos=True)
    first, second = requests_for(texts(2), long)
    leaving, waiting = submit(backend, first, second)
    while not leaving.updates:
        time.sleep(0.001)
    backend.cancel(first.id)
    assert leaving.wait().last.finish_reason == "cancelled"
    assert 0 < len(leaving.tokens) < 900
    assert waiting.wait().last.finish_reason == "length"
    assert len(waiting.tokens) == 900
    backend.cancel("nobody")


def test_closing_ends_everything_as_cancelled_and_the_thread(model, tokenizer):
    before = set(threading.enumerate())
    backend = TransformersBackend(model, tokenizer, [2], max_batch_size=1)
    backend.start()
    assert set(threading.enumerate()) - before
    answers = submit(backend, *requests_for(texts(3), SamplingParams(max_new_tokens=900, ignore_eos=True)))
    while not any(answer.updates for answer in answers):
        time.sleep(0.001)
    backend.close()
    backend.close()
    assert [answer.last.finish_reason for answer in answers] == ["cancelled"] * 3
    assert not set(threading.enumerate()) - before
    with pytest.raises(SwiftError, match="closed"):
        backend.submit(Request("late", [5], GREEDY), print)


def test_a_backend_that_nobody_holds_lets_go_of_the_model(tiny_model_dir, tokenizer):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    backend = TransformersBackend(model, tokenizer, [2])
    backend.start()
    ask(backend, Request("a", [5, 6], GREEDY))
    gone = weakref.ref(model)
    del model, backend
    gc.collect()
    assert gone() is None


def test_the_oldest_request_is_never_passed_over(model, tokenizer):
    """A short prompt waits for one batch, however many long ones come after it."""
    backend = TransformersBackend(model, tokenizer, [2], max_batch_size=2)
    order = []
    waits = threading.Event()

    def told(name):
        def take(update):
            if update.finish_reason:
                order.append(name)
                if len(order) == 9:
                    waits.set()

        return take

    backend.submit(Request("short", [5], GREEDY), told("short"))
    for k in range(8):
        backend.submit(Request(f"long{k}", [6] * (50 + k), GREEDY), told(f"long{k}"))
    backend.start()
    assert waits.wait(60)
    assert "short" in order[:2]
    backend.close()


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        (Request("x", [], GREEDY), "empty"),
        (Request("x", [10**6], GREEDY), "1000000"),
        (Request("x", [-1], GREEDY), "-1"),
        (Request("x", [5] * 1024, GREEDY), "1024"),
        (Request("x", [5], GREEDY, adapter="one"), "adapters"),
        (Request("x", [5], SamplingParams(prompt_logprobs=1)), "prompt_logprobs"),
        (Request("x", [5], SamplingParams(num_beams=2, presence_penalty=1.0)), "presence_penalty"),
        (Request("x", [5], SamplingParams(structure=Structure("regex", "("))), "regex"),
        (Request("x", [5], SamplingParams(temperature=-1.0)), "temperature"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_done_is_refused_by_name(backend, request_, word):
    with pytest.raises((UsageError, DataError), match=word):
        backend.submit(request_, lambda update: pytest.fail("refused requests get no updates"))


@pytest.mark.parametrize("action", ["load_adapter", "unload_adapter", "update_weights", "sleep", "wake"])
def test_what_training_asks_for_is_refused_by_name(backend, action, tmp_path):
    arguments = {"load_adapter": ("a", tmp_path), "unload_adapter": ("a",), "update_weights": ([],)}
    with pytest.raises(UsageError, match="transformers' generate"):
        getattr(backend, action)(*arguments.get(action, ()))


def test_a_failure_of_the_model_reaches_every_request_and_the_next_ones_are_answered(model, tokenizer, monkeypatch):
    backend = TransformersBackend(model, tokenizer, [2])
    backend.start()
    generate = model.generate

    def broken(**inputs):
        raise RuntimeError("a kernel is missing")

    monkeypatch.setattr(model, "generate", broken)
    for answer in ask(backend, *requests_for(texts(3), GREEDY)):
        assert answer.last.finish_reason == "error" and "a kernel is missing" in str(answer.last.error)
    monkeypatch.setattr(model, "generate", generate)
    assert ask(backend, Request("again", [5], GREEDY))[0].last.error is None
    backend.close()


def test_nan_ends_the_row_that_has_it(tiny_model_dir, tokenizer):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with torch.no_grad():
        model.model.embed_tokens.weight[9] = float("nan")
    backend = TransformersBackend(model, tokenizer, [2])
    backend.start()
    well, broken = ask(backend, Request("well", [5, 6], GREEDY), Request("broken", [5, 9], GREEDY))
    assert broken.last.finish_reason == "error" and "NaN" in str(broken.last.error)
    assert well.last.error is None and well.tokens
    backend.close()
