"""Makes the table of synonyms out of the files of a WordNet release.

    python -m swift.data.augment.wordnet DICT_FOLDER OUTPUT.txt.gz

`DICT_FOLDER` holds `index.*` and `data.*` for noun, verb, adj and adv, and `index.sense`, in the formats that WordNet's
manual pages wndb(5) and senseidx(5) describe. The table is text, one word a line, sorted, gzipped without a time stamp,
so the same release always gives the same bytes:

    word TAB pos:synonym,synonym;synonym TAB pos:…

The parts of speech (n, v, a, r) stand with the most frequent first, by how often the release's tagged texts use them.
Between semicolons stand the senses, the most frequent first; a sense without synonyms is empty. `~` stands before the
first part of speech of a word whose first sense there is meant in less than half of its uses. This module reads WordNet
and knows nothing of texts.
"""

from __future__ import annotations

import gzip
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from swift.core.errors import DataError, SwiftError, UsageError
from swift.core.files import write_atomic

_POS_FILES = {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}
_WORD = re.compile(r"[a-z]{3,}(?:[-_][a-z]+)*")
_MARKER = re.compile(r"\((?:a|p|ip)\)$")  # where an adjective may stand
# words of such senses are offered nowhere, whatever else they mean
_UNWANTED = re.compile(
    r"offensive|obscen|\bslurs?\b|vulgar|disparag|derogat|\bslang\b|\bracist\b|\bsexual|\bgenital|\bpejorat|\binsult",
    re.IGNORECASE,
)
_UNWANTED_USAGES = {"ethnic_slur", "disparagement", "obscenity", "vulgarism", "slang", "dirty_word", "profanity"}
MAX_SYNONYMS = 6


def _lines(path: Path) -> Iterator[list[str]]:
    """The records of a file, after the licence at its head."""
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                if not line.startswith("  "):
                    yield line.rstrip("\n").split(" ")
    except FileNotFoundError:
        raise DataError(
            f"{path.name} isn't there", where=str(path.parent), fix="name WordNet's `dict` folder"
        ) from None


class _Synsets:
    """The synonym sets of one part of speech: offset -> its words, and what of them is unwanted."""

    def __init__(self, path: Path) -> None:
        self.words: dict[str, list[str]] = {}
        self.usages: dict[str, list[tuple[str, str]]] = {}
        self.unwanted: set[str] = set()
        for fields in _lines(path):
            try:
                self._read(fields)
            except (IndexError, ValueError) as error:
                raise DataError(f"not a record of WordNet: {' '.join(fields)[:80]!r}", where=str(path)) from error

    def _read(self, fields: list[str]) -> None:
        count = int(fields[3], 16)  # hexadecimal, says wndb(5)
        words = [_MARKER.sub("", word) for word in fields[4 : 4 + 2 * count : 2]]
        self.words[fields[0]] = words
        start = 4 + 2 * count
        pointers = fields[start + 1 : start + 1 + 4 * int(fields[start])]
        self.usages[fields[0]] = [
            (pointers[i + 2], pointers[i + 1]) for i in range(0, len(pointers), 4) if pointers[i] == ";u"
        ]
        gloss = " ".join(fields).partition(" | ")[2]
        if _UNWANTED.search(gloss):
            self.unwanted.update(word.lower() for word in words)


@dataclass
class Entry:
    """What the table says of a word.

    Attributes:
        ambiguous: whether its first sense is meant in less than half of its uses, all parts of speech together.
        parts: for each part of speech, the most frequent first: its letter, and for each sense its synonyms.
    """

    ambiguous: bool
    parts: list[tuple[str, list[list[str]]]]


def _uses(path: Path) -> dict[tuple[str, str], list[int]]:
    """(word, part of speech) -> how often each sense was tagged, in the order of senses."""
    found: dict[tuple[str, str], dict[int, int]] = {}
    for fields in _lines(path):
        try:
            word, _, rest = fields[0].partition("%")
            found.setdefault((word, " nvara"[int(rest[0])]), {})[int(fields[2])] = int(fields[3])
        except (IndexError, ValueError) as error:
            raise DataError(f"not a record of WordNet: {' '.join(fields)[:80]!r}", where=str(path)) from error
    return {key: [senses[number] for number in sorted(senses)] for key, senses in found.items()}


