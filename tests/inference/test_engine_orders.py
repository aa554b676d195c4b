"""What comes between an engine's steps: orders at the wrong time, owners that fail, requests that can't go on."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
from architectures import build
from engines import Answer, ask, engine, generated, submit

from swift.config.engine import EngineConfig
from swift.core.errors import ModelError, SwiftError, UsageError
from swift.inference.backends.swift import SwiftBackend
from swift.inference.requests import Request, SamplingParams

GREEDY = SamplingParams(max_new_tokens=20, ignore_eos=True)
LONG = replace(GREEDY, max_new_tokens=200)


@pytest.fixture
def running(tokenizer):
    backend = engine("llama", tokenizer)
    yield backend
    backend.close()


def answers_still(backend) -> None:
    """The engine works."""
    wanted = generated(build("llama"), [5, 6], 20, eos_token_id=None)
    assert ask(backend, Request("still", [5, 6], GREEDY))[0].tokens == wanted


def in_thread(function) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_waking_an_engine_that_is_awake_changes_nothing(running):
    text = list(range(3, 30))
    wanted = generated(build("llama"), text, 200, eos_token_id=None)
    (answer,) = submit(running, Request("r", text, LONG))
    running.wake()
    assert answer.wait().tokens == wanted
    assert ask(running, Request("again", text, GREEDY))[0].last.num_cached_tokens == 24


def test_a_request_behind_a_sleep_is_told_so(running):
    """It was taken while the engine was awake, and its turn comes when it sleeps."""
    (first,) = submit(running, Request("first", [5, 6], LONG))
    sleeping = in_thread(running.sleep)
    late = []
    while sleeping.is_alive():
        answer = Answer()
        try:
            running.submit(Request(f"late{len(late)}", [5, 7], GREEDY), answer.take)
        except UsageError:
            break
        late.append(answer)
        time.sleep(0.002)  # without it, this thread would keep the engine from the interpreter and fill the memory
    sleeping.join(30)
    assert first.wait().last.finish_reason == "length"
    for answer in late:
        last = answer.wait().last
        assert last.finish_reason == "length" or "sleeps" in last.error.message
    running.wake()
    answers_still(running)


def test_who_leaves_while_others_are_waited_for_is_let_go(running):
    (answer,) = submit(running, Request("r", [5, 6], replace(LONG, max_new_tokens=250)))
    waiting = in_thread(lambda: running.update_weights({}.items()))
    running.cancel("r")
    assert answer.wait().last.finish_reason == "cancelled"
    waiting.join(30)
    assert not waiting.is_alive()
    answers_still(running)


def test_closing_doesnt_wait_for_those_that_are_waited_for(tokenizer):
    backend = engine("llama", tokenizer)
    (answer,) = submit(backend, Request("r", [5, 6], replace(LONG, max_new_tokens=250)))
    failures = []

    def unload() -> None:
        try:
            backend.update_weights({}.items())
        except SwiftError as error:
            failures.append(error)

    waiting = in_thread(unload)
    backend.close()
    waiting.join(30)
    assert answer.wait().last.finish_reason in ("cancelled", "length")
    assert not waiting.is_alive()


def test_an_owner_that_fails_harms_nobody_else(running):
    def fails(update):
        raise RuntimeError("the owner's own fault")

    running.submit(Request("bad", [5, 6], GREEDY), fails)
    answers_still(running)
    assert running.stats().blocks_used == 0


def test_two_requests_of_one_name(running):
    first, second = submit(running, Request("same", [5, 6], LONG), Request("same", [7], GREEDY))
    assert second.wait().last.finish_reason == "error" and "same" in second.last.error.message
    assert first.wait().last.finish_reason == "length" and len(first.tokens) == 200
    answers_still(running)


def test_an_engine_that_isnt_started(tokenizer):
    backend = SwiftBackend(build("llama"), tokenizer, EngineConfig(kv_cache_gib=0.01), stop_token_ids=(2,))
    with pytest.raises(SwiftError, match="started"):
        backend.submit(Request("r", [5], GREEDY), lambda update: None)
    with pytest.raises(SwiftError, match="started"):
        backend.sleep()
    backend.close()


def test_an_adapter_that_cant_be_read_ends_nothing(running, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x10" + b"\x00" * 40)
    with pytest.raises((ModelError, Exception)):
        running.load_adapter("a", tmp_path)
    answers_still(running)


def test_beams_that_dont_fit_end_alone(tokenizer):
    backend = engine("llama", tokenizer, kv_cache_gib=14 * 4 * 2 * 2 * 2 * 16 * 4 / 2**30)
    try:
        params = SamplingParams(max_new_tokens=30, num_beams=4, ignore_eos=True)
        (answer,) = ask(backend, Request("wide", list(range(3, 20)), params))
        assert answer.last.finish_reason == "error" and "beams" in answer.last.error.message
        answers_still(backend)
        with pytest.raises(UsageError, match="beams are more"):
            backend.submit(Request("r", [5], replace(params, num_beams=64)), lambda update: None)
    finally:
        backend.close()


def test_a_beam_that_is_computed_again_isnt_missed(tokenizer, monkeypatch):
    """Its scores were taken before it lost its blocks, so the search moves on while it is computed once more."""
    backend = engine("llama", tokenizer)
    wanted: list[int] = []
    core = backend._core
    params = SamplingParams(max_new_tokens=20, num_beams=2, ignore_eos=True)
    plan = core.scheduler.plan
    for disturbed in (False, True):
        answer = Answer()
        core.add(Request("r", list(range(3, 40)), params), answer.take)
        core.step()  # the prompt
        core.step()
        first, second = core._sequences["r"]
        if disturbed:
            monkeypatch.setattr(core.scheduler, "plan", lambda only=second: [p for p in plan() if p.sequence is only])
            core.step()
            monkeypatch.undo()
            core.scheduler._preempt(second)
            pieces = [piece.sequence for piece in plan()]
            assert pieces == [first, second]
            core.scheduler._preempt(second)
        while core.has_work:
            core.step()
        assert answer.last.finish_reason == "length" and len(answer.tokens) == 20
        wanted = wanted or answer.tokens
        assert answer.tokens == wanted
    assert core.scheduler.pool.num_used == 0
    backend.close()
