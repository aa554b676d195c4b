"""vLLM as a backend: its own server in its own environment, spoken to over HTTP.

vLLM pins versions of torch and transformers that this program doesn't run with, so it lives in an environment of its
own (`--engine_python`), and is started on a free port of this machine with a key that nobody else knows. A server that
runs already is named by `--engine_url`.

vLLM for CPUs has been run; on a GPU it has not yet.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig

from swift.config.engine_checks import paged_settings
from swift.core.errors import DependencyError, SwiftError, UsageError
from swift.core.logging import get_logger
from swift.inference.backends.base import Feature, ModelInfo
from swift.inference.backends.http import Endpoint, HttpBackend
from swift.inference.backends.process import ServerProcess, free_port

if TYPE_CHECKING:
    from swift.inference.loading import Prepared

log = get_logger("inference")

_START_S = 900.0
_FEATURES: frozenset[Feature] = frozenset({"logprobs", "structure", "penalties", "logit_bias", "min_p"})
_MODEL = "model"
# vLLM's own variables; who has set them keeps them
_ON_CPU = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "2"}
# what vLLM's builds for CPUs say when they can't start -> what to do
_KNOWN_FAULTS = {
    "torchvision::nms does not exist": "pip uninstall torchvision torchaudio in vLLM's environment",
    "No package metadata was found for vllm": "vllm-cpu is looked for under the name vllm: give its environment a "
    "vllm-<version>+cpu.dist-info folder with a METADATA file (Name: vllm, Version: <version>+cpu)",
}


def vllm_backend(prepared: Prepared) -> HttpBackend:
    """vLLM with the model that `prepared` describes; it isn't started yet.

    Raises:
        UsageError: settings that vLLM isn't driven with. DependencyError: it isn't there.
    """
    config = prepared.config
    engine = config.engine
    if given := paged_settings(engine):
        raise UsageError(
            f"{given[0]} is a setting of the paged engine, and vLLM runs the model",
            where=f"--{given[0]}",
            fix="say it in vLLM's own words with --engine_args",
        )
    if prepared.adapter is not None:
        raise UsageError(
            "vLLM is not driven with adapters", where="--adapters", fix="merge it first: swift merge-lora --adapters …"
        )
    text = AutoConfig.from_pretrained(
        str(prepared.base), local_files_only=True, trust_remote_code=config.model.trust_remote_code
    ).get_text_config()
    info = ModelInfo(
        context_length=config.model.max_model_len or getattr(text, "max_position_embeddings", None),
        vocab_size=text.vocab_size,
        stop_token_ids=tuple(prepared.stop_token_ids()),
        features=_FEATURES,
        max_logprobs=20,
    )
    if engine.engine_url is not None:
        url, key = engine.engine_url.rstrip("/"), os.environ.get("OPENAI_API_KEY")
        return HttpBackend("vllm", lambda: Endpoint(url, _first_model(url, key), key), info)
    python = engine.engine_python or sys.executable
    if engine.engine_python is None and importlib.util.find_spec("vllm") is None:
        raise DependencyError(
            "vLLM is not installed here",
            fix="install it into an environment of its own and name that one's python with --engine_python, or a "
            "running server with --engine_url",
        )
    own = _Server(serve_command(python, prepared, info), prepared.device.type)
    return HttpBackend("vllm", own.start, info, stop=own.stop)


def serve_command(python: str, prepared: Prepared, info: ModelInfo) -> list[str]:
    """The words that start vLLM's server, without address and key."""
    config = prepared.config
    words = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(prepared.base)]
    words += ["--served-model-name", _MODEL, "--dtype", str(prepared.dtype).removeprefix("torch.")]
    words += ["--max-num-seqs", str(config.engine.max_batch_size), "--max-logprobs", str(info.max_logprobs)]
    if info.context_length is not None:
        words += ["--max-model-len", str(info.context_length)]
    if config.model.trust_remote_code:
        words += ["--trust-remote-code"]
    if prepared.device.type == "cpu":
        words += ["--enforce-eager"]
    return [*words, *config.engine.engine_args]


class _Server:
    """vLLM's server as a child process."""

    def __init__(self, command: Sequence[str], device: str) -> None:
        self._command = command
        self._environment: dict[str, str] = {}
        if device == "cpu":
            self._environment = {name: value for name, value in _ON_CPU.items() if name not in os.environ}
        self._process: ServerProcess | None = None

    def start(self) -> Endpoint:
        port, key = free_port(), secrets.token_hex(16)
        handle, path = tempfile.mkstemp(prefix="vllm-", suffix=".log")
        os.close(handle)
        log.info("starting vLLM; what it says is in %s", path)
        words = [*self._command, "--host", "127.0.0.1", "--port", str(port)]
        # the key goes by the environment: command lines can be read by everyone
        self._process = ServerProcess(words, Path(path), {**self._environment, "VLLM_API_KEY": key})
        try:
            self._process.wait_until(f"http://127.0.0.1:{port}/health", timeout_s=_START_S)
        except SwiftError as error:
            for sign, fix in _KNOWN_FAULTS.items():
                if sign in Path(path).read_text(encoding="utf-8", errors="replace"):
                    raise SwiftError(error.message, where=error.where, fix=fix) from error
            raise
        return Endpoint(f"http://127.0.0.1:{port}/v1", _MODEL, key)

    def stop(self) -> None:
        if self._process is not None:
            self._process.close()


def _first_model(url: str, key: str | None) -> str:
    """The model that a server offers first."""
    request = urllib.request.Request(f"{url}/models", headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # as requests go: by no proxy
        with opener.open(request, timeout=10) as answer:
            found: Any = json.load(answer)
        return str(found["data"][0]["id"])
    except (OSError, urllib.error.URLError, ValueError, KeyError, IndexError) as error:
        raise SwiftError(
            f"no server answers at {url}: {error}", where="--engine_url", fix="give its address up to /v1"
        ) from error
