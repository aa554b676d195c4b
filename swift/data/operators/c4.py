"""The rules of C4: lines that aren't sentences go, and pages that hold code, placeholders or too few sentences.

Knows the rules only; what a line, a word and the end of a sentence are is defined in `text_plain`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from swift.config.fields import setting
from swift.data.engine.document import Document
from swift.data.engine.operator import OPERATORS, Context, MapOperator
from swift.data.engine.tally import Tally
from swift.data.operators.rules import wrong
from swift.data.operators.text_plain import C4_FLAG
from swift.data.operators.text_stats import analyse
from swift.data.operators.word_lists import WordList, read_list

POLICY_PHRASES = (
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)
_LINE_REASONS = ("", "line_without_end", "short_line", "javascript_line", "policy_line")
_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")


@OPERATORS.register("c4_quality")
@dataclass
class C4Quality(MapOperator):
    """Remove lines that aren't sentences; drop pages with code, placeholder text, blocked words or too few sentences.

    Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", section
    2.2. East Asian and other end marks count beside the paper's `. ! ? "`; a line that ends in `...` stays, which the
    program that made C4 removes. The paper's list of offensive words isn't
    shipped: `blocked_words` names a file. Lines are only removed from plain text: a turn of a conversation stays
    whole, and the rules about pages look at its joined texts.
    """

    min_sentences: int | None = setting(3, help="fewest sentences in the lines that stay")
    min_words_per_line: int | None = setting(5, help="lines with fewer words are removed")
    require_line_end: bool = setting(True, help="remove lines that don't end with . ! ? or a closing quotation mark")
    remove_javascript_lines: bool = setting(True, help="remove lines with the word javascript")
    remove_policy_lines: bool = setting(True, help="remove lines about cookies, privacy policies and terms of use")
    remove_citations: bool = setting(True, help="remove [1], [edit] and [citation needed]")
    drop_lorem_ipsum: bool = setting(True, help="drop pages with the words lorem ipsum")
    drop_curly_brackets: bool = setting(True, help="drop pages with a curly bracket, which mostly are code")
    blocked_words: str | None = setting(None, help="file of words, one a line; a page with one of them is dropped")

    def check(self) -> None:
        for name in ("min_sentences", "min_words_per_line"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise wrong(name, value, "at least 0, or null for no such rule")

    def open(self, context: Context) -> None:
        super().open(context)
        self._blocked = WordList(read_list(self.blocked_words, "blocked_words")) if self.blocked_words else None

    def run(self, batch: list[Document], tally: Tally) -> list[Document]:
        pages = [document for document in batch if self._page_stays(document, tally)]
        cut = {id(document) for document in pages if self.remove_citations and _without_citations(document, tally)}
        stay: set[int] = set()
        # texts that citations were cut from are new; the others were often analysed before
        for documents in (
            [document for document in pages if id(document) not in cut],
            [document for document in pages if id(document) in cut],
        ):
            stats = analyse([document.text for document in documents])
            for place, document in enumerate(documents):
                if self._sentences_stay(document, stats.lines(place), tally):
                    stay.add(id(document))
        return [document for document in pages if id(document) in stay]

    def _page_stays(self, document: Document, tally: Tally) -> bool:
        text = document.text
        if self.drop_curly_brackets and "{" in text:
            tally.drop(document, "curly_bracket")
        elif self.drop_lorem_ipsum and "lorem ipsum" in text.lower():
            tally.drop(document, "lorem_ipsum")
        elif self._blocked is not None and (word := self._blocked.first(text)):
            tally.drop(document, "blocked_word", word)
        else:
            return True
        return False

    def _sentences_stay(self, document: Document, lines: np.ndarray, tally: Tally) -> bool:
        """Remove the lines of plain text that break a rule, and say whether enough sentences are left."""
        if document.roles is None:
            lines = self._without_lines(document, lines, tally)
        sentences = int(np.maximum(lines[:, 4], 1).sum())
        tally.observe("sentences", sentences)
        if self.min_sentences is not None and sentences < self.min_sentences:
            tally.drop(document, "too_few_sentences", f"{sentences} sentences, allowed: at least {self.min_sentences}")
            return False
        if not len(lines):
            tally.drop(document, "no_line_left")
            return False
        return True

    def _without_lines(self, document: Document, lines: np.ndarray, tally: Tally) -> np.ndarray:
        """The lines that stay; the text becomes these if any goes."""
        text = document.texts[0]
        reasons = np.zeros(len(lines), np.int64)  # the number in _LINE_REASONS of the first rule that a line breaks
        lowered = text.lower()
        if self.remove_policy_lines and any(phrase in lowered for phrase in POLICY_PHRASES):
            reasons[[any(phrase in line for phrase in POLICY_PHRASES) for line in _lowered(text, lines)]] = 4
        if self.remove_javascript_lines and "javascript" in lowered:
            reasons[["javascript" in line for line in _lowered(text, lines)]] = 3
        if self.min_words_per_line is not None:
            reasons[lines[:, 2] < self.min_words_per_line] = 2
        if self.require_line_end:
            reasons[lines[:, 3] & C4_FLAG == 0] = 1
        stays = reasons == 0
        if stays.all():
            return lines
        lines = lines[stays]
        after = "\n".join([text[start:end] for start, end in lines[:, :2].tolist()])
        for reason, times in enumerate(np.bincount(reasons).tolist()):
            if reason and times:
                tally.change(document, _LINE_REASONS[reason], text, after, times=times)
        document.texts[0] = after
        return lines


def _without_citations(document: Document, tally: Tally) -> bool:
    """Cut citation marks out of each text; whether there were any."""
    found = False
    for place, text in enumerate(document.texts):
        if "[" not in text:
            continue
        after, times = _CITATION.subn("", text)
        if times:
            found = True
            document.texts[place] = after
            tally.change(document, "citation", text, after, times=times)
    return found


def _lowered(text: str, lines: np.ndarray) -> list[str]:
    return [text[start:end].lower() for start, end in lines[:, :2].tolist()]
