"""`swift app`: what it refuses before anything is loaded."""

from __future__ import annotations

import pytest

from swift.commands.app import app
from swift.core.errors import UsageError


def test_app_is_never_shared() -> None:
    with pytest.raises(UsageError, match="another company") as caught:
        app(share=True)
    assert caught.value.where == "--share"


def test_app_takes_an_endpoint_or_a_model() -> None:
    with pytest.raises(UsageError, match="an endpoint and a model"):
        app(base_url="http://127.0.0.1:9/v1", model="smollm2")
