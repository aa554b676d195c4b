"""A text as words, the gaps between them, and spans that stay as they are.

Every transform works on this view. Joining the parts gives the text back, character for character, so whatever a
transform doesn't name it doesn't change. Knows scripts and punctuation, and no language.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from swift.data.scripts import UNSPACED_RANGES

# What may be protected, in the order in which the kinds are looked for. Every repetition is bounded, so that a text
# made of openings without ends can't take quadratic time.
_PROTECTED = {
    "code": (
        r"^[ \t]*(?P<fence>```+|~~~+)[^\n]*(?:\n(?:(?![ \t]*(?P=fence))[^\n]*(?:\n|\Z))*(?:[ \t]*(?P=fence)[^\n]*)?)?"
        r"|``[^\n]{1,500}?``|`[^`\n]{1,500}`"
    ),
    "latex": (
        r"\\begin\{(?P<env>[A-Za-z]{1,20}\*?)\}[\s\S]{0,4000}?\\end\{(?P=env)\}"
        r"|\$\$[\s\S]{1,2000}?\$\$|\\\[[\s\S]{1,2000}?\\\]|\\\([\s\S]{1,500}?\\\)"
        r"|\$(?![\s$])[^$\n]{1,300}?(?<!\s)\$(?!\d)"  # as pandoc: `$5 or $6` is money
        r"|\\[A-Za-z]{1,30}(?:\{[^{}\n]{0,200}\})*"
    ),
    "placeholder": r"\{\{[^{}\n]{1,200}\}\}|\$?\{[A-Za-z_][\w.\[\]:!]{0,100}\}|%\([A-Za-z_]\w{0,60}\)[sdifr]|%[sdif]\b",
    "special": r"<\|[^|<>\n]{1,80}\|>|</?[A-Za-z_][^<>\n]{0,200}>|\[/?[A-Z_]{2,30}\]",
    "url": (
        r"(?:[a-z][a-z0-9+.-]{1,20}://|www\.)[^\s<>\"'`{}|\\^]{0,1999}[^\s<>\"'`{}|\\^.,;:!?)\]]"
        r"|[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}"
    ),
    # a word with a digit in it is a number, a version or a name: 3.5, 20%, GPT-4, v2
    "number": r"(?a:[+-]?[$€£]?[A-Za-z]{0,12}[-.]?\d[\w.,:/+-]{0,60}(?<![.,:/+-])|\d)[%°€£]?",
}
PROTECTABLE = tuple(_PROTECTED)
# a text without any of these has no span of the kind, and needn't be searched for one
_SIGNS = {
    "code": ("`", "~~~"),
    "latex": ("\\", "$"),
    "placeholder": ("{", "%"),
    "special": ("<", "["),
    "url": ("://", "www.", "@"),
    "number": tuple("0123456789"),
}
_ASCII_LETTER = re.compile("[A-Za-z]")
_ASCII_WORD = r"[A-Za-z0-9]+(?:['-][A-Za-z0-9]+)*"  # what `_word` is on ASCII, several times as fast

# scripts written without spaces: each character, with its marks, counts as a word
_UNSPACED_CHARACTER = re.compile(f"[{UNSPACED_RANGES}]")
_SENTENCE_ENDS = ".!?\u2026\u3002\uff01\uff1f\uff0e\u061f\u06d4\u0964"
_CLOSERS = "\"')\\]\u201d\u2019\u00bb\u300d\u300f\uff09"
_STARTS_SENTENCE = re.compile(rf"[{_SENTENCE_ENDS}:][{_CLOSERS}]*\s|[\u3002\uff01\uff1f]|\n")
_ABBREVIATION = re.compile(
    r"(?:^|[\s(])(?:[A-Z]|(?:[A-Za-z]\.)+[A-Za-z]|Mr|Mrs|Ms|Dr|Prof|St|vs|etc|cf|al|Fig|fig|No|no|Vol|pp?|Inc|Ltd|Co|"
    r"Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sep|Sept|Oct|Nov|Dec)\.$"
)


@cache
def _marks() -> str:
    """The combining marks of the basic plane, as ranges for a character class; `\\w` leaves them out."""
    points = [p for p in range(0x300, 0x10000) if unicodedata.category(chr(p))[0] == "M"]
    ranges: list[list[int]] = []
    for point in points:
        if ranges and ranges[-1][1] == point - 1:
            ranges[-1][1] = point
        else:
            ranges.append([point, point])
    return "".join(f"\\u{low:04x}-\\u{high:04x}" for low, high in ranges) + "\u200c\u200d"


@cache
def _word() -> str:
    letter = f"(?:(?![{UNSPACED_RANGES}])[^\\W_])[{_marks()}]*"
    return rf"(?:{letter})+(?:['\u2019-](?:{letter})+)*|[{UNSPACED_RANGES}][{_marks()}]*"


@cache
def _scanner(protect: tuple[str, ...], ascii_only: bool) -> re.Pattern[str]:
    kept = "|".join(_PROTECTED[kind] for kind in protect)
    word = _ASCII_WORD if ascii_only else _word()
    return re.compile(f"(?P<kept>{kept or '(?!)'})|(?P<word>{word})", re.MULTILINE)


def _present(text: str, protect: tuple[str, ...]) -> tuple[str, ...]:
    """The kinds that the text may have spans of, in the order of `PROTECTABLE`."""
    return tuple(kind for kind in PROTECTABLE if kind in protect and any(sign in text for sign in _SIGNS[kind]))


@cache
def _keeper(protect: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(_PROTECTED[kind] for kind in protect), re.MULTILINE)


def kept_spans(text: str, protect: tuple[str, ...]) -> list[tuple[int, int]]:
    """Start and end of each protected span, in order.

    Args:
        text: any.
        protect: kinds, of `PROTECTABLE`.
    """
    present = _present(text, protect)
    return [match.span() for match in _keeper(present).finditer(text) if match.group()] if present else []


def kept_texts(text: str, protect: tuple[str, ...]) -> list[str]:
    """The protected spans themselves, sorted: what a rewritten text must still contain."""
    return sorted(text[start:end] for start, end in kept_spans(text, protect))


@dataclass
class Words:
    """A text cut into parts: a gap, a word, a gap, …, a gap. Gaps may be empty.

    Attributes:
        parts: the pieces of the text; words stand at odd places.
        free: the places (odd) of words that may be changed; the others are protected.
    """

    parts: list[str]
    free: list[int]

    @classmethod
    def of(cls, text: str, protect: tuple[str, ...] = PROTECTABLE) -> Words:
        """Cut a text."""
        parts: list[str] = []
        free: list[int] = []
        end = 0
        for match in _scanner(_present(text, protect), text.isascii()).finditer(text):
            if match.end() == match.start():
                continue
            parts.append(text[end : match.start()])
            if match["word"] is not None:
                free.append(len(parts))
            parts.append(match.group())
            end = match.end()
        parts.append(text[end:])
        return cls(parts, free)

    def __str__(self) -> str:
        return "".join(self.parts)

    def starts_sentence(self, place: int) -> bool:
        """Whether the word at a place begins a sentence, a line or the text."""
        if place == 1:
            return True
        gap = self.parts[place - 1]
        if not _STARTS_SENTENCE.search(gap):
            return False
        return "\n" in gap or not _ABBREVIATION.search(self.parts[place - 2][-12:] + gap.rstrip())

    @property
    def values(self) -> Iterable[str]:
        """The words that may be changed."""
        return (self.parts[place] for place in self.free)


def word_set(words: str) -> frozenset[str]:
    """A set from words with white space between them."""
    return frozenset(words.split())


def is_unspaced(word: str) -> bool:
    """Whether a word is a character of a script written without spaces."""
    return bool(_UNSPACED_CHARACTER.match(word))


def is_latin(text: str) -> bool:
    """Whether at least half of the letters are Latin ones; false without letters."""
    sample = text[:2000]
    if sample.isascii():
        return bool(_ASCII_LETTER.search(sample))
    letters = [c for c in sample if c.isalpha()]
    latin = sum(c < "\u0250" or "\u1e00" <= c < "\u1f00" for c in letters)
    return bool(letters) and 2 * latin >= len(letters)


def like(word: str, model: str) -> str:
    """`word` in the casing of `model`: ALL CAPITALS, Capitalised, or as it is."""
    if len(model) > 1 and model.isupper():
        return word.upper()
    if model[:1].isupper():
        return capitalised(word)
    return word


def capitalised(word: str) -> str:
    """With a capital first letter; the rest as it is."""
    return word[:1].upper() + word[1:]


def uncapitalised(word: str) -> str:
    """With a small first letter, unless the word is `I`, all capitals or mixed (`McCoy`, `eBay`)."""
    if (
        word in ("I", "I'm", "I'd", "I'll", "I've")
        or word[1:] != word[1:].lower()
        or (len(word) > 1 and word.isupper())
    ):
        return word
    return word[:1].lower() + word[1:]


def sentences(text: str, protect: tuple[str, ...] = PROTECTABLE) -> tuple[list[str], list[str]]:
    """Cut a line of text into sentences; no cut lies inside a protected span.

    Args:
        text: one paragraph.
        protect: kinds of spans that hold together.

    Returns:
        The sentences with their punctuation, and one gap more than there are sentences: what stands before, between
        and after them. Put together in turn they are the text.
    """
    spans = kept_spans(text, protect)
    found: list[str] = []
    gaps: list[str] = []
    start = len(text) - len(text.lstrip())
    gaps.append(text[:start])
    for match in _boundary().finditer(text):
        end = match.end("end")
        if end <= start or any(
            low < end < high or low <= match.start() < high for low, high in _near(spans, match.start())
        ):
            continue
        if match["end"] == "." and _ABBREVIATION.search(text[max(start, end - 14) : end]):
            continue
        found.append(text[start:end])
        gaps.append(match["gap"])
        start = match.end()
    rest = text[start:]
    if rest.strip():
        found.append(rest.rstrip())
        gaps.append(rest[len(rest.rstrip()) :])
    elif rest:
        gaps[-1] += rest
    return found, gaps


@cache
def _boundary() -> re.Pattern[str]:
    ends = ".!?\u2026\u061f\u06d4\u0964"
    spaced = rf"(?<![{ends}])[{ends}]+[{_CLOSERS}]*(?=\s|\Z)"  # each run is tried once, from its beginning
    unspaced = rf"[\u3002\uff01\uff1f\uff0e]+[{_CLOSERS}]*"
    return re.compile(rf"(?P<end>{spaced}|{unspaced})(?P<gap>\s*)")


def _near(spans: list[tuple[int, int]], position: int) -> list[tuple[int, int]]:
    """The spans that may hold a position: the last that begins at or before it, and the next."""
    low, high = 0, len(spans)
    while low < high:
        middle = (low + high) // 2
        if spans[middle][0] <= position:
            low = middle + 1
        else:
            high = middle
    return spans[max(0, low - 1) : low + 1]


def paragraphs(text: str, protect: tuple[str, ...] = PROTECTABLE) -> list[tuple[str, bool]]:
    """Cut a text at line ends that lie outside protected spans.

    Returns:
        (piece, whether it may be changed): lines without their ends, the line ends, and protected blocks that reach
        over several lines. Put together they are the text.
    """
    pieces: list[tuple[str, bool]] = []
    start = 0
    for low, high in [*((a, b) for a, b in kept_spans(text, protect) if "\n" in text[a:b]), (len(text), len(text))]:
        for line in re.split(r"(\n+)", text[start:low]):
            if line:
                pieces.append((line, line[0] != "\n"))
        if high > low:
            pieces.append((text[low:high], False))
        start = high
    return pieces
