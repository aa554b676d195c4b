"""A request on its way: its tokens, how many of them are in the cache and where, and its text so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from swift.inference.decoding import AnswerText
from swift.inference.requests import Request, Sink


@dataclass(eq=False)
class Sequence:
    """One text that grows.

    Attributes:
        request, sink: whose, and where updates go.
        arrival: its number among all requests.
        tokens: prompt and answer.
        limit: most tokens of prompt and answer together.
        ends: ids that end the answer.
        root: where its text begins in the prefix cache (`BlockPool.new_root`).
        adapter: slot of its adapter; 0 for none.
        state: what the chooser keeps of it.
        text: what has become of its answer's tokens.
        blocks: in order; `num_computed` tokens are in them.
        node: the text before the first block that isn't registered.
        num_registered: blocks that the pool knows.
        num_cached: tokens of the prompt found in the cache.
        drafts: tokens guessed for the next step.
        leader: the sequence of its group whose prompt it waits for.
        beams: the beam search that it is a part of.
        prompt_logprobs: collected while the prompt is computed.
        begun: its first update was sent.
    """

    request: Request
    sink: Sink
    arrival: int
    tokens: list[int]
    limit: int
    ends: frozenset[int]
    root: int
    adapter: int
    state: Any
    text: AnswerText
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    node: int = 0
    num_registered: int = 0
    num_cached: int = 0
    drafts: tuple[int, ...] = ()
    leader: Sequence | None = None
    beams: Any = None
    prompt_logprobs: list[Any] | None = None
    begun: bool = False

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_pending(self) -> int:
        """Tokens that are not in the cache yet."""
        return len(self.tokens) - self.num_computed

    @property
    def prompt_done(self) -> bool:
        """Whether the prompt is computed."""
        return self.num_computed >= self.num_prompt

    def order(self) -> tuple[int, int]:
        """Who goes first: priority, then arrival."""
        return self.request.priority, self.arrival


class Placed(Protocol):
    """All that a runner asks of a sequence: where its tokens lie, and which adapter it goes through."""

    blocks: list[int]
    adapter: int


@dataclass(eq=False)
class Placement:
    """A `Placed` and nothing more."""

    blocks: list[int]
    adapter: int = 0


P = TypeVar("P", bound=Placed)


@dataclass(frozen=True)
class Piece(Generic[P]):
    """What a step computes of a sequence.

    Attributes:
        start: position of the first token.
        tokens: the tokens, drafts at the end.
        num_drafts: how many of them are guesses.
        wants: positions within `tokens` whose logits are needed, in order.
    """

    sequence: P
    start: int
    tokens: list[int]
    num_drafts: int
    wants: range


def table_of(blocks: list[int], width: int) -> np.ndarray:
    """int32 [width], the blocks and then anything."""
    row = np.zeros(width, dtype=np.int32)
    row[: len(blocks)] = blocks
    return row
