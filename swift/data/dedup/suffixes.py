"""Which windows of a corpus in memory have occurred before, by sorting its suffixes.

Suffixes are sorted by their first `width` symbols only, by prefix doubling (Manber, Myers 1990): the rank of a suffix
by 2p symbols is that of the pair of ranks by p symbols of itself and of the suffix p further on. Nothing is hashed, so
there is nothing to verify. Knows nothing of documents and files.
"""

from __future__ import annotations

import numpy as np

BYTES_PER_SYMBOL = 80  # alive at once while ranks are doubled


def window_ranks(values: np.ndarray, width: int) -> np.ndarray:
    """int64 [windows]: equal for equal windows of `width` symbols, and in the order of their symbols.

    Windows run over the borders of texts that were joined; whoever joined them leaves those out.
    """
    count = len(values) - width + 1
    if count < 1:
        return np.zeros(0, dtype=np.int64)
    block = _dense(values)
    size, done = 1, 0
    ranks = np.zeros(count, dtype=np.int64)
    while True:
        if width & size:
            ranks = _pairs(ranks, block[done : done + count])
            done += size
        if done == width:
            return ranks
        block = _pairs(block[:-size], block[size:])
        size *= 2


def repeated_windows(ranks: np.ndarray, width: int, inside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The windows equal to one that ended before they begin, and the first window equal to each; int64, by position.

    Args:
        ranks: of `window_ranks`.
        width: of a window.
        inside: bool, whether a window lies in one text.
    """
    places = np.flatnonzero(inside)
    order = places[np.argsort(ranks[places], kind="stable")]
    ranked = ranks[order]
    starts = np.ones(len(order), dtype=bool)
    starts[1:] = ranked[1:] != ranked[:-1]
    first = order[starts][np.cumsum(starts) - 1] if len(order) else order
    repeated = order >= first + width
    found, first = order[repeated], first[repeated]
    by_place = np.argsort(found)
    return found[by_place], first[by_place]


def _pairs(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return _dense(left * (int(right.max()) + 1) + right)


def _dense(values: np.ndarray) -> np.ndarray:
    """Values replaced by their places among the distinct ones."""
    return np.unique(values, return_inverse=True)[1].astype(np.int64)
