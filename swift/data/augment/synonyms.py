"""Synonyms of a word in the form in which it stands, from the table that ships or from a user's own.

The shipped table is made from WordNet by `swift.data.augment.wordnet`; its licence lies beside it.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from swift.core.errors import DataError
from swift.data.augment.inflection import FORMS, IRREGULAR_FORMS, possible_bases

SHIPPED = Path(__file__).parent / "assets" / "synonyms_en.txt.gz"
_POS_OF_FORM = {"ns": "n", "vs": "v", "ved": "v", "ving": "v"}


@dataclass
class SynonymTable:
    """Synonyms by word.

    Attributes:
        lines: word -> `pos:a,b;c TAB pos:…`, most frequent part of speech and sense first, with `~` before it if that
            sense is meant in less than half of the word's uses; unpacked when asked for.
        inflected: whether forms of a word may be looked up through English rules (the shipped table).
    """

    lines: dict[str, str] = field(repr=False)
    inflected: bool = True

    def __contains__(self, word: str) -> bool:
        return word in self.lines

    def of(self, word: str, *, senses: int = 1, multiword: bool = False, ambiguous: bool = True) -> list[str]:
        """Synonyms that can stand where `word` (lower case) stands; empty if none are known.

        Args:
            word: as it stands; `cars` gives `automobiles`.
            senses: how many of its most frequent senses are believed to be meant.
            multiword: also synonyms of several words.
            ambiguous: also of words whose most frequent sense is meant in less than half of their uses.
        """
        if word in self.lines:
            if self.inflected and (word in IRREGULAR_FORMS or self._is_verb_form(word)):
                return []  # `saw` is hardly ever the tool; `stopped` may be either
            if self.lines[word].startswith("~") and not ambiguous:
                return []
            return self._base(word, None, senses, multiword)
        if not self.inflected:
            return []
        bases = [(base, form) for base, form in possible_bases(word) if base in self.lines]
        for base, form in bases:
            if form in ("ns", "vs") and self._first_pos(base) != _POS_OF_FORM[form]:
                continue  # -s alone doesn't tell a noun from a verb: its usual part of speech does
            if self.lines[base].startswith("~") and not ambiguous:
                continue
            made = (FORMS[form](other) for other in self._base(base, _POS_OF_FORM[form], senses, False))
            return [other for other in made if other and other != word]
        return []

    def _is_verb_form(self, word: str) -> bool:
        if not word.endswith(("ed", "ing")):
            return False
        return any(form in ("ved", "ving") and base in self.lines for base, form in possible_bases(word))

    def _first_pos(self, word: str) -> str:
        return self.lines[word].lstrip("~")[:1]

    def _base(self, word: str, pos: str | None, senses: int, multiword: bool) -> list[str]:
        for part in self.lines[word].lstrip("~").split("\t"):
            if pos is None or part[0] == pos:
                listed = [other for sense in part[2:].split(";")[:senses] for other in sense.split(",") if other]
                return [other for other in listed if multiword or " " not in other]
        return []


@cache
def shipped_table() -> SynonymTable:
    """The English table."""
    lines = gzip.decompress(SHIPPED.read_bytes()).decode().split("\n")
    return SynonymTable(dict(line.split("\t", 1) for line in lines if line))


def read_table(path: Path) -> SynonymTable:
    """A user's table: a JSON object, word -> list of synonyms, the best first. Words are matched as they are written.

    Raises:
        DataError: the file can't be read, or isn't such an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"the table of synonyms can't be read: {error}", where=str(path), fix='a JSON object: {"word": ["synonym"]}'
        ) from error
    if not isinstance(content, dict):
        raise DataError("the table of synonyms isn't an object", where=str(path), fix='write {"word": ["synonym"]}')
    lines = {}
    for word, others in content.items():
        if not isinstance(others, list) or not all(isinstance(other, str) and other.strip() for other in others):
            raise DataError(
                f"the synonyms of {word!r} aren't a list of texts", where=str(path), fix='write {"word": ["synonym"]}'
            )
        bad = [other for other in others if set(other) & set(",;\t\n")]
        if bad:
            raise DataError(
                f"the synonym {bad[0]!r} of {word!r} has a comma, semicolon, tab or line end in it", where=str(path)
            )
        lines[word.lower()] = "x:" + ",".join(others)
    return SynonymTable(lines, inflected=False)
