"""Beam search among sequences: a request's beams are computed like any others, and move on together.

The bookkeeping of scores is `choosing.beams`; which blocks a beam takes over is the engine's business.
"""

from __future__ import annotations

import torch

from swift.inference.choosing.beams import BeamGroup
from swift.inference.choosing.chooser import Chooser
from swift.inference.paged.sequence import Sequence
from swift.inference.requests import Request


class BeamSearch:
    """One request's beams.

    Args:
        chooser: makes log-probabilities as the request's settings want them.
        ends: ids that end a beam.
        limit: most tokens of prompt and answer together.
    """

    def __init__(self, chooser: Chooser, request: Request, ends: frozenset[int], limit: int) -> None:
        self._chooser = chooser
        self._request = request
        self._ends = ends
        self._width = request.params.num_beams
        self._group = BeamGroup(self._width, request.params.length_penalty, ends, limit - len(request.prompt))
        self._scores: dict[int, torch.Tensor] = {}  # of the beams that were computed since the last move

    def advance(
        self, members: list[Sequence], sequence: Sequence, logits: torch.Tensor
    ) -> list[tuple[Sequence, int]] | None:
        """Take one beam's logits.

        Args:
            members: the beams, in order; the prompt alone at first.
            sequence: one of them.
            logits: [1, vocab].

        Returns:
            None while others are missing; then the next beams as (the one it goes on from, its new token), or nothing
            when the search is over.

        Raises:
            NumericsError: the scores are NaN or infinite.
        """
        self._scores[members.index(sequence)] = logits
        if len(self._scores) < len(members):
            return None
        rows = torch.cat([self._scores[k] for k in range(len(members))])
        self._scores.clear()
        if len(rows) < self._width:  # the prompt is every beam's beginning
            rows = rows.expand(self._width, -1)
        logprobs = self._chooser.beam_logprobs(rows, self._request, self._ends, self._group.beams)
        moved = self._group.advance(logprobs)
        if self._group.finished:
            return []
        return [(members[min(parent, len(members) - 1)], token) for parent, token in moved]

    def best(self) -> list[int]:
        """The answer's tokens."""
        return list(self._group.best()[0])
