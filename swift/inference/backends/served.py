"""An engine of another project as a backend: its own server in its own environment, spoken to over HTTP.

Such projects pin versions of torch and transformers that this program doesn't run with, so each lives in an
environment of its own (`--engine_python`), and is started on a free port of this machine with a key that nobody else
knows. A server that runs already is named by `--engine_url`. What differs between them is a `Project`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig

from swift.config.engine_checks import paged_settings
from swift.config.engine_words import words_for
from swift.core.errors import DependencyError, SwiftError, UsageError
from swift.core.logging import get_logger
from swift.inference.backends.base import Feature, ModelInfo
from swift.inference.backends.dialect import Dialect
from swift.inference.backends.http import Endpoint, HttpBackend
from swift.inference.backends.process import ServerProcess, free_port
from swift.inference.backends.weight_files import shapes_in
from swift.models.adapters import read_adapter_config

if TYPE_CHECKING:
    from swift.inference.loading import Prepared

log = get_logger("inference")

_START_S = 900.0
_MODEL = "model"
_FIRST_ADAPTER = "adapter"


@dataclass(frozen=True)
class Launch:
    """A server that is about to be started.

    Attributes:
        python: of the environment that has the engine.
        prepared: the model and the settings.
        info: what is known of the model.
        model: name of the model in requests.
        port: on 127.0.0.1.
        key: API key that the server has to ask for.
        folder: scratch of this server alone, readable by nobody else, gone when it ends.
    """

    python: str
    prepared: Prepared
    info: ModelInfo
    model: str
    port: int
    key: str
    folder: Path


@dataclass(frozen=True)
class Project:
    """What differs between engines that are run as servers.

    Attributes:
        name: as in `--infer_backend`.
        title: as the project writes itself.
        package: what is imported where it is installed.
        dialect: how its server is spoken to.
        features: what any of its servers is asked for.
        own_features: what only a server that is started here is asked for besides (it shares our disk and settings).
        command: the words that start it, address and key included, without `--engine_args`.
        without: which of all these features a server that is started with these settings doesn't have.
        most_adapters: how many adapters such a server may hold together; None: any number.
        environment: variables that it needs; who has set them keeps them.
        secrets: variables of this server alone, such as its key.
        ready: path that answers 200 when the first request would be answered.
        faults: a sign in its log when it can't start -> what to do.
    """

    name: str
    title: str
    package: str
    dialect: Dialect
    features: frozenset[Feature]
    own_features: frozenset[Feature]
    command: Callable[[Launch], Sequence[str]]
    without: Callable[[Prepared], frozenset[Feature]] = lambda prepared: frozenset()
    most_adapters: Callable[[Prepared], int | None] = lambda prepared: None
    environment: Callable[[Launch], Mapping[str, str]] = lambda launch: {}
    secrets: Callable[[Launch], Mapping[str, str]] = lambda launch: {}
    ready: str = "/health"
    faults: Mapping[str, str] = field(default_factory=dict)


def served_backend(project: Project, prepared: Prepared) -> HttpBackend:
    """The engine with the model that `prepared` describes; it isn't started yet.

    Raises:
        UsageError: settings that it isn't driven with. DependencyError: it isn't there.
    """
    engine = prepared.config.engine
    if given := paged_settings(engine):
        raise UsageError(
            f"{given[0]} is a setting of the paged engine, and {project.title} runs the model",
            where=f"--{given[0]}",
            fix=f"say it in {project.title}'s own words with --engine_args",
        )
    if prepared.config.infer.merge_lora:
        raise UsageError(
            f"{project.title} reads the model's own files, and nothing is merged into them",
            where="--merge_lora",
            fix="leave it out, or swift merge-lora first, and serve the result",
        )
    if engine.engine_url is not None:
        return _running(project, prepared, engine.engine_url)
    python = engine.engine_python or sys.executable
    if engine.engine_python is None and importlib.util.find_spec(project.package) is None:
        raise DependencyError(
            f"{project.title} is not installed here",
            fix="install it into an environment of its own and name that one's python with --engine_python, or a "
            "running server with --engine_url",
        )
    info = _model_info(prepared, (project.features | project.own_features) - project.without(prepared))
    server = OwnServer(project, python, prepared, info)
    return HttpBackend(
        project.name,
        server.start,
        info,
        project.dialect,
        stop=server.stop,
        shapes=lambda: shapes_in(prepared.base),
        adapter=None if prepared.adapter is None else (_FIRST_ADAPTER, prepared.adapter),
        most_adapters=project.most_adapters(prepared),
    )


def _running(project: Project, prepared: Prepared, url: str) -> HttpBackend:
    if prepared.adapter is not None:
        raise UsageError(
            "a server that runs already has its own weights",
            where="--adapters",
            fix="merge the adapter first: swift merge-lora --adapters …, and serve the result",
        )
    root, key = url.rstrip("/").removesuffix("/v1"), os.environ.get("OPENAI_API_KEY")
    info = _model_info(prepared, project.features)
    return HttpBackend(project.name, lambda: Endpoint(root, _first_model(root, key), key), info, project.dialect)


def _model_info(prepared: Prepared, features: frozenset[Feature]) -> ModelInfo:
    model = prepared.config.model
    text = AutoConfig.from_pretrained(
        str(prepared.base), local_files_only=True, trust_remote_code=model.trust_remote_code
    ).get_text_config()
    return ModelInfo(
        context_length=model.max_model_len or getattr(text, "max_position_embeddings", None),
        vocab_size=text.vocab_size,
        stop_token_ids=tuple(prepared.stop_token_ids()),
        features=features,
        max_logprobs=20,
    )


def most_lora_rank(prepared: Prepared) -> int:
    """The highest rank of adapters that a server has to leave room for: what was asked for, and the given one's."""
    most = prepared.config.engine.max_lora_rank
    if prepared.adapter is None:
        return most
    config = read_adapter_config(prepared.adapter)
    ranks = [getattr(config, "r", 0), *(getattr(config, "rank_pattern", None) or {}).values()]
    return max(most, *ranks)


