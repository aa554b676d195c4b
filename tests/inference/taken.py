"""What backends answered, for tests that ask several of them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from swift.inference.requests import FinishReason, Request, TokenLogprob, Update


@dataclass(frozen=True)
class Whole:
    """One answer, its pieces put together."""

    tokens: list[int]
    text: str
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob | None] | None
    last: Update


class Taken:
    """The updates of one request."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.ended = threading.Event()

    def take(self, update: Update) -> None:
        self.updates.append(update)
        if update.finish_reason is not None:
            self.ended.set()

    def whole(self) -> Whole:
        """Waits for the end; an error is raised."""
        assert self.ended.wait(60)
        last = self.updates[-1]
        if last.error is not None:
            raise last.error
        return Whole(
            [token for update in self.updates for token in update.tokens],
            "".join(update.text for update in self.updates),
            last.finish_reason,
            [entry for update in self.updates for entry in update.logprobs or ()],
            next((update.prompt_logprobs for update in self.updates if update.prompt_logprobs is not None), None),
            last,
        )


def asked(backend: Any, *requests: Request) -> list[Taken]:
    """Send requests together."""
    found = [Taken() for _ in requests]
    for request, taken in zip(requests, found, strict=True):
        backend.submit(request, taken.take)
    return found
