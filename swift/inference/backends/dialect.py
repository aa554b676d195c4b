"""What differs between servers that answer in tokens: how they are asked, and how their answers are read.

A dialect is pure: it makes JSON bodies and reads JSON objects. Connections are the business of `http.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from swift.core.errors import SwiftError, UsageError
from swift.inference.backends.base import ModelInfo
from swift.inference.requests import Request, SamplingParams, Update

_REQUEST_AT_FAULT = frozenset({400, 413, 422})


@dataclass(frozen=True)
class Call:
    """A POST to a server.

    Attributes:
        path: from the server's root, with a slash.
        body: sent as JSON; None: nothing is sent.
        query: of the address.
    """

    path: str
    body: Mapping[str, Any] | None = None
    query: Mapping[str, str] | None = None


Reader = Callable[[dict[str, Any]], Iterable[Update]]
"""Takes the JSON objects of one answer's stream in their order."""


class Enough(Exception):
    """Raised by a reader behind an answer's last update, where the server would go on: the connection is closed."""


class Dialect(Protocol):
    """How one kind of server is spoken to.

    Only what the backend's `ModelInfo.features` has is asked of a dialect.
    """

    def question(self, request: Request, model: str, info: ModelInfo) -> Call:
        """A request, answered by a stream of server-sent events.

        Raises:
            UsageError: the server has no way to be asked this.
        """
        ...

    def reader(self, request: Request) -> Reader:
        """What reads the answer. It raises ValueError where the server doesn't answer in tokens."""
        ...

    def cancel(self, request: Request) -> Sequence[Call]:
        """What to say when a request is left, besides closing its connection."""
        ...

    def load_adapter(self, name: str, folder: Path) -> Sequence[Call]: ...

    def unload_adapter(self, name: str) -> Sequence[Call]: ...

    def update_weights(self, folder: Path) -> Sequence[Call]:
        """Take weights by name from the safetensors files of a folder, and forget what was cached."""
        ...

    def sleep(self, level: int) -> Sequence[Call]:
        """Give memory back: 1 keeps the weights in main memory, 2 forgets them."""
        ...

    def wake(self, level: int) -> Sequence[Call]: ...


def most_tokens(request: Request, info: ModelInfo) -> int | None:
    """How many tokens an answer may have: what was asked for, and no more than the context leaves."""
    most = request.params.max_new_tokens
    if info.context_length is None:
        return most
    left = info.context_length - len(request.prompt)
    return left if most is None else min(most, left)


def end_tokens(params: SamplingParams, info: ModelInfo) -> list[int]:
    """The ids that end an answer: the model's own, unless they are ignored, and the request's."""
    return [*(() if params.ignore_eos else info.stop_token_ids), *params.stop_token_ids]


def seed_number(params: SamplingParams) -> int:
    """The seed as 31 bits, equal for equal seeds."""
    return int.from_bytes(hashlib.sha256(params.seed.encode()).digest()[:4], "big") >> 1


def refusal(name: str, status: int, text: str) -> SwiftError:
    """What a server said in an error body: a UsageError where the request is at fault."""
    try:
        body = json.loads(text)
        said = body["error"]["message"] if isinstance(body.get("error"), dict) else body["message"]
    except (ValueError, KeyError, TypeError, AttributeError):
        said = text.strip()[:300]
    kind = UsageError if status in _REQUEST_AT_FAULT else SwiftError
    return kind(f"{name} answered {status}: {said}")