class OwnServer:
    """A project's server as a child process."""

    def __init__(self, project: Project, python: str, prepared: Prepared, info: ModelInfo) -> None:
        self._project = project
        self._python = python
        self._prepared = prepared
        self._info = info
        self._folder: Path | None = None
        self._process: ServerProcess | None = None

    def start(self) -> Endpoint:
        """Returns when it answers.

        Raises:
            SwiftError: it can't be started; the message has what it said last.
        """
        project = self._project
        self._folder = Path(tempfile.mkdtemp(prefix=f"{project.name}-"))
        handle, path = tempfile.mkstemp(prefix=f"{project.name}-", suffix=".log")
        os.close(handle)
        launch = Launch(
            self._python, self._prepared, self._info, _MODEL, free_port(), secrets.token_hex(16), self._folder
        )
        log.info("starting %s; what it says is in %s", project.title, path)
        usual = {name: value for name, value in project.environment(launch).items() if name not in os.environ}
        engine = self._prepared.config.engine
        words = [*project.command(launch), *words_for(engine.engine_words), *engine.engine_args]
        self._process = ServerProcess(words, Path(path), {**usual, **project.secrets(launch)})
        try:
            self._process.wait_until(f"http://127.0.0.1:{launch.port}{project.ready}", timeout_s=_START_S)
        except SwiftError as error:
            for sign, fix in project.faults.items():
                if sign in Path(path).read_text(encoding="utf-8", errors="replace"):
                    raise SwiftError(error.message, where=error.where, fix=fix) from error
            raise
        return Endpoint(f"http://127.0.0.1:{launch.port}", _MODEL, launch.key)

    def stop(self) -> None:
        if self._process is not None:
            self._process.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _first_model(url: str, key: str | None) -> str:
    """The model that a server offers first."""
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # as requests go: by no proxy
        with opener.open(request, timeout=10) as answer:
            found: Any = json.load(answer)
        return str(found["data"][0]["id"])
    except (OSError, urllib.error.URLError, ValueError, KeyError, IndexError) as error:
        raise SwiftError(
            f"no server answers at {url}/v1: {error}", where="--engine_url", fix="give its address up to /v1"
        ) from error
