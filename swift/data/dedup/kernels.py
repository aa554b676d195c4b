"""The loops that numba compiles: text to token hashes, and token hashes to MinHash signatures.

`tokens` and `minhash` hold the same functions in numpy, with the same bits, and say what they compute; the constants of
the hashes are theirs. Imported where a kernel is first needed, since numba is slow to import.
"""

from __future__ import annotations

import numpy as np

from swift.data.compiled import kernel

_BLOCK = 4096  # shingles that are hashed at a time: they stay in the first-level cache


@kernel
def _mix(value):
    value ^= value >> np.uint64(33)
    value *= np.uint64(0xFF51AFD7ED558CCD)
    value ^= value >> np.uint64(33)
    value *= np.uint64(0xC4CEB9FE1A85EC53)
    return value ^ (value >> np.uint64(33))


@kernel
def _class_at(buffer, position, classes):
    """Class and length in bytes of the code point at a position."""
    byte = np.int64(buffer[position])
    if byte < 0x80:
        return classes[byte], 1
    if byte < 0xE0:
        return classes[(byte & 0x1F) << 6 | np.int64(buffer[position + 1] & 0x3F)], 2
    point = np.int64(buffer[position + 1] & 0x3F) << 6 | np.int64(buffer[position + 2] & 0x3F)
    if byte < 0xF0:
        return classes[(byte & 0x0F) << 12 | point], 3
    point = (byte & 0x07) << 18 | point << 6 | np.int64(buffer[position + 3] & 0x3F)
    return classes[min(point, len(classes) - 1)], 4


@kernel
def _fill(buffer, position, stop, classes, lower, hashes, starts, ends, count):
    """Tokens from a position on, until the text or the room in `hashes` ends; returns their number and the position."""
    base = np.uint64(0x9E3779B97F4A7C15)
    room = len(hashes)
    while position < stop and count < room:
        kind, length = _class_at(buffer, position, classes)
        if kind == 0:
            position += length
            continue
        start = position
        value = np.uint64(0)
        while True:
            for index in range(position, position + length):
                value = value * base + np.uint64(lower[buffer[index]])
            position += length
            if kind == 2 or position >= stop:
                break
            following, length = _class_at(buffer, position, classes)
            if following != 1:
                break
        hashes[count] = _mix(value)
        starts[count] = start
        ends[count] = position
        count += 1
    return count, position


@kernel
def tokenise(buffer, borders, classes, lower, hashes, starts, ends, offsets):
    """Fills `hashes`, `starts`, `ends` and `offsets`; returns the number of tokens."""
    count = 0
    for text in range(len(borders) - 1):
        offsets[text] = count
        count, _ = _fill(buffer, borders[text], borders[text + 1], classes, lower, hashes, starts, ends, count)
    offsets[len(borders) - 1] = count
    return count


@kernel
def signatures(buffer, borders, classes, lower, ngram, factors, shifts, out):
    """Fills `out` uint32 [texts, hashes]; a text without tokens keeps what `out` holds."""
    base = np.uint64(0xD6E8FEB86659FD93)
    leaving = np.uint64(1)
    for _ in range(ngram):
        leaving *= base
    hashes = np.empty(_BLOCK + ngram, dtype=np.uint64)
    spans = np.empty((2, _BLOCK + ngram), dtype=np.int64)
    shingles = np.empty(_BLOCK + ngram, dtype=np.uint32)
    for text in range(len(borders) - 1):
        position, stop = borders[text], borders[text + 1]
        held = 0  # tokens kept from the block before
        made = 0
        while position < stop:
            count, position = _fill(buffer, position, stop, classes, lower, hashes, spans[0], spans[1], held)
            num = 0
            if count >= ngram:
                value = np.uint64(0)
                for index in range(count):
                    value = value * base + hashes[index]
                    if index >= ngram:
                        value -= hashes[index - ngram] * leaving
                    if index >= ngram - 1:
                        shingles[num] = np.uint32(_mix(value) >> np.uint64(32))
                        num += 1
                for index in range(ngram - 1):
                    hashes[index] = hashes[count - ngram + 1 + index]
                held = ngram - 1
            elif made == 0 and position >= stop and count > 0:  # a text shorter than an n-gram is one
                value = np.uint64(0)
                for index in range(count):
                    value = value * base + hashes[index]
                shingles[0] = np.uint32(_mix(value) >> np.uint64(32))
                num = 1
            else:
                held = count
            made += num
            for which in range(len(factors)):
                factor, shift = factors[which], shifts[which]
                least = out[text, which]
                for index in range(num):
                    least = min(least, np.uint32(shingles[index] * factor + shift))
                out[text, which] = least


@kernel
def _root(parents, node):
    while parents[node] != node:
        parents[node] = parents[parents[node]]
        node = parents[node]
    return node


@kernel
def union(parents, left, right):
    """Union-find with the least node as root and path halving (Tarjan, van Leeuwen 1984); `parents` become roots."""
    for edge in range(len(left)):
        a = _root(parents, left[edge])
        b = _root(parents, right[edge])
        if a < b:
            parents[b] = a
        elif b < a:
            parents[a] = b
    for node in range(len(parents)):
        parents[node] = parents[parents[node]] if parents[node] != node else node
