"""Attention over a paged cache in fp32 on a CPU, compiled by numba.

Each query row by itself: the scores of its request's keys, their softmax, the sum of values, always added in the order
of the keys. So a row's bits depend on its query and its request's cache alone, whatever the block size, the chunk it
came in or the rows beside it. Query heads that share a key head are taken together, so a block of keys is read once.

Loops are written eight steps deep where that lets the compiler keep sums in registers; the additions stay one after the
other. Nothing is read beyond a request's own tokens: what others left in a block may be NaN.
"""

from __future__ import annotations

import math

import numpy as np

from swift.data.compiled import numeric_kernel

_LOG2E = np.float32(1.4426950408889634)
# ln 2 in two parts: the first has few enough bits that a multiple of it is exact
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_C2, _C3, _C4, _C5, _C6, _C7 = (np.float32(1 / math.factorial(k)) for k in range(2, 8))
_HALF, _ONE, _ZERO, _LOWEST = np.float32(0.5), np.float32(1), np.float32(0), np.float32(-87.0)


@numeric_kernel
def write(keys, values, key, value, slots):
    """Put rows into the cache.

    Args:
        keys: [blocks, heads, key_dim, block_size]; values: [blocks, heads, block_size, value_dim].
        key: [heads, rows, key_dim]; value: [heads, rows, value_dim].
        slots: int64 [rows].
    """
    block_size = keys.shape[3]
    for row in range(slots.shape[0]):
        block, place = slots[row] // block_size, slots[row] % block_size
        for head in range(keys.shape[1]):
            for d in range(keys.shape[2]):
                keys[block, head, d, place] = key[head, row, d]
            for d in range(values.shape[3]):
                values[block, head, place, d] = value[head, row, d]


@numeric_kernel
def exponentials(scores, bits, powers, start, end, top):
    """scores[i] = exp(scores[i] - top) for start <= i < end; error about 1e-7 of the value.

    Args:
        bits: the same memory as `scores`, as int32.
        powers: int32 scratch, as long.
    """
    for i in range(start, end):
        x = max(scores[i] - top, _LOWEST)
        whole = np.floor(x * _LOG2E + _HALF)
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
        powers[i] = np.int32(whole) << np.int32(23)
    for i in range(start, end):  # times 2 ** whole
        bits[i] += powers[i]


@numeric_kernel
def score_block(scores, start, block, query, scale):
    """scores[start + j] = scale * sum over d of query[d] * block[d, j], added in the order of d."""
    size = block.shape[1]
    for j in range(size):
        scores[start + j] = _ZERO
    dim = query.shape[0]
    eights = dim - dim % 8
    for d in range(0, eights, 8):
        q0, q1, q2, q3 = query[d] * scale, query[d + 1] * scale, query[d + 2] * scale, query[d + 3] * scale
        q4, q5, q6, q7 = query[d + 4] * scale, query[d + 5] * scale, query[d + 6] * scale, query[d + 7] * scale
        for j in range(size):
            s = scores[start + j]
            s += q0 * block[d, j]
            s += q1 * block[d + 1, j]
            s += q2 * block[d + 2, j]
            s += q3 * block[d + 3, j]
            s += q4 * block[d + 4, j]
            s += q5 * block[d + 5, j]
            s += q6 * block[d + 6, j]
            s += q7 * block[d + 7, j]
            scores[start + j] = s
    for d in range(eights, dim):
        q0 = query[d] * scale
        for j in range(size):
            scores[start + j] += q0 * block[d, j]


@numeric_kernel
def add_values(output, weights, offset, block, start, end):
    """output[d] += weights[offset + j] * block[j, d] for start <= j < end, added in the order of j."""
    dim = output.shape[0]
    j = start
    while j + 8 <= end:
        at = offset + j
        w0, w1, w2, w3 = weights[at], weights[at + 1], weights[at + 2], weights[at + 3]
        w4, w5, w6, w7 = weights[at + 4], weights[at + 5], weights[at + 6], weights[at + 7]
        for d in range(dim):
            y = output[d]
            y += w0 * block[j, d]
            y += w1 * block[j + 1, d]
            y += w2 * block[j + 2, d]
            y += w3 * block[j + 3, d]
            y += w4 * block[j + 4, d]
            y += w5 * block[j + 5, d]
            y += w6 * block[j + 6, d]
            y += w7 * block[j + 7, d]
            output[d] = y
        j += 8
    while j < end:
        w0 = weights[offset + j]
        for d in range(dim):
            output[d] += w0 * block[j, d]
        j += 1


@numeric_kernel
def attend(query, keys, values, spans, tables, options, sinks, output, rows):
    """Attention of some rows of a step.

    Args:
        query: [heads, rows, key_dim].
        keys, values: of the cache, see `write`.
        spans: int32 [spans, 3]: first row, number of rows, position of the first.
        tables: int32 [spans, width].
        options: float32 [3]: scale; window (0: none); soft cap (0: none).
        sinks: [heads]; empty for none.
        output: [rows, heads, value_dim]; rows of no span aren't touched.
        rows: int64 [2]: rows from the first to before the second are computed.
    """
    scale, window, softcap = options[0], int(options[1]), options[2]
    block_size = keys.shape[3]
    heads = keys.shape[1]
    shared = query.shape[0] // heads
    longest = tables.shape[1] * block_size
    scores = np.empty((shared, longest), dtype=np.float32)
    bits = scores.view(np.int32)
    powers = np.empty(longest, dtype=np.int32)
    for span in range(spans.shape[0]):
        start = max(spans[span, 0], rows[0])
        end = min(spans[span, 0] + spans[span, 1], rows[1])
        for row in range(start, end):
            stop = spans[span, 2] + row - spans[span, 0] + 1  # keys before this one are seen
            first = max(0, stop - window) if window > 0 else 0
            for head in range(heads):
                for block in range(first // block_size, (stop + block_size - 1) // block_size):
                    held = keys[tables[span, block], head]
                    for g in range(shared):
                        score_block(scores[g], block * block_size, held, query[head * shared + g, row], scale)
                for g in range(shared):
                    weights = scores[g]
                    if softcap > 0:
                        for i in range(first, stop):
                            weights[i] = softcap * np.float32(math.tanh(weights[i] / softcap))
                    top = weights[first]
                    for i in range(first + 1, stop):
                        top = max(top, weights[i])
                    if sinks.shape[0] > 0:
                        top = max(top, sinks[head * shared + g])
                    exponentials(weights, bits[g], powers, first, stop, top)
                    total = _ZERO
                    for i in range(first, stop):
                        total += weights[i]
                    if sinks.shape[0] > 0:
                        total += np.float32(math.exp(sinks[head * shared + g] - top))
                    inverse = _ONE / total
                    for i in range(first, stop):
                        weights[i] *= inverse
                    output[row, head * shared + g, :] = _ZERO
                for block in range(first // block_size, (stop + block_size - 1) // block_size):
                    offset = block * block_size
                    held = values[tables[span, block], head]
                    begin, finish = max(0, first - offset), min(block_size, stop - offset)
                    for g in range(shared):
                        add_values(output[row, head * shared + g], scores[g], offset, held, begin, finish)
