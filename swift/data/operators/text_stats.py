"""What the quality rules know of a batch of texts, computed once however many rules ask.

The last batch's analysis is remembered: the next operator of a recipe, which sees the same texts or some of them, finds
it there. A text that was changed in between is another text and is analysed anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swift.core.logging import get_logger
from swift.data.compiled import has_numba
from swift.data.operators import text_plain
from swift.data.operators.characters import character_table
from swift.data.operators.text_plain import COUNTS

log = get_logger("data.operators")


class Analysis:
    """Counts of each text of a batch; see `text_plain` for what is counted.

    Attributes:
        lines: int64 [lines, 6], columns `text_plain.LINE`; line_offsets: int64 [texts + 1].
        columns: int64 [texts] by name: `text_plain.COUNTS`, `lines`, `line_characters`, `duplicate_lines`,
            `duplicate_line_characters`, `paragraphs`, `duplicate_paragraphs`, `duplicate_paragraph_characters`.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.index = {text: row for row, text in enumerate(texts)}
        self.columns: dict[str, np.ndarray] = {}
        self.lines = np.empty((0, 6), np.int64)
        self.line_offsets = np.zeros(1, np.int64)
        self._ngrams = np.zeros((len(texts), 9), np.int64)
        self._has_ngrams = np.zeros(len(texts), bool)

    def line_sums(self, values: np.ndarray) -> np.ndarray:
        """For each text the sum over its lines of `values` [lines]."""
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(values, dtype=np.int64)])
        return sums[self.line_offsets[1:]] - sums[self.line_offsets[:-1]]

    def ngrams(self, rows: np.ndarray) -> np.ndarray:
        """int64 [rows, 9]: `text_plain.repeated_ngrams` of these texts."""
        missing = np.unique(rows[~self._has_ngrams[rows]])
        if len(missing):
            self._ngrams[missing] = self._repeated(missing)
            self._has_ngrams[missing] = True
        return self._ngrams[rows]

    def _repeated(self, rows: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def _fill(self, counts: np.ndarray, duplicate_lines: np.ndarray, paragraphs: list[np.ndarray]) -> None:
        self.columns = {name: counts[:, i] for i, name in enumerate(COUNTS)}
        self.columns["lines"] = np.diff(self.line_offsets)
        self.columns["line_characters"] = self.line_sums(self.lines[:, 5])
        self.columns["duplicate_lines"] = duplicate_lines[:, 0]
        self.columns["duplicate_line_characters"] = duplicate_lines[:, 1]
        self.columns["paragraphs"] = paragraphs[0]
        self.columns["duplicate_paragraphs"] = paragraphs[1][:, 0]
        self.columns["duplicate_paragraph_characters"] = paragraphs[1][:, 1]


class PlainAnalysis(Analysis):
    """By the plain implementation."""

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__(texts)
        found = text_plain.scan(texts)
        self.lines, self.line_offsets = found.lines, found.line_offsets
        self._words = found.words
        self._fill(found.counts, found.duplicate_lines, [found.paragraph_counts, found.duplicate_paragraphs])

    def _repeated(self, rows: np.ndarray) -> np.ndarray:
        return np.array([text_plain.repeated_ngrams(self._words[row]) for row in rows], np.int64)


class CompiledAnalysis(Analysis):
    """By the compiled kernels."""

    def __init__(self, texts: Sequence[str]) -> None:
        from swift.data.operators import text_kernels

        super().__init__(texts)
        encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
        offsets = np.zeros(len(texts) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), out=offsets[1:])
        data = np.frombuffer(b"".join(encoded), np.uint8)
        found = text_kernels.scan(data, offsets, character_table())
        counts, word_hash, word_length, word_offsets, self.lines, line_hash, self.line_offsets = found[:7]
        lengths, hashes, paragraph_offsets = found[7:]
        self._count = lambda rows: text_kernels.repeated_ngrams(word_hash, word_length, word_offsets, rows)
        self._fill(
            counts,
            text_kernels.duplicates(line_hash, np.ascontiguousarray(self.lines[:, 5]), self.line_offsets),
            [
                np.diff(paragraph_offsets),
                text_kernels.duplicates(hashes, lengths, paragraph_offsets),
            ],
        )

    def _repeated(self, rows: np.ndarray) -> np.ndarray:
        return self._count(rows)


@dataclass
class Stats:
    """Some texts of an analysed batch, in the order asked for: `stats["words"]` is int64 [texts]."""

    analysis: Analysis
    rows: np.ndarray

    def __getitem__(self, name: str) -> np.ndarray:
        return self.analysis.columns[name][self.rows]

    def share(self, part: str, whole: str) -> np.ndarray:
        """float64 [texts]: one count as a share of another; 0 where the latter is 0."""
        return shares(self[part], self[whole])

    def lines_with(self, mask: np.ndarray) -> np.ndarray:
        """int64 [texts]: lines for which `mask` [lines of the batch] holds."""
        return self.analysis.line_sums(mask)[self.rows]

    def ngrams(self) -> np.ndarray:
        """int64 [texts, 9]: characters in repeated n-grams, n = 2 ... 10."""
        return self.analysis.ngrams(self.rows)

    def lines(self, place: int) -> np.ndarray:
        """int64 [lines, 6]: the lines of the text at this place."""
        row = self.rows[place]
        return self.analysis.lines[self.analysis.line_offsets[row] : self.analysis.line_offsets[row + 1]]


def shares(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """part / whole as float64; 0 where `whole` is 0."""
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole != 0)


_REMEMBERED = 2  # an operator may ask for the texts it changed and for the others
_recent: list[Analysis] = []
_told = False


def analyse(texts: Sequence[str]) -> Stats:
    """The statistics of `texts`; what was computed just before is used again where the texts are among its own."""
    known = next((past for past in _recent if all(text in past.index for text in texts)), None)
    if known is None:
        known = _fresh(texts)
        _recent.insert(0, known)
        del _recent[_REMEMBERED:]
    return Stats(known, np.fromiter((known.index[text] for text in texts), np.int64, len(texts)))


def _fresh(texts: Sequence[str]) -> Analysis:
    global _told
    if has_numba():
        return CompiledAnalysis(texts)
    if not _told:
        log.warning('numba is not installed: text rules run in plain Python (pip install "swift-llm[data]")')
        _told = True
    return PlainAnalysis(texts)
