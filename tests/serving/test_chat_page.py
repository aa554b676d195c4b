"""The chat page's server: its files, its rules for the browser, and what it hands on."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from starlette.testclient import TestClient

from swift.core.errors import UsageError
from swift.serving.chat_page import endpoint_trouble, make_page


class _Endpoint(BaseHTTPRequestHandler):
    seen: ClassVar[list[tuple[str, str | None, bytes]]] = []

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(200 if self.headers["Authorization"] == "Bearer secret" else 401)
        self.end_headers()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.seen.append((self.path, self.headers["Authorization"], body))
        if b"moved" in body:
            self.send_response(307)
            self.send_header("Location", "http://127.0.0.1:9/")
            self.end_headers()
            return
        busy = b"busy" in body
        self.send_response(429 if busy else 200)
        self.send_header("Content-Type", "application/json" if busy else "text/event-stream")
        if busy:
            self.send_header("Retry-After", "3")
        self.end_headers()
        self.wfile.write(b'{"error": {"message": "too many"}}' if busy else b"data: {}\n\ndata: [DONE]\n\n")


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


@pytest.fixture
def page(endpoint: str) -> Iterator[TestClient]:
    app = make_page(endpoint, "secret", title="T", local_only=True)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        yield client


@pytest.mark.parametrize("name", ["", "page.js", "page.css", "markdown.js", "messages.js", "talks.js", "words.js"])
def test_page_files_bring_a_strict_policy(page: TestClient, name: str) -> None:
    answer = page.get(f"/{name}")
    assert answer.status_code == 200
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert "innerHTML" not in answer.text and "//cdn" not in answer.text and "secret" not in answer.text


def test_page_adds_the_key_and_streams(page: TestClient) -> None:
    answer = page.post("/v1/chat/completions", json={"messages": []})
    assert answer.text.endswith("data: [DONE]\n\n")
    path, key, body = _Endpoint.seen[-1]
    assert (path, key, json.loads(body)) == ("/v1/chat/completions", "Bearer secret", {"messages": []})


def test_page_passes_refusals_on(page: TestClient) -> None:
    answer = page.post("/v1/chat/completions", json={"busy": 1})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    assert answer.json()["error"]["message"] == "too many"


def test_page_refuses_what_it_has_no_use_for(page: TestClient) -> None:
    assert page.post("/v1/load_lora_adapter", json={}).status_code == 404
    assert page.get("/..%2fchat_page.py").status_code == 404
    assert page.post("/v1/chat/completions", content="x=1").status_code == 415
    for host in ("evil.example", "127.0.0.1.evil.example", "[::1", ""):
        assert page.get("/", headers={"Host": host}).status_code == 400
    for host in ("localhost:7860", "[::1]:7860", "127.0.0.5"):
        assert page.get("/", headers={"Host": host}).status_code == 200


def test_page_says_when_the_endpoint_is_gone() -> None:
    with TestClient(make_page("http://127.0.0.1:9/v1", None)) as client:
        answer = client.get("/v1/models")
    assert answer.status_code == 502 and "can't be reached" in answer.json()["error"]["message"]


@pytest.mark.parametrize("address", ["localhost:8000", "http://x:99999/v1", "http://[::1/v1", "file:///etc/passwd"])
def test_page_wants_an_address(address: str) -> None:
    with pytest.raises(UsageError, match="no address"):
        make_page(address, None)


def test_page_follows_no_redirect_with_the_key(page: TestClient) -> None:
    answer = page.post("/v1/chat/completions", json={"moved": 1})
    assert answer.status_code == 502 and "elsewhere" in answer.json()["error"]["message"]


def test_what_an_endpoint_has_against_being_asked(page: TestClient, endpoint: str) -> None:
    assert "can't be reached" in str(endpoint_trouble("http://127.0.0.1:9/v1", None))
    assert "refuses the key" in str(endpoint_trouble(endpoint, "wrong"))
    assert "without a key" in str(endpoint_trouble(endpoint, None))
    assert endpoint_trouble(endpoint, "secret") is None
