"""SGLang's server, played by answers in the form that its source (0.5.23) gives them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from replay_server import ReplayServer, Unending
from taken import Taken, asked

from swift.config import InferConfig, build_config
from swift.core.errors import ModelError, SwiftError, UsageError
from swift.inference.backends.base import ModelInfo
from swift.inference.backends.http import Endpoint, HttpBackend
from swift.inference.backends.served import Launch
from swift.inference.backends.sglang import SglangDialect, generate_body, sglang_backend, sglang_project
from swift.inference.loading import prepare
from swift.inference.requests import Request, SamplingParams, Structure

EVERYTHING = frozenset(
    {"logprobs", "prompt_logprobs", "structure", "penalties", "logit_bias", "min_p", "adapters", "weight_update",
     "sleep"}
)  # fmt: skip
INFO = ModelInfo(context_length=100, vocab_size=120, stop_token_ids=(2,), features=EVERYTHING)
GENERATE = ("POST", "/generate")
SHAPES = {"a.weight": (2, 3), "b.weight": (3,)}
# flags of its parser, read off the fields of its ServerArgs (0.5.23): dashes for underscores
FLAGS = {
    "--config", "--model-path", "--served-model-name", "--host", "--port", "--incremental-streaming-output", "--dtype",
    "--max-running-requests", "--context-length", "--trust-remote-code", "--device", "--enable-memory-saver",
    "--enable-weights-cpu-backup", "--enable-lora", "--max-lora-rank", "--lora-target-modules",
}  # fmt: skip


def backend_at(server: ReplayServer, tokenizer: Any, **settings: Any) -> HttpBackend:
    info = replace(INFO, **settings)
    found = HttpBackend(
        "sglang",
        lambda: Endpoint(server.url, "model", "key"),
        info,
        SglangDialect(tokenizer, info.stop_token_ids),
        shapes=lambda: SHAPES,
    )
    found.start()
    return found


def stream(*chunks: dict[str, Any]) -> str:
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def chunk(ids: list[int], total: int, reason: dict[str, Any] | None = None, **about: Any) -> dict[str, Any]:
    meta = {"id": "r", "finish_reason": reason, "prompt_tokens": 3, "completion_tokens": total, "cached_tokens": 2}
    return {"text": "never read", "output_ids": ids, "meta_info": {**meta, **about}}


def one(tokenizer: Any, answer: str, params: SamplingParams) -> Any:
    with ReplayServer({GENERATE: [answer]}) as server:
        backend = backend_at(server, tokenizer)
        (taken,) = asked(backend, Request("r", [5, 6, 7], params))
        try:
            return taken.whole()
        finally:
            backend.close()


def test_pieces_and_growing_answers_are_read_alike(tokenizer):
    text = "Grüße, 世界 — fin"
    ids = tokenizer.encode(text, add_special_tokens=False)
    end = {"type": "stop", "matched": 2}
    pieces = [chunk([each], k + 1) for k, each in enumerate(ids)] + [chunk([2], len(ids) + 1, end)]
    growing = [chunk(ids[: k + 1], k + 1) for k in range(len(ids))] + [chunk([*ids, 2], len(ids) + 1, end)]
    for chunks in (pieces, growing):
        whole = one(tokenizer, stream(*chunks), SamplingParams(max_new_tokens=50))
        assert (whole.tokens, whole.text, whole.finish_reason) == ([*ids, 2], text, "stop")
        assert whole.last.stop_reason is None and whole.last.num_cached_tokens == 2


def test_ends_and_their_reasons(tokenizer):
    ids = tokenizer.encode("one two three", add_special_tokens=False)
    params = SamplingParams(max_new_tokens=50, stop=(" two",), stop_token_ids=(40,))
    stopped = one(tokenizer, stream(chunk(ids, len(ids), {"type": "stop", "matched": " two"})), params)
    assert (stopped.text, stopped.finish_reason, stopped.last.stop_reason) == ("one", "stop", " two")
    own = one(tokenizer, stream(chunk([ids[0], 40], 2, {"type": "stop", "matched": 40})), params)
    assert (own.finish_reason, own.last.stop_reason, own.tokens) == ("stop", 40, [ids[0], 40])
    cut = one(tokenizer, stream(chunk(ids[:1], 1, {"type": "length", "length": 1})), params)
    assert (cut.finish_reason, cut.text) == ("length", tokenizer.decode(ids[:1]))
    gone = one(tokenizer, stream(chunk(ids[:1], 1, {"type": "abort", "message": "x"})), params)
    assert gone.finish_reason == "cancelled"


def test_log_probabilities(tokenizer):
    answer = stream(
        chunk([8], 1, input_token_logprobs=[[None, 5, None], [-1.5, 6, None], [-2.0, 7, None]],
              input_top_logprobs=[None, [[-0.1, 3, None], [-1.5, 6, None]], [[-0.2, 4, None], [-0.4, 9, None]]],
              output_token_logprobs=[[-0.5, 8, None]], output_top_logprobs=[[[-0.5, 8, None], [-1.0, 9, None]]]),
        chunk([9], 2, {"type": "length", "length": 2}, input_token_logprobs=[[None, 5, None]],
              output_token_logprobs=[[-0.25, 9, None]], output_top_logprobs=[[[-0.25, 9, None], [-3.0, 1, None]]]),
    )  # fmt: skip
    whole = one(tokenizer, answer, SamplingParams(max_new_tokens=2, logprobs=1, prompt_logprobs=2))
    assert [(each.token, each.logprob, each.top) for each in whole.logprobs] == [
        (8, -0.5, ((8, -0.5),)),
        (9, -0.25, ((9, -0.25),)),
    ]
    assert whole.prompt_logprobs[0] is None
    assert [each.top for each in whole.prompt_logprobs[1:]] == [((3, -0.1), (6, -1.5)), ((4, -0.2), (9, -0.4))]


def test_everything_asked_for_is_sent():
    params = SamplingParams(
        max_new_tokens=9, min_new_tokens=2, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, presence_penalty=0.5,
        frequency_penalty=0.25, logit_bias=((4, 1.5),), seed="a", stop=("x",), stop_token_ids=(8,), ignore_eos=True,
        skip_special_tokens=False, structure=Structure("choice", '["a.b", "c"]'),
    )  # fmt: skip
    body = generate_body(Request("r", [5] * 95, params, adapter="mine"), INFO)
    seed = body["sampling_params"].pop("sampling_seed")
    assert body == {
        "rid": "r",
        "input_ids": [5] * 95,
        "stream": True,
        "lora_path": "mine",
        "sampling_params": {
            "max_new_tokens": 5, "min_new_tokens": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
            "presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {"4": 1.5}, "stop": ["x"],
            "stop_token_ids": [8], "ignore_eos": True, "skip_special_tokens": False, "regex": "(a\\.b)|(c)",
        },
    }  # fmt: skip
    plain = generate_body(Request("r", [5], SamplingParams(seed="a")), INFO)["sampling_params"]
    assert plain["sampling_seed"] == seed and plain["top_k"] == -1 and plain["stop_token_ids"] == [2]
    for kind, value, expected in (
        ("json", "", {"json_schema": '{"type": "object"}'}),
        ("json_schema", "{}", {"json_schema": "{}"}),
        ("regex", "a+", {"regex": "a+"}),
        ("grammar", "root ::= x", {"ebnf": "root ::= x"}),
    ):
        found = generate_body(Request("r", [5], SamplingParams(structure=Structure(kind, value))), INFO)
        assert found["sampling_params"].items() >= expected.items()
    scored = generate_body(Request("r", [5], SamplingParams(logprobs=0, prompt_logprobs=3)), INFO)
    assert (scored["return_logprob"], scored["logprob_start_len"], scored["top_logprobs_num"]) == (True, 0, 3)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(logprobs=1, presence_penalty=0.5),
        SamplingParams(logprobs=1, structure=Structure("regex", "a")),
        SamplingParams(num_beams=2),
    ],
)
def test_what_means_something_else_there_is_refused(params, tokenizer):
    with ReplayServer({}) as server:
        backend = backend_at(server, tokenizer)
        with pytest.raises(UsageError):
            backend.submit(Request("r", [5], params), lambda update: None)
        backend.close()


def test_errors_of_the_server(tokenizer):
    wrong = {"error": {"message": "top_p must be in (0, 1]", "type": "invalid_request_error", "code": 400}}
    answers = [(400, wrong), f"data: {json.dumps(wrong)}\n\ndata: [DONE]\n\n", stream({"text": "no ids"})]
    with ReplayServer({GENERATE: answers}) as server:
        backend = backend_at(server, tokenizer)
        for expected in ("top_p", "top_p", "token ids"):
            (taken,) = asked(backend, Request("r", [5], SamplingParams()))
            with pytest.raises(SwiftError, match=expected):
                taken.whole()
        backend.close()


def test_who_leaves_is_aborted(tokenizer):
    open_stream = Unending(f"data: {json.dumps(chunk([5], 1))}\n\n")
    with ReplayServer({GENERATE: [open_stream], ("POST", "/abort_request"): [None]}) as server:
        backend = backend_at(server, tokenizer)
        taken = Taken()
        backend.submit(Request("r", [5], SamplingParams()), lambda update: (taken.take(update), backend.cancel("r")))
        assert taken.whole().finish_reason == "cancelled"
        assert server.asked_of("/abort_request")[0].body == {"rid": "r"}
        backend.close()


def test_adapters_weights_and_sleep(tokenizer, tmp_path):
    done = {"success": True, "message": "ok"}
    answers = {
        ("POST", "/load_lora_adapter"): [done, (400, {"success": False, "error_message": "rank", "message": "rank"})],
        GENERATE: [stream(chunk([5, 2], 2, {"type": "stop", "matched": 2}))],
        ("POST", "/unload_lora_adapter"): [done],
        ("POST", "/update_weights_from_disk"): [done, (400, {"success": False, "message": "no such tensor"}), done],
        ("POST", "/release_memory_occupation"): [None],
        ("POST", "/resume_memory_occupation"): [None],
    }
    with ReplayServer(answers) as server:
        backend = backend_at(server, tokenizer)
        backend.load_adapter("a", tmp_path)
        with pytest.raises(ModelError, match="rank"):
            backend.load_adapter("b", tmp_path)
        (taken,) = asked(backend, Request("r", [5], SamplingParams(), adapter="a"))
        assert taken.whole().tokens == [5, 2]
        assert server.asked_of("/generate")[0].body["lora_path"] == "a"
        backend.unload_adapter("a")
        weights = {"a.weight": torch.ones(2, 3), "b.weight": torch.ones(3)}
        with pytest.raises(ModelError, match="was given"):
            backend.update_weights({"a.weight": torch.ones(3, 3)}.items())
        backend.update_weights(weights.items())
        with pytest.raises(SwiftError, match="no such tensor"):
            backend.update_weights(weights.items())
        with pytest.raises(UsageError, match="not given back"):  # nobody knows what it holds now
            backend.submit(Request("r", [5], SamplingParams()), lambda update: None)
        backend.sleep(2)
        with pytest.raises(UsageError, match="sleeps"):
            backend.submit(Request("r", [5], SamplingParams()), lambda update: None)
        backend.wake()
        backend.update_weights(weights.items())
        assert [each.path for each in server.asked] == [
            "/load_lora_adapter", "/load_lora_adapter", "/generate", "/unload_lora_adapter",
            "/update_weights_from_disk", "/update_weights_from_disk", "/release_memory_occupation",
            "/resume_memory_occupation", "/update_weights_from_disk",
        ]  # fmt: skip
        assert all(each.headers["authorization"] == "Bearer key" for each in server.asked)
        backend.close()


def test_the_command_line(tiny_model_dir, tmp_path):
    settings = {"model": str(tiny_model_dir), "infer_backend": "sglang", "device": "cpu"}
    prepared = prepare(build_config(InferConfig, settings))
    project = sglang_project(prepared)
    info = replace(INFO, features=EVERYTHING)
    words = list(project.command(Launch("python", prepared, info, "model", 1234, "secret", tmp_path)))
    assert {word for word in words if word.startswith("--")} <= FLAGS
    assert "secret" not in " ".join(words)
    file = Path(words[words.index("--config") + 1])
    assert file.read_text() == "api-key: secret\n" and file.stat().st_mode & 0o077 == 0
    assert words[words.index("--context-length") + 1] == "100"


def test_it_is_missing_where_it_isnt_installed(tiny_model_dir):
    config = build_config(InferConfig, {"model": str(tiny_model_dir), "infer_backend": "sglang", "device": "cpu"})
    with pytest.raises(SwiftError, match="SGLang is not installed"):
        sglang_backend(prepare(config))
