"""Texts to token ids, and character spans to token spans."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any

_CACHE_SIZE = 4096


def added_token_pattern(tokenizer: Any) -> re.Pattern[str]:
    """Matches any added token of the tokenizer that isn't white space; longest first; nothing where there is none."""
    names = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    longest_first = sorted((name for name in names if name.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


class Tokens:
    """A tokenizer with the checks that a span of text is a span of tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._added_ids = frozenset(tokenizer.added_tokens_decoder)
        self._tails: dict[str, list[int]] = {}
        # texts that would be read as tokens if a row contained them
        self.turn_marks = tuple(
            str(token) for token in tokenizer.added_tokens_decoder.values() if token.special and str(token).strip()
        )

    def encode(self, texts: Sequence[str], *, special: bool) -> list[Any]:
        """One `tokenizers.Encoding` for each text; `special` adds what the tokenizer adds around a text (bos, eos)."""
        out = self.tokenizer(list(texts), add_special_tokens=special, return_attention_mask=False, verbose=False)
        return out.encodings

    @cached_property
    def num_after(self) -> int:
        """How many tokens the tokenizer puts after a text."""
        added = self.encode(["a"], special=True)[0].special_tokens_mask
        return len(list(takewhile(bool, reversed(added))))

    def span(self, encoding: Any, text: str, start: int, end: int) -> tuple[int, int, bool]:
        """Tokens [first, after) that belong to the characters [start, end) of the encoding's text.

        A token belongs to the span when it begins inside it. So a token that begins in the prompt and reaches into the
        answer isn't trained; the third value says that this happened, or that the tokens before the span aren't those
        that the prompt alone would give.
        """
        first = _token_at(encoding, start, end)
        after = _token_at(encoding, end, len(text))
        merged = False
        while first < after and _begin(encoding, first) < start:
            merged = True
            first += 1
        if after < len(encoding.ids) and _begin(encoding, after) < end:
            after += 1
        return first, after, merged or not self._prompt_agrees(encoding, text, first, start)

    def _prompt_agrees(self, encoding: Any, text: str, first: int, start: int) -> bool:
        """Whether the tokens before `first` are those of the text before `start` by itself.

        Added tokens cut a text into parts that are tokenised independently, so only the part from the last added token
        to `start` has to be compared.
        """
        ids = encoding.ids
        at = first - 1
        while at >= 0 and ids[at] not in self._added_ids:
            at -= 1
        chars = encoding.token_to_chars(at) if at >= 0 else None
        if chars is None:  # nothing before, or a token that the tokenizer put before the text
            at += 1
        tail = text[chars[0] if chars else 0 : start]
        alone = self._tails.get(tail)
        if alone is None:
            if len(self._tails) >= _CACHE_SIZE:
                self._tails.clear()
            alone = self._tails[tail] = self.tokenizer(tail, add_special_tokens=False, verbose=False).input_ids
        return alone == ids[at:first]


def _begin(encoding: Any, token: int) -> int:
    """Character at which a token begins; a token that isn't from the text begins nowhere before its end."""
    chars = encoding.token_to_chars(token)
    return chars[0] if chars else sys.maxsize


def _token_at(encoding: Any, char: int, limit: int) -> int:
    """The first token that holds character `char`, or the next one that any token holds; the number of tokens at the
    end of the text. `limit` bounds the search when characters belong to no token (white space that the tokenizer
    drops)."""
    num_tokens = len(encoding.ids)
    while char < limit:
        token = encoding.char_to_token(char)
        if token is not None:
            return token
        char += 1
    token = encoding.char_to_token(char)
    return num_tokens if token is None else token
