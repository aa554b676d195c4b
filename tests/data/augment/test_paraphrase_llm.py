"""Paraphrases from an endpoint: a real HTTP server on this machine that answers, refuses, hangs and breaks off."""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from swift.core.errors import NetworkError, SwiftError, UsageError
from swift.data.augment import build_augmenter


class Endpoint:
    """Answers with `reply(body, number of the request)`: a text, a (status, headers, bytes), or None to hang up."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.running = self.most_running = 0
        self.reply: Callable[[dict[str, Any], int], Any] = lambda body, _: "PARAPHRASE " + text_in(body)
        self.lock = threading.Lock()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with endpoint.lock:
                    endpoint.running += 1
                    endpoint.most_running = max(endpoint.most_running, endpoint.running)
                    number = len(endpoint.requests)
                    endpoint.requests.append(body)
                    endpoint.headers.append(dict(self.headers))
                    endpoint.paths.append(self.path)
                try:
                    reply = endpoint.reply(body, number)
                finally:  # before the answer leaves: the client may ask again as soon as it has it
                    with endpoint.lock:
                        endpoint.running -= 1
                try:
                    if reply is None:
                        self.close_connection = True
                        return
                    status, headers, content = reply if isinstance(reply, tuple) else (200, {}, completion(reply))
                    self.send_response(status)
                    for name, value in {"Content-Length": str(len(content)), **headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(content)
                except OSError:  # the client has given up
                    self.close_connection = True

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


def completion(text: Any) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


def text_in(body: dict[str, Any]) -> str:
    return body["messages"][-1]["content"].rpartition("\n\n")[2]


@pytest.fixture
def endpoint(monkeypatch) -> Iterator[Endpoint]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    running = Endpoint()
    yield running
    running.server.shutdown()
    running.server.server_close()


def augmenter_for(endpoint: Endpoint, **settings):
    settings = {"base_url": endpoint.url, "model": "writer", "backoff_s": 0.01, **settings}
    return build_augmenter({"text": {"paraphrase_llm": settings}}, seed=7)


def test_the_request_and_the_answer(endpoint, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret\n")
    augmenter = augmenter_for(
        endpoint,
        api_key_env="MY_KEY",
        prompt="Say it again: {text}",
        system="Be brief.",
        temperature=0.2,
        max_tokens=50,
    )
    endpoint.reply = lambda *_: "<think>hm</think>\n Another wording. \n"
    assert augmenter("Some words.", row_id="a") == "Another wording."
    (body,) = endpoint.requests
    seed = body.pop("seed")
    assert 0 <= seed < 2**31
    assert body == {
        "model": "writer",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Say it again: Some words."},
        ],
        "temperature": 0.2,
        "max_tokens": 50,
    }
    assert endpoint.paths == ["/v1/chat/completions"]
    assert endpoint.headers[0]["Authorization"] == "Bearer secret"
    assert augmenter.counts == {"paraphrase_llm.changed": 1}


def test_the_seed_is_a_function_of_seed_and_row(endpoint):
    for row in ("a", "b", "a"):
        augmenter_for(endpoint)("Some words.", row_id=row)
    first, second, again = (body["seed"] for body in endpoint.requests)
    assert first == again != second
    assert "Authorization" not in endpoint.headers[0]
    augmenter_for(endpoint, send_seed=False)("Some words.")
    assert "seed" not in endpoint.requests[-1]


def test_requests_run_side_by_side_and_come_back_in_order(endpoint):
    def reply(body, _):
        time.sleep(0.1 if text_in(body) == "text number two" else 0.02)
        return "new " + text_in(body)

    endpoint.reply = reply
    texts = [f"text number {word}" for word in ("one", "two", "three", "four", "five", "six")]
    results = augmenter_for(endpoint, concurrency=3).run(texts, list("abcdef"))
    assert [result.text for result in results] == ["new " + text for text in texts]
    assert endpoint.most_running <= 3
    alone = Endpoint()
    alone.reply = reply
    augmenter_for(alone, concurrency=1).run(texts[:3], list("abc"))
    assert alone.most_running == 1
    assert [b["seed"] for b in alone.requests] == [
        next(b["seed"] for b in endpoint.requests if text_in(b) == text) for text in texts[:3]
    ]
    alone.server.shutdown()
    alone.server.server_close()


FAULTS = {
    "busy": (429, {}, b"slow down"),
    "broken": (503, {}, b"no model"),
    "hung up": None,
    "cut off": (200, {"Content-Length": "9999", "Connection": "close"}, b'{"cho'),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_it_tries_again(endpoint, fault):
    endpoint.reply = lambda body, number: FAULTS[fault] if number < 2 else "fine now"
    augmenter = augmenter_for(endpoint, retries=2, timeout_s=5)
    assert augmenter("Some words.") == "fine now"
    assert len(endpoint.requests) == 3
    assert augmenter.counts == {"paraphrase_llm.changed": 1, "paraphrase_llm.retries": 2}
    assert endpoint.requests[0] == endpoint.requests[2]


@pytest.mark.parametrize("fault", FAULTS)
def test_tries_end(endpoint, fault):
    endpoint.reply = lambda *_: FAULTS[fault]
    augmenter = augmenter_for(endpoint, retries=1, timeout_s=2)
    assert augmenter("Some words.") == "Some words."
    assert len(endpoint.requests) == 2
    assert augmenter.counts["paraphrase_llm.failed"] == 1
    with pytest.raises(SwiftError, match=r"no usable answer: .*after 2 tries") as caught:
        augmenter_for(endpoint, retries=1, timeout_s=2, on_failure="stop")("Some words.")
    assert caught.value.where == endpoint.url + "/chat/completions"


def test_waits_between_tries_double_and_obey_the_endpoint(endpoint, monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr("swift.core.chat_client.time.sleep", waits.append)
    endpoint.reply = lambda body, number: (503, {"Retry-After": "7"} if number == 2 else {}, b"")
    augmenter_for(endpoint, retries=4, backoff_s=1.5)("Some words.")
    assert waits == [1.5, 3.0, 7.0, 12.0]


def test_an_endpoint_that_hangs(endpoint):
    released = threading.Event()
    endpoint.reply = lambda *_: released.wait(20) and "late"
    augmenter = augmenter_for(endpoint, retries=1, timeout_s=0.2)
    assert augmenter("Some words.") == "Some words."
    assert augmenter.counts == {"paraphrase_llm.failed": 1, "paraphrase_llm.retries": 1}
    released.set()


def test_nobody_listens():
    free = Endpoint()
    free.server.server_close()
    augmenter = augmenter_for(free, retries=0, timeout_s=2)
    assert augmenter("Some words.") == "Some words."
    assert augmenter.counts["paraphrase_llm.failed"] == 1
    free.server.shutdown()


@pytest.mark.parametrize("status", [400, 401, 403, 404])
@pytest.mark.parametrize("policy", ["keep", "stop"])
def test_what_would_fail_for_every_text_stops_at_once(endpoint, status, policy):
    endpoint.reply = lambda *_: (status, {}, b'{"error": "no such model"}')
    with pytest.raises(SwiftError, match=f"refuses .HTTP {status}: .*no such model"):
        augmenter_for(endpoint, on_failure=policy)("Some words.")
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize("content", [b"<html>", b"{}", b'{"choices": []}', b"[]", completion(None), completion("  ")])
def test_answers_that_are_none(endpoint, content):
    endpoint.reply = lambda *_: (200, {}, content)
    augmenter = augmenter_for(endpoint)
    assert augmenter("Some words.") == "Some words."
    assert augmenter.counts == {"paraphrase_llm.failed": 1}
    assert len(endpoint.requests) == 1  # the same question would get the same answer


def test_an_answer_without_what_is_protected_is_not_used(endpoint):
    text = "Set {{NAME}} to 42 at https://a.b/c."
    for answer, kept in (
        ("Put 42 into {{NAME}} (https://a.b/c).", False),
        ("Put 43 into {{NAME}}: https://a.b/c", True),
    ):
        endpoint.reply = lambda *_, answer=answer: answer
        augmenter = augmenter_for(endpoint)
        assert augmenter(text) == (text if kept else answer)
        assert augmenter.counts[f"paraphrase_llm.{'protected_span_lost' if kept else 'changed'}"] == 1


def test_texts_that_are_not_drawn_are_never_sent(endpoint):
    augmenter_for(endpoint, prob=0.0).run(["One.", "Two."], ["a", "b"])
    augmenter_for(endpoint)("")
    assert endpoint.requests == []


def test_offline_refuses(endpoint):
    with pytest.raises(NetworkError, match="--offline"):
        augmenter_for(endpoint).open(offline=True)
    assert endpoint.requests == []


def test_a_key_that_is_not_set(endpoint, monkeypatch):
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(UsageError, match="MY_KEY holds no key"):
        augmenter_for(endpoint, api_key_env="MY_KEY").open()


def test_the_key_is_not_carried_in_pickles(endpoint, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret-key")
    augmenter = augmenter_for(endpoint, api_key_env="MY_KEY")
    augmenter("Some words.")
    assert b"secret-key" not in pickle.dumps(augmenter)
    assert pickle.loads(pickle.dumps(augmenter))("Some words.") == "PARAPHRASE Some words."


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"base_url": "localhost:8000"}, "must be an address"),
        ({"base_url": "file:///etc"}, "must be an address"),
        ({"model": ""}, "must name a model"),
        ({"prompt": "Rewrite it"}, "must hold {text}"),
        ({"temperature": -1}, "at least 0"),
        ({"timeout_s": 0}, "above 0"),
        ({"retries": -1}, "at least 0"),
        ({"backoff_s": -1}, "at least 0"),
        ({"concurrency": 0}, "at least 1"),
        ({"max_tokens": 0}, "at least 1"),
        ({"on_failure": "skip"}, "not allowed"),
    ],
)
def test_settings_that_cannot_be_meant(settings, says):
    with pytest.raises(UsageError, match=says):
        build_augmenter({"text": {"paraphrase_llm": {"base_url": "http://x/v1", "model": "m", **settings}}})


@pytest.mark.parametrize("status", [301, 302, 307])
def test_the_key_is_not_sent_to_where_the_endpoint_points(endpoint, monkeypatch, status):
    other = Endpoint()
    monkeypatch.setenv("SOME_KEY", "secret")
    endpoint.reply = lambda body, _: (status, {"Location": other.url}, b"")
    with pytest.raises(SwiftError, match=f"refuses .HTTP {status}"):
        augmenter_for(endpoint, api_key_env="SOME_KEY")("Some words.")
    assert len(endpoint.requests) == 1
    assert other.requests == []
    other.server.shutdown()
    other.server.server_close()
