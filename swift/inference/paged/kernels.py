"""Attention over a paged cache on a CPU, computed in fp32, compiled by numba.

Each query row by itself: the scores of its request's keys, their softmax, the sum of values, always added in an order
that follows from the keys' positions. So a row's bits depend on its query and its request's cache alone, whatever the
block size, the chunk it came in or the rows beside it. Query heads that share a key head are taken together, so a block
of keys is read once for all of them.

What a compiler needs to use the machine's vectors: inner loops of a constant length (`lanes`, a tuple whose length is a
part of its type: an eighth of how often a loop runs), several sums at a time, and indices that can't be negative.
Nothing is used beyond a request's own tokens: what others left in a block may be NaN.
"""

from __future__ import annotations

import math

import numpy as np
from numba import types
from numba.extending import overload

from swift.data.compiled import numeric_kernel

_LOG2E = np.float32(1.4426950408889634)
# ln 2 in two parts: the first has few enough bits that a multiple of it is exact
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_C2, _C3, _C4, _C5, _C6, _C7 = (np.float32(1 / math.factorial(k)) for k in range(2, 8))
_ONE, _ZERO, _LOWEST = np.float32(1), np.float32(0), np.float32(-87.0)
# 1.5 * 2 ** 23: a small number added to it is rounded to a whole one, which its lowest bits then hold
_ROUND = np.float32(12582912.0)


@numeric_kernel
def write(keys, values, key, value, slots):
    """Put rows into the cache.

    Args:
        keys: [blocks, heads, key_dim, block_size]; values: [blocks, heads, block_size, value_dim].
        key: [rows, heads, key_dim]; value: [rows, heads, value_dim]; of the cache's type.
        slots: int64 [rows].
    """
    block_size = keys.shape[3]
    for row in range(slots.shape[0]):
        block, place = slots[row] // block_size, slots[row] % block_size
        for head in range(keys.shape[1]):
            for d in range(keys.shape[2]):
                keys[block, head, d, place] = key[row, head, d]
            for d in range(values.shape[3]):
                values[block, head, place, d] = value[row, head, d]


@numeric_kernel
def exponentials(scores, bits, powers, top):
    """scores[i] = exp(scores[i] - top); error about 1e-7 of the value. NaN stays NaN.

    Args:
        bits: the same memory as `scores`, as int32.
        powers: fp32 and int32 views of scratch, as long.
    """
    raised, raised_bits = powers
    for i in range(scores.shape[0]):
        x = scores[i] - top
        x = _LOWEST if x < _LOWEST else x
        y = x * _LOG2E + _ROUND
        whole = y - _ROUND
        r = (x - whole * _LN2_HIGH) - whole * _LN2_LOW
        p = _C7
        p = p * r + _C6
        p = p * r + _C5
        p = p * r + _C4
        p = p * r + _C3
        p = p * r + _C2
        p = p * r + _ONE
        p = p * r + _ONE
        scores[i] = p
        raised[i] = y
    for i in range(scores.shape[0]):  # times 2 ** whole
        bits[i] += raised_bits[i] << 23


