"""A stream taken up by another replica: what the client has already is left out, and the rest goes on without a seam.

The same request with the same seed gives the same tokens, whatever a server is doing besides. They needn't come in the
same pieces, so answers are compared by their contents: each text and list grows as it grew before. Where one doesn't,
the two aren't the same answer, and nothing of the second one is sent. Knows nothing of servers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

_HEAD = ("id", "created", "system_fingerprint")
# of a choice, its delta and its log-probabilities: what grows by pieces, and what is said once
_GROWS = frozenset({
    "content", "reasoning_content", "text", "refusal", "token_ids", "tokens", "token_logprobs", "top_logprobs",
    "text_offset",
})  # fmt: skip
_ONCE = frozenset({"role", "finish_reason", "stop_reason", "prompt_token_ids", "prompt_logprobs"})
_NESTED = frozenset({"delta", "logprobs"})

Path = tuple[int | str, ...]


class Diverged(Exception):
    """The second answer isn't the first one."""


def events(data: bytes) -> Iterator[bytes]:
    """The events of a part of a stream that holds whole ones, without the empty lines between them."""
    for each in data.split(b"\n\n"):
        if each:
            yield each


class Continuation:
    """Turns a second stream into the rest of the first.

    Args:
        sent: what the client has: whole events.

    Raises:
        Diverged: it holds what can't be compared.
    """

    def __init__(self, sent: bytes) -> None:
        self._head: dict[str, Any] = {}
        self._had: dict[Path, Any] = {}
        self._position: dict[Path, int] = {}
        self._had_usage = False
        for each in events(sent):
            value = _value(each)
            if value is None:
                continue
            self._head = self._head or {name: value[name] for name in _HEAD if name in value}
            self._had_usage = self._had_usage or not value["choices"]
            for choice in value["choices"]:
                self._keep((choice["index"],), choice)

    def rest(self, data: bytes) -> bytes:
        """What of the second stream's next whole events the client doesn't have yet.

        Raises:
            Diverged: it differs from what the client has.
        """
        return b"".join(kept + b"\n\n" for each in events(data) if (kept := self._rest(each)))

    @property
    def complete(self) -> bool:
        """Whether the second stream has come as far as the first had."""
        return all(self._position.get(path, 0) >= len(had) for path, had in self._had.items() if path[-1] in _GROWS)

    def _keep(self, path: Path, values: dict[str, Any]) -> None:
        for name, value in values.items():
            here = (*path, name)
            if name == "index" or value is None:
                continue
            if name in _GROWS:
                self._had[here] = self._had[here] + value if here in self._had else value
            elif name in _NESTED:
                self._keep(here, value)
            elif name in _ONCE:
                self._had[here] = value
            else:
                raise Diverged(f"{name} can't be continued")

    def _rest(self, each: bytes) -> bytes:
        value = _value(each)
        if value is None:
            if each == b"data: [DONE]" and not self.complete:
                raise Diverged("the second answer is shorter")
            return each
        value.update({name: self._head[name] for name in _HEAD if name in value and name in self._head})
        if not value["choices"]:
            return b"" if self._had_usage else b"data: " + orjson.dumps(value)
        value["choices"] = [kept for choice in value["choices"] if (kept := self._new((choice["index"],), choice))]
        return b"data: " + orjson.dumps(value) if value["choices"] else b""

    def _new(self, path: Path, values: dict[str, Any]) -> dict[str, Any] | None:
        """`values` without what the client has; None when nothing is left."""
        kept: dict[str, Any] = {}
        anything = False
        for name, value in values.items():
            here = (*path, name)
            if name == "index" or value is None:
                kept[name] = value
            elif name in _GROWS:
                new = self._grown(here, value)
                anything = anything or bool(new)
                if new or path[-1] != "delta":
                    kept[name] = new
            elif name in _NESTED:
                inner = self._new(here, value)
                anything = anything or inner is not None
                kept[name] = inner if inner is not None else {} if name == "delta" else None
            elif name in _ONCE:
                if here not in self._had:
                    kept[name], anything = value, True
                elif self._had[here] != value:
                    raise Diverged(f"{name} is another")
                elif name == "finish_reason":
                    kept[name] = None
            else:
                raise Diverged(f"{name} can't be continued")
        return kept if anything else None

    def _grown(self, path: Path, value: Any) -> Any:
        had = self._had.get(path)
        start = self._position.get(path, 0)
        self._position[path] = start + len(value)
        if had is None or start >= len(had):
            return value
        known = had[start : start + len(value)]
        if value[: len(known)] != known:
            raise Diverged(f"{path[-1]} differs at {start}")
        return value[len(known) :]


def _value(each: bytes) -> dict[str, Any] | None:
    """An event's JSON; None for comments and the end."""
    if not each.startswith(b"data: {"):
        return None
    value = orjson.loads(each[6:])
    if not isinstance(value.get("choices"), list):
        raise Diverged("an event without choices")
    return value
