"""What single tokens look like: their bytes, and a text for each, for the log-probabilities of an answer.

A token may be a part of a character; its bytes are exact then, its text has the replacement character.
"""

from __future__ import annotations

import re
from typing import Any

from swift.inference.requests import TokenLogprob

_LEAST = -9999.0  # JSON has no infinity
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The characters with which byte-level BPE writes bytes (GPT-2's table): printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + number): byte for number, byte in enumerate(others)}


class TokenTexts:
    """Bytes and texts of a tokenizer's tokens.

    Args:
        tokenizer: a fast tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {int(number): str(token) for number, token in tokenizer.added_tokens_decoder.items()}
        self._alphabet = _byte_alphabet() if _is_byte_level(tokenizer) else None
        self._known: dict[int, bytes] = {}

    def spelling(self, token: int) -> bytes:
        """The bytes that a token adds to a text."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._make(token)
        return found

    def text(self, token: int) -> str:
        return self.spelling(token).decode("utf-8", errors="replace")

    def _make(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        written = self._tokenizer.convert_ids_to_tokens(token)
        if written is None:  # an id of the model that the tokenizer doesn't have
            return b""
        if self._alphabet is not None and all(character in self._alphabet for character in written):
            return bytes(self._alphabet[character] for character in written)
        if match := _BYTE_TOKEN.fullmatch(written):
            return bytes([int(match[1], 16)])
        return written.replace("\u2581", " ").encode("utf-8", errors="replace")

    # --- as OpenAI writes them ---

    def chat_entry(self, found: TokenLogprob) -> dict[str, Any]:
        """An entry of `choices[].logprobs.content`."""
        tops = [self._entry(token, logprob) for token, logprob in found.top]
        return {**self._entry(found.token, found.logprob), "top_logprobs": tops}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": max(logprob, _LEAST), "bytes": list(self.spelling(token))}

    def completion_logprobs(self, found: list[TokenLogprob | None], tokens: list[int], offset: int) -> dict[str, Any]:
        """`choices[].logprobs` of /v1/completions: four lists.

        Args:
            found: of each of `tokens`; None for the first token of a prompt.
            offset: characters of the text before.
        """
        texts = [self.text(token) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [None if each is None else max(each.logprob, _LEAST) for each in found],
            "top_logprobs": [None if each is None else self._tops(each) for each in found],
            "text_offset": offsets,
        }

    def _tops(self, found: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens by their texts, and the token itself, which needn't be among them."""
        tops: dict[str, float] = {}
        for token, logprob in (*found.top, (found.token, found.logprob)):
            text = self.text(token)
            tops[text] = max(tops.get(text, _LEAST), logprob)
        return tops

    def prompt_entry(self, found: TokenLogprob | None) -> dict[str, Any] | None:
        """An entry of vLLM's `prompt_logprobs`: token id -> log-probability, rank where it is known, and text."""
        if found is None:
            return None
        ranks = {token: rank for rank, (token, _) in enumerate(found.top, 1)}
        every = dict([(found.token, found.logprob), *found.top])
        return {
            str(token): {
                "logprob": max(logprob, _LEAST),
                "rank": ranks.get(token),
                "decoded_token": self.text(token),
            }
            for token, logprob in every.items()
        }


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether the decoder of the tokenizer reads GPT-2's alphabet."""
    return "ByteLevel" in str(tokenizer.backend_tokenizer.decoder)
