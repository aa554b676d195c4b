"""Beam search as bookkeeping: scores of the next tokens in, beams to go on with out.

Does what `generate` of transformers does for one prompt (`_beam_search`, 5.24), to the bit where its scores are: twice
as many candidates as beams, ends only among the best `width` of them, sums of log-probabilities in fp32, a length
penalty for finished beams, and its rules of when nothing better can come. Knows nothing of models or caches.
"""

from __future__ import annotations

import torch

_IMPOSSIBLE = -1.0e9  # added to scores that must not be chosen, as transformers does


class BeamGroup:
    """The beams of one prompt.

    Args:
        width: beams.
        length_penalty: a finished beam's score is divided by its length to this power; above 0 favours long ones.
        end_tokens: ids that end a beam.
        max_new_tokens: most tokens of a beam.
        early_stopping: end as soon as `width` beams are finished, instead of when no better one is in sight.

    Attributes:
        finished: whether the search is over.
    """

    def __init__(
        self,
        width: int,
        length_penalty: float,
        end_tokens: frozenset[int],
        max_new_tokens: int,
        *,
        early_stopping: bool = False,
    ) -> None:
        self._width = width
        self._length_penalty = length_penalty
        self._ends = end_tokens
        self._max_new_tokens = max_new_tokens
        self._early_stopping = early_stopping
        self._beams: list[list[int]] = [[] for _ in range(width)]
        # all beams start with the prompt: only the first one's candidates count
        self._scores = torch.tensor([0.0] + [_IMPOSSIBLE] * (width - 1))
        self._done: list[tuple[float, list[int]]] = []  # best first
        self.finished = False

    @property
    def beams(self) -> list[list[int]]:
        """Tokens of the beams that go on, best first."""
        return self._beams

    def advance(self, logprobs: torch.Tensor) -> list[tuple[int, int]]:
        """Go one token further.

        Args:
            logprobs: [width, vocab] fp32, of the tokens after each beam; rows in the order of the last answer. At
                first every row is that of the prompt.

        Returns:
            (the beam that it goes on from, its new token) for each next beam. Once `finished`, nothing of it is needed.
        """
        vocab = logprobs.shape[1]
        kept = max(2, 1 + len(self._ends)) * self._width
        sums = (logprobs + self._scores.to(logprobs.device)[:, None]).view(-1)
        best, places = (found.cpu() for found in sums.topk(min(kept, len(sums))))
        candidates = [divmod(place, vocab) for place in places.tolist()]
        length = len(self._beams[0]) + 1
        hits = [length >= self._max_new_tokens or token in self._ends for _, token in candidates]

        running = best + torch.tensor(hits, dtype=torch.float32) * _IMPOSSIBLE
        order = running.topk(self._width).indices
        self._keep_finished(best, candidates, hits)
        moves = [candidates[place] for place in order.tolist()]
        self._scores = running[order]
        self._beams = [[*self._beams[parent], token] for parent, token in moves]
        self.finished = all(hits) or not self._can_improve()
        return moves

    def best(self) -> tuple[list[int], float]:
        """Tokens of the best finished beam, the one that ended it included, and its score."""
        score, tokens = self._done[0]
        return tokens, score

    def _keep_finished(self, best: torch.Tensor, candidates: list[tuple[int, int]], hits: list[bool]) -> None:
        """Take the ended ones among the first `width` candidates; keep the best `width` of all."""
        length = len(self._beams[0]) + 1
        scores = (best / length**self._length_penalty).tolist()
        for score, (parent, token), hit in list(zip(scores, candidates, hits))[: self._width]:
            if hit:
                self._done.append((score, [*self._beams[parent], token]))
        self._done.sort(key=lambda beam: -beam[0])
        del self._done[self._width :]

    def _can_improve(self) -> bool:
        """Whether a beam that goes on may still become better than the worst finished one."""
        if len(self._done) < self._width:
            return True
        if self._early_stopping:
            return False
        hopeful = (self._scores[0] / len(self._beams[0]) ** self._length_penalty).item()
        return hopeful > self._done[-1][0]
