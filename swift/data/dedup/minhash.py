"""MinHash signatures and the choice of bands (Broder 1997; Leskovec et al., Mining of Massive Datasets, ch. 3).

A text is the set of its n-grams of tokens. Hash i of the set is the least `(factor_i · x + shift_i) mod 2**32` over the
32-bit hashes x of its n-grams; two texts agree in a share of hashes that estimates the Jaccard similarity J of the sets
with standard error `sqrt(J (1 - J) / hashes)`. Texts that agree in all `rows` hashes of one of `bands` bands are
candidates, which happens with probability `1 - (1 - J**rows)**bands`.

The numpy implementation gives the same bits as the compiled one. Knows nothing of documents and files.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from swift.data.compiled import has_numba
from swift.data.dedup.tokens import CLASSES, LOWER, join_texts, mix64, report_missing, tokenise_numpy

EMPTY = np.uint32(0xFFFFFFFF)  # each hash of a text without tokens
_SHINGLE_BASE = np.uint64(0xD6E8FEB86659FD93)
_MOST_HASHES = 256
_PIECE_BYTES = 1 << 20
_BLOCK_SHINGLES = 1 << 16


@cache
def permutations(hashes: int) -> tuple[np.ndarray, np.ndarray]:
    """uint32 [hashes] odd factors and shifts: the same on every machine and for every number of hashes."""
    drawn = mix64(np.arange(1, 2 * _MOST_HASHES + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    words = (drawn >> np.uint64(32)).astype(np.uint32)
    return words[0 : 2 * hashes : 2] | np.uint32(1), words[1 : 2 * hashes : 2]


def signatures(texts: list[str], ngram: int, hashes: int) -> np.ndarray:
    """uint32 [texts, hashes]; all `EMPTY` for a text without tokens."""
    buffer, borders = join_texts(texts)
    factors, shifts = permutations(hashes)
    out = np.full((len(texts), hashes), EMPTY, dtype=np.uint32)
    if has_numba():
        from swift.data.dedup import kernels

        kernels.signatures(buffer, borders, CLASSES, LOWER, ngram, factors, shifts, out)
    else:
        report_missing()
        for index in range(len(texts)):
            _signature_numpy(buffer[borders[index] : borders[index + 1]], ngram, out[index])
    return out


def set_apart(signature: np.ndarray, key: int) -> np.ndarray:
    """A signature that agrees only with those that were set apart by the same key (64 bits).

    Args:
        signature: uint32 [hashes]; one that is all `EMPTY` stays so.
    """
    if (signature == EMPTY).all():
        return signature
    places = np.arange(1, len(signature) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    masks = (mix64(places ^ np.uint64(key)) >> np.uint64(32)).astype(np.uint32)
    return signature ^ masks


def _signature_numpy(text: np.ndarray, ngram: int, out: np.ndarray) -> None:
    shingles = shingle_hashes(_token_hashes(text), ngram)
    factors, shifts = permutations(len(out))
    for start in range(0, len(shingles), _BLOCK_SHINGLES):
        block = shingles[start : start + _BLOCK_SHINGLES]
        for which in range(len(out)):
            out[which] = min(out[which], (block * factors[which] + shifts[which]).min())


def _token_hashes(text: np.ndarray) -> np.ndarray:
    """Token hashes of one text, taken piece by piece: the numpy tokeniser needs some hundred bytes for each byte."""
    found = []
    start = 0
    while start < len(text):
        stop = min(start + _PIECE_BYTES, len(text))
        while stop < len(text) and (
            text[stop - 1] >= 0x80 or CLASSES[text[stop - 1]] != 0
        ):  # up to a separator of one byte
            stop += 1
        piece = text[start:stop]
        found.append(tokenise_numpy(piece, np.array([0, len(piece)])).hashes)
        start = stop
    return np.concatenate(found) if found else np.zeros(0, dtype=np.uint64)


def shingle_hashes(tokens: np.ndarray, ngram: int) -> np.ndarray:
    """uint32 hashes of the n-grams of a text's tokens, in order; of all tokens together if they are fewer than n."""
    width = min(ngram, len(tokens))
    if width == 0:
        return np.zeros(0, dtype=np.uint32)
    return (ngram_hashes(tokens, width) >> np.uint64(32)).astype(np.uint32)


def ngram_hashes(tokens: np.ndarray, width: int) -> np.ndarray:
    """uint64 [tokens - width + 1] hashes of the runs of `width` tokens."""
    values = np.zeros(max(0, len(tokens) - width + 1), dtype=np.uint64)
    for index in range(width):
        values = values * _SHINGLE_BASE + tokens[index : index + len(values)]
    return mix64(values)


def band_keys(signatures: np.ndarray, bands: int, rows: int) -> np.ndarray:
    """uint64 [texts, bands]: equal where two texts agree in all hashes of a band, elsewhere almost surely not."""
    words = signatures[:, : bands * rows].reshape(len(signatures), bands, rows).astype(np.uint64)
    keys = np.broadcast_to(np.arange(1, bands + 1, dtype=np.uint64) * _SHINGLE_BASE, words.shape[:2])
    for row in range(rows):
        keys = mix64(keys ^ words[:, :, row]) + _SHINGLE_BASE
    return keys


def similarity(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """float64 [pairs] estimated Jaccard similarity of pairs of signatures [pairs, hashes]."""
    return (left == right).mean(axis=1)


def probability(similarity: float, bands: int, rows: int) -> float:
    """That two texts of this Jaccard similarity become candidates."""
    return 1 - (1 - similarity**rows) ** bands


@cache
def choose_bands(threshold: float, hashes: int = 128) -> tuple[int, int]:
    """Bands and rows, at most `hashes` together, whose curve comes nearest to a step at `threshold`.

    What is compared is the area between curve and step. Among equals the one with fewer hashes wins.
    """
    steps = [(index + 0.5) / 200 for index in range(200)]
    best: tuple[float, int, int, int] | None = None
    for bands in range(1, hashes + 1):
        for rows in range(1, hashes // bands + 1):
            area = sum(abs((value >= threshold) - probability(value, bands, rows)) for value in steps) / len(steps)
            found = (round(area, 6), bands * rows, bands, rows)
            best = found if best is None else min(best, found)
    assert best is not None
    return best[2], best[3]
