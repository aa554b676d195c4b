"""What a router reads of a request: the model, the beginning of the prompt, and whether its answer could be taken up by
another replica. The body is parsed once, and sent on as it came.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import orjson

from swift.serving.router.balance import prefix_chain

_CONTINUED = frozenset({"/v1/chat/completions", "/v1/completions"})


@dataclass(frozen=True)
class Asked:
    """A request on its way.

    Attributes:
        path: with its query.
        model: None where it names none.
        chain: of its prompt (`prefix_chain`); empty for requests without one.
        continuable: it asks for a stream that an equal server could go on with, if the draws have a seed.
    """

    method: str
    path: str
    body: bytes
    content_type: str
    model: str | None = None
    chain: tuple[int, ...] = ()
    continuable: bool = False
    seeded_body: bytes = b""


def read_request(method: str, path: str, body: bytes, content_type: str) -> Asked:
    """Look at a request. What is wrong with it is left to the replica to say."""
    asked = Asked(method, path, body, content_type, seeded_body=body)
    if method != "POST":
        return asked
    try:
        values = orjson.loads(body)
    except orjson.JSONDecodeError:
        return asked
    if not isinstance(values, dict):
        return asked
    model = values.get("model")
    continuable = path in _CONTINUED and values.get("stream") is True and not values.get("tools")
    return Asked(
        method,
        path,
        body,
        content_type,
        model if isinstance(model, str) else None,
        prefix_chain(_prompt(values)),
        continuable,
        _seeded(body, values) if continuable else body,
    )


def _prompt(values: dict[str, Any]) -> bytes:
    """A text that begins alike where the models' inputs begin alike."""
    if "messages" in values:
        parts: Any = [values.get("tools"), values["messages"]]
    elif "prompt" in values:
        parts = values["prompt"]
    else:
        parts = [values.get("instructions"), values.get("input")] if "input" in values else None
    if parts is None:
        return b""
    return orjson.dumps([values.get("model"), parts])


def _seeded(body: bytes, values: dict[str, Any]) -> bytes:
    """The body with a seed of its own, where it has none: then its answer can be made a second time."""
    if values.get("seed") is not None:
        return body
    seed = secrets.randbits(62)
    if "seed" in values:  # null
        return orjson.dumps({**values, "seed": seed})
    return b'{"seed":%d,' % seed + body.lstrip()[1:]  # it holds other fields, so the comma is right
