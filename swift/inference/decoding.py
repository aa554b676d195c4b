"""From token ids to text while they arrive: whole characters only, and nothing that might still become a stop word.

Knows a tokenizer's `decode` and strings; knows nothing about models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# what a decoder writes for bytes that are not (yet) a character
_INCOMPLETE = "\ufffd"


def decode(tokenizer: Any, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """The text of `tokens`, spaces exactly as the tokens have them."""
    return tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


class IncrementalDecoder:
    """Turns a stream of token ids into text pieces whose concatenation is `decode` of all of them.

    A character of several bytes may be spread over several tokens; it is held back until it is whole. Decoding a token
    alone is wrong for tokenizers that treat the start of a text specially (leading spaces), so each step decodes a
    short window that begins at an earlier piece and takes what the new tokens added to it.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._tokens: list[int] = []
        self._window = 0  # where the decoded window begins
        self._emitted = 0  # tokens before this index are out already

    def push(self, token: int) -> str:
        """Take one more token; returns the text that is certain now, which may be empty."""
        self._tokens.append(token)
        piece = self._pending()
        if not piece or piece.endswith(_INCOMPLETE):
            return ""
        self._window, self._emitted = self._emitted, len(self._tokens)
        return piece

    def flush(self) -> str:
        """What is left at the end, incomplete characters included."""
        piece = self._pending()
        self._window = self._emitted = len(self._tokens)
        return piece

    def _pending(self) -> str:
        known = self._decode(self._tokens[self._window : self._emitted])
        return self._decode(self._tokens[self._window :])[len(known) :]

    def _decode(self, tokens: list[int]) -> str:
        return decode(self._tokenizer, tokens, skip_special_tokens=self._skip_special_tokens)


class StopScanner:
    """Lets text through until a stop word appears; the word and everything after it are cut."""

    def __init__(self, stop_words: Sequence[str]) -> None:
        self._words = [word for word in stop_words if word]
        self._held = ""
        self.stopped = False
        self.word: str | None = None  # the one that appeared

    def push(self, piece: str) -> str:
        """The part of the text so far that can be shown: it can't turn into a stop word any more."""
        if self.stopped:
            return ""
        text = self._held + piece
        cut = find_stop(text, self._words)
        if cut is not None:
            self.stopped, self._held = True, ""
            self.word = next(word for word in self._words if text.startswith(word, cut))
            return text[:cut]
        keep = max((_overlap(text, word) for word in self._words), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, once no more text will come."""
        held, self._held = self._held, ""
        return held


class AnswerText:
    """The text of an answer while its tokens come.

    Args:
        stop_words: texts that end it; an empty sequence for none.
        skip_special_tokens: special tokens don't show.
    """

    def __init__(self, tokenizer: Any, stop_words: Sequence[str] = (), *, skip_special_tokens: bool = True) -> None:
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self._scanner = StopScanner(stop_words)

    @property
    def stopped_by(self) -> str | None:
        """The stop word that ended the text."""
        return self._scanner.word

    def push(self, token: int) -> str:
        """Take one more token; returns the text that is certain now."""
        return self._scanner.push(self._decoder.push(token))

    def flush(self) -> str:
        """What was held back, once no more tokens will come."""
        return self._scanner.push(self._decoder.flush()) + self._scanner.flush()


def find_stop(text: str, words: Sequence[str]) -> int | None:
    """Where the first of the stop words begins in `text`, or None."""
    return min((at for at in (text.find(word) for word in words) if at >= 0), default=None)


def _overlap(text: str, word: str) -> int:
    """Length of the longest proper prefix of `word` that `text` ends with."""
    for length in range(min(len(word) - 1, len(text)), 0, -1):
        if text.endswith(word[:length]):
            return length
    return 0
