"""What hooks into transformers' `generate`: requests choose their own tokens in it, and end when they want to.

Knows the rows of one batch; knows nothing of threads, queues or how batches are made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from transformers import LogitsProcessor, StoppingCriteria

from swift.core.errors import SwiftError
from swift.inference.choosing.chooser import Choice, RowState
from swift.inference.decoding import AnswerText
from swift.inference.requests import Request, Sink


@dataclass(eq=False)
class Row:
    """A request on its way.

    Attributes:
        arrival: its number.
        tokens: prompt and answer.
        limit: most tokens of both.
        ends: ids that end the answer.
        state: what the chooser keeps of it.
        text: what has become of its answer's tokens.
        cancelled: wanted no more.
        done: its last update was sent.
    """

    request: Request
    sink: Sink
    arrival: int
    tokens: list[int]
    limit: int
    ends: frozenset[int]
    state: RowState
    text: AnswerText
    cancelled: bool = False
    done: bool = False

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self.limit - len(self.tokens)

    def beam_key(self) -> Any:
        """What has to be equal in a batch; None: nothing, without beams."""
        params = self.request.params
        if params.num_beams == 1:
            return None
        return replace(params, seed="", stop=(), max_new_tokens=self.room), self.ends


class Chooses(Protocol):
    """Who chooses tokens, and is told of them."""

    @property
    def pad_token_id(self) -> int: ...

    def choose(self, rows: list[Row], scores: torch.Tensor) -> list[list[Choice] | SwiftError]: ...

    def take(self, row: Row, choice: Choice) -> None: ...

    def end(self, row: Row, error: SwiftError | None = None) -> None: ...


class Choosing(LogitsProcessor):
    """Chooses the next token of each row and leaves it as the only candidate."""

    def __init__(self, worker: Chooses, rows: list[Row]) -> None:
        self._worker, self._rows = worker, rows

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores in and out: [batch, vocab] float32."""
        for row in self._rows:
            if row.cancelled:
                self._worker.end(row)
        tokens = [self._worker.pad_token_id] * len(self._rows)
        places = [place for place, row in enumerate(self._rows) if not row.done]
        rows = [self._rows[place] for place in places]
        chosen = self._worker.choose(rows, scores if len(rows) == len(scores) else scores[places]) if rows else []
        for place, row, choices in zip(places, rows, chosen, strict=True):
            if isinstance(choices, SwiftError):
                self._worker.end(row, choices)
            else:
                tokens[place] = choices[0].token
                self._worker.take(row, choices[0])
        only = torch.full_like(scores, -torch.inf)
        only[torch.arange(len(tokens)), torch.tensor(tokens)] = 0.0
        return cast(torch.FloatTensor, only)


class Done(StoppingCriteria):
    """Says which rows have ended; `generate` returns once all have."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        """`input_ids` [batch, seq] → [batch], True where the row is done."""
        done = torch.tensor([row.done for row in self._rows], device=input_ids.device)
        return cast(torch.BoolTensor, done)


class Unwanted(StoppingCriteria):
    """Ends a beam search that nobody wants any more."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        """`input_ids` [batch x beams, seq] → [batch x beams], all alike."""
        unwanted = all(row.cancelled for row in self._rows)
        return cast(torch.BoolTensor, torch.full((input_ids.shape[0],), unwanted, device=input_ids.device))
