"""A shuffled order of n things that nobody has to write down.

A Feistel network permutes the numbers below a power of two; numbers that land at n or above walk on until they fall
below it ("cycle walking"). So the thing at any place of the order is worked out from (n, seed, epoch) alone: no list of
n numbers, no start-up time, any place reached at once.

Source: Luby & Rackoff, "How to construct pseudorandom permutations from pseudorandom functions" (1988); cycle walking:
Black & Rogaway, "Ciphers with arbitrary finite domains" (2002). This file knows nothing of data sets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import overload

import numpy as np

# Part of a run's identity: a checkpoint made with another way of ordering must not be continued with this one.
ORDER_VERSION = "feistel-1"

_ROUNDS = 6
_LEAST_BITS = 8  # halves of fewer than four bits have too few round functions to look random
_BLOCK = 1 << 15  # numbers worked out at once, so that they stay in the processor's cache
_MULTIPLIERS = (np.uint32(0x9E3779B1), np.uint32(0x85EBCA77))


class FeistelOrder:
    """The numbers 0 … n-1 in an order that is a function of (n, seed, epoch, stream).

    Args:
        n: how many; at least 0.
        seed, epoch: any integers.
        stream: more integers, to have independent orders under one seed and epoch.

    Indexing takes an int (negative ones count from the end), a slice, or an integer array, and gives an int or an int64
    array of the same shape. Every number below n comes exactly once.
    """

    def __init__(self, n: int, seed: int, epoch: int, *stream: int) -> None:
        if not 0 <= n <= 1 << 62:
            raise ValueError(f"an order of {n} things can't be made")
        self.n = n
        bits = max(_LEAST_BITS, (n - 1).bit_length())
        self._low_bits = np.uint64(bits // 2)
        self._low_mask = np.uint64((1 << (bits // 2)) - 1)
        self._high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        words = repr((ORDER_VERSION, seed, epoch, *stream)).encode()
        digest = hashlib.blake2b(words, digest_size=8 * _ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u4").astype(np.uint32).reshape(_ROUNDS, 2)
        self._table: np.ndarray | None = None
        if n <= 1 << _LEAST_BITS:  # walking would be long: take the images below n as they come
            images = self._permuted(np.arange(1 << _LEAST_BITS, dtype=np.uint64)).astype(np.int64)
            self._table = images[images < n]

    def __len__(self) -> int:
        return self.n

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice | np.ndarray) -> np.ndarray: ...
    def __getitem__(self, at: int | slice | np.ndarray) -> int | np.ndarray:
        if isinstance(at, slice):
            return self._at(np.arange(*at.indices(self.n), dtype=np.int64))
        places = np.asarray(at, dtype=np.int64)
        if places.size and (int(places.min()) < -self.n or int(places.max()) >= self.n):
            raise IndexError(f"the order has {self.n} places")
        places = np.where(places < 0, places + self.n, places)
        return int(self._at(places.reshape(1))[0]) if places.ndim == 0 else self._at(places)

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self.n, _BLOCK):
            yield from self[start : start + _BLOCK].tolist()

    def _at(self, places: np.ndarray) -> np.ndarray:
        if self._table is not None:
            return self._table[places]
        flat = places.astype(np.uint64).reshape(-1)
        for start in range(0, len(flat), _BLOCK):
            block = flat[start : start + _BLOCK]
            block[:] = self._permuted(block)
            while len(outside := np.flatnonzero(block >= np.uint64(self.n))):
                block[outside] = self._permuted(block[outside])
        return flat.astype(np.int64).reshape(places.shape)

    def _permuted(self, numbers: np.ndarray) -> np.ndarray:
        """Each number below the power of two to its image; uint64 [n]. Rounds change the halves in turn."""
        low, high = numbers & self._low_mask, numbers >> self._low_bits
        for number, key in enumerate(self._keys):
            if number % 2:
                low ^= _scrambled(high, key) & self._low_mask
            else:
                high ^= _scrambled(low, key) & self._high_mask
        return (high << self._low_bits) | low


def _scrambled(half: np.ndarray, key: np.ndarray) -> np.ndarray:
    """A function of (half, key) whose every output bit depends on every input bit: two multiply-and-fold rounds."""
    x = half.astype(np.uint32)  # a half has at most 31 bits
    x ^= key[0]
    x *= _MULTIPLIERS[0]
    x ^= x >> np.uint32(15)
    x += key[1]
    x *= _MULTIPLIERS[1]
    x ^= x >> np.uint32(13)
    return x.astype(np.uint64)
