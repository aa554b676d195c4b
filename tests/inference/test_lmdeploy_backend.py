"""LMDeploy's server, played by answers in the form that its source (0.18.0) gives them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from replay_server import ReplayServer, Unending
from taken import Taken, asked

from swift.config import InferConfig, build_config
from swift.core.errors import SwiftError, UsageError
from swift.inference.backends.base import ModelInfo
from swift.inference.backends.http import Endpoint, HttpBackend
from swift.inference.backends.lmdeploy import LmdeployDialect, generate_body, lmdeploy_backend, lmdeploy_project
from swift.inference.backends.served import Launch
from swift.inference.loading import prepare
from swift.inference.requests import Request, SamplingParams

INFO = ModelInfo(100, 120, (2,), frozenset({"logprobs", "penalties", "min_p", "sleep"}))
GENERATE = ("POST", "/generate")
# flags of its parser for `serve api_server` (0.18.0)
FLAGS = {
    "--backend", "--server-name", "--server-port", "--model-name", "--logprobs-mode", "--max-batch-size", "--dtype",
    "--enable-prefix-caching", "--session-len", "--trust-remote-code",
}  # fmt: skip


def backend_at(server: ReplayServer, tokenizer: Any) -> HttpBackend:
    dialect = LmdeployDialect(tokenizer, INFO.stop_token_ids)
    found = HttpBackend("lmdeploy", lambda: Endpoint(server.url, "model", "key"), INFO, dialect)
    found.start()
    return found


def chunk(ids: list[int], reason: str | None = None, **about: Any) -> dict[str, Any]:
    ended = None if reason is None else {"type": reason}
    return {"text": "never read", "output_ids": ids, "meta_info": {"finish_reason": ended, **about}}


def stream(*chunks: dict[str, Any]) -> str:
    return "".join(f"data: {json.dumps(each)}\n\n" for each in chunks) + "data: [DONE]\n\n"


def one(tokenizer: Any, answer: Any, params: SamplingParams) -> Any:
    with ReplayServer({GENERATE: [answer]}) as server:
        backend = backend_at(server, tokenizer)
        try:
            (taken,) = asked(backend, Request("r", [5, 6, 7], params))
            return taken.whole()
        finally:
            backend.close()


def test_an_answer_and_its_ends(tokenizer):
    text = "Grüße, 世界 — fin"
    ids = tokenizer.encode(text, add_special_tokens=False)
    params = SamplingParams(max_new_tokens=50, stop_token_ids=(40,))
    whole = one(tokenizer, stream(*[chunk([each]) for each in ids], chunk([2], "stop")), params)
    assert (whole.tokens, whole.text, whole.finish_reason) == ([*ids, 2], text, "stop")
    own = one(tokenizer, stream(chunk(ids[:1]), chunk([40], "stop")), params)
    assert (own.tokens, own.last.stop_reason) == ([ids[0], 40], 40)
    cut = one(tokenizer, stream(chunk(ids), chunk([], "length")), params)
    assert (cut.tokens, cut.text, cut.finish_reason) == (ids, text, "length")
    assert one(tokenizer, stream(chunk(ids[:1]), chunk([], "abort")), params).finish_reason == "cancelled"
    with pytest.raises(SwiftError, match="error"):
        one(tokenizer, stream(chunk(ids[:1]), chunk([], "error")), params)


def test_a_stop_text_ends_the_answer_here(tokenizer):
    """The server doesn't know it, so the connection is closed."""
    ids = tokenizer.encode("one two three four", add_special_tokens=False)
    with ReplayServer(
        {GENERATE: [Unending(stream(*[chunk([each]) for each in ids]).removesuffix("data: [DONE]\n\n"))]}
    ) as server:
        backend = backend_at(server, tokenizer)
        (taken,) = asked(backend, Request("r", [5], SamplingParams(max_new_tokens=50, stop=(" three",))))
        whole = taken.whole()
        assert (whole.text, whole.finish_reason, whole.last.stop_reason) == ("one two", "stop", " three")
        assert "stop" not in server.asked[0].body
        backend.close()


def test_log_probabilities(tokenizer):
    answer = stream(
        chunk([8], output_token_logprobs=[[-0.5, 8]], output_top_logprobs=[[[-0.25, 9], [-0.5, 8]]]),
        chunk([], "length"),
    )
    whole = one(tokenizer, answer, SamplingParams(max_new_tokens=2, logprobs=1))
    assert [(each.token, each.logprob, each.top) for each in whole.logprobs] == [(8, -0.5, ((9, -0.25),))]


