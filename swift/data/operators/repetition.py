"""Repetition within a document: lines, paragraphs and n-grams of words; what counts is defined in `text_plain`."""

from __future__ import annotations

from dataclasses import dataclass

from swift.config.fields import setting
from swift.data.engine.document import Document
from swift.data.engine.operator import OPERATORS, MapOperator
from swift.data.engine.tally import Tally
from swift.data.operators.rules import Rule, apply_rules, check_shares
from swift.data.operators.text_stats import analyse, shares


@OPERATORS.register("gopher_repetition")
@dataclass
class GopherRepetition(MapOperator):
    """Drop documents in which lines, paragraphs or n-grams of words repeat too much.

    Rae et al. 2021, "Scaling Language Models: Methods, Analysis & Insights from Training Gopher", appendix A1.1, table
    A1. Duplicates are the later occurrences, not the first. Characters in n-grams are counted once and without white
    space, as a share of the characters of all words.
    """

    max_duplicate_line_share: float | None = setting(0.30, help="largest share of lines that came before")
    max_duplicate_paragraph_share: float | None = setting(0.30, help="largest share of paragraphs that came before")
    max_duplicate_line_character_share: float | None = setting(0.20, help="largest share of characters in such lines")
    max_duplicate_paragraph_character_share: float | None = setting(
        0.20, help="largest share of characters in such paragraphs"
    )
    max_top_2gram_share: float | None = setting(0.20, help="largest share of characters in the most frequent 2-gram")
    max_top_3gram_share: float | None = setting(0.18, help="largest share of characters in the most frequent 3-gram")
    max_top_4gram_share: float | None = setting(0.16, help="largest share of characters in the most frequent 4-gram")
    max_duplicate_5gram_share: float | None = setting(0.15, help="largest share of characters in duplicate 5-grams")
    max_duplicate_6gram_share: float | None = setting(0.14, help="largest share of characters in duplicate 6-grams")
    max_duplicate_7gram_share: float | None = setting(0.13, help="largest share of characters in duplicate 7-grams")
    max_duplicate_8gram_share: float | None = setting(0.12, help="largest share of characters in duplicate 8-grams")
    max_duplicate_9gram_share: float | None = setting(0.11, help="largest share of characters in duplicate 9-grams")
    max_duplicate_10gram_share: float | None = setting(0.10, help="largest share of characters in duplicate 10-grams")

    def check(self) -> None:
        check_shares(self, self.__dataclass_fields__)

    def run(self, batch: list[Document], tally: Tally) -> list[Document]:
        stats = analyse([document.text for document in batch])
        ngrams = stats.ngrams()
        rules = [
            Rule("duplicate_lines", stats.share("duplicate_lines", "lines"), high=self.max_duplicate_line_share),
            Rule(
                "duplicate_paragraphs",
                stats.share("duplicate_paragraphs", "paragraphs"),
                high=self.max_duplicate_paragraph_share,
            ),
            Rule(
                "duplicate_line_characters",
                stats.share("duplicate_line_characters", "line_characters"),
                high=self.max_duplicate_line_character_share,
            ),
            Rule(
                "duplicate_paragraph_characters",
                stats.share("duplicate_paragraph_characters", "line_characters"),
                high=self.max_duplicate_paragraph_character_share,
            ),
        ]
        for n in range(2, 11):
            name = f"top_{n}gram" if n < 5 else f"duplicate_{n}gram"
            values = shares(ngrams[:, n - 2], stats["word_characters"])
            rules.append(Rule(name, values, high=getattr(self, f"max_{name}_share")))
        return apply_rules(batch, rules, tally)
