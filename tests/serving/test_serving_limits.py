"""Who may ask, and how much: keys, rates, sizes, the queue, time-outs, and clients that leave."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from live_server import HELLO, Live, check_schema, live_server, wait_for

from swift.config.serving import ServeConfig
from swift.core.errors import UsageError
from swift.serving.limits import Bucket, Keys, Queue, read_keys

LONG = {"messages": HELLO, "max_tokens": 900, "ignore_eos": True}
SHORT = {"messages": HELLO, "max_tokens": 2}
CHAT = "/v1/chat/completions"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_keys_are_needed_and_kept_as_hashes(tiny_model_dir: Path, serving_backend: Any, tmp_path: Path) -> None:
    hashed = hashlib.sha256(b"from-file").hexdigest()
    file = tmp_path / "keys"
    file.write_text(f"# keys\nsha256:{hashed} name=alice concurrency=2\nplain-one requests_per_minute=1\n")
    settings = {"api_key": ["given"], "api_key_file": str(file)}
    with live_server(tiny_model_dir, backend=serving_backend, **settings) as live:
        wrong = ["Bearer wrong", "Bearer", "given", "Basic given"]
        for headers in ({}, *[{"Authorization": text} for text in wrong]):
            answer = live.post(CHAT, SHORT, headers=headers)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            check_schema("ErrorResponse", answer.json())
        for key in ("given", "from-file", "plain-one"):
            assert live.post(CHAT, SHORT, headers=bearer(key)).status_code == 200, key
        again = live.post(CHAT, SHORT, headers=bearer("plain-one"))
        assert again.status_code == 429 and 50 <= int(again.headers["retry-after"]) <= 61
        assert live.post(CHAT, SHORT, headers=bearer("given")).status_code == 200
        for path in ("/health", "/ready", "/ping", "/metrics"):
            assert live.get(path).status_code == 200
        assert live.get("/v1/models").status_code == 401
        text = repr(vars(live.server.keys)) + repr([vars(key) for key in live.server.keys._keys])
        assert "given" not in text and "from-file" not in text and "alice" in text


def test_tokens_a_minute_and_requests_at_a_time(tiny_model_dir: Path, serving_backend: Any) -> None:
    settings = {"api_key": ["k"], "tokens_per_minute": 300, "key_concurrency": 1}
    with live_server(tiny_model_dir, backend=serving_backend, **settings) as live:
        url, headers = live.url + CHAT, bearer("k")
        with httpx2.stream("POST", url, json={**LONG, "stream": True}, headers=headers, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            busy = live.post(CHAT, SHORT, headers=headers)
            assert busy.status_code == 429 and busy.json()["error"]["code"] == "concurrency"
            for _ in lines:
                pass
        wait_for(live.idle)
        spent = live.post(CHAT, SHORT, headers=headers)  # 900 of 300 tokens are used
        assert spent.status_code == 429 and spent.json()["error"]["code"] == "tokens"
        assert int(spent.headers["retry-after"]) > 60


@pytest.mark.parametrize(
    "line", ["k nonsense", "k requests_per_minute=-1", "k concurrency=x", "sha256:12 name=a", "k name="]
)
def test_lines_that_are_not_understood(line: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(line + "\n")
    with pytest.raises(UsageError):
        read_keys(ServeConfig(api_key_file=str(tmp_path / "keys")))


def test_files_of_keys_that_cannot_be_used(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(UsageError, match="can't be read"):
            read_keys(ServeConfig(api_key_file=str(path)))
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(UsageError, match="holds no key"):
        read_keys(ServeConfig(api_key_file=str(tmp_path / "empty")))
    with pytest.raises(UsageError, match="empty"):
        read_keys(ServeConfig(api_key=[""]))
    assert Keys([]).find(None).name == "anyone"


def test_a_bucket_fills_up_again() -> None:
    bucket = Bucket(6000)
    assert bucket.wait_s(1) == 0
    bucket.take(6000)
    waiting = bucket.wait_s(10)
    assert 0 < waiting <= 0.1
    time.sleep(waiting + 0.01)
    assert bucket.wait_s(10) == 0


def test_the_queue_has_an_end(tiny_model_dir: Path, serving_backend: Any) -> None:
    with live_server(tiny_model_dir, backend=serving_backend, places=1, max_queue=1) as live:
        statuses: list[int] = []
        threads = [
            threading.Thread(target=lambda: statuses.append(live.post(CHAT, LONG).status_code)) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: live.num_answers == 2)
        full = live.post(CHAT, SHORT)
        assert full.status_code == 429 and full.json()["error"]["code"] == "queue_full"
        assert int(full.headers["retry-after"]) >= 1
        for thread in threads:
            thread.join()
        assert statuses == [200, 200]
        assert live.post(CHAT, SHORT).status_code == 200
        assert live.post(CHAT, {**SHORT, "n": 3}).status_code == 400  # never so many at a time
    queue = Queue(2, 2)
    queue.enter(3)
    queue.leave(3, 1.0)
    assert queue.num_answers == 0


def test_large_bodies_are_refused_while_they_come(live: Live) -> None:
    def pieces() -> Any:
        for _ in range(160):
            yield b"[" * (64 << 10)

    declared = live.post(CHAT, raw=b'{"x": "' + b"a" * 10_000_000 + b'"}')
    undeclared = httpx2.post(
        live.url + CHAT, content=pieces(), headers={"Content-Type": "application/json"}, timeout=60
    )
    for answer in (declared, undeclared):
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "request_too_large"
    with socket.create_connection(("127.0.0.1", live.port)) as connection:  # answered before the body is there
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99999999\r\n\r\n{{"
        )
        connection.sendall(head.encode())
        connection.settimeout(3)
        assert connection.recv(12) == b"HTTP/1.1 413"


def test_slow_clients_are_cut_off(tiny_model_dir: Path, serving_backend: Any) -> None:
    settings = {"header_timeout_s": 0.3, "body_timeout_s": 0.3, "keep_alive_s": 1}
    with live_server(tiny_model_dir, backend=serving_backend, **settings) as live:

        def heard(sent: bytes) -> bytes:
            with socket.create_connection(("127.0.0.1", live.port)) as connection:
                connection.sendall(sent)
                connection.settimeout(20)
                received = b""
                try:
                    while piece := connection.recv(4096):
                        received += piece
                except ConnectionResetError:
                    pass
                return received

        assert heard(b"") == b""
        assert heard(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow:") == b""
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        assert heard(head + b'Content-Length: 50\r\n\r\n{"a"').startswith(b"HTTP/1.1 408")
        assert heard(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n").startswith(b"HTTP/1.1 200")  # idle, then closed
        assert heard(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n\r\nGET").startswith(b"HTTP/1.1 200")
        assert heard(b"GET / HTTP/1.1\r\nX: " + b"a" * (1 << 20)) == b""


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_frees_the_engine(live: Live, stream: bool) -> None:
    body = {**LONG, "stream": stream, "n": 2}
    with socket.create_connection(("127.0.0.1", live.port)) as connection:
        content = httpx2.Request("POST", "http://x", json=body).content
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
        connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
        wait_for(lambda: live.backend.stats().num_running == 2)
    before = live.backend.stats().generated_tokens
    wait_for(live.idle)
    assert live.backend.stats().generated_tokens - before < 600  # of 1800


def test_an_answer_may_not_take_forever(tiny_model_dir: Path, serving_backend: Any) -> None:
    with live_server(tiny_model_dir, backend=serving_backend, request_timeout_s=0.05) as live:
        late = live.post(CHAT, LONG)
        assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
        text = live.post(CHAT, {**LONG, "stream": True}).text
        assert '"code":"timeout"' in text.splitlines()[-2] or '"code":"timeout"' in text
        assert "[DONE]" not in text
        wait_for(live.idle)


def test_other_pages_may_not_call_unless_allowed(live: Live, tiny_model_dir: Path, serving_backend: Any) -> None:
    origin = {"Origin": "https://example.org"}
    assert "access-control-allow-origin" not in live.get("/v1/models", headers=origin).headers
    settings = {"allowed_origins": ["https://example.org"], "api_key": ["k"]}
    with live_server(tiny_model_dir, backend=serving_backend, **settings) as other:
        asked = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        allowed = httpx2.options(other.url + CHAT, headers=asked)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://example.org"
        found = other.get("/v1/models", headers={**origin, **bearer("k")})
        assert found.headers["access-control-allow-origin"] == "https://example.org"


def test_only_admins_change_adapters(live: Live, tmp_path: Path) -> None:
    body = {"lora_name": "a", "lora_path": str(tmp_path)}
    assert live.post("/v1/load_lora_adapter", body).status_code == 403
    assert live.post("/v1/unload_lora_adapter", body).status_code == 403
    admin = bearer("admin-key")
    assert live.post("/v1/load_lora_adapter", body, headers=admin).status_code == 400  # an empty folder
    assert live.post("/v1/unload_lora_adapter", body, headers=admin).status_code == 404
    assert live.post("/v1/load_lora_adapter", {**body, "lora_name": "tiny"}, headers=admin).status_code == 400
