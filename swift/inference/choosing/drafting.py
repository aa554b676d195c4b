"""Guesses of the next tokens from a request's own text: what followed the same words before will follow them again.

Knows tokens only. Whether a guess is right is the chooser's business (speculative decoding as in Saxena, "Prompt lookup
decoding", 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Drafter(Protocol):
    """Guesses tokens of one text that grows."""

    def draft(self, tokens: list[int], num: int) -> list[int]:
        """At most `num` tokens that may follow `tokens`, which are prompt and answer so far."""
        ...


class PromptLookup:
    """Finds the latest earlier occurrence of the last tokens and guesses what followed it.

    One object serves one text: it remembers where groups of tokens occurred and looks only at new tokens in each call.

    Args:
        num_tokens: most tokens of a guess.
        max_ngram: tokens that have to agree at best; fewer are tried, down to `min_ngram`.
        min_ngram: fewer than these agreeing are no reason to guess.
    """

    def __init__(self, num_tokens: int, max_ngram: int = 3, min_ngram: int = 2) -> None:
        self._num_tokens = num_tokens
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._follows: dict[tuple[int, ...], int] = {}  # group of tokens -> where its latest occurrence went on
        self._known = 0  # groups that end before this place are in there

    def draft(self, tokens: Sequence[int], num: int) -> list[int]:
        """At most `num` tokens that may follow; none if the last tokens are new.

        A guess that reaches the end of the text goes on with itself, so a repetition is guessed at full length.

        Args:
            tokens: those of the last call and more.
            num: wanted; no more than `num_tokens` come.
        """
        length = len(tokens)
        if length - 1 < self._known:  # another text
            self._follows.clear()
            self._known = 0
        for end in range(self._known, length - 1):
            for size in self._sizes:
                if size <= end + 1:
                    self._follows[tuple(tokens[end + 1 - size : end + 1])] = end + 1
        self._known = max(0, length - 1)
        wanted = min(num, self._num_tokens)
        for size in self._sizes:
            start = self._follows.get(tuple(tokens[-size:])) if size < length else None
            if start is not None:
                period = length - start
                return [tokens[start + k % period] for k in range(wanted)]
        return []
