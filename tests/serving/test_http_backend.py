"""A backend over HTTP gives what the engine behind the server gives."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace

import pytest
from live_server import MODEL, live_server

from swift.core.errors import DataError, SwiftError, UsageError
from swift.inference.backends.base import ModelInfo
from swift.inference.backends.completions import Completions, completion_body
from swift.inference.backends.http import Endpoint, HttpBackend
from swift.inference.requests import Request, SamplingParams, Structure, Update

GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True)
PROMPTS = [[5, 6, 7], list(range(3, 60)), [9, 9]]


class Taken:
    """The updates of one request."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.ended = threading.Event()

    def take(self, update: Update) -> None:
        self.updates.append(update)
        if update.finish_reason is not None:
            self.ended.set()

    def whole(self) -> tuple[list[int], str, str | None]:
        assert self.ended.wait(60)
        tokens = [token for update in self.updates for token in update.tokens]
        return tokens, "".join(update.text for update in self.updates), self.updates[-1].finish_reason


def asked(backend, *requests: Request) -> list[Taken]:
    found = [Taken() for _ in requests]
    for request, taken in zip(requests, found, strict=True):
        backend.submit(request, taken.take)
    return found


def info_of(backend) -> ModelInfo:
    return replace(backend.info, features=frozenset({"structure", "penalties", "logit_bias", "min_p"}))


@pytest.fixture(scope="module")
def both(tiny_model_dir):
    """An engine, and a backend that asks the server in front of it."""
    with live_server(tiny_model_dir, max_logprobs=5) as server:
        over = HttpBackend("ours", lambda: Endpoint(server.url, MODEL), info_of(server.backend), Completions())
        over.start()
        yield server.backend, over
        over.close()


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        replace(GREEDY, repetition_penalty=1.3, presence_penalty=0.5, logit_bias=((11, 4.0),)),
        replace(GREEDY, ignore_eos=False, stop=("a", "e")),
        replace(GREEDY, structure=Structure("choice", '["alpha", "beta"]')),
        replace(GREEDY, min_new_tokens=3, max_new_tokens=None, stop_token_ids=(20, 30, 40)),
    ],
)
def test_answers_are_those_of_the_engine(params, both):
    engine, over = both
    requests = [Request(f"r{k}", prompt, params) for k, prompt in enumerate(PROMPTS)]
    direct = [taken.whole() for taken in asked(engine, *requests)]
    assert [taken.whole() for taken in asked(over, *requests)] == direct


def test_leaving_ends_the_answer_at_the_server(both):
    engine, over = both
    (taken,) = asked(over, Request("long", [5, 6], replace(GREEDY, max_new_tokens=2000)))
    deadline = time.monotonic() + 30
    while engine.stats().num_running == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    over.cancel("long")
    assert taken.whole()[2] == "cancelled"
    while engine.stats().num_running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.stats().num_running == 0


def test_who_leaves_at_once_is_told_so(both):
    """The cancellation may come before the request's first step."""
    engine, over = both
    for k in range(20):
        taken = Taken()
        over.submit(Request(f"brief{k}", [5, 6], replace(GREEDY, max_new_tokens=500)), taken.take)
        over.cancel(f"brief{k}")
        assert taken.whole()[2] == "cancelled"
        assert sum(update.finish_reason is not None for update in taken.updates) == 1
    deadline = time.monotonic() + 30
    while engine.stats().num_running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.stats().num_running == 0


def test_what_cant_be_asked_is_refused_here(both):
    _, over = both
    with pytest.raises(DataError):
        over.submit(Request("r", [], GREEDY), lambda update: None)
    with pytest.raises(UsageError, match="logprobs"):
        over.submit(Request("r", [5], replace(GREEDY, logprobs=1)), lambda update: None)
    with pytest.raises(UsageError, match="adapters"):
        over.submit(Request("r", [5], GREEDY, adapter="a"), lambda update: None)
    with pytest.raises(UsageError, match="sleep"):
        over.sleep()


def test_what_the_server_refuses_ends_the_request_with_its_words(tiny_model_dir, both):
    engine, over = both
    wrong = HttpBackend("ours", lambda: Endpoint(over._endpoint.url, "nobody"), info_of(engine), Completions())
    wrong.start()
    try:
        (taken,) = asked(wrong, Request("r", [5], GREEDY))
        assert taken.whole()[2] == "error" and "404" in taken.updates[-1].error.message
    finally:
        wrong.close()
    with pytest.raises(SwiftError, match="closed"):
        wrong.submit(Request("r", [5], GREEDY), lambda update: None)


def test_a_server_that_is_gone_is_an_error_and_closing_ends_what_is_open(tiny_model_dir, both):
    engine, over = both
    gone = HttpBackend("ours", lambda: Endpoint("http://127.0.0.1:9", MODEL), info_of(engine), Completions())
    gone.start()
    (taken,) = asked(gone, Request("r", [5], GREEDY))
    assert taken.whole()[2] == "error"
    gone.close()
    other = HttpBackend("ours", lambda: over._endpoint, info_of(engine), Completions())
    other.start()
    (taken,) = asked(other, Request("r", [5], replace(GREEDY, max_new_tokens=2000)))
    other.close()
    assert taken.whole()[2] == "cancelled"


def test_equal_seeds_are_equal_numbers_and_ends_are_sent_along():
    info = ModelInfo(100, 50, (2, 7), frozenset())
    body = completion_body(Request("r", [5] * 90, SamplingParams(seed="a", stop_token_ids=(9,))), "m", info)
    again = completion_body(Request("s", [5], SamplingParams(seed="a", ignore_eos=True)), "m", info)
    assert (
        body["seed"] == again["seed"] != completion_body(Request("r", [5], SamplingParams(seed="b")), "m", info)["seed"]
    )
    assert body["max_tokens"] == 10 and body["stop_token_ids"] == [2, 7, 9] and again["stop_token_ids"] == []


@pytest.mark.slow
@pytest.mark.real_model
def test_vllm_answers_as_our_engine_does():
    """Runs where SWIFT_TEST_VLLM_PYTHON names the python of an environment with vLLM for CPUs."""
    from swift.config import InferConfig, build_config
    from swift.config.inference import GenerationConfig
    from swift.inference.loading import load_engine

    python = os.environ.get("SWIFT_TEST_VLLM_PYTHON")
    if python is None:
        pytest.skip("SWIFT_TEST_VLLM_PYTHON names no python with vLLM")
    wanted = GenerationConfig(max_new_tokens=12, temperature=0.0, logprobs=True, stop_words=["Lyon"])
    found = []
    for settings in ({"infer_backend": "vllm", "engine_python": python}, {"infer_backend": "swift"}):
        values = {"model": "smollm2", "device": "cpu", "max_model_len": 512, **settings}
        with load_engine(build_config(InferConfig, values)) as engine:
            texts = ["What is the capital of France?", "Count to five.", "Name a colour and say why you like it."]
            prompts = [engine.encoder.encode_prompt([{"role": "user", "content": text}]) for text in texts]
            found.append(engine.generate(prompts, wanted, logprobs=True))
    for theirs, ours in zip(*found, strict=True):
        assert (theirs.tokens, theirs.text, theirs.finish_reason) == (ours.tokens, ours.text, ours.finish_reason)
        assert theirs.logprobs == pytest.approx(ours.logprobs, abs=1e-3)
