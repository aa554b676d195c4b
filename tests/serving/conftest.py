"""One engine and one server without limits for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from live_server import Live, live_server, make_backend


@pytest.fixture(scope="session")
def serving_backend(tiny_model_dir: Path) -> Iterator[Any]:
    """The engine, running. Tests leave it as they found it."""
    backend = make_backend(tiny_model_dir)
    backend.start()
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def live(tiny_model_dir: Path, serving_backend: Any) -> Iterator[Live]:
    with live_server(tiny_model_dir, backend=serving_backend, admin_api_key="admin-key") as server:
        yield server


@pytest.fixture
def client(live: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=60)
