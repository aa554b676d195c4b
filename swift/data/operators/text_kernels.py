# mypy: ignore-errors
"""Compiled loops over the UTF-8 bytes of a batch of texts: words, lines, paragraphs, and what repeats in them.

The plain implementation of the same functions is `text_plain`, where the definitions are spelt out. Words, lines and
paragraphs are compared by 64-bit hashes here; two different ones in a text of a million words share a hash with a
probability below 1e-7.
"""

from __future__ import annotations

import numpy as np

from swift.data.compiled import kernel
from swift.data.operators.characters import (
    ALNUM,
    ALPHA,
    BULLET,
    C4_END,
    CLOSING,
    DASH_BULLET,
    LINE_END,
    SENTENCE_END,
    SPACE,
    UNSPACED,
    WIDE_END,
)

_FNV_START = np.uint64(0xCBF29CE484222325)
_FNV_PRIME = np.uint64(0x100000001B3)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)


@kernel
def _grown(array, size):
    larger = np.empty(size, array.dtype)
    larger[: array.shape[0]] = array
    return larger


@kernel
def _grown_rows(array, size):
    larger = np.empty((size, array.shape[1]), array.dtype)
    larger[: array.shape[0]] = array
    return larger


@kernel
def _scan_text(data, place, end, table, counts, word, line, paragraph):
    """One text; `word`, `line`, `paragraph` are arrays with room enough, written from their beginnings.

    Apart from `scan` because a loop in which arrays are replaced by larger ones counts references at every turn, which
    makes it ten times slower.
    """
    word_hash, word_length = word
    line_rows, line_hash = line
    paragraph_length_of, paragraph_hash = paragraph
    words = lines = paragraphs = 0
    position = 0  # in code points
    in_word = alnum = alpha = unspaced = False
    hashed, length = _FNV_START, 0
    first = last = -1  # of the line, as positions
    bullet = 0
    dots = 0
    flags = 0
    line_words = sentences = pending = 0
    line_mix = paragraph_mix = _FNV_START
    paragraph_length = 0
    while place <= end:
        width = 1
        if place == end:
            code = 10  # every text ends its last line
        else:
            code = np.int64(data[place])
            if code >= 0x80:
                if code < 0xE0:
                    width = 2
                    code = (code & 0x1F) << 6 | np.int64(data[place + 1]) & 0x3F
                elif code < 0xF0:
                    width = 3
                    code = (code & 0x0F) << 12 | (np.int64(data[place + 1]) & 0x3F) << 6
                    code |= np.int64(data[place + 2]) & 0x3F
                else:
                    width = 4
                    code = (code & 0x07) << 18 | (np.int64(data[place + 1]) & 0x3F) << 12
                    code |= (np.int64(data[place + 2]) & 0x3F) << 6 | np.int64(data[place + 3]) & 0x3F
        bits = np.int64(table[code]) if code < table.shape[0] else np.int64(0)
        if in_word and (
            bits & SPACE or (bits & UNSPACED and alnum) or (unspaced and bits & ALNUM and not bits & UNSPACED)
        ):
            word_hash[words] = hashed
            word_length[words] = length
            words += 1
            line_words += 1
            line_mix = (line_mix ^ hashed) * _MIX
            line_mix ^= line_mix >> _HALF
            paragraph_mix = (paragraph_mix ^ hashed) * _MIX
            paragraph_mix ^= paragraph_mix >> _HALF
            counts[1] += 1
            counts[3] += alpha
            counts[5] += length
            if unspaced:
                counts[2] += 1
            else:
                counts[4] += length
            in_word = alnum = alpha = unspaced = False
            hashed, length = _FNV_START, 0
        if bits & SPACE:
            if pending:
                sentences += 1
                pending = 0
            if bullet == 1:
                flags |= 1  # a dash with white space behind it
            bullet = 2
            if code == 10:
                if first >= 0:
                    line_rows[lines, 0] = first
                    line_rows[lines, 1] = last + 1
                    line_rows[lines, 2] = line_words
                    line_rows[lines, 3] = flags
                    line_rows[lines, 4] = sentences
                    line_rows[lines, 5] = last + 1 - first
                    line_hash[lines] = line_mix
                    lines += 1
                    paragraph_length += last + 1 - first
                if (first < 0 or place == end) and paragraph_length:
                    paragraph_length_of[paragraphs] = paragraph_length
                    paragraph_hash[paragraphs] = paragraph_mix
                    paragraphs += 1
                    paragraph_length = 0
                    paragraph_mix = _FNV_START
                first = last = -1
                bullet = dots = flags = 0
                line_words = sentences = 0
                line_mix = _FNV_START
        else:
            if not in_word:
                in_word = True
            if bits & UNSPACED:
                unspaced = True
            if bits & ALNUM:
                alnum = True
                if bits & ALPHA:
                    alpha = True
            length += 1
            for i in range(place, place + width):
                hashed = (hashed ^ np.uint64(data[i])) * _FNV_PRIME
            if first < 0:
                first = position
                bullet = 2
                if bits & BULLET:
                    flags |= 1
                elif bits & DASH_BULLET:
                    bullet = 1
            else:
                bullet = 2
            if last == position - 1 and code == 46:
                dots += 1
            else:
                dots = 1 if code == 46 else 0
            last = position
            flags &= 1
            if bits & C4_END:
                flags |= 2
            if bits & LINE_END:
                flags |= 4
            if dots >= 3 or code == 0x2026:
                flags |= 8
            if bits & SENTENCE_END:
                pending = 2 if bits & WIDE_END else 1
            elif pending and not bits & CLOSING:
                if pending == 2:
                    sentences += 1
                pending = 0
        if place < end:
            position += 1
        place += width
    counts[0] = position
    return words, lines, paragraphs


