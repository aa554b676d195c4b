"""Attention over a paged cache on a CPU, computed in fp32, compiled by numba.

Each query row by itself: the scores of its request's keys, their softmax, the sum of values, always added in an order
that follows from the keys' positions. So a row's bits depend on its query and its request's cache alone, whatever the
block size, the chunk it came in or the rows beside it. Query heads that share a key head are taken together, so a block
of keys is read once for all of them. The products are those of `products`. Nothing is used beyond a request's own
tokens: what others left in a block may be NaN.
"""

from __future__ import annotations

import math

import numpy as np

from swift.data.compiled import numeric_kernel
from swift.inference.paged.products import LANES, make_tile

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


# of four, two and one row: four vectors of columns, one vector, and a single column
_wide4, _wide2, _wide1 = make_tile(4, 4), make_tile(2, 4), make_tile(1, 4)
_one4, _one2, _one1 = make_tile(4, 1), make_tile(2, 1), make_tile(1, 1)
_single4, _single2, _single1 = make_tile(4, 1, 1), make_tile(2, 1, 1), make_tile(1, 1, 1)


@numeric_kernel
def small_product(x, x_step, held, panel, columns, out, out_step, rows, depth, go_on):
    """out = x times a small matrix, each number one multiply-add after the other; on top of what is there if `go_on`.

    Args:
        x, out: addresses of fp32 [rows, depth] and [rows, columns], with `*_step` numbers from row to row.
        held: an array of the matrix's type; panel: address of the matrix [depth, columns] in it.
    """
    item = held.itemsize
    column = 0
    while column < columns:
        width = 4 * LANES if column + 4 * LANES <= columns else LANES if column + LANES <= columns else 1
        matrix = panel + column * item
        row = 0
        while row < rows:
            source, target = x + row * x_step * 4, out + (row * out_step + column) * 4
            count = 4 if row + 4 <= rows else 2 if row + 2 <= rows else 1
            if width > LANES:
                if count == 4:
                    _wide4(source, x_step, held, matrix, columns, target, out_step, depth, go_on)
                elif count == 2:
                    _wide2(source, x_step, held, matrix, columns, target, out_step, depth, go_on)
                else:
                    _wide1(source, x_step, held, matrix, columns, target, out_step, depth, go_on)
            elif width > 1:
                if count == 4:
                    _one4(source, x_step, held, matrix, columns, target, out_step, depth, go_on)
                elif count == 2:
                    _one2(source, x_step, held, matrix, columns, target, out_step, depth, go_on)
                else:
                    _one1(source, x_step, held, matrix, columns, target, out_step, depth, go_on)
            elif count == 4:
                _single4(source, x_step, held, matrix, columns, target, out_step, depth, go_on)
            elif count == 2:
                _single2(source, x_step, held, matrix, columns, target, out_step, depth, go_on)
            else:
                _single1(source, x_step, held, matrix, columns, target, out_step, depth, go_on)
            row += count
        column += width


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
        cache: keys, values (see `write`).
        places: spans, int32 [spans, 3]: first row, number of rows, position of the first; tables, int32 [spans, width].
        options: float32 [3]: scale; window (0: none); soft cap (0: none).
        sinks: fp32 [heads], -inf for none.
        output: fp32 [rows, heads, value_dim], contiguous; rows of no span aren't touched.
        share: what is computed, from here to before there, counted as row * key heads + key head.
    """
    keys, values = cache
    spans, tables = places
    scale, window, softcap = options[0], int(options[1]), options[2]
    heads, dim, block_size = keys.shape[1:]
    num_asking, value_dim = query.shape[1], values.shape[3]
    shared = num_asking // heads
    scores = np.empty((num_asking, tables.shape[1] * block_size), dtype=np.float32)
    bits = scores.view(np.int32)
    width = scores.shape[1]
    raised = np.empty(width, dtype=np.float32)
    raised_bits = raised.view(np.int32)
    asked = np.empty((num_asking, dim), dtype=np.float32)
    from_asked, from_scores = np.int64(asked.ctypes.data), np.int64(scores.ctypes.data)
    from_keys, from_values = np.int64(keys.ctypes.data), np.int64(values.ctypes.data)
    for span in range(spans.shape[0]):
        begin, count, position = spans[span]
        for row in range(max(begin, share[0] // heads), min(begin + count, -(-share[1] // heads))):
            stop = position + row - begin + 1  # keys before this one are seen
            start = max(0, stop - window) if window > 0 else 0
            first, last = start // block_size, (stop - 1) // block_size
            some = range(max(0, share[0] - row * heads), min(heads, share[1] - row * heads))
            asking = range(some.start * shared, some.stop * shared)
            for h in asking:
                for d in range(dim):
                    asked[h, d] = query[row, h, d] * scale
            for block in range(first, last + 1):  # all heads of a block lie side by side
                for head in some:
                    place = (np.int64(tables[span, block]) * heads + head) * dim * block_size
                    small_product(
                        from_asked + head * shared * dim * 4, dim, keys, from_keys + place * keys.itemsize, block_size,
                        from_scores + (head * shared * width + block * block_size) * 4, width, shared, dim, False,
                    )  # fmt: skip
            for h in asking:
                powers = raised[start:stop], raised_bits[start:stop]
                softmax(scores[h, start:stop], bits[h, start:stop], powers, softcap, sinks[h])
            target = np.int64(output.ctypes.data) + row * num_asking * value_dim * 4
            for block in range(first, last + 1):
                at = block * block_size
                low, high = max(start, at), min(stop, at + block_size)
                for head in some:
                    place = (np.int64(tables[span, block]) * heads + head) * block_size + low - at
                    small_product(
                        from_scores + (head * shared * width + low) * 4, width, values,
                        from_values + place * value_dim * values.itemsize, value_dim,
                        target + head * shared * value_dim * 4, value_dim, shared, high - low, block > first,
                    )  # fmt: skip


@numeric_kernel
def write_and_attend(key, value, slots, query, cache, places, options, sinks, output, share):
    """`write`, then `attend`: one call of a layer costs less than two."""
    write(cache[0], cache[1], key, value, slots)
    attend(query, cache, places, options, sinks, output, share)
