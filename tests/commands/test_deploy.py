"""`swift deploy` as a process: from the command line to an answer, adapters by name, signals."""

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
from typing import Any

import httpx2
import openai
import pytest

HELLO: Any = [{"role": "user", "content": "Hello, who are you?"}]


@contextmanager
def deployed(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """(process, url, its lines so far) of a server that is ready."""
    command = [sys.executable, "-m", "swift.cli", "deploy", "--port", "0", "--kv_cache_gib", "0.05", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if line.startswith("ready after"):
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert ready.wait(120) and process.poll() is None, "".join(lines)
        found = re.search(r"http\S+(?=/v1)", "".join(lines))
        assert found, lines
        yield process, found[0], lines
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join(10)


@pytest.fixture(scope="module")
def adapter_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that changes the answers."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    tuned = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    tuned.save_pretrained(folder)
    return folder


def test_from_the_command_line_to_an_answer(tiny_model_dir: Path, adapter_dir: Path) -> None:
    flags = ["--model", str(tiny_model_dir), "--served_model_name", "small", "alias", "--admin_api_key", "boss"]
    with deployed(*flags, "--adapters", f"tuned={adapter_dir}", "--max_new_tokens", "5") as (process, url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["small", "alias", "tuned"]

        def text(name: str) -> str | None:
            answer = client.chat.completions.create(model=name, messages=HELLO, temperature=0)
            assert answer.usage and answer.usage.completion_tokens <= 5
            return answer.choices[0].message.content

        assert text("small") == text("alias") != text("tuned")
        with pytest.raises(openai.NotFoundError, match="small, alias, tuned"):
            text("other")
        admin = {"Authorization": "Bearer boss"}
        body = {"lora_name": "more", "lora_path": str(adapter_dir)}
        assert httpx2.post(f"{url}/v1/load_lora_adapter", json=body).status_code == 403
        loaded = httpx2.post(f"{url}/v1/load_lora_adapter", json=body, headers=admin)
        assert loaded.status_code == 200, loaded.text
        assert text("more") == text("tuned")
        assert httpx2.post(f"{url}/v1/unload_lora_adapter", json=body, headers=admin).status_code == 200
        with pytest.raises(openai.NotFoundError):
            text("more")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.slow
def test_a_model_over_two_processes_answers_as_one_does(tiny_model_dir: Path) -> None:
    texts = []
    for size in ("1", "2"):
        with deployed("--model", str(tiny_model_dir), "--tensor_parallel_size", size) as (process, url, lines):
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
            name = client.models.list().data[0].id
            answer = client.chat.completions.create(model=name, messages=HELLO, temperature=0, max_tokens=20)
            texts.append(answer.choices[0].message.content)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0, "".join(lines)
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_running_answer_may_end_after_the_signal(tiny_model_dir: Path, number: signal.Signals) -> None:
    with deployed("--model", str(tiny_model_dir)) as (process, url, lines):
        body = {"messages": HELLO, "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx2.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
            found = answer.iter_lines()
            next(found)
            process.send_signal(number)
            rest = [line for line in found if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        assert process.wait(30) == 0
        time.sleep(0.1)
        assert "stopped\n" in lines and not any("Traceback" in line for line in lines)


def test_what_is_wrong_is_said_before_the_model_is_loaded(tiny_model_dir: Path, tmp_path: Path) -> None:
    def fails(*flags: str) -> str:
        command = [sys.executable, "-m", "swift.cli", "deploy", "--model", str(tiny_model_dir), *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"--port {port}" in fails("--port", port)
    assert "there is no adapter folder" in fails("--adapters", f"x={tmp_path}/absent")
    assert "--api_key_file" in fails("--api_key_file", str(tmp_path / "absent"))
    assert "--ssl_certfile" in fails("--ssl_keyfile", str(tmp_path / "absent"))
