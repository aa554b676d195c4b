"""UTF-8 text to token hashes: what n-grams are made of, in near-duplicate search and in decontamination.

A token is a run of word bytes (ASCII letters and digits in lower case, letters of other spaced scripts as they are) or
one code point of a script that is written without spaces (Han, Kana, Thai, Lao, Khmer, Burmese, Tibetan). So n-grams
are word n-grams in English and code-point n-grams in Chinese, and a text that mixes both needs no decision. Everything
else separates: spaces, ASCII and general punctuation, CJK punctuation and full-width signs.

Two implementations give the same bits: one for numba, one for numpy. They know nothing of n-grams.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from swift.core.logging import get_logger
from swift.data.compiled import has_numba
from swift.data.scripts import UNSPACED_BLOCKS

# The hash of a token (here and in `kernels`) is fmix64 of the polynomial of its bytes in _BASE modulo 2**64. _BASE is
# odd, so it has an inverse, which lets numpy take the hash of every token from one running sum.
_BASE = np.uint64(0x9E3779B97F4A7C15)
_INVERSE = np.uint64(pow(int(_BASE), -1, 1 << 64))
_MIX_A = np.uint64(0xFF51AFD7ED558CCD)
_MIX_B = np.uint64(0xC4CEB9FE1A85EC53)
_SEPARATOR, _WORD, _SINGLE = 0, 1, 2

# first and last code point of ranges, in order; what neither they nor UNSPACED_BLOCKS hold is a word (above ASCII)
_SEPARATORS = (
    (0x80, 0xA9),
    (0xAB, 0xB4),
    (0xB6, 0xB9),
    (0xBB, 0xBF),
    (0x2000, 0x206F),  # general punctuation
    (0x2E00, 0x2E7F),
    (0x3000, 0x3004),
    (0x3008, 0x3020),
    (0x3030, 0x303F),
    (0xFE10, 0xFE6F),
    (0xFEFF, 0xFEFF),
    (0xFF00, 0xFF0F),  # full-width signs
    (0xFF1A, 0xFF20),
    (0xFF3B, 0xFF40),
    (0xFF5B, 0xFF65),
)


def _class_table() -> np.ndarray:
    """uint8 [0x40000]: the class of each code point; beyond it everything is a word (or a picture, which counts so)."""
    table = np.full(0x40000, _WORD, dtype=np.uint8)
    table[:128] = [_WORD if chr(code).isalnum() else _SEPARATOR for code in range(128)]
    for first, last in _SEPARATORS:
        table[first : last + 1] = _SEPARATOR
    for first, last in UNSPACED_BLOCKS:
        table[first : last + 1] = _SINGLE
    return table


CLASSES = _class_table()
LOWER = np.arange(256, dtype=np.uint8)
LOWER[ord("A") : ord("Z") + 1] += 32


@dataclass(frozen=True)
class Tokens:
    """The tokens of several texts, in order.

    Attributes:
        hashes: uint64 [tokens].
        starts, ends: int64 [tokens], bytes in the buffer.
        offsets: int64 [texts + 1]: text i has the tokens offsets[i] to offsets[i + 1].
    """

    hashes: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    offsets: np.ndarray


def join_texts(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """The texts in one buffer, a newline behind each.

    Returns:
        uint8 [bytes] and int64 [texts + 1]; text i has the bytes borders[i] to borders[i + 1] - 1.
    """
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    borders = np.zeros(len(texts) + 1, dtype=np.int64)
    np.cumsum([len(data) + 1 for data in encoded], out=borders[1:])
    return np.frombuffer(b"\n".join([*encoded, b""]), dtype=np.uint8), borders


def tokenise(buffer: np.ndarray, borders: np.ndarray) -> Tokens:
    """The tokens of joined texts."""
    if not has_numba():
        report_missing()
        return tokenise_numpy(buffer, borders)
    from swift.data.dedup import kernels

    room = len(buffer) // 2 + len(borders)  # a token has a byte and a separator, or is a code point of three bytes
    hashes = np.empty(room, dtype=np.uint64)
    starts = np.empty(room, dtype=np.int64)
    ends = np.empty(room, dtype=np.int64)
    offsets = np.empty(len(borders), dtype=np.int64)
    count = kernels.tokenise(buffer, borders, CLASSES, LOWER, hashes, starts, ends, offsets)
    return Tokens(hashes[:count].copy(), starts[:count].copy(), ends[:count].copy(), offsets)


@cache
def report_missing() -> None:
    """Say once in a process that the slower implementation is used."""
    get_logger(__name__).warning(
        "numba is not installed: deduplication uses numpy, with the same results at a fraction of the speed; "
        'pip install "swift-llm[data]"'
    )


def mix64(values: np.ndarray) -> np.ndarray:
    """MurmurHash3's 64-bit finaliser on uint64 values (public domain, Austin Appleby): every bit depends on all."""
    values = values ^ (values >> np.uint64(33))
    values = values * _MIX_A
    values = values ^ (values >> np.uint64(33))
    values = values * _MIX_B
    return values ^ (values >> np.uint64(33))


def tokenise_numpy(buffer: np.ndarray, borders: np.ndarray) -> Tokens:
    """`tokenise` without numba."""
    leads = np.flatnonzero((buffer & 0xC0) != 0x80)
    ends_of_points = np.append(leads[1:], len(buffer))
    kinds = CLASSES[np.minimum(_code_points(buffer, leads), len(CLASSES) - 1)]
    before = np.append(np.uint8(_SEPARATOR), kinds[:-1]) if len(kinds) else kinds
    after = np.append(kinds[1:], np.uint8(_SEPARATOR)) if len(kinds) else kinds
    starts = leads[(kinds == _SINGLE) | ((kinds == _WORD) & (before != _WORD))]
    ends = ends_of_points[(kinds == _SINGLE) | ((kinds == _WORD) & (after != _WORD))]
    powers = np.full(len(buffer) + 1, _BASE, dtype=np.uint64)
    inverses = np.full(len(buffer) + 1, _INVERSE, dtype=np.uint64)
    powers[0] = inverses[0] = 1
    np.multiply.accumulate(powers, out=powers)
    np.multiply.accumulate(inverses, out=inverses)
    sums = np.zeros(len(buffer) + 1, dtype=np.uint64)
    np.cumsum(LOWER[buffer].astype(np.uint64) * inverses[:-1], out=sums[1:])
    hashes = mix64((sums[ends] - sums[starts]) * powers[ends - 1]) if len(starts) else np.zeros(0, dtype=np.uint64)
    return Tokens(hashes, starts, ends, np.searchsorted(starts, borders))


def _code_points(buffer: np.ndarray, leads: np.ndarray) -> np.ndarray:
    """uint32 [code points] of valid UTF-8."""
    padded = np.concatenate([buffer, np.zeros(3, dtype=np.uint8)]).astype(np.uint32)
    one, two, three, four = (padded[leads + shift] for shift in range(4))
    tail = np.uint32(0x3F)
    points = np.where(one < 0x80, one, (one & 0x1F) << 6 | (two & tail))
    points = np.where(one >= 0xE0, (one & 0x0F) << 12 | (two & tail) << 6 | (three & tail), points)
    return np.where(one >= 0xF0, (one & 0x07) << 18 | (two & tail) << 12 | (three & tail) << 6 | (four & tail), points)
