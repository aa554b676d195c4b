"""Windows of a fixed number of symbols (bytes or words): their hashes, and the anchors that say which may be repeated.

Equal windows have the same least k-gram hash (winnowing: Schleimer, Wilkerson, Aiken 2003, "Winnowing: local algorithms
for document fingerprinting"). So only windows whose least k-gram occurs twice in the corpus need to be hashed and
compared, and k-grams that are the least of some window are about 2 / (width - k + 2) of all.

All in numpy, so that nothing depends on what is installed. Knows nothing of documents and files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from swift.data.dedup.minhash import mix64

_BASE = np.uint64(0x9E3779B97F4A7C15)
_INVERSE = np.uint64(pow(int(_BASE), -1, 1 << 64))
_LANES = (np.uint64(0xA0761D6478BD642F), np.uint64(0xE7037ED1A0B428DB))
_WORD = re.compile(rb"\S+")
PIECE = 1 << 18  # windows that are looked at at a time; numpy needs some hundred bytes for each


@dataclass(frozen=True)
class Symbols:
    """A text as what is compared.

    Attributes:
        values: uint8 or uint64 [symbols].
        borders: int64 [symbols + 1]: symbol i is the bytes borders[i] to borders[i + 1] (the space behind it included);
            None if symbols are bytes.
    """

    values: np.ndarray
    borders: np.ndarray | None = None

    def byte_span(self, first: int, end: int) -> tuple[int, int]:
        """The bytes of the symbols `first` to `end`."""
        if self.borders is None:
            return first, end
        return int(self.borders[first]), int(self.borders[end])


def symbols_of(data: bytes, unit: str) -> Symbols:
    """The bytes or the words (whatever stands between spaces) of a text in UTF-8."""
    raw = np.frombuffer(data, dtype=np.uint8)
    if unit == "bytes":
        return Symbols(raw)
    spans = np.array([match.span() for match in _WORD.finditer(data)], dtype=np.int64).reshape(-1, 2)
    values = np.zeros(len(spans), dtype=np.uint64)
    first = 0
    while first < len(spans):
        base = int(spans[first, 0])
        end = max(first + 1, int(np.searchsorted(spans[:, 1], base + PIECE, side="right")))
        sums, powers = _running_sums(raw[base : spans[end - 1, 1]])
        starts, ends = spans[first:end, 0] - base, spans[first:end, 1] - base
        values[first:end] = mix64((sums[ends] - sums[starts]) * powers[ends - 1])
        first = end
    return Symbols(values, np.append(spans[:, 0], len(data)))


def pieces(values: np.ndarray, width: int) -> Iterator[tuple[int, np.ndarray]]:
    """First window, and symbols, of pieces that together have every window of `width` symbols once."""
    for start in range(0, len(values) - width + 1, PIECE):
        yield start, values[start : start + PIECE + width - 1]


def anchors(values: np.ndarray, width: int) -> np.ndarray:
    """uint64: the hashes of k-grams that are the least of some window of a piece, one for each place they are at."""
    least = least_anchors(values, width)
    if not len(least):
        return least
    size = _anchor_width(width)
    span = width - size + 1
    padding = np.zeros(span - 1, dtype=np.uint64)
    best = _sliding(np.maximum, np.concatenate([padding, least, padding]), span)
    grams = _grams(values, size)
    return grams[grams == best]


def least_anchors(values: np.ndarray, width: int) -> np.ndarray:
    """uint64 [windows]: the least k-gram hash of each window of `width` symbols; none if the text is shorter."""
    if len(values) < width:
        return np.zeros(0, dtype=np.uint64)
    size = _anchor_width(width)
    return _sliding(np.minimum, _grams(values, size), width - size + 1)


def window_hashes(values: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Two uint64 [windows]: 128 bits for each window of `width` symbols.

    A window's hash is put together from those of blocks of powers of two, with a mixing step at each: no algebra that
    periodic texts could undo, as with a polynomial.
    """
    return _lane(values, width, _LANES[0]), _lane(values, width, _LANES[1])


def _lane(values: np.ndarray, width: int, factor: np.uint64) -> np.ndarray:
    count = len(values) - width + 1
    block = mix64((values + np.uint64(1)) * factor)
    size, done = 1, 0
    whole = np.full(count, factor, dtype=np.uint64)
    while True:
        if width & size:
            whole = _combined(whole, block[done : done + count], factor)
            done += size
        if done == width:
            return mix64(whole)
        block = _combined(block[:-size], block[size:], factor)
        size *= 2


def _combined(left: np.ndarray, right: np.ndarray, factor: np.uint64) -> np.ndarray:
    both = left * factor
    both += right
    both ^= both >> np.uint64(32)
    both *= _BASE
    return both


def _anchor_width(width: int) -> int:
    return max(1, width // 2)


def _grams(values: np.ndarray, size: int) -> np.ndarray:
    """uint64 hashes of all runs of `size` symbols, from one running sum; never 0."""
    sums, powers = _running_sums(values)
    starts = np.arange(len(values) - size + 1)
    return mix64((sums[size:] - sums[:-size]) * powers[starts + size - 1]) | np.uint64(1)


def _running_sums(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums of value_i · BASE**-i, and the powers of BASE: the difference of two sums is a polynomial hash, shifted."""
    powers = np.full(len(values) + 1, _BASE, dtype=np.uint64)
    inverses = np.full(len(values) + 1, _INVERSE, dtype=np.uint64)
    powers[0] = inverses[0] = 1
    np.multiply.accumulate(powers, out=powers)
    np.multiply.accumulate(inverses, out=inverses)
    sums = np.zeros(len(values) + 1, dtype=np.uint64)
    np.cumsum(values * inverses[:-1], out=sums[1:])
    return sums, powers


def _sliding(reduce: Callable[..., np.ndarray], values: np.ndarray, span: int) -> np.ndarray:
    """The minimum or maximum of each `span` values in a row, by doubling."""
    size = 1
    while 2 * size <= span:
        values = reduce(values[:-size], values[size:])
        size *= 2
    rest = span - size
    return reduce(values[: len(values) - rest], values[rest:]) if rest else values
