"""What exact deduplication compares: whole documents, paragraphs or lines, normalised and hashed.

The hash is 128 bits of BLAKE2b over UTF-8, the same on every machine. Knows nothing of shards and files.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable

from swift.data.engine.document import Document, beside_texts

_PUNCTUATION = re.compile(r"[^\w\s]+|_+")
_BORDERS = {"paragraph": re.compile(r"(\n[^\S\n]*(?:\n[^\S\n]*)+)"), "line": re.compile(r"(\n)")}

Normalise = Callable[[str], str]


def normaliser(*, lower: bool, collapse_whitespace: bool, strip_punctuation: bool) -> Normalise:
    """The function that takes out of a text what shouldn't count."""

    def normalise(text: str) -> str:
        if lower:
            text = text.lower()
        if strip_punctuation:
            text = _PUNCTUATION.sub("", text)
        if collapse_whitespace:
            text = " ".join(text.split())
        return text

    return normalise


def digest(text: str) -> tuple[int, int]:
    """The two 64-bit halves of a text's hash."""
    raw = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return int.from_bytes(raw[:8], "big"), int.from_bytes(raw[8:], "big")


def whole(document: Document, normalise: Normalise) -> str:
    """A document's normalised text; turns are told apart by their roles. Empty if nothing is left of any text.

    Conversations that differ in their tools, calls or pictures differ in this as well.
    """
    if document.roles is None and len(document.texts) == 1:
        return normalise(document.texts[0])
    texts = [normalise(text) for text in document.texts]
    if not any(texts):
        return ""
    roles = document.roles or [""] * len(texts)
    said = "\x1e".join(f"{role}\x1f{text}" for role, text in zip(roles, texts))
    beside = beside_texts(document)
    return f"{said}\x1d{digest(beside.decode())}" if beside else said


def cut(text: str, unit: str) -> list[str]:
    """Paragraphs or lines (at even places) and what stands between them (at odd ones); joined they are the text."""
    return _BORDERS[unit].split(text)


def without(pieces: list[str], removed: set[int]) -> str:
    """The text of `cut` without the units of these numbers, each with what stands between it and the next one kept."""
    kept: list[str] = []
    for number in range((len(pieces) + 1) // 2):
        if number in removed:
            continue
        if kept:
            kept.append(pieces[2 * number - 1])
        kept.append(pieces[2 * number])
    return "".join(kept)
