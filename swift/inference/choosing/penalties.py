"""What a request's settings do to the scores before a token is chosen: penalties, bias, forbidden ends.

The tokens of a request are counted once, when they arrive; a step then touches only the scores of tokens that
occurred. Knows nothing of how a token is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from swift.inference.requests import SamplingParams


class Counts:
    """Which tokens occurred, in the prompt or the answer, and how often in the answer.

    Args:
        prompt: token ids.
    """

    def __init__(self, prompt: Iterable[int]) -> None:
        ids = list(dict.fromkeys(prompt))
        self._place = {token: place for place, token in enumerate(ids)}
        self._ids = np.array(ids, dtype=np.int64)
        self._counts = np.zeros(len(ids), dtype=np.float32)

    def add(self, token: int) -> None:
        """One more token of the answer."""
        place = self._place.setdefault(token, len(self._place))
        if place >= len(self._ids):
            room = max(16, len(self._ids))
            self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.float32)])
        self._ids[place] = token
        self._counts[place] += 1

    @property
    def ids(self) -> np.ndarray:
        """int64, each token once, in order of first occurrence."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> np.ndarray:
        """fp32, of `ids`: occurrences in the answer."""
        return self._counts[: len(self._place)]

    def copy(self) -> Counts:
        """The same, to go on by itself."""
        twin = Counts(())
        twin._place, twin._ids, twin._counts = dict(self._place), self._ids.copy(), self._counts.copy()
        return twin


def has_penalties(params: SamplingParams) -> bool:
    """Whether tokens have to be counted."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def penalise(
    scores: torch.Tensor, rows: Sequence[int], counts: Sequence[Counts], params: Sequence[SamplingParams]
) -> None:
    """Change the scores of tokens that occurred, in place.

    The repetition penalty divides positive scores and multiplies negative ones of tokens in prompt and answer (Keskar
    et al., 2019, section 4.1); then the frequency penalty is taken off per occurrence in the answer and the presence
    penalty once.

    Args:
        scores: [rows, vocab] fp32, contiguous.
        rows: which of them; `counts` and `params` are theirs.
    """
    sizes = [len(each.ids) for each in counts]

    def spread(values: Iterable[float]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(list(values), dtype=np.float32), sizes)).to(scores.device)

    ids = np.concatenate([each.ids + row * scores.shape[1] for row, each in zip(rows, counts)])
    places = torch.from_numpy(ids).to(scores.device)
    occurred = torch.from_numpy(np.concatenate([each.counts for each in counts])).to(scores.device)
    flat = scores.view(-1)
    values = flat[places]
    repetition = spread(each.repetition_penalty for each in params)
    values = torch.where(values < 0, values * repetition, values / repetition)
    values = values - occurred * spread(each.frequency_penalty for each in params)
    values = values - (occurred > 0) * spread(each.presence_penalty for each in params)
    flat[places] = values


def add_bias(scores: torch.Tensor, row: int, bias: Sequence[tuple[int, float]]) -> None:
    """Add to single scores of a row, in place."""
    places = torch.tensor([token for token, _ in bias], device=scores.device)
    scores[row].index_add_(0, places, torch.tensor([value for _, value in bias], dtype=scores.dtype).to(scores.device))


def forbid(scores: torch.Tensor, row: int, tokens: Iterable[int]) -> None:
    """Make tokens impossible, in place. Ids beyond the scores can't be chosen anyway."""
    places = [token for token in tokens if token < scores.shape[1]]
    scores[row, places] = -torch.inf
