"""Keeping test questions out of training data: documents that share an n-gram with a given test set are dropped or cut.

The rule is that of GPT-3 (Brown et al. 2020, appendix C): 13 words in a row after normalising. The index is built from
the test sets in each process when it starts, and takes 12 bytes for each n-gram in them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from swift.config.fields import setting
from swift.core.errors import DataError, UsageError
from swift.core.logging import get_logger
from swift.data.dedup.ngram_index import Match, NgramIndex
from swift.data.engine.document import Document, document_from
from swift.data.engine.operator import OPERATORS, Context, MapOperator
from swift.data.engine.tally import Tally
from swift.data.readers import FileTally, parse_raw, read_raw
from swift.data.rows import RowProblem
from swift.data.sources import parse_source

_TEXTS_AT_A_TIME = 256
_CHARACTERS_AT_A_TIME = 4 << 20


@OPERATORS.register("decontaminate")
@dataclass
class Decontaminate(MapOperator):
    """Drops or cuts documents that share a run of words with a test set."""

    test_sets: list[str] = setting(help="what must not be trained on: files, folders, patterns, hub ids", factory=list)
    columns: list[str] = setting(
        help="columns of the test sets whose texts count, each by itself; none: the texts of the row as in training",
        factory=list,
    )
    ngram: int = setting(13, help="words in a row that make a match")
    ngram_unspaced: int = setting(
        25, help="code points in a row, for test rows in Chinese, Japanese, Thai and the like"
    )
    min_tokens: int = setting(8, help="shorter test texts are left out; one shorter than an n-gram must match whole")
    min_matches: int = setting(1, help="separate matching stretches that a document needs to count as contaminated")
    action: Literal["drop", "cut"] = setting(
        "drop", help="drop: the whole document; cut: the match and what is near it"
    )
    margin: int = setting(200, help="characters that are cut on each side of a match (cut)")
    min_left: int = setting(200, help="pieces between cuts that are shorter are cut too, in characters (cut)")

    def check(self) -> None:
        if not self.test_sets:
            raise UsageError(
                "decontaminate needs test sets", where="decontaminate.test_sets", fix="test_sets: [FILE.jsonl]"
            )
        least = {"ngram": 1, "ngram_unspaced": 1, "min_tokens": 1, "min_matches": 1, "margin": 0, "min_left": 0}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise UsageError(f"{name} is {getattr(self, name)}: at least {value}", where=f"decontaminate.{name}")

    def open(self, context: Context) -> None:
        super().open(context)
        self._index = NgramIndex(self.ngram, self.ngram_unspaced, self.min_tokens)
        self._names: list[str] = []
        for argument in self.test_sets:
            before = len(self._names)
            for name, text in self._reference_texts(argument):
                self._index.add(text)
                self._names.append(name)
            if len(self._names) == before:
                raise DataError(
                    "the test set has no texts", where=f"decontaminate.test_sets {argument}", fix="check its columns"
                )
        self._index.freeze()
        if self._index.too_short:
            get_logger(__name__).info(
                "decontaminate: %d of %d test texts have fewer than %d words and aren't looked for",
                self._index.too_short,
                self._index.references,
                self.min_tokens,
            )

    def _reference_texts(self, argument: str) -> Iterator[tuple[str, str]]:
        """Name and text of all test rows."""
        for file in parse_source(argument).files:
            for line, row in read_raw(file, FileTally()):
                name = str(file.ref(line))
                try:
                    record = parse_raw(row)
                    if self.columns:
                        texts = [(column, _cell(record, column)) for column in self.columns]
                    else:
                        texts = [("", text) for text in document_from(record, name).texts]
                except RowProblem as problem:
                    raise DataError(
                        f"bad row in a test set ({problem.reason}): {problem.message}",
                        where=name,
                        fix=problem.fix or "mend the row, or name its columns in decontaminate.columns",
                    ) from problem
                for column, text in texts:
                    yield (f"{name} ({column})" if column else name), text

    def run(self, batch: list[Document], tally: Tally) -> list[Document]:
        kept = []
        for part in _parts(batch):
            texts = [text for document in part for text in document.texts]
            found = iter(self._index.find(texts))
            for document in part:
                matches = [next(found) for _ in document.texts]
                if sum(map(len, matches)) < self.min_matches or self._goes_on(document, matches, tally):
                    kept.append(document)
        return kept

    def _goes_on(self, document: Document, matches: list[list[Match]], tally: Tally) -> bool:
        """Whether a contaminated document stays; its texts are cut then."""
        first = next(match for found in matches for match in found)
        note = f"{first.tokens} tokens of {self._names[first.reference]}"
        for match in (match for found in matches for match in found):
            tally.count("decontaminate", self._names[match.reference].rsplit(":", 1)[0])
        if self.action == "drop":
            tally.drop(document, "contaminated", note)
            return False
        texts = [self._cut(text, found) if found else text for text, found in zip(document.texts, matches)]
        emptied = any(not after.strip() and before.strip() for before, after in zip(document.texts, texts))
        if emptied and (document.roles is not None or not any(text.strip() for text in texts)):
            tally.drop(document, "contaminated_throughout", note)
            return False
        before = document.text
        document.texts[:] = texts
        tally.change(document, "contaminated_part", before, document.text, note=note)
        return True

    def _cut(self, text: str, matches: list[Match]) -> str:
        """The text without matches and their surroundings; a blank line stands where something was."""
        data = text.encode("utf-8", "surrogatepass")
        pieces = []
        start = 0
        for match in matches:
            first = len(data[: match.start].decode("utf-8", "surrogatepass")) - self.margin
            if first > start:
                pieces.append(text[start:first])
            start = max(start, len(data[: match.end].decode("utf-8", "surrogatepass")) + self.margin)
        pieces.append(text[start:])
        return "\n\n".join(piece.strip() for piece in pieces if len(piece.strip()) >= max(1, self.min_left))


def _parts(batch: list[Document]) -> Iterator[list[Document]]:
    """The batch in parts that are looked up at once."""
    part: list[Document] = []
    characters = 0
    for document in batch:
        part.append(document)
        characters += sum(map(len, document.texts))
        if len(part) >= _TEXTS_AT_A_TIME or characters >= _CHARACTERS_AT_A_TIME:
            yield part
            part, characters = [], 0
    yield part


def _cell(record: dict[str, object], column: str) -> str:
    """A column as text; lists and objects (choices of a question) as JSON."""
    if column not in record:
        raise RowProblem("no_column", f"there is no column {column!r}; there are {', '.join(map(str, record))}")
    value = record[column]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