def _is_ambiguous(word: str, pos: str, uses: dict[tuple[str, str], list[int]]) -> bool:
    counts = {part: uses.get((word, part), []) for part in "nvar"}
    total = sum(map(sum, counts.values()))
    if total == 0:  # never met: then it must have one sense only
        return sum(map(len, counts.values())) > 1
    return 2 * counts[pos][0] < total


def build_table(folder: Path) -> dict[str, Entry]:
    """Read a release.

    Args:
        folder: with `index.*` and `data.*` for each part of speech, and `index.sense`.

    Returns:
        word -> its entry. Words and synonyms have at least three letters and are written in lower case; names aren't in
        it. A multiword has spaces. At most six synonyms a part of speech.

    Raises:
        DataError: a file is missing or isn't WordNet's.
    """
    synsets = {pos: _Synsets(folder / f"data.{name}") for name, pos in _POS_FILES.items()}
    unwanted = set().union(*(part.unwanted for part in synsets.values()))
    for part in synsets.values():
        for offset, usages in part.usages.items():
            if any(_UNWANTED_USAGES & set(synsets[pos].words.get(target, ())) for pos, target in usages):
                unwanted.update(word.lower() for word in part.words[offset])
    uses = _uses(folder / "index.sense")
    found: dict[str, list[tuple[int, str, list[list[str]]]]] = {}
    for name, pos in _POS_FILES.items():
        for fields in _lines(folder / f"index.{name}"):
            word = fields[0]
            if "_" in word or word in unwanted or not _WORD.fullmatch(word):
                continue
            fields = [field for field in fields if field]
            senses = _senses(word, fields[-int(fields[2]) :], synsets[pos], unwanted)
            found.setdefault(word, []).append((sum(uses.get((word, pos), ())), pos, senses))
    table: dict[str, Entry] = {}
    for word, parts in found.items():
        # stable: noun, verb, adj, adv where counts are equal. A part without synonyms may still be the usual one:
        # it stays, empty, so that a rarer part of speech isn't taken for it
        ordered = sorted(parts, key=lambda part: -part[0])
        if any(senses for _, _, senses in ordered):
            ambiguous = _is_ambiguous(word, ordered[0][1], uses)
            table[word] = Entry(ambiguous, [(pos, senses) for _, pos, senses in ordered])
    return table


def _senses(word: str, offsets: list[str], synsets: _Synsets, unwanted: set[str]) -> list[list[str]]:
    """The synonyms of each sense; empty senses at the end are cut."""
    senses: list[list[str]] = []
    seen = {word}
    for offset in offsets:
        fresh = []
        for other in synsets.words[offset]:
            if other in seen or other in unwanted or not _WORD.fullmatch(other):
                continue
            if len(seen) > MAX_SYNONYMS:
                break
            seen.add(other)
            fresh.append(other.replace("_", " "))
        senses.append(fresh)
    while senses and not senses[-1]:
        senses.pop()
    return senses


def write_table(table: dict[str, Entry], path: Path) -> int:
    """Write a table; the bytes depend on its content only. Returns how many there are."""
    text = io.StringIO()
    for word in sorted(table):
        parts = [f"{pos}:{';'.join(','.join(sense) for sense in senses)}" for pos, senses in table[word].parts]
        text.write(f"{word}\t{'~' * table[word].ambiguous}" + "\t".join(parts) + "\n")
    packed = gzip.compress(text.getvalue().encode(), 9, mtime=0)
    write_atomic(path, packed)
    return len(packed)


def main(argv: list[str]) -> int:
    """The command line: two paths."""
    try:
        if len(argv) != 2:
            raise UsageError(
                "two paths are needed: WordNet's dict folder, and the file to write",
                fix="python -m swift.data.augment.wordnet dict synonyms_en.txt.gz",
            )
        table = build_table(Path(argv[0]))
        size = write_table(table, Path(argv[1]))
    except SwiftError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{len(table):,} words, {size:,} bytes: {argv[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
