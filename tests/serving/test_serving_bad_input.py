"""Bodies that no well-meaning client sends: each gets an error in OpenAI's shape, and the server goes on."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from live_server import HELLO, MODEL, Live, check_schema

CHAT = "/v1/chat/completions"
DEEP = "[" * 5000 + "]" * 5000

RAW = {
    "empty": (b"", "body"),
    "no JSON": (b"{", "not JSON"),
    "no object": (b"[]", "object"),
    "NaN": (b'{"messages": [], "temperature": NaN}', "not JSON"),
    "Infinity": (b'{"messages": [], "temperature": Infinity}', "not JSON"),
    "1e999": (b'{"messages": [], "temperature": 1e999}', "not JSON"),
    "invalid UTF-8": (b'{"messages": "\xff\xfe"}', "UTF-8"),
    "lone surrogate": (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
    "too deep": (DEEP.encode(), "depth"),
    "NUL": (b'{"mess\x00ages": 1}', "not JSON"),
}
MESSAGES: dict[str, Any] = {
    "no messages": {"messages": []},
    "messages of a wrong type": {"messages": "hi"},
    "a bad role": {"messages": [{"role": "boss", "content": "hi"}]},
    "no content": {"messages": [{"role": "user"}]},
    "content of a wrong type": {"messages": [{"role": "user", "content": 5}]},
    "an image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    "a call without a function": {"messages": [*HELLO, {"role": "assistant", "tool_calls": [{}]}]},
    "arguments that are no JSON": {
        "messages": [*HELLO, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]
    },
}
FIELDS: dict[str, Any] = {
    "max_tokens": [-1, 0, 1.5, "5", 1 << 40, True, 10**30],
    "temperature": [-0.1, 2.1, "hot", [1]],
    "top_p": [-0.1, 1.1],
    "n": [0, -1, 129, 10**40, 1.5],
    "seed": ["x", 1 << 70],
    "stop": [5, [""], [["a"]], ["x"] * 65],
    "top_logprobs": [21, -1, 3],  # without logprobs
    "logit_bias": [{"a": 1}, {"1": 101}, {"-1": 1}, {"99999999": 1}],
    "stream": ["yes", 1],
    "stream_options": [{"include_usage": True}],
    "response_format": [{"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}, "json"],
    "tools": [[{"type": "web"}], [{"type": "function"}], "x"],
    "tool_choice": ["required", "maybe", {"type": "function", "function": {"name": "nothing"}}],
    "guided_regex": ["(", 5],
    "guided_grammar": ["this is no grammar"],
    "guided_json": ["{", {"type": "nonsense"}],
    "model": [5, ""],
    "store": [True],
    "audio": [{"voice": "x"}],
    "modalities": [["audio"]],
    "functions": [[{"name": "f"}]],
    "web_search_options": [{}],
    "prediction": [{"type": "content", "content": "x"}],
    "service_tier": ["flex"],
    "add_generation_prompt": [False],
    "continue_final_message": [True],
    "include_stop_str_in_output": [True],
    "reasoning_effort": ["high", "very"],
    "chat_template_kwargs": [{"messages": []}, "x"],
    "min_tokens": [-1, 9],
    "top_k": [-2, 1.5],
    "repetition_penalty": [0, -1],
    "prompt_logprobs": [-1, 21],
}  # fmt: skip


@pytest.mark.parametrize("name", RAW)
def test_bodies_that_are_no_json(live: Live, name: str) -> None:
    raw, words = RAW[name]
    answer = live.post(CHAT, raw=raw)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    check_schema("ErrorResponse", answer.json())


@pytest.mark.parametrize("name", MESSAGES)
def test_conversations_that_cannot_be(live: Live, name: str) -> None:
    answer = live.post(CHAT, MESSAGES[name])
    assert answer.status_code == 400, answer.text
    assert (answer.json()["error"]["param"] or "").startswith("messages")


@pytest.mark.parametrize("name", FIELDS)
def test_fields_are_named(live: Live, name: str) -> None:
    for value in FIELDS[name]:
        answer = live.post(CHAT, {"model": MODEL, "messages": HELLO, "max_tokens": 5, name: value})
        assert answer.status_code == (404 if (name, value) == ("model", "") else 400), (value, answer.text)
        error = answer.json()["error"]
        word = name.removeprefix("guided_")
        assert word in error["message"] or name in (error["param"] or ""), (value, error)
        check_schema("ErrorResponse", answer.json())


def test_fields_that_nobody_knows_are_ignored(live: Live) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "of_tomorrow": {"x": [1]}, "metadata": {"a": "b"}, "user": "me"}
    assert live.post(CHAT, body).status_code == 200


def test_other_ways_to_be_wrong(live: Live) -> None:
    body = json.dumps({"messages": HELLO, "max_tokens": 2}).encode()
    assert live.post(CHAT, raw=body, headers={"Content-Type": "text/plain"}).status_code == 400
    assert live.post(CHAT, raw=body, headers={"Content-Type": "application/json; charset=utf-8"}).status_code == 200
    for path in ("/v1/nothing", "/", "/v1/models/nothing", "/v1/chat/completions/x", "/%00", "/docs"):
        answer = live.get(path)
        assert answer.status_code == 404, path
        check_schema("ErrorResponse", answer.json())
    answer = live.get(CHAT)
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
    check_schema("ErrorResponse", answer.json())
    for path in ("/v1/embeddings", "/v1/score", "/v1/rerank", "/classify"):
        bodies = {"input": "x", "text_1": "a", "text_2": "b", "query": "q", "documents": ["d"]}
        answer = live.post(path, bodies)
        assert answer.status_code == 400 and "generating text" in answer.json()["error"]["message"]


def test_what_is_no_http(live: Live) -> None:
    for sent in (b"\x16\x03\x01\x02\x00", b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x00" * 1000):
        with socket.create_connection(("127.0.0.1", live.port)) as connection:
            connection.sendall(sent)
            connection.settimeout(20)
            assert connection.recv(4096).startswith(b"HTTP/1.1 400")
    assert live.get("/health").status_code == 200 and live.idle()
