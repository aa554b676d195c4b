"""Operators one behind the other over a stream of batches, each with its tally and the CPU seconds it took.

Counts what operators can't get wrong: documents in, out and changed, and characters. Knows nothing of files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from swift.core.errors import SwiftError
from swift.data.engine.document import Document
from swift.data.engine.inputs import domain_of
from swift.data.engine.operator import MapOperator
from swift.data.engine.tally import Tally

KEPT = "kept"


class RecordingTally(Tally):
    """A tally that also tells which documents were dropped, to a function that is called with id and reason."""

    def __init__(self, tell: Callable[[str, str], None] | None = None) -> None:
        super().__init__()
        self._tell = tell

    def drop(self, document: Document, reason: str, note: str | Callable[[], str] = "") -> None:
        """As `Tally.drop`."""
        super().drop(document, reason, note)
        if self._tell is not None:
            self._tell(document.id, reason)

    def as_json(self) -> dict[str, Any]:
        """Plain values; `Tally.from_json` reads them back."""
        values = super().as_json()
        del values["_tell"]
        return values


@dataclass
class Record:
    """What an operator did in one task, or merged: its tally, CPU seconds, and bytes of text that it was given."""

    label: str
    tally: Tally = field(default_factory=Tally)
    cpu_s: float = 0.0
    bytes: int = 0

    def merge(self, other: Record) -> None:
        """Add another task's."""
        self.tally.merge(other.tally)
        self.cpu_s += other.cpu_s
        self.bytes += other.bytes

    def as_json(self) -> dict[str, Any]:
        return {"label": self.label, "tally": self.tally.as_json(), "cpu_s": self.cpu_s, "bytes": self.bytes}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Record:
        return cls(values["label"], Tally.from_json(values["tally"]), values["cpu_s"], values["bytes"])


@dataclass
class Link:
    """One opened operator, and its record of this task."""

    operator: MapOperator
    record: Record


def run_chain(links: list[Link], batches: Iterable[list[Document]]) -> Iterator[list[Document]]:
    """What is left of each batch after all operators; batches of which nothing is left are passed over.

    Raises:
        SwiftError: an operator failed (the operator and the document are named), or lost documents uncounted.
    """
    for batch in batches:
        for link in links:
            if not batch:
                break
            batch = _step(link, batch)
        if batch:
            yield batch


def _step(link: Link, batch: list[Document]) -> list[Document]:
    record, tally = link.record, link.record.tally
    before = [(document, tuple(document.texts)) for document in batch]
    given = len(batch)
    first, last = batch[0].id, batch[-1].id
    dropped = tally.dropped.total()
    start = time.process_time()
    try:
        kept = link.operator.run(batch, tally)
    except SwiftError:
        raise
    except Exception as error:  # somebody else's code: whatever it raises is told with the operator and the row
        raise _failure(link, [document for document, _ in before], (first, last), error) from error
    record.cpu_s += time.process_time() - start
    told = tally.dropped.total() - dropped
    _refuse_misshapen(record.label, kept, (first, last))
    left = set(map(id, kept))
    gone = sum(id(document) not in left for document, _ in before)
    if told > gone or len(left) < len(kept):
        raise SwiftError(
            f"the operator {record.label} "
            + ("drops documents that it hands on as well" if told > gone else "hands on the same document twice"),
            where=f"between {first} and {last}",
            fix="a document is either returned, once, or given to tally.drop",
        )
    if len(kept) + told < given:
        raise SwiftError(
            f"the operator {record.label} left out {given - len(kept) - told} document(s) without saying why",
            where=f"between {first} and {last}",
            fix="an operator calls tally.drop(document, reason) for each document that it leaves out",
        )
    tally.read += given
    tally.kept += len(kept)
    for document, texts in before:
        tally.characters_in += sum(map(len, texts))
        if id(document) not in left:
            continue
        now = document.texts
        if len(now) != len(texts) or any(a is not b and a != b for a, b in zip(now, texts)):
            tally.changed += 1
    for document in kept:
        tally.characters_out += sum(map(len, document.texts))
    return kept


def _refuse_misshapen(label: str, kept: Any, ends: tuple[str, str]) -> None:
    """What is handed on is a list of documents with as many texts as before."""
    fix = "`run` returns a list of documents; it replaces items of `document.texts` by texts, and adds or removes none"
    if not isinstance(kept, list):
        raise SwiftError(
            f"the operator {label} returned {type(kept).__name__}, not a list of documents",
            where=f"between {ends[0]} and {ends[1]}",
            fix=fix,
        )
    for document in kept:
        if not isinstance(document, Document):
            what = f"{type(document).__name__} in place of a document"
        elif len(document.texts) != len(document.paths):
            what = f"{document.id} with {len(document.texts)} texts in place of {len(document.paths)}"
        elif any(not isinstance(text, str) for text in document.texts):
            what = f"{document.id} with a text that is none"
        else:
            continue
        raise SwiftError(f"the operator {label} returned {what}", where=f"between {ends[0]} and {ends[1]}", fix=fix)


def _failure(link: Link, batch: list[Document], ends: tuple[str, str], error: Exception) -> SwiftError:
    """The error with the row it comes from: the operator is asked again, one document at a time."""
    where = ends[0] if len(batch) == 1 else f"between {ends[0]} and {ends[1]}"
    for document in batch if len(batch) > 1 else ():
        try:
            link.operator.run([document], Tally())
        except Exception as again:  # the same boundary as above
            if type(again) is type(error):
                where = document.id
                break
    message = str(error) or "no message"
    return SwiftError(
        f"the operator {link.record.label} failed: {type(error).__name__}: {message}",
        where=where,
        fix="look at that row; leave the operator out, or drop such rows before it",
    )


def counted_output(batches: Iterable[list[Document]], record: Record) -> Iterator[list[Document]]:
    """Pass on what goes into the output, counted: sources, domains, languages, lengths, and a few samples."""
    tally = record.tally
    for batch in batches:
        for document in batch:
            characters = sum(map(len, document.texts))
            tally.read += 1
            tally.kept += 1
            tally.characters_in += characters
            tally.characters_out += characters
            tally.observe("characters", characters)
            for group in ("source", "language"):
                label = document.meta.get(group)
                if isinstance(label, str):
                    tally.count(group, label)
            domain = domain_of(document.record)
            if domain is not None:
                tally.count("domain", domain)
            tally.show(KEPT, document)
        yield batch
