"""`swift deploy --replicas` as processes: kill -9 in the midst of streams and of the router; rolling restarts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from swift.commands.replicas import environments, replica_config
from swift.config import DeployConfig, build_config
from swift.config.checks import find_problems
from swift.config.nodes import processes_wanted

CHAT = "/v1/chat/completions"
ROUTER = [sys.executable, "-m", "swift.cli", "deploy"]


def _wait_for(condition: Callable[[], Any], limit_s: float = 90.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.05)


@contextmanager
def _deployed(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """(process, url, its lines so far) of a router whose replicas are ready."""
    command = [*ROUTER, "--port", "0", "--kv_cache_gib", "0.02", "--access_log", "false", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines: list[str] = []

    def collect() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)

    reader = threading.Thread(target=collect, daemon=True)
    reader.start()
    try:
        _wait_for(lambda: process.poll() is not None or any(line.startswith("ready: ") for line in lines), 120)
        found = re.search(r"http\S+(?=/v1)", "".join(lines))
        assert process.poll() is None and found, "".join(lines)
        yield process, found[0], lines
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(30)
        finally:
            process.kill()
            reader.join(10)


def _children(process: subprocess.Popen[str]) -> list[int]:
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=False
    )
    return [int(word) for word in found.stdout.split()]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _starts(url: str) -> dict[str, int]:
    text = httpx2.get(f"{url}/metrics", timeout=30).text
    return {name: int(count) for name, count in re.findall(r'swift_replica_starts_total\{replica="(\d)"\} (\d+)', text)}


class _Streams:
    """Many streams at once, and what came of them."""

    def __init__(self, url: str, count: int, max_tokens: int) -> None:
        self.url, self.count, self.max_tokens = url, count, max_tokens
        self.begun = [0] * count

    def ask(self, number: int) -> tuple[list[int], str, list[Any], str]:
        body = {
            "messages": [{"role": "user", "content": f"Tell me of number {number}."}], "max_tokens": self.max_tokens,
            "ignore_eos": True, "stream": True, "return_token_ids": True, "temperature": number % 2, "seed": number,
        }  # fmt: skip
        tokens: list[int] = []
        text, errors, last = "", [], ""
        with httpx2.stream("POST", self.url + CHAT, json=body, timeout=120) as response:
            for line in response.iter_lines():
                last = line or last
                if line.startswith("data: {"):
                    value = json.loads(line[6:])
                    if "error" in value:
                        errors.append(value)
                        continue
                    self.begun[number] += 1
                    tokens += value["choices"][0].get("token_ids") or []
                    text += value["choices"][0]["delta"].get("content") or ""
        return tokens, text, errors, last

    def all(self) -> list[tuple[list[int], str, list[Any], str]]:
        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(self.ask, range(self.count)))


@pytest.mark.slow
def test_a_replica_killed_in_the_midst_of_streams_is_not_noticed(tiny_model_dir: Path) -> None:
    with _deployed("--model", str(tiny_model_dir), "--replicas", "2") as (process, url, lines):
        expected = _Streams(url, 12, 120).all()
        assert all(len(tokens) == 120 for tokens, *_ in expected)
        streams = _Streams(url, 12, 120)
        found: list[Any] = []
        asking = threading.Thread(target=lambda: found.extend(streams.all()))
        asking.start()
        _wait_for(lambda: min(streams.begun) > 5)
        killed = _children(process)[0]
        os.kill(killed, signal.SIGKILL)
        asking.join()
        assert found == expected  # token for token, no errors, all with their end
        assert all(last == "data: [DONE]" for *_, last in found)
        assert "failed with request" in "".join(lines)
        _wait_for(lambda: sum(_starts(url).values()) == 3)  # it comes back, elsewhere
        _wait_for(lambda: set(httpx2.get(f"{url}/ready").json()["replicas"].values()) == {"ready"})
        assert killed not in _children(process) and len(_children(process)) == 2
        # a kill -9 of the router leaves nobody behind
        replicas = _children(process)
        process.kill()
        process.wait()
        _wait_for(lambda: not any(_alive(pid) for pid in replicas))


@pytest.mark.slow
def test_replicas_are_restarted_one_by_one_under_load(tiny_model_dir: Path) -> None:
    with _deployed("--model", str(tiny_model_dir), "--replicas", "2", "--drain_s", "0") as (process, url, lines):
        before = _children(process)
        expected = _Streams(url, 8, 200).all()
        process.send_signal(signal.SIGHUP)
        while not any("all replicas were restarted" in line for line in lines):
            assert _Streams(url, 8, 200).all() == expected
        assert not set(before) & set(_children(process)) and _starts(url) == {"0": 2, "1": 2}
        # keys: only the router knows those of its replicas
        port = re.findall(
            r"--port (\d+)", Path(f"/proc/{_children(process)[0]}/cmdline").read_text().replace("\0", " ")
        )
        assert httpx2.post(f"http://127.0.0.1:{port[0]}{CHAT}", json={"messages": []}).status_code == 401
        process.terminate()
        assert process.wait(60) in (0, -signal.SIGTERM)


@pytest.mark.slow
def test_replicas_that_cannot_start_end_the_router(tiny_model_dir: Path) -> None:
    command = [
        *ROUTER,
        "--model",
        str(tiny_model_dir),
        "--port",
        "0",
        "--replicas",
        "2",
        "--served_model_name",
        "x",
        "x",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and "ended before it was ready" in done.stderr
    assert "two models can't both be called x" in done.stderr


def _problems(**flags: Any) -> list[str]:
    return [str(problem.where) for problem in find_problems(build_config(DeployConfig, {"model": "smollm2", **flags}))]


def test_settings_that_cannot_be_meant() -> None:
    url = "http://gpu1:8000"
    assert not _problems(replicas=3) and not _problems(replica_urls=[url, "https://b/prefix"], replica_api_key="k")
    assert _problems(replicas=0) == ["--replicas"]
    assert _problems(replica_check_s=0) == ["--replica_check_s"]
    assert _problems(replicas=2, replica_urls=[url])
    assert _problems(replica_urls=[url, url]) == ["--replica_urls"]
    for wrong in ("gpu1:8000", "ftp://a", "http://", url + "/v1", url + "/v1/", "http://a:b"):
        assert _problems(replica_urls=[wrong]) == ["--replica_urls"], wrong
    assert _problems(replica_api_key="k") == ["--replica_api_key"]
    assert _problems(executor="ray", replicas=2) == ["--executor"]


def test_what_a_replica_is_started_with(tmp_path: Path) -> None:
    config = build_config(
        DeployConfig,
        {"model": "smollm2", "replicas": 4, "tensor_parallel_size": 2, "api_key": ["secret"], "host": "0.0.0.0",
         "requests_per_minute": 5, "max_batch_size": 7, "temperature": 0.5, "device": "cpu"},
    )  # fmt: skip
    made = replica_config(config, tmp_path / "keys")
    assert made.serve.host == "127.0.0.1" and not made.serve.api_key and made.serve.requests_per_minute is None
    assert made.engine.max_batch_size == 7 and made.generation.temperature == 0.5 and not made.scale.routed
    assert made.engine.kv_cache_gib is None or made.engine.kv_cache_gib <= 4
    assert processes_wanted(config, {}) == 1 and processes_wanted(made, {}) == 2
    assert environments(config, {"OMP_NUM_THREADS": "3"}) == [{"OMP_NUM_THREADS": "3"}] * 4
    assert all(int(each["OMP_NUM_THREADS"]) >= 1 for each in environments(config, {}))
    config.serve.device = "cuda"
    shares = [
        each["CUDA_VISIBLE_DEVICES"] for each in environments(config, {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"})
    ]
    assert shares == ["0,1", "2,3", "4,5", "6,7"]
