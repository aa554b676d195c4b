"""What words, lines and paragraphs of a text are, and what repeats in them, in plain Python.

The definitions that every quality rule uses. `text_kernels` computes the same from bytes, some seventy times faster;
this one runs where numba isn't installed, and tests hold the two against each other.

- A word is what stands between white space. A letter of a script without spaces (`scripts.UNSPACED_BLOCKS`) is a
  word of its own, together with the marks and punctuation around it.
- A line ends with a line feed; white space at its ends isn't part of it, and a line of white space doesn't count.
- A paragraph is a run of lines with no blank line between them.
- Lines (paragraphs) are the same when their words are.
- Lengths are numbers of code points.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

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
    kind,
)

# columns of the counts of a text: code points; words; those of unspaced letters; those with a letter; characters in
# spaced words; characters in all words
COUNTS = ("characters", "words", "unspaced_words", "alphabetic_words", "spaced_word_characters", "word_characters")
# columns of a line: where it begins and ends in the text, words, flags (below), ends of sentences in it, length
LINE = ("start", "end", "words", "flags", "sentences", "characters")
BULLET_FLAG, C4_FLAG, END_FLAG, ELLIPSIS_FLAG = 1, 2, 4, 8
_WORD = re.compile("P*(?:UP*|A[AP]*)|P+")


@dataclass
class PlainScan:
    """What was found in a batch of texts: arrays as `text_kernels.scan` returns them, and the words themselves."""

    counts: np.ndarray
    words: list[list[str]]
    lines: np.ndarray
    line_offsets: np.ndarray
    paragraph_counts: np.ndarray
    paragraph_characters: np.ndarray
    duplicate_lines: np.ndarray
    duplicate_paragraphs: np.ndarray


class _Classes(dict[int, str]):
    """For `str.translate`: each character's letter in `_WORD`."""

    def __missing__(self, code: int) -> str:
        bits = kind(chr(code))
        letter = "S" if bits & SPACE else "U" if bits & UNSPACED else "A" if bits & ALNUM else "P"
        self[code] = letter
        return letter


_CLASSES = _Classes()


def words_of(text: str) -> list[str]:
    """The words of a text."""
    return [text[match.start() : match.end()] for match in _WORD.finditer(text.translate(_CLASSES))]


def scan(texts: Sequence[str]) -> PlainScan:
    """Cut texts into words, lines and paragraphs, and count."""
    counts, all_words, all_lines, line_offsets = [], [], [], [0]
    paragraphs, paragraph_characters, duplicate_lines, duplicate_paragraphs = [], [], [], []
    for text in texts:
        words = words_of(text)
        unspaced = [any(kind(c) & UNSPACED for c in word) for word in words]
        counts.append(
            [
                len(text),
                len(words),
                sum(unspaced),
                sum(any(kind(c) & ALPHA for c in word) for word in words),
                sum(len(word) for word, alone in zip(words, unspaced) if not alone),
                sum(map(len, words)),
            ]
        )
        lines, keys, groups = _lines(text)
        all_words.append(words)
        all_lines += lines
        line_offsets.append(len(all_lines))
        lengths = [line[5] for line in lines]
        duplicate_lines.append(_duplicates(keys, lengths))
        paragraphs.append(len(groups))
        paragraph_characters.append(sum(lengths))
        duplicate_paragraphs.append(
            _duplicates(
                [tuple(word for line in group for word in keys[line]) for group in groups],
                [sum(lengths[line] for line in group) for group in groups],
            )
        )
    return PlainScan(
        np.array(counts, np.int64).reshape(-1, len(COUNTS)),
        all_words,
        np.array(all_lines, np.int64).reshape(-1, len(LINE)),
        np.array(line_offsets, np.int64),
        np.array(paragraphs, np.int64),
        np.array(paragraph_characters, np.int64),
        np.array(duplicate_lines, np.int64).reshape(-1, 2),
        np.array(duplicate_paragraphs, np.int64).reshape(-1, 2),
    )


def _lines(text: str) -> tuple[list[list[int]], list[tuple[str, ...]], list[list[int]]]:
    """Rows of `LINE`, the words of each, and the numbers of the lines of each paragraph."""
    lines: list[list[int]] = []
    keys: list[tuple[str, ...]] = []
    groups: list[list[int]] = [[]]
    place = 0
    for raw in text.split("\n"):
        stripped = raw.strip()
        if stripped:
            start = place + len(raw) - len(raw.lstrip())
            words = tuple(words_of(stripped))
            length = len(stripped)
            lines.append([start, start + length, len(words), _flags(stripped), _sentences(stripped), length])
            groups[-1].append(len(keys))
            keys.append(words)
        elif groups[-1]:
            groups.append([])
        place += len(raw) + 1
    return lines, keys, [group for group in groups if group]


def _flags(line: str) -> int:
    first, last = kind(line[0]), kind(line[-1])
    bullet = first & BULLET or (first & DASH_BULLET and not line[1:2].strip())
    return (
        (BULLET_FLAG if bullet else 0)
        | (C4_FLAG if last & C4_END else 0)
        | (END_FLAG if last & LINE_END else 0)
        | (ELLIPSIS_FLAG if line.endswith(("...", "…")) else 0)
    )


def _sentences(line: str) -> int:
    """Ends of sentences: an end mark and closing quotes or brackets, then white space or the end of the line.

    Behind the wide marks of East Asian scripts there needn't be white space.
    """
    number = 0
    pending = 0
    for character in line:
        bits = kind(character)
        if bits & SPACE:
            number += pending > 0
            pending = 0
        elif bits & SENTENCE_END:
            pending = 2 if bits & WIDE_END else 1
        elif pending and not bits & CLOSING:
            number += pending == 2
            pending = 0
    return number + (pending > 0)


def _duplicates(keys: Sequence[Hashable], lengths: Sequence[int]) -> tuple[int, int]:
    """How many items came before, and their summed length."""
    seen: set[Hashable] = set()
    number = characters = 0
    for key, length in zip(keys, lengths):
        if key in seen:
            number += 1
            characters += length
        seen.add(key)
    return number, characters


def repeated_ngrams(words: Sequence[str]) -> list[int]:
    """Characters in repeated n-grams of words, n = 2 ... 10; a character counts once, white space doesn't.

    n = 2, 3, 4: those in the occurrences of the most frequent n-gram, if it occurs more than once; of several equally
    frequent ones, the one that covers most. n = 5 ... 10: those in n-grams that came before in the text, which leaves
    out each one's first occurrence.
    """
    result = []
    for n in range(2, 11):
        places: dict[tuple[str, ...], list[int]] = {}
        for i in range(len(words) - n + 1):
            places.setdefault(tuple(words[i : i + n]), []).append(i)
        if n < 5:
            most = max(map(len, places.values()), default=0)
            tops = [at for at in places.values() if len(at) == most > 1]
            result.append(max((_covered(words, at, n) for at in tops), default=0))
        else:
            result.append(_covered(words, [i for at in places.values() for i in at[1:]], n))
    return result


def _covered(words: Sequence[str], places: Sequence[int], n: int) -> int:
    return sum(len(words[i]) for i in {place + k for place in places for k in range(n)})