@numeric_kernel
def largest(numbers):
    """The largest of at least one number."""
    a = b = c = d = numbers[0]
    for k in range(numbers.shape[0] // 4):
        i = np.uintp(4 * k)
        a = numbers[i] if numbers[i] > a else a
        b = numbers[i + np.uintp(1)] if numbers[i + np.uintp(1)] > b else b
        c = numbers[i + np.uintp(2)] if numbers[i + np.uintp(2)] > c else c
        d = numbers[i + np.uintp(3)] if numbers[i + np.uintp(3)] > d else d
    for j in range(numbers.shape[0] // 4 * 4, numbers.shape[0]):
        a = numbers[j] if numbers[j] > a else a
    a = b if b > a else a
    c = d if d > c else c
    return c if c > a else a


@numeric_kernel
def sum_of(numbers):
    """Their sum, as four sums of every fourth one."""
    a = b = c = d = _ZERO
    for k in range(numbers.shape[0] // 4):
        i = np.uintp(4 * k)
        a += numbers[i]
        b += numbers[i + np.uintp(1)]
        c += numbers[i + np.uintp(2)]
        d += numbers[i + np.uintp(3)]
    for j in range(numbers.shape[0] // 4 * 4, numbers.shape[0]):
        a += numbers[j]
    return (a + b) + (c + d)


@numeric_kernel
def add_products(target, factors, rows, lanes):
    """target[j] += sum over i of factors[i] * rows[i, j], two sums of four products at a time.

    Args:
        target: [n]; factors: [m]; rows: [m or more, n].
        lanes: a tuple of n // 8.
    """
    constant = 8 * len(lanes)
    size = target.shape[0]
    count = factors.shape[0]
    for k in range(count // 8):
        i0 = np.uintp(8 * k)
        i1, i2, i3, i4 = i0 + np.uintp(1), i0 + np.uintp(2), i0 + np.uintp(3), i0 + np.uintp(4)
        i5, i6, i7 = i0 + np.uintp(5), i0 + np.uintp(6), i0 + np.uintp(7)
        f0, f1, f2, f3 = factors[i0], factors[i1], factors[i2], factors[i3]
        f4, f5, f6, f7 = factors[i4], factors[i5], factors[i6], factors[i7]
        for j in range(constant):
            a = f0 * rows[i0, j] + f1 * rows[i1, j] + f2 * rows[i2, j] + f3 * rows[i3, j]
            b = f4 * rows[i4, j] + f5 * rows[i5, j] + f6 * rows[i6, j] + f7 * rows[i7, j]
            target[j] += a + b
        for j in range(constant, size):
            a = f0 * rows[i0, j] + f1 * rows[i1, j] + f2 * rows[i2, j] + f3 * rows[i3, j]
            b = f4 * rows[i4, j] + f5 * rows[i5, j] + f6 * rows[i6, j] + f7 * rows[i7, j]
            target[j] += a + b
    for i in range(count // 8 * 8, count):
        for j in range(constant):
            target[j] += factors[i] * rows[i, j]
        for j in range(constant, size):
            target[j] += factors[i] * rows[i, j]


@numeric_kernel
def add_in_order(target, factors, rows, lanes):
    """The same as `add_products`, one product after the other: where a block ends makes no difference."""
    constant = 8 * len(lanes)
    size = target.shape[0]
    count = factors.shape[0]
    for k in range(count // 8):
        i0 = np.uintp(8 * k)
        i1, i2, i3, i4 = i0 + np.uintp(1), i0 + np.uintp(2), i0 + np.uintp(3), i0 + np.uintp(4)
        i5, i6, i7 = i0 + np.uintp(5), i0 + np.uintp(6), i0 + np.uintp(7)
        f0, f1, f2, f3 = factors[i0], factors[i1], factors[i2], factors[i3]
        f4, f5, f6, f7 = factors[i4], factors[i5], factors[i6], factors[i7]
        for j in range(constant):
            a = target[j] + f0 * rows[i0, j] + f1 * rows[i1, j] + f2 * rows[i2, j] + f3 * rows[i3, j]
            target[j] = a + f4 * rows[i4, j] + f5 * rows[i5, j] + f6 * rows[i6, j] + f7 * rows[i7, j]
        for j in range(constant, size):
            a = target[j] + f0 * rows[i0, j] + f1 * rows[i1, j] + f2 * rows[i2, j] + f3 * rows[i3, j]
            target[j] = a + f4 * rows[i4, j] + f5 * rows[i5, j] + f6 * rows[i6, j] + f7 * rows[i7, j]
    for i in range(count // 8 * 8, count):
        for j in range(constant):
            target[j] += factors[i] * rows[i, j]
        for j in range(constant, size):
            target[j] += factors[i] * rows[i, j]


def in_fp32(held, scratch):
    """What a block holds, in fp32: itself, or of bfloat16 (given as uint16) the same numbers in `scratch`.

    Args:
        held: [n, m]; scratch: fp32 [n, m].
    """
    return held if held.dtype == np.float32 else (held.astype(np.int32) << 16).view(np.float32)


@overload(in_fp32)  # the same, compiled: the type of the cache decides
def _in_fp32(held, scratch):
    def same(held, scratch):
        return held

    def widened(held, scratch):
        bits = scratch.view(np.int32)
        for i in range(held.shape[0]):
            for j in range(held.shape[1]):
                bits[i, j] = np.int32(held[i, j]) << 16
        return scratch

    return same if held.dtype == types.float32 else widened


@numeric_kernel
def softmax(scores, bits, powers, softcap, sink):
    """Replace scores by their softmax.

    Args:
        scores: [n]; bits, powers: see `exponentials`.
        softcap: 0 for none.
        sink: one more score, that has no value; -inf for none.
    """
    if softcap > 0:
        for i in range(scores.shape[0]):
            scores[i] = softcap * np.float32(math.tanh(scores[i] / softcap))
    top = largest(scores)
    top = sink if sink > top else top
    exponentials(scores, bits, powers, top)
    inverse = _ONE / (sum_of(scores) + np.float32(math.exp(sink - top)))
    for i in range(scores.shape[0]):
        scores[i] *= inverse


@numeric_kernel
def attend(query, cache, places, options, sinks, output, share):
    """Attention of some rows of a step.

    Args:
        query: fp32 [rows, heads, key_dim].
        cache: keys, values (see `write`), lanes of block_size and of value_dim (see `add_products`).
        places: spans, int32 [spans, 3]: first row, number of rows, position of the first; tables, int32 [spans, width].
        options: float32 [3]: scale; window (0: none); soft cap (0: none).
        sinks: fp32 [heads], -inf for none.
        output: fp32 [rows, heads, value_dim]; rows of no span aren't touched.
        share: what is computed, from here to before there, counted as row * key heads + key head.
    """
    keys, values, key_lanes, value_lanes = cache
    spans, tables = places
    scale, window, softcap = options[0], int(options[1]), options[2]
    heads, dim, block_size = keys.shape[1:]
    num_asking = query.shape[1]
    shared = num_asking // heads
    scores = np.empty((num_asking, tables.shape[1] * block_size), dtype=np.float32)
    bits = scores.view(np.int32)
    raised = np.empty(scores.shape[1], dtype=np.float32)
    raised_bits = raised.view(np.int32)
    asked = np.empty((num_asking, dim), dtype=np.float32)
    wide_keys = np.empty((dim, block_size), dtype=np.float32)
    wide_values = np.empty(values.shape[2:], dtype=np.float32)
    for span in range(spans.shape[0]):
        begin, count, position = spans[span]
        for row in range(max(begin, share[0] // heads), min(begin + count, -(-share[1] // heads))):
            stop = position + row - begin + 1  # keys before this one are seen
            start = max(0, stop - window) if window > 0 else 0
            blocks = range(start // block_size, (stop - 1) // block_size + 1)
            some = range(max(0, share[0] - row * heads), min(heads, share[1] - row * heads))
            asking = range(some.start * shared, some.stop * shared)
            for h in asking:
                for d in range(dim):
                    asked[h, d] = query[row, h, d] * scale
            for block in blocks:  # all heads of a block lie side by side
                at = block * block_size
                for head in some:
                    held = in_fp32(keys[tables[span, block], head], wide_keys)
                    for h in range(head * shared, (head + 1) * shared):
                        target = scores[h, at : at + block_size]
                        target[:] = _ZERO
                        add_products(target, asked[h], held, key_lanes)
            for h in asking:
                powers = raised[start:stop], raised_bits[start:stop]
                softmax(scores[h, start:stop], bits[h, start:stop], powers, softcap, sinks[h])
                output[row, h, :] = _ZERO
            for block in blocks:
                at = block * block_size
                low, high = max(start, at), min(stop, at + block_size)
                for head in some:
                    held = in_fp32(values[tables[span, block], head], wide_values)
                    for h in range(head * shared, (head + 1) * shared):
                        add_in_order(output[row, h], scores[h, low:high], held[low - at :], value_lanes)


@numeric_kernel
def write_and_attend(key, value, slots, query, cache, places, options, sinks, output, share):
    """`write`, then `attend`: one call of a layer costs less than two."""
    write(cache[0], cache[1], key, value, slots)
    attend(query, cache, places, options, sinks, output, share)
