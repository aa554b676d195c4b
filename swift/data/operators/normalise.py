"""One spelling for the same text: Unicode form, line ends, invisible characters, and texts that were decoded wrongly.

Works on every text of a document. Most texts need nothing; each step first asks the cheapest question that tells.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from swift.config.fields import setting
from swift.core.extras import require
from swift.data.engine.document import Document
from swift.data.engine.operator import OPERATORS, Context, MapOperator
from swift.data.engine.tally import Tally
from swift.data.operators.rules import check_choice

FORMS = ("NFC", "NFKC", "none")
# C0 and C1 controls except tab, line feed, carriage return and NEL (U+0085), which is a line end
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f]+")
_LINE_ENDS = re.compile("\r\n?|[\x0b\x0c\x85\u2028\u2029]")  # vertical tab and form feed are line ends too
# soft hyphen, zero-width space, word joiner and invisible operators, byte-order mark, interlinear and tag characters;
# not U+E0100-E01EF, which choose the form of a Chinese character in Japanese names
_ZERO_WIDTH = re.compile("[\u00ad\u200b\u2060-\u2064\ufeff\ufff9-\ufffb\U000e0000-\U000e00ff\U000e01f0-\U000e0fff]+")
# the joiners shape letters in Persian, Indic scripts and emoji: they go only between Latin, Greek and Cyrillic letters
_JOINERS = re.compile("(?<=[\t -\u052f])[\u200c\u200d]+(?=[\t -\u052f])")
_BLANK_LINES = re.compile(r"\n{3,}")
_MOST_MARKS = 1000  # combining marks in a row that are normalised together: their sorting takes quadratic time
# A byte of UTF-8 read as Latin-1 or Windows-1252 (first byte C2-F4, then 80-BF); then those of Cyrillic letters and of
# typographic signs read as Windows-1251
_LATER = "\u0080-\u00bfŒœŠšŸŽžƒˆ˜–—‘’‚“”„†‡•…‰‹›€™"
_MOJIBAKE = re.compile(
    f"[\u00c2-\u00f4][{_LATER}]|(?:[РС][\u00a0-\u00bfЂЃѓђЉЊЌЋЏљњќћџЎўЈҐЁЄЇІіґєјЅѕї†‡•]){{2}}|в[Ђ„][\u2122љњќћџ¦]"
)
# printable ASCII, tab and line feed never need a step; what is left of a text without them is short, or nothing
_UNSUSPICIOUS = bytes([9, 10, *range(32, 127)])
_SUSPECTS = {
    "line_ends": re.compile("[\r\x0b\x0c\x85\u2028\u2029]"),
    "control_characters": _CONTROLS,
    "zero_width": re.compile(
        "[\u00ad\u200b-\u200d\u2060-\u2064\ufeff\ufff9-\ufffb\U000e0000-\U000e00ff\U000e01f0-\U000e0fff]"
    ),
    # all but characters that neither compose with one before them nor decompose in NFC
    "unicode_form": re.compile(
        "[^\x00-\u02ff\u0400-\u0482\u2010-\u2027\u2030-\u205e\u20a0-\u20bf\u2190-\u21ff\u2500-\u27bf"
        "\u3001-\u3029\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3\uff01-\uff5e\U0001f300-\U0001faff]"
    ),
}


@OPERATORS.register("normalise")
@dataclass
class Normalise(MapOperator):
    """Bring texts to one Unicode form, mend wrongly decoded ones, and clean line ends and invisible characters."""

    form: Literal["NFC", "NFKC", "none"] = setting(
        "NFC", help="Unicode normal form; none leaves characters as they are"
    )
    fix_encoding: bool = setting(
        True, help="mend text that was decoded with the wrong encoding (cafÃ© to café), by ftfy"
    )
    line_ends: bool = setting(
        True, help="turn CRLF, CR, form feeds and Unicode's line and paragraph separators into line feeds"
    )
    control_characters: bool = setting(True, help="remove control characters other than tab and line feed")
    zero_width: bool = setting(True, help="remove zero-width characters, soft hyphens and byte-order marks")
    trailing_spaces: bool = setting(False, help="remove white space at the ends of lines")
    blank_lines: bool = setting(False, help="leave no more than one blank line in a row")
    strip: bool = setting(False, help="remove white space at the beginning and the end of a text")

    def check(self) -> None:
        check_choice(self, "form", FORMS)

    def open(self, context: Context) -> None:
        super().open(context)
        self._ftfy = require("ftfy", extra="data", purpose="mend wrongly decoded text") if self.fix_encoding else None

    def run(self, batch: list[Document], tally: Tally) -> list[Document]:
        for document in batch:
            for place, text in enumerate(document.texts):
                after = self._cleaned(text, partial(tally.change, document))
                if after is not text:
                    document.texts[place] = after
        return batch

    def _cleaned(self, text: str, told: Callable[[str, str, str], None]) -> str:
        """The text after all steps; each that changed something is told with its name, before and after."""

        def done(reason: str, new: str) -> None:
            nonlocal text
            if new != text:
                told(reason, text, new)
                text = new

        rest = text.encode("utf-8", "surrogatepass").translate(None, _UNSUSPICIOUS).decode("utf-8", "surrogatepass")
        if rest:
            if self._ftfy is not None and _MOJIBAKE.search(rest):
                done("encoding", _mended(text, self._ftfy.fix_encoding))
                rest = text  # mending may bring any character
            if self.line_ends and _SUSPECTS["line_ends"].search(rest):
                done("line_ends", _LINE_ENDS.sub("\n", text))
            if self.control_characters and _SUSPECTS["control_characters"].search(rest):
                done("control_characters", _CONTROLS.sub("", text))
            if self.zero_width and _SUSPECTS["zero_width"].search(rest):
                done("zero_width", _JOINERS.sub("", _ZERO_WIDTH.sub("", text)))
            if self.form == "NFKC" or (self.form == "NFC" and _SUSPECTS["unicode_form"].search(rest)):
                done("unicode_form", _in_form(self.form, text))
        if self.trailing_spaces:
            done("trailing_spaces", "\n".join(map(str.rstrip, text.split("\n"))))
        if self.blank_lines and "\n\n\n" in text:
            done("blank_lines", _BLANK_LINES.sub("\n\n", text))
        if self.strip:
            done("strip", text.strip())
        return text


def _in_form(form: Literal["NFC", "NFKC"], text: str) -> str:
    """The text in a normal form; runs of over a thousand combining marks, which no language has, in pieces."""
    half = _MOST_MARKS // 2  # a run that is too long fills one of these windows
    if not any(all(map(unicodedata.combining, text[at : at + half])) for at in range(0, len(text), half)):
        return unicodedata.normalize(form, text)
    pieces = []
    begin = marks = 0
    for place, character in enumerate(text):
        marks = marks + 1 if unicodedata.combining(character) else 0
        if marks > _MOST_MARKS:
            pieces.append(text[begin:place])
            begin, marks = place, 1
    return "".join(unicodedata.normalize(form, piece) for piece in [*pieces, text[begin:]])


def _mended(text: str, fix: Callable[[str], str]) -> str:
    """The text with each suspicious line mended by itself: lines of one page may have gone through different hands."""
    pieces = []
    end = 0
    while match := _MOJIBAKE.search(text, end):
        start = text.rfind("\n", end, match.start()) + 1 or end
        stop = text.find("\n", match.end()) + 1 or len(text)
        pieces += [text[end:start], fix(text[start:stop])]
        end = stop
    return "".join(pieces) + text[end:]
