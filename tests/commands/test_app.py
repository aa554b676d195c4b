"""`swift app`: what it refuses before anything is loaded, and as a process: ready, in use, and at its end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from swift.commands.app import app
from swift.config import AppConfig, build_config
from swift.core.errors import UsageError

NOWHERE = "http://127.0.0.1:9/v1"


class Shown:
    """A running `swift app` and the lines that it wrote."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "swift.cli", "app", "--server_port", "0", *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)

    def url(self) -> str:
        return self.wait_for("chat page at").split()[-1]

    def wait_for(self, words: str) -> str:
        """The first line that has these words."""
        end = time.monotonic() + 120
        while True:
            if found := [line for line in list(self.lines) if words in line]:
                return found[0]
            assert time.monotonic() < end and self._reader.is_alive(), "".join(self.lines)
            time.sleep(0.02)

    def ended(self) -> int:
        code = self.process.wait(60)
        self._reader.join(10)
        return code


@contextmanager
def shown(*flags: str) -> Iterator[Shown]:
    running = Shown(*flags)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
        running.ended()


def test_app_is_never_shared() -> None:
    with pytest.raises(UsageError, match="another company") as caught:
        app(share=True)
    assert caught.value.where == "--share"


def test_app_refuses_settings_of_a_model_beside_an_endpoint_by_name() -> None:
    with pytest.raises(UsageError, match="has its model and engine already") as caught:
        app(base_url=NOWHERE, model="smollm2", max_batch_size=4, device="cpu", temperature=0.5, system="x")
    assert caught.value.where == "--base_url and --model and --max_batch_size and --device"


def test_app_refuses_a_key_without_an_endpoint() -> None:
    with pytest.raises(UsageError, match="a key without an endpoint"):
        app(model="smollm2", api_key="x")


def test_app_names_its_own_flags_for_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UsageError, match="can't listen") as caught:
        app(base_url=NOWHERE, server_port=taken.getsockname()[1])
    assert "--server_port" in str(caught.value.where) and "--server_port" in str(caught.value.fix)


def test_app_takes_model_and_template_from_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "base"}')
    saved = "model: {model: base}\ntemplate: {template: chatml, system: Be kind.}\n"
    (tmp_path / "swift_config.yaml").write_text(saved)
    config = build_config(AppConfig, {"adapters": [str(tmp_path)]})
    assert (config.model.model, config.template.template, config.template.system) == ("base", "chatml", "Be kind.")
    config = build_config(AppConfig, {"adapters": [str(tmp_path)], "load_args": False})
    assert config.template.system is None


def test_the_page_begins_with_the_settings_given(tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Be short.\n")
    flags = ["--temperature", "0", "--max_new_tokens", "9", "--stop_words", "END", "--system", str(prompt)]
    with shown("--base_url", NOWHERE, *flags) as running:
        settings = httpx2.get(f"{running.url()}/settings").json()
        assert settings["start"] == {"temperature": 0, "max_tokens": 9, "stop": ["END"], "system": "Be short."}
        assert "can't be reached now" in "".join(running.lines)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_page_over_an_endpoint(number: signal.Signals) -> None:
    with shown("--base_url", NOWHERE, "--server_name", "::1") as running:
        assert running.url().startswith("http://[::1]:")
        assert httpx2.get(running.url()).status_code == 200
        running.process.send_signal(number)
        assert running.ended() == 0
        assert running.lines[-1] == "the page is closed\n"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["chat page at", "loading the model", "ready after"])
def test_a_signal_ends_a_page_over_a_model(tiny_model_dir: Path, number: signal.Signals, moment: str) -> None:
    with shown("--model", str(tiny_model_dir), "--kv_cache_gib", "0.05") as running:
        running.wait_for(moment)
        running.process.send_signal(number)
        assert running.ended() == 0
        assert not any("Traceback" in line for line in running.lines)


@pytest.mark.slow
def test_a_model_is_asked_through_the_page(tiny_model_dir: Path) -> None:
    flags = ["--model", str(tiny_model_dir), "--kv_cache_gib", "0.05", "--system", "Be kind."]
    with shown(*flags) as running:
        running.wait_for("ready after")
        url = running.url()
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "stream": True}
        answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.text.endswith("data: [DONE]\n\n")
        behind = re.search(r"listening at (\S+),", "".join(running.lines))
        assert behind and httpx2.get(f"{behind[1]}/v1/models").status_code == 401  # nobody else has its key
        running.process.send_signal(signal.SIGTERM)
        assert running.ended() == 0
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(behind[1])


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_ends_the_page(tiny_model_dir: Path, tmp_path: Path) -> None:
    for path in tiny_model_dir.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tokenizer.json").write_text("{}")
    with shown("--model", str(tmp_path)) as running:
        assert running.ended() == 1
        assert any(line.startswith("error: ") for line in running.lines), running.lines
        assert not any("Traceback" in line for line in running.lines), "".join(running.lines)
