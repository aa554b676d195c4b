"""From the first connection to the last: not ready, ready, draining, gone; TLS; engines that fail."""

from __future__ import annotations

import logging
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from live_server import HELLO, MODEL, live_server, running, talker_of, wait_for

from swift.config.serving import ServeConfig
from swift.core.errors import ModelError, SwiftError, UsageError
from swift.inference.backends.dialect import refusal
from swift.inference.requests import Update
from swift.serving.lifecycle import LiveServer, check_tls, listen
from swift.serving.served import ServedModel

CHAT = "/v1/chat/completions"
SHORT = {"messages": HELLO, "max_tokens": 2}
LONG = {"messages": HELLO, "max_tokens": 900, "ignore_eos": True}


def test_it_listens_before_the_model_is_there(tiny_model_dir: Path, serving_backend: Any) -> None:
    config = ServeConfig(port=0, access_log=False)
    there = threading.Event()

    def load() -> list[ServedModel]:
        there.wait(30)
        return [ServedModel(MODEL, talker_of(tiny_model_dir, serving_backend, config))]

    server = LiveServer(config, listen(config), load)
    server._close_models = lambda: None  # type: ignore[method-assign]  # the engine is the other tests' too
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.services is not None)
    assert httpx2.get(server.url + "/health").status_code == 200
    assert httpx2.get(server.url + "/ready").status_code == 503
    early = httpx2.post(server.url + CHAT, json=SHORT)
    assert early.status_code == 503 and early.json()["error"]["code"] == "loading" and early.headers["retry-after"]
    there.set()
    wait_for(lambda: httpx2.get(server.url + "/ready").status_code == 200)
    assert httpx2.post(server.url + CHAT, json=SHORT).status_code == 200
    server.stop()
    thread.join(30)


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    config = ServeConfig(port=0)

    def load() -> list[ServedModel]:
        raise ModelError("there is nothing to load")

    with pytest.raises(ModelError, match="nothing to load"):
        LiveServer(config, listen(config), load).run()


def test_running_answers_may_end(tiny_model_dir: Path, serving_backend: Any) -> None:
    answers: list[httpx2.Response] = []
    with live_server(tiny_model_dir, backend=serving_backend, drain_s=60) as live:

        def ask(body: dict[str, Any]) -> None:
            answers.append(httpx2.post(live.url + CHAT, json=body, timeout=60))

        threads = [threading.Thread(target=ask, args=({**LONG, "stream": stream},)) for stream in (False, True)]
        for thread in threads:
            thread.start()
        wait_for(lambda: live.num_answers == 2)
        live.server.stop()
        wait_for(lambda: not _accepts(live.port))
        for thread in threads:
            thread.join()
    assert [answer.status_code for answer in answers] == [200, 200]
    assert all('"finish_reason":"length"' in answer.text for answer in answers)


def test_the_end_comes_at_once_when_nothing_may_drain(tiny_model_dir: Path, serving_backend: Any) -> None:
    texts: list[str] = []
    with live_server(tiny_model_dir, backend=serving_backend, drain_s=0) as live:
        body = {**LONG, "stream": True}
        asked = threading.Thread(target=lambda: texts.append(httpx2.post(live.url + CHAT, json=body, timeout=60).text))
        asked.start()
        wait_for(lambda: live.backend.stats().num_running == 1)
        live.server.stop()
        asked.join()
    assert '"code":"cancelled"' in texts[0] and "[DONE]" not in texts[0]
    wait_for(lambda: serving_backend.stats().num_running == 0)


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    key, cert = str(folder / "key.pem"), str(folder / "cert.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return key, cert


def test_tls(tiny_model_dir: Path, serving_backend: Any, certificate: tuple[str, str]) -> None:
    key, cert = certificate
    settings = {"ssl_keyfile": key, "ssl_certfile": cert}
    with live_server(tiny_model_dir, backend=serving_backend, **settings) as live:
        assert live.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=cert)
        assert httpx2.post(live.url + CHAT, json=SHORT, verify=trusted).status_code == 200
        with pytest.raises(httpx2.HTTPError):
            httpx2.get(live.url.replace("https", "http") + "/health")