@kernel
def scan(data, offsets, table):
    """Cut texts into words, lines and paragraphs.

    Args:
        data: uint8 [bytes]: the texts behind one another. offsets: int64 [texts + 1]. table: `character_table()`.

    Returns:
        counts int64 [texts, 6] (`text_plain.COUNTS`), word hashes uint64 and lengths int32 [words], word offsets
        int64 [texts + 1], lines int64 [lines, 6] (`text_plain.LINE`), their hashes and offsets, paragraph lengths int64
        [paragraphs], their hashes and offsets.
    """
    num_texts = offsets.shape[0] - 1
    num_bytes = data.shape[0]
    counts = np.zeros((num_texts, 6), np.int64)
    word_hash = np.empty(num_bytes // 4 + 64, np.uint64)
    word_length = np.empty(num_bytes // 4 + 64, np.int32)
    word_offsets = np.zeros(num_texts + 1, np.int64)
    line_rows = np.empty((num_bytes // 16 + 64, 6), np.int64)
    line_hash = np.empty(num_bytes // 16 + 64, np.uint64)
    line_offsets = np.zeros(num_texts + 1, np.int64)
    paragraph_length = np.empty(num_bytes // 32 + 64, np.int64)
    paragraph_hash = np.empty(num_bytes // 32 + 64, np.uint64)
    paragraph_offsets = np.zeros(num_texts + 1, np.int64)
    words = lines = paragraphs = 0
    for text in range(num_texts):
        room = (offsets[text + 1] - offsets[text]) // 2 + 2  # a word has a byte, and a space or two more bytes
        if words + room > word_hash.shape[0]:
            word_hash = _grown(word_hash, 2 * (words + room))
            word_length = _grown(word_length, 2 * (words + room))
        if lines + room > line_rows.shape[0]:
            line_rows = _grown_rows(line_rows, 2 * (lines + room))
            line_hash = _grown(line_hash, 2 * (lines + room))
        if paragraphs + room > paragraph_length.shape[0]:
            paragraph_length = _grown(paragraph_length, 2 * (paragraphs + room))
            paragraph_hash = _grown(paragraph_hash, 2 * (paragraphs + room))
        found = _scan_text(
            data,
            offsets[text],
            offsets[text + 1],
            table,
            counts[text],
            (word_hash[words:], word_length[words:]),
            (line_rows[lines:], line_hash[lines:]),
            (paragraph_length[paragraphs:], paragraph_hash[paragraphs:]),
        )
        words += found[0]
        lines += found[1]
        paragraphs += found[2]
        word_offsets[text + 1] = words
        line_offsets[text + 1] = lines
        paragraph_offsets[text + 1] = paragraphs
    return (
        counts,
        word_hash[:words],
        word_length[:words],
        word_offsets,
        line_rows[:lines],
        line_hash[:lines],
        line_offsets,
        paragraph_length[:paragraphs],
        paragraph_hash[:paragraphs],
        paragraph_offsets,
    )


@kernel
def duplicates(hashes, lengths, offsets):
    """Of each text's items: how many came before in the same text, and their summed length: int64 [texts, 2]."""
    num_texts = offsets.shape[0] - 1
    out = np.zeros((num_texts, 2), np.int64)
    most = 0
    for text in range(num_texts):
        most = max(most, offsets[text + 1] - offsets[text])
    size = 16
    while size < 2 * most:
        size *= 2
    keys = np.empty(size, np.uint64)
    stamps = np.zeros(size, np.int32)
    for text in range(num_texts):
        begin, end = offsets[text], offsets[text + 1]
        size = 16
        while size < 2 * (end - begin):
            size *= 2
        mask = size - 1
        for i in range(begin, end):
            key = hashes[i]
            slot = np.int64((key * _MIX) >> _HALF) & mask
            while stamps[slot] == text + 1 and keys[slot] != key:
                slot = (slot + 1) & mask
            if stamps[slot] == text + 1:
                out[text, 0] += 1
                out[text, 1] += lengths[i]
            else:
                stamps[slot] = text + 1
                keys[slot] = key
    return out


@kernel
def repeated_ngrams(hashes, lengths, offsets, rows):
    """Characters in repeated n-grams of words, n = 2 ... 10, of the texts `rows`: int64 [rows, 9].

    For n = 2, 3, 4 those of the most frequent n-gram, for larger n those of all n-grams that came before; see
    `text_plain.repeated_ngrams`.
    """
    out = np.zeros((rows.shape[0], 9), np.int64)
    most = 0
    for row in rows:
        most = max(most, offsets[row + 1] - offsets[row])
    size = 16
    while size < 2 * most:
        size *= 2
    keys = np.empty(size, np.uint64)
    stamps = np.zeros(size, np.int32)
    times = np.empty(size, np.int32)
    covered = np.empty(size, np.int64)
    reached = np.empty(size, np.int64)
    grams = np.empty(most + 1, np.uint64)
    start = np.empty(most + 1, np.int64)
    stamp = 0
    for index in range(rows.shape[0]):
        begin = offsets[rows[index]]
        num_words = offsets[rows[index] + 1] - begin
        size = 16
        while size < 2 * num_words:
            size *= 2
        mask = size - 1
        start[0] = 0
        for i in range(num_words):
            grams[i] = hashes[begin + i]
            start[i + 1] = start[i] + lengths[begin + i]
        for n in range(2, 11):
            stamp += 1
            repeated = False
            total = 0
            if n < 5:
                best_times = 1
                for i in range(num_words - n + 1):
                    key = (grams[i] * _MIX) ^ hashes[begin + i + n - 1]
                    key ^= key >> _HALF
                    grams[i] = key
                    slot = np.int64((key * _MIX) >> _HALF) & mask
                    while stamps[slot] == stamp and keys[slot] != key:
                        slot = (slot + 1) & mask
                    if stamps[slot] != stamp:
                        stamps[slot] = stamp
                        keys[slot] = key
                        times[slot] = 1
                        covered[slot] = start[i + n] - start[i]
                        reached[slot] = i + n
                        continue
                    repeated = True
                    times[slot] += 1
                    covered[slot] += start[i + n] - start[max(i, reached[slot])]
                    reached[slot] = i + n
                    if times[slot] > best_times:
                        best_times = times[slot]
                        total = covered[slot]
                    elif times[slot] == best_times:
                        total = max(total, covered[slot])
            else:
                behind = 0
                for i in range(num_words - n + 1):
                    key = (grams[i] * _MIX) ^ hashes[begin + i + n - 1]
                    key ^= key >> _HALF
                    grams[i] = key
                    slot = np.int64((key * _MIX) >> _HALF) & mask
                    while stamps[slot] == stamp and keys[slot] != key:
                        slot = (slot + 1) & mask
                    if stamps[slot] == stamp:
                        repeated = True
                        total += start[i + n] - start[max(i, behind)]
                        behind = i + n
                    else:
                        stamps[slot] = stamp
                        keys[slot] = key
            out[index, n - 2] = total
            if not repeated:  # then no longer n-gram repeats either
                break
    return out
