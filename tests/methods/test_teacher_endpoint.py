"""A teacher behind HTTP: a real server on this machine that answers as vLLM does, and in worse ways."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from swift.core.errors import ModelError, NetworkError, SwiftError, UsageError
from swift.methods.endpoint import EndpointSettings, TeacherEndpoint

K = 4


def logps_after(ids: list[int]) -> np.ndarray:
    """What the teacher of these tests thinks comes next."""
    logits = np.random.default_rng(sum(ids)).normal(0, 2, 2048)
    return logits - np.log(np.exp(logits).sum())


class Server:
    """Answers in both forms; `reply(body, number of the request)` may be replaced: (status, headers, content), a
    dictionary, or None to cut the connection."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.as_ids = tokenizer, True
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.running = self.most = 0
        self.lock = threading.Lock()
        self.reply: Any = lambda body, _: self.answer(body)
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    server.bodies.append(body)
                    server.headers.append(dict(self.headers))
                    number = len(server.bodies)
                    server.running += 1
                    server.most = max(server.most, server.running)
                try:
                    reply = server.reply(body, number) if self.path == "/v1/completions" else (404, {}, b"no such path")
                finally:
                    with server.lock:
                        server.running -= 1
                if reply is None:
                    self.close_connection = True
                    return
                status, headers, content = reply if isinstance(reply, tuple) else (200, {}, json.dumps(reply).encode())
                try:
                    self.send_response(status)
                    for name, value in {"Content-Length": str(len(content)), **headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(content)
                except OSError:  # the client has given up
                    self.close_connection = True

            def log_message(self, *_: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = body["prompt"]
        distributions = [logps_after(ids[:i]) for i in range(1, len(ids))]
        if "prompt_logprobs" in body:
            positions: list[Any] = [None]
            for logps, own in zip(distributions, ids[1:], strict=True):
                shown = [*np.argsort(-logps)[: body["prompt_logprobs"]].tolist(), own]
                text = self.tokenizer.decode
                positions.append({str(i): {"logprob": logps[i], "decoded_token": text([i])} for i in shown})
            return {"choices": [{"text": "x", "prompt_logprobs": positions}]}
        name = (lambda i: f"token_id:{i}") if self.as_ids else (lambda i: self.tokenizer.decode([i]))
        tops: list[Any] = [None]
        for logps, own in zip(distributions, ids[1:], strict=True):
            shown = [*np.argsort(-logps)[: body["logprobs"]].tolist(), own]
            tops.append({name(i): logps[i] for i in reversed(shown)})
        own = [None, *(float(d[i]) for d, i in zip(distributions, ids[1:], strict=True))]
        logprobs = {
            "tokens": [name(i) for i in [*ids, 300]],
            "token_logprobs": [*own, -1.0],
            "top_logprobs": [*tops, {name(300): -1.0}],
        }
        return {"choices": [{"text": "x", "logprobs": logprobs}]}


@pytest.fixture
def server(tokenizer, monkeypatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    running = Server(tokenizer)
    yield running
    running.http.shutdown()
    running.http.server_close()


def client(server: Server, **settings: Any) -> TeacherEndpoint:
    defaults = {"base_url": server.url, "model": "big", "k": K, "backoff_s": 0.01}
    return TeacherEndpoint(EndpointSettings(**{**defaults, **settings}), server.tokenizer)


def prompts(tokenizer: Any) -> list[list[int]]:
    return [tokenizer(text)["input_ids"] for text in ("The river is green.", "One two three", "Seven stones lie here")]


@pytest.mark.parametrize("form", ["prompt_logprobs", "echo"])
def test_best_tokens_of_each_position(server, form):
    sent = prompts(server.tokenizer)
    for ids, best in zip(sent, client(server, form=form).best_tokens(sent), strict=True):
        assert best.ids.shape == best.logps.shape == (len(ids) - 1, K)
        for i in range(1, len(ids)):
            logps = logps_after(ids[:i])
            expected = np.argsort(-logps)[:K]
            assert best.ids[i - 1].tolist() == expected.tolist()
            np.testing.assert_allclose(best.logps[i - 1], logps[expected], rtol=1e-6)
    wanted = {"model": "big", "max_tokens": 1, "temperature": 0}
    for body in server.bodies:
        assert body.pop("prompt") in sent
        forms = {"prompt_logprobs": K} if form == "prompt_logprobs" else {
            "echo": True, "logprobs": K, "return_tokens_as_token_ids": True}  # fmt: skip
        assert body == wanted | forms
    assert all("Authorization" not in headers for headers in server.headers)


def test_texts_are_looked_up_and_what_is_ambiguous_is_counted(server):
    server.as_ids = False
    ids = prompts(server.tokenizer)[0]
    teacher = client(server, form="echo", k=400)
    (best,) = teacher.best_tokens([ids])
    texts = [server.tokenizer.decode([i]) for i in range(2048)]
    unknown = 0
    for i in range(1, len(ids)):
        logps = logps_after(ids[:i])
        shown = np.argsort(-logps)[:400].tolist()
        clear = [j for j in shown if texts.count(texts[j]) == 1]
        found = best.ids[i - 1][best.ids[i - 1] >= 0].tolist()
        assert [j for j in found if j != ids[i]] == [j for j in clear if j != ids[i]]
        assert np.isneginf(best.logps[i - 1][len(found) :]).all() and (best.ids[i - 1][len(found) :] == -1).all()
        unknown += len({texts[j] for j in shown if texts.count(texts[j]) > 1})
    assert teacher.counts["unknown_texts"] == unknown > 0


@pytest.mark.parametrize("form", ["prompt_logprobs", "echo"])
def test_another_tokenizer_is_refused(server, form):
    ids = prompts(server.tokenizer)[0]

    def shifted(body: dict[str, Any], _: int) -> dict[str, Any]:
        return server.answer(body | {"prompt": [i + 1 for i in body["prompt"]]})

    def longer(body: dict[str, Any], _: int) -> dict[str, Any]:
        return server.answer(body | {"prompt": [5, *body["prompt"]]})

    def shorter(body: dict[str, Any], _: int) -> dict[str, Any]:
        return server.answer(body | {"prompt": body["prompt"][:-2]})

    for reply in (shifted, longer, shorter):
        server.reply = reply
        with pytest.raises(ModelError, match="another tokenizer"):
            client(server, form=form).best_tokens([ids])
    server.reply = lambda body, _: server.answer(body)
    original = server.tokenizer.decode
    server.as_ids = False
    teacher = client(server, form=form)
    server.tokenizer.decode = lambda numbers: original([numbers[0] - 1])  # ids are the same, what they mean is not
    with pytest.raises(ModelError, match=r"another tokenizer than the student: .* for it"):
        teacher.best_tokens([ids])


def test_passing_failures_are_tried_again(server):
    trouble = {1: (503, {}, b"loading"), 2: None, 3: (429, {"Retry-After": "0.02"}, b"slow down")}
    server.reply = lambda body, number: trouble[number] if number in trouble else server.answer(body)
    teacher = client(server)
    (best,) = teacher.best_tokens(prompts(server.tokenizer)[:1])
    assert (best.ids >= 0).all() and teacher.counts == {"requests": 4, "retries": 3}
    server.reply = lambda *_: (500, {}, b"out of memory")
    with pytest.raises(NetworkError, match="no answer in 3 tries: HTTP 500: out of memory"):
        client(server, retries=2).best_tokens(prompts(server.tokenizer)[:1])


def test_time_outs_are_tried_again(server):
    release = threading.Event()
    server.reply = lambda body, number: (
        (release.wait(20), server.answer(body))[1] if number == 1 else server.answer(body)
    )
    teacher = client(server, timeout_s=0.5)
    assert len(teacher.best_tokens(prompts(server.tokenizer)[:1])) == 1
    assert teacher.counts["retries"] >= 1
    release.set()


def test_refusals_end_at_once_and_the_key_is_not_shown(server, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "sk-very-secret\n")
    server.reply = lambda *_: (401, {}, b"Incorrect API key provided: sk-very-secret")
    teacher = client(server, api_key_env="TEACHER_KEY")
    with pytest.raises(NetworkError, match="HTTP 401") as caught:
        teacher.best_tokens(prompts(server.tokenizer))
    assert "secret" not in str(caught.value) and "the key" in caught.value.fix
    assert server.headers[0]["Authorization"] == "Bearer sk-very-secret"
    assert "secret" not in repr(teacher) + repr(vars(teacher)["settings"]) and teacher.counts["retries"] == 0
    server.reply = lambda *_: (302, {"Location": f"{server.url}/elsewhere"}, b"")
    before = len(server.bodies)
    with pytest.raises(NetworkError, match="HTTP 302"):
        teacher.best_tokens(prompts(server.tokenizer)[:1])
    assert len(server.bodies) == before + 1
    server.reply = lambda *_: (400, {}, b"prompt_logprobs=50 is above max_logprobs")
    with pytest.raises(NetworkError, match="above max_logprobs") as caught:
        client(server).best_tokens(prompts(server.tokenizer)[:1])
    assert "--gkd_logits_topk" in caught.value.fix


def test_no_more_requests_at_a_time_than_allowed(server):
    def slow(body: dict[str, Any], _: int) -> dict[str, Any]:
        time.sleep(0.03)
        return server.answer(body)

    server.reply = slow
    answers = client(server, concurrency=2).best_tokens(prompts(server.tokenizer) * 4)
    assert len(answers) == 12 and server.most == 2
    np.testing.assert_array_equal(answers[0].ids, answers[9].ids)


@pytest.mark.parametrize(
    "reply",
    [
        {"choices": []},
        {"choices": [{"text": "x"}]},
        {"choices": [{"prompt_logprobs": None}]},
        (200, {}, b"<html>"),
    ],
)
def test_answers_that_are_not_understood_are_errors(server, reply):
    server.reply = lambda *_: reply
    with pytest.raises(ModelError, match=r"no log-probabilities|no JSON"):
        client(server).best_tokens(prompts(server.tokenizer)[:1])


def test_what_can_be_seen_at_the_start_is_said_at_the_start(server, monkeypatch):
    monkeypatch.delenv("NO_KEY_HERE", raising=False)
    for settings, message in (
        ({"base_url": "teacher.example"}, "no address"),
        ({"api_key_env": "NO_KEY_HERE"}, "holds no key"),
        ({"k": 0}, "at least 1"),
    ):
        with pytest.raises(UsageError, match=message):
            client(server, **settings)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(NetworkError, match="--offline"):
        client(server, base_url="https://teacher.example/v1")
    assert client(server).best_tokens([]) == []
    assert issubclass(NetworkError, SwiftError) and not server.bodies


def test_padding_columns_are_left_to_the_rest(server):
    def padded(body: dict[str, Any], _: int) -> dict[str, Any]:
        answer = server.answer(body)
        for entries in answer["choices"][0]["prompt_logprobs"][1:]:
            entries["2049"] = {"logprob": -0.001, "decoded_token": None}
        return answer

    server.reply = padded
    (best,) = client(server).best_tokens(prompts(server.tokenizer)[:1])
    assert best.ids.max() < 2048 and (best.logps < -0.01).all() and math.isfinite(best.logps.min())