def test_certificates_that_cannot_be_used(certificate: tuple[str, str], tmp_path: Path) -> None:
    key, cert = certificate
    for settings in (
        {"ssl_keyfile": key},
        {"ssl_certfile": str(tmp_path / "absent.pem")},
        {"ssl_certfile": cert},
        {"ssl_certfile": key, "ssl_keyfile": key},
    ):
        with pytest.raises(UsageError):
            check_tls(ServeConfig(**settings))
    check_tls(ServeConfig(ssl_certfile=cert, ssl_keyfile=key))


def test_addresses_that_cannot_be_had() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(UsageError, match="can't listen") as error:
            listen(ServeConfig(port=taken.getsockname()[1]))
        assert "--port" in str(error.value.where)
    with pytest.raises(UsageError, match="no such address"):
        listen(ServeConfig(host="nowhere.invalid"))


def test_who_opens_a_server_to_all_is_warned(tiny_model_dir: Path, serving_backend: Any) -> None:
    heard = _Heard()
    logging.getLogger("swift").addHandler(heard)
    try:
        for host, keys, warned in (("0.0.0.0", [], True), ("0.0.0.0", ["k"], False), ("127.0.0.1", [], False)):
            heard.lines.clear()
            with live_server(tiny_model_dir, backend=serving_backend, host=host, api_key=keys):
                pass
            assert any("anyone" in line for line in heard.lines) is warned
    finally:
        logging.getLogger("swift").removeHandler(heard)


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.mark.parametrize("contents", [False, True])
def test_the_log_has_contents_only_when_asked(tiny_model_dir: Path, serving_backend: Any, contents: bool) -> None:
    heard = _Heard()
    logging.getLogger("swift").addHandler(heard)
    secret = "the word is marmalade"
    body = {"messages": [{"role": "user", "content": secret}], "max_tokens": 3}
    settings = {"access_log": True, "log_contents": contents, "api_key": ["hidden-key"]}
    try:
        with live_server(tiny_model_dir, backend=serving_backend, **settings) as live:
            headers = {"Authorization": "Bearer hidden-key"}
            answer = live.post(CHAT, body, headers=headers)
            live.post("/v1/completions", {"prompt": secret, "max_tokens": 3}, headers=headers)
            live.events_text = live.post(CHAT, {**body, "stream": True}, headers=headers).text  # type: ignore[attr-defined]
            live.get("/marmalade", headers=headers)
        lines = "\n".join(heard.lines)
    finally:
        logging.getLogger("swift").removeHandler(heard)
    assert ("marmalade" in lines) is contents
    assert "hidden-key" not in lines
    assert answer.headers["x-request-id"] in lines
    assert '"prompt_tokens":' in lines and '"status":404' in lines


class _Failing:
    """An engine whose answers fail while `broken` is set."""

    def __init__(self, backend: Any) -> None:
        self._backend, self.broken = backend, False
        self.error: SwiftError = SwiftError("out of memory")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def close(self) -> None:
        pass

    def submit(self, request: Any, sink: Any) -> None:
        if not self.broken:
            self._backend.submit(request, sink)
            return
        last = Update(request.id, finish_reason="error", error=self.error)
        threading.Timer(0.05, lambda: sink(last)).start()