def test_everything_asked_for_is_sent():
    params = SamplingParams(
        max_new_tokens=9, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.1, stop_token_ids=(8,),
        ignore_eos=True, logprobs=3,
    )  # fmt: skip
    assert generate_body(Request("r", [5] * 95, params), INFO) == {
        "input_ids": [5] * 95, "stream": True, "max_tokens": 5, "temperature": 0.7, "top_p": 0.9, "top_k": 5,
        "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [8], "ignore_eos": True,
        "skip_special_tokens": False, "include_stop_str_in_output": True, "return_logprob": True,
        "top_logprobs_num": 3,
    }  # fmt: skip
    assert generate_body(Request("r", [5], SamplingParams()), INFO)["stop_token_ids"] == [2]
    with pytest.raises(UsageError, match="how long"):
        generate_body(Request("r", [5], SamplingParams()), replace(INFO, context_length=None))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(presence_penalty=0.5),
        SamplingParams(frequency_penalty=0.5),
        SamplingParams(min_new_tokens=3),
        SamplingParams(temperature=2.5),
        SamplingParams(logit_bias=((3, 1.0),)),
        SamplingParams(num_beams=2),
    ],
)
def test_what_it_cant_be_asked_is_refused(params, tokenizer):
    with ReplayServer({}) as server:
        backend = backend_at(server, tokenizer)
        with pytest.raises(UsageError):
            backend.submit(Request("r", [5], params), lambda update: None)
        with pytest.raises(UsageError, match="weights"):
            backend.update_weights([])
        with pytest.raises(UsageError, match="adapters"):
            backend.submit(Request("r", [5], SamplingParams(), adapter="a"), lambda update: None)
        with pytest.raises(UsageError, match="given back"):
            backend.sleep(2)
        backend.close()


def test_errors_sleep_and_leaving(tokenizer):
    refused = {"object": "error", "message": "The top_p 7 must be in (0, 1].", "type": "invalid_request_error"}
    answers = {
        GENERATE: [(400, refused), Unending(f"data: {json.dumps(chunk([5]))}\n\n")],
        ("POST", "/sleep"): [None],
        ("POST", "/wakeup"): [None],
    }
    with ReplayServer(answers) as server:
        backend = backend_at(server, tokenizer)
        (taken,) = asked(backend, Request("r", [5], SamplingParams()))
        with pytest.raises(UsageError, match="top_p"):
            taken.whole()
        left = Taken()
        backend.submit(Request("l", [5], SamplingParams()), lambda update: (left.take(update), backend.cancel("l")))
        assert left.whole().finish_reason == "cancelled"
        backend.sleep()
        assert server.asked[-1].query == {"level": "1"} and backend.stats().asleep
        backend.wake()
        assert all(each.headers["authorization"] == "Bearer key" for each in server.asked)
        backend.close()


def test_the_command_line(tiny_model_dir, tmp_path):
    prepared = prepare(
        build_config(InferConfig, {"model": str(tiny_model_dir), "infer_backend": "lmdeploy", "device": "cpu"})
    )
    launch = Launch(sys.executable, prepared, INFO, "model", 1234, "hidden", tmp_path)
    project = lmdeploy_project(prepared)
    words = list(project.command(launch))
    assert {word for word in words if word.startswith("--")} <= FLAGS
    assert "hidden" not in " ".join(words)
    # a module of that name shows what its entry point gets
    package = tmp_path / "lmdeploy" / "cli"
    package.mkdir(parents=True)
    (package / "entrypoint.py").write_text(
        "import os, sys\ndef run(): print(sys.argv, 'SWIFT_LMDEPLOY_KEY' in os.environ)\n"
    )
    environment = {**os.environ, **project.secrets(launch), "PYTHONPATH": str(tmp_path)}
    said = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
    assert said.strip() == f"{['lmdeploy', *words[3:], '--api-keys', 'hidden']} False"


def test_it_is_missing_where_it_isnt_installed(tiny_model_dir):
    settings = {"model": str(tiny_model_dir), "infer_backend": "lmdeploy", "device": "cpu", "torch_dtype": "float32"}
    with pytest.raises(UsageError, match="float16 or bfloat16"):
        lmdeploy_backend(prepare(build_config(InferConfig, settings)))
    config = build_config(InferConfig, {**settings, "torch_dtype": "bfloat16"})
    with pytest.raises(SwiftError, match="LMDeploy is not installed"):
        lmdeploy_backend(prepare(config))
