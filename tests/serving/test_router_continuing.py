"""A stream taken up by another one: wherever the first broke, nothing is lost or doubled."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from swift.serving.router.asked import read_request
from swift.serving.router.continuing import Continuation, Diverged

TOKENS = [" The", " quick", "", " brown", "\n\n", 'data: {"x"}', " fox", "", " ends"]


def _chat(name: str, groups: list[list[int]], *, choices: int = 1, logprobs: bool = False) -> list[bytes]:
    """A stream of /v1/chat/completions whose events hold these tokens."""
    head = {"id": name, "object": "chat.completion.chunk", "created": hash(name) % 1000, "model": "m",
            "system_fingerprint": f"fp_{name}"}  # fmt: skip
    made = []

    def add(choice: dict[str, Any]) -> None:
        made.append(_event({**head, "choices": [{"logprobs": None, "finish_reason": None, **choice}]}))

    for index in range(choices):
        add({"index": index, "delta": {"role": "assistant", "content": ""}})
    for group in groups:
        for index in range(choices):
            more: dict[str, Any] = {"token_ids": [token + index for token in group]}
            if logprobs:
                more["logprobs"] = {
                    "content": [{"token": TOKENS[t], "logprob": -0.1 * t} for t in group],
                    "refusal": None,
                }
            add({"index": index, "delta": {"content": "".join(TOKENS[token] for token in group)}, **more})
    for index in range(choices):
        add({"index": index, "delta": {}, "finish_reason": "length", "stop_reason": "x"})
    made.append(_event({**head, "choices": [], "usage": {"completion_tokens": len(TOKENS)}}))
    return [*made, b"data: [DONE]\n\n"]


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _read(stream: bytes) -> dict[Any, Any]:
    """What a client makes of a stream."""
    found: dict[Any, Any] = {"ids": set(), "usage": 0, "done": 0}
    for each in stream.split(b"\n\n"):
        if each == b"data: [DONE]":
            found["done"] += 1
        elif each:
            value = json.loads(each[6:])
            found["ids"].add((value["id"], value["created"], value["system_fingerprint"]))
            found["usage"] += "usage" in value
            for choice in value["choices"]:
                had = found.setdefault(choice["index"], {"text": "", "ids": [], "logprobs": [], "roles": 0, "ends": []})
                had["text"] += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
                had["ids"] += choice.get("token_ids") or []
                had["logprobs"] += (choice["logprobs"] or {}).get("content") or []
                had["roles"] += "role" in choice.get("delta", {})
                had["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return found


def _cut(random_: random.Random) -> list[list[int]]:
    """The tokens in groups of any size."""
    groups, left = [], list(range(len(TOKENS)))
    while left:
        size = random_.randint(1, 4)
        groups.append(left[:size])
        left = left[size:]
    return groups


@pytest.mark.parametrize(("choices", "logprobs"), [(1, False), (1, True), (3, True)])
def test_the_rest_comes_without_a_seam(choices: int, logprobs: bool) -> None:
    random_ = random.Random(choices)
    for _ in range(40):
        first = _chat("one", _cut(random_), choices=choices, logprobs=logprobs)
        second = _chat("two", _cut(random_), choices=choices, logprobs=logprobs)
        for position in range(1, len(first) + 1):
            sent = b"".join(first[:position])
            continuation = Continuation(sent)
            parts = [b"".join(second[:3]), *second[3:]]
            whole = sent + b"".join(continuation.rest(part) for part in parts)
            if position == len(first):  # all was there but the end of the connection
                whole = whole.removesuffix(b"data: [DONE]\n\n")
            assert _read(whole) == _read(b"".join(first)), position


def test_texts_too() -> None:
    def stream(name: str, parts: list[str]) -> list[bytes]:
        head = {"id": name, "created": 1, "system_fingerprint": "f"}
        made = [
            _event({**head, "choices": [{"text": part, "index": 0, "logprobs": None, "finish_reason": None}]})
            for part in parts
        ]
        end = {"text": "", "index": 0, "logprobs": None, "finish_reason": "stop"}
        return [*made, _event({**head, "choices": [end]}), b"data: [DONE]\n\n"]

    first, second = stream("one", ["ab", "cd", "ef"]), stream("two", ["a", "bcde", "f"])
    for position in range(1, len(first)):
        sent = b"".join(first[:position])
        whole = sent + Continuation(sent).rest(b"".join(second))
        assert _read(whole) == _read(b"".join(first))


def test_another_answer_is_not_taken_for_the_same() -> None:
    first = _chat("one", [[0], [1], [3]])
    sent = b"".join(first[:3])
    for other in (_chat("two", [[0], [6], [3]]), _chat("two", [[0, 3]]), _chat("two", [[0]])):
        with pytest.raises(Diverged):
            Continuation(sent).rest(b"".join(other))
    called = _event({"id": "x", "choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0}]}}]})
    with pytest.raises(Diverged):
        Continuation(called)
    with pytest.raises(Diverged):
        Continuation(sent).rest(_event({"type": "response.created"}))


def test_what_is_read_of_a_request() -> None:
    def asked(path: str = "/v1/chat/completions", **values: Any) -> Any:
        return read_request("POST", path, json.dumps(values).encode(), "application/json")

    messages = [{"role": "user", "content": "x" * 1000}]
    plain = asked(messages=messages, stream=True, model="m")
    assert plain.model == "m" and plain.continuable
    sent = json.loads(plain.seeded_body)
    assert isinstance(sent.pop("seed"), int) and sent == json.loads(plain.body)
    assert (
        asked(messages=messages, stream=True, seed=3).seeded_body == asked(messages=messages, stream=True, seed=3).body
    )
    assert json.loads(asked(messages=messages, stream=True, seed=None).seeded_body)["seed"] is not None
    assert json.loads(asked(messages=messages, stream=True, seed=0).seeded_body)["seed"] == 0
    for no in ({"stream": False}, {"stream": True, "tools": [{}]}, {"stream": True, "path": "/v1/responses"}):
        assert not asked(messages=messages, **no).continuable
    # the next turn begins as the one before, and other tools make another beginning
    longer = [*messages, {"role": "assistant", "content": "y"}]
    assert asked(messages=longer, model="m").chain[:7] == plain.chain[:7] and len(plain.chain) >= 7
    assert asked(messages=messages, model="m", tools=[{"a": 1}]).chain[0] != plain.chain[0]
    for body in (b"", b"{", b"[]", b"\xff", b'{"model": 5, "messages": {"a": 1}, "stream": true}'):
        read_request("POST", "/v1/chat/completions", body, "")
