"""Quality rules for running text, as their papers publish them (Gopher, FineWeb), and shares of kinds of characters.

What a word, a line and the end of a sentence are is defined in `text_plain`. A conversation is judged by its joined
texts. In documents that are mostly written without spaces the rules that only make sense for words between spaces don't
apply, and the others count each letter as a word.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from swift.config.fields import setting
from swift.data.engine.document import Document
from swift.data.engine.operator import OPERATORS, Context, MapOperator
from swift.data.engine.tally import Tally
from swift.data.operators.characters import ALNUM, ALPHA, SPACE, TABLE_SIZE, character_table
from swift.data.operators.rules import Rule, apply_rules, check_range, check_shares, wrong
from swift.data.operators.text_plain import BULLET_FLAG, ELLIPSIS_FLAG, END_FLAG
from swift.data.operators.text_stats import Stats, analyse, shares

_PIECE = 1 << 20  # characters that are looked at in one go, so that a huge text needs no huge array
GOPHER_STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")


def mostly_unspaced(stats: Stats) -> np.ndarray:
    """bool [texts]: whether more than half of the words are letters of scripts without spaces."""
    return 2 * stats["unspaced_words"] > stats["words"]


def _only_where(mask: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.where(mask, values, np.nan)


@OPERATORS.register("gopher_quality")
@dataclass
class GopherQuality(MapOperator):
    """Drop documents that don't look like prose: number and length of words, symbols, bullets, ellipses, stop words.

    Rae et al. 2021, "Scaling Language Models: Methods, Analysis & Insights from Training Gopher", appendix A1.1,
    quality filtering.
    """

    min_words: int | None = setting(50, help="fewest words of a document")
    max_words: int | None = setting(100_000, help="most words of a document")
    min_mean_word_length: float | None = setting(3.0, help="least mean length of a word, in characters")
    max_mean_word_length: float | None = setting(10.0, help="largest mean length of a word, in characters")
    max_symbol_word_ratio: float | None = setting(0.1, help="most `#` per word, and most ellipses per word")
    max_bullet_line_share: float | None = setting(0.9, help="largest share of lines that begin with a bullet")
    max_ellipsis_line_share: float | None = setting(0.3, help="largest share of lines that end with an ellipsis")
    min_alphabetic_word_share: float | None = setting(0.8, help="least share of words with a letter in them")
    min_stop_words: int | None = setting(2, help="fewest different stop words")
    stop_words: list[str] = setting(
        factory=lambda: list(GOPHER_STOP_WORDS), help="the stop words, in any case; for another language give its own"
    )

    def check(self) -> None:
        check_range(self, "min_words", "max_words")
        check_range(self, "min_mean_word_length", "max_mean_word_length")
        check_shares(self, ("max_bullet_line_share", "max_ellipsis_line_share", "min_alphabetic_word_share"))
        if self.min_stop_words and self.min_stop_words > len(self.stop_words):
            raise wrong("min_stop_words", self.min_stop_words, f"at most the {len(self.stop_words)} stop_words")

    def open(self, context: Context) -> None:
        super().open(context)
        words = "|".join(map(re.escape, sorted(self.stop_words, key=len, reverse=True)))
        self._stop_word = re.compile(rf"\b(?:{words})\b", re.IGNORECASE)

    def run(self, batch: list[Document], tally: Tally) -> list[Document]:
        texts = [document.text for document in batch]
        stats = analyse(texts)
        spaced = ~mostly_unspaced(stats)
        words, lines = stats["words"], stats["lines"]
        flags = stats.analysis.lines[:, 3]
        hashes = np.array([text.count("#") for text in texts], np.int64)
        ellipses = np.array([text.count("...") + text.count("…") for text in texts], np.int64)
        mean_length = shares(stats["spaced_word_characters"], words - stats["unspaced_words"])
        stop_words = np.array(
            [self._stop_words(text) if alone else np.nan for text, alone in zip(texts, spaced)], float
        )
        rules = (
            Rule("words", words.astype(float), self.min_words, self.max_words, share=False),
            Rule(
                "mean_word_length",
                _only_where(spaced, mean_length),
                self.min_mean_word_length,
                self.max_mean_word_length,
                share=False,
            ),
            Rule("hashes_per_word", shares(hashes, words), high=self.max_symbol_word_ratio, share=False),
            Rule("ellipses_per_word", shares(ellipses, words), high=self.max_symbol_word_ratio, share=False),
            Rule(
                "bullet_lines",
                shares(stats.lines_with(flags & BULLET_FLAG != 0), lines),
                high=self.max_bullet_line_share,
            ),
            Rule(
                "ellipsis_lines",
                shares(stats.lines_with(flags & ELLIPSIS_FLAG != 0), lines),
                high=self.max_ellipsis_line_share,
            ),
            Rule("alphabetic_words", stats.share("alphabetic_words", "words"), low=self.min_alphabetic_word_share),
            Rule("stop_words", stop_words, low=self.min_stop_words, share=False),
        )
        return apply_rules(batch, rules, tally)

    def _stop_words(self, text: str) -> int:
        """Different stop words in the text; counting ends when there are enough."""
        found: set[str] = set()
        enough = self.min_stop_words or 0
        for match in self._stop_word.finditer(text):
            found.add(match.group().lower())
            if len(found) >= enough:
                break
        return len(found)


@OPERATORS.register("fineweb_quality")
@dataclass
class FinewebQuality(MapOperator):
    """Drop documents whose lines don't end like sentences, are mostly short, or repeat.

    Penedo et al. 2024, "The FineWeb Datasets: Decanting the Web for the Finest Text Data at Scale", section 3.6: the
    three custom filters, with their thresholds (which themselves break the rule).
    """

    min_line_end_share: float | None = setting(
        0.12, help="lines that end with punctuation must be more than this share of all"
    )
    max_duplicate_line_character_share: float | None = setting(
        0.1, help="characters in lines that came before must be less than this share of all"
    )
    max_short_line_share: float | None = setting(0.67, help="short lines must be less than this share of all")
    short_line_characters: int = setting(
        30, help="a line with fewer characters is short; half of it where most is written without spaces"
    )

    def check(self) -> None:
        check_shares(self, ("min_line_end_share", "max_duplicate_line_character_share", "max_short_line_share"))
        if self.short_line_characters < 1:
            raise wrong("short_line_characters", self.short_line_characters, "at least 1")

    def run(self, batch: list[Document], tally: Tally) -> list[Document]:
        stats = analyse([document.text for document in batch])
        lines = stats["lines"]
        table = stats.analysis.lines
        short = np.where(
            mostly_unspaced(stats),
            stats.lines_with(table[:, 5] < self.short_line_characters / 2),
            stats.lines_with(table[:, 5] < self.short_line_characters),
        )
        rules = (
            Rule(
                "line_ends",
                shares(stats.lines_with(table[:, 3] & END_FLAG != 0), lines),
                low=self.min_line_end_share,
                strict=True,
            ),
            Rule(
                "duplicate_line_characters",
                stats.share("duplicate_line_characters", "line_characters"),
                high=self.max_duplicate_line_character_share,
                strict=True,
            ),
            Rule("short_lines", shares(short, lines), high=self.max_short_line_share, strict=True),
        )
        return apply_rules(batch, rules, tally)


@OPERATORS.register("symbol_ratio")
@dataclass
class SymbolRatio(MapOperator):
    """Drop documents with too many symbols or digits, or too few letters, among their characters.

    Own rule: shares of the characters that aren't white space. A letter and a digit are what Unicode calls so; symbols
    are all other characters, marks that belong to letters included (so leave more room for Indic scripts and Thai).
    """

    max_symbol_share: float | None = setting(0.3, help="largest share of characters that are no letter and no digit")
    max_digit_share: float | None = setting(0.3, help="largest share of digits")
    min_letter_share: float | None = setting(0.5, help="least share of letters")

    def check(self) -> None:
        check_shares(self, ("max_symbol_share", "max_digit_share", "min_letter_share"))

    def run(self, batch: list[Document], tally: Tally) -> list[Document]:
        counts = np.array([_kinds(document.text) for document in batch], np.int64).reshape(-1, 3)
        characters = counts.sum(axis=1)
        rules = (
            Rule("symbols", shares(counts[:, 2], characters), high=self.max_symbol_share),
            Rule("digits", shares(counts[:, 1], characters), high=self.max_digit_share),
            Rule("letters", shares(counts[:, 0], characters), low=self.min_letter_share),
        )
        return apply_rules(batch, rules, tally)


def _kinds(text: str) -> tuple[int, int, int]:
    """Numbers of letters, of digits and other numerals, and of symbols."""
    table = character_table()
    letters = numerals = solid = 0
    for start in range(0, len(text), _PIECE):
        codes = np.frombuffer(text[start : start + _PIECE].encode("utf-32-le", "surrogatepass"), np.uint32)
        bits = table[np.minimum(codes, TABLE_SIZE - 1)]
        bits[codes >= TABLE_SIZE] = 0
        letters += int(np.count_nonzero(bits & ALPHA))
        numerals += int(np.count_nonzero((bits & (ALNUM | ALPHA)) == ALNUM))
        solid += len(codes) - int(np.count_nonzero(bits & SPACE))
    return letters, numerals, solid - letters - numerals
