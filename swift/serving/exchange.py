"""What belongs to one HTTP request: who asks, since when, how many tokens it took; found in its ASGI scope."""

from __future__ import annotations

import secrets
import time
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

from swift.serving.limits import Key

_NAME = "swift.exchange"


@dataclass
class Exchange:
    """One request and its answer, for limits, log and metrics.

    Attributes:
        id: given to the client as `x-request-id`.
        key: whose it is, once that is known.
        first_token_s: seconds from the start to the first token.
        contents: what was asked and answered, kept only where it is logged.
    """

    id: str = field(default_factory=lambda: secrets.token_hex(12))
    started_s: float = field(default_factory=time.monotonic)
    key: Key | None = None
    model: str = ""
    status: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    first_token_s: float | None = None
    disconnected: bool = False
    contents: dict[str, Any] = field(default_factory=dict)

    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s


def exchange_of(scope: MutableMapping[str, Any]) -> Exchange:
    """The exchange of a request; a new one for the first who asks."""
    exchange = scope.get(_NAME)
    if exchange is None:
        exchange = scope[_NAME] = Exchange()
    return exchange