def test_a_failing_engine_is_told(tiny_model_dir: Path, serving_backend: Any) -> None:
    config = ServeConfig(port=0, access_log=False)
    engine = _Failing(serving_backend)
    models = [ServedModel(MODEL, talker_of(tiny_model_dir, engine, config))]
    with running(config, models) as server:
        engine.broken = True
        for stream in (False, True):
            failed = httpx2.post(server.url + CHAT, json={**SHORT, "stream": stream})
            assert failed.status_code == 500 and "out of memory" in failed.json()["error"]["message"]
        assert httpx2.get(server.url + "/health").status_code == 503
        assert httpx2.get(server.url + "/ready").status_code == 503
        engine.broken = False
        assert httpx2.post(server.url + CHAT, json=SHORT).status_code == 200
        assert httpx2.get(server.url + "/health").status_code == 200
        # where nobody asks any more, the question about its health does
        engine.broken = True
        assert httpx2.post(server.url + CHAT, json=SHORT).status_code == 500
        assert server.services is not None
        models = server.services.models
        models.failed_at -= 100
        assert httpx2.get(server.url + "/health").status_code == 503
        engine.broken = False
        assert httpx2.get(server.url + "/health").status_code == 503  # not asked again at once
        models.failed_at -= 100
        assert httpx2.get(server.url + "/health").status_code == 200


def test_a_request_at_fault_is_no_failure_of_the_engine(tiny_model_dir: Path, serving_backend: Any) -> None:
    """An engine may find out late, a server of another project for one."""
    config = ServeConfig(port=0, access_log=False)
    engine = _Failing(serving_backend)
    models = [ServedModel(MODEL, talker_of(tiny_model_dir, engine, config))]
    with running(config, models) as server:
        engine.broken, engine.error = True, refusal("vllm", 400, '{"error": {"message": "no such grammar"}}')
        refused = httpx2.post(server.url + CHAT, json=SHORT)
        assert refused.status_code == 400 and "no such grammar" in refused.json()["error"]["message"]
        assert httpx2.get(server.url + "/health").status_code == 200
        engine.error = refusal("vllm", 500, '{"error": {"message": "died"}}')
        assert httpx2.post(server.url + CHAT, json=SHORT).status_code == 500
        assert httpx2.get(server.url + "/health").status_code == 503


def test_metrics_count_what_happened(tiny_model_dir: Path, serving_backend: Any) -> None:
    with live_server(tiny_model_dir, backend=serving_backend) as live:
        for _ in range(3):
            live.post(CHAT, SHORT)
        live.post(CHAT, raw=b"{")
        found = {}
        for line in live.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[name] = float(value)
        assert found[f'swift_requests_total{{route="{CHAT}",status="200"}}'] == 3
        assert found[f'swift_requests_total{{route="{CHAT}",status="400"}}'] == 1
        assert found["swift_request_seconds_count"] == found['swift_request_seconds_bucket{le="+Inf"}'] == 3
        assert found["swift_request_generated_tokens_sum"] == 6
        assert found['swift_engine_generated_tokens_total{model="tiny"}'] >= 6
        assert found['swift_engine_blocks_total{model="tiny"}'] > 0


def test_one_wakeup_brings_what_a_step_made() -> None:
    import asyncio

    from swift.serving.mailbox import Bridge, Mailbox

    async def main() -> tuple[int, int]:
        loop = asyncio.get_running_loop()
        bridge = Bridge(loop)
        boxes = [Mailbox(loop) for _ in range(32)]
        sinks = [bridge.sink(box, 0) for box in boxes]

        def step() -> None:
            for sink in sinks:
                sink(Update("x", tokens=[1]))

        thread = threading.Thread(target=step)
        thread.start()
        thread.join()  # holds the loop, so that all is there when it wakes
        taken = [len(await box.take()) for box in boxes]
        return bridge.num_wakeups, sum(taken)

    assert asyncio.run(main()) == (1, 32)


def test_nothing_is_lost_between_threads() -> None:
    import asyncio

    from swift.serving.mailbox import Bridge, Mailbox

    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        bridge, box, found = Bridge(loop), Mailbox(loop), []

        def work() -> None:
            sink = bridge.sink(box, 0)
            for number in range(20_000):
                sink(Update("x", tokens=[number]))
                if number % 1000 == 0:
                    time.sleep(0.001)

        thread = threading.Thread(target=work)
        thread.start()
        while len(found) < 20_000:
            found += [update.tokens[0] for _, update in await box.take()]
        thread.join()
        return found

    assert asyncio.run(main()) == list(range(20_000))
