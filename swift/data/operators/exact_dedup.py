"""Exact deduplication: of documents, paragraphs or lines that are equal after normalising, the first one stays.

Hashes of every shard are sorted and partitioned by their leading bits; equal ones meet in one partition; what isn't the
first of its kind goes back to its shard by document number. Memory is bounded in every phase by the run's setting.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from swift.config.fields import setting
from swift.core.errors import UsageError
from swift.data.dedup.nodes import IdWriter, node_of, shard_cuts
from swift.data.dedup.runs import RunWriter, hash_cuts, records
from swift.data.dedup.stages import check_partitions, id_of, joined, partitions_of, repeats, runs_of
from swift.data.dedup.units import Normalise, cut, digest, normaliser, whole, without
from swift.data.engine.document import Document
from swift.data.engine.operator import OPERATORS, GlobalOperator, PhaseWork

_HASH = np.dtype([("key", "<u8"), ("low", "<u8"), ("node", "<u8"), ("at", "<u4")])
_TWIN = np.dtype([("key", "<u8"), ("at", "<u4"), ("twin", "<u8")])
_FLUSH = 1 << 14  # hashes collected as Python numbers before they become an array


@OPERATORS.register("exact_dedup")
@dataclass
class ExactDedup(GlobalOperator):
    """Drops documents (or removes paragraphs or lines) equal to an earlier one after normalising."""

    unit: Literal["document", "paragraph", "line"] = setting(
        "document", help="what is compared: document, paragraph (between blank lines) or line"
    )
    lower: bool = setting(False, help="whether case doesn't count")
    collapse_whitespace: bool = setting(True, help="whether kind and number of spaces and line ends don't count")
    strip_punctuation: bool = setting(False, help="whether signs other than letters and digits don't count")
    min_characters: int = setting(
        20, help="paragraphs and lines that are shorter after normalising are left alone (`}` and `return` repeat)"
    )
    partitions: int | None = setting(None, help="tasks that share the comparing; None: by the bytes of the input")

    def check(self) -> None:
        if self.min_characters < 0:
            raise UsageError(f"min_characters is {self.min_characters}: at least 0", where="exact_dedup.min_characters")
        check_partitions(self.partitions)

    def phases(self, num_shards: int) -> list[tuple[str, int]]:
        return [
            ("hash", num_shards),
            ("compare", partitions_of(num_shards, self.partitions, self.num_partitions)),
            ("filter", num_shards),
        ]

    def run_phase(self, phase: str, index: int, work: PhaseWork) -> None:
        partitions = partitions_of(work.num_shards, self.partitions, self.num_partitions)
        if phase == "hash":
            self._hash(index, work, partitions)
        elif phase == "compare":
            self._compare(index, work)
        else:
            work.write(self._filter(index, work, partitions))

    def _hash(self, shard: int, work: PhaseWork, partitions: int) -> None:
        hashes = RunWriter(work.output, _HASH, hash_cuts(partitions), work.context.memory_bytes // 2)
        ids = IdWriter(work.output)
        normalise = self._normaliser()
        held: list[tuple[int, int, int, int]] = []
        for batch in work.documents(shard):
            for place, document in enumerate(batch):
                node = node_of(shard, ids.count + place)
                held += [(high, low, node, unit) for unit, high, low in self._digests(document, normalise)]
            ids.add([document.id for document in batch])
            if len(held) >= _FLUSH:
                hashes.add(np.array(held, dtype=_HASH))
                held = []
        hashes.add(np.array(held, dtype=_HASH))
        hashes.close()
        ids.close()

    def _normaliser(self) -> Normalise:
        return normaliser(
            lower=self.lower,
            collapse_whitespace=self.collapse_whitespace,
            strip_punctuation=self.strip_punctuation,
        )

    def _digests(self, document: Document, normalise: Normalise) -> Iterator[tuple[int, int, int]]:
        """Number, and both halves of the hash, of each unit that is compared."""
        if self.unit == "document":
            text = whole(document, normalise)
            if text:
                yield 0, *digest(text)
            return
        if document.roles is not None:  # a turn with holes isn't what was said
            return
        number = 0
        for text in document.texts:
            for piece in cut(text, self.unit)[::2]:
                shown = normalise(piece)
                if shown and len(shown) >= self.min_characters:
                    yield number, *digest(shown)
                number += 1

    def _compare(self, partition: int, work: PhaseWork) -> None:
        memory = work.context.memory_bytes
        twins = RunWriter(work.output, _TWIN, shard_cuts(work.num_shards), memory // 4)
        for chunk in runs_of(work, "hash", work.num_shards, _HASH, partition).chunks():
            for rows, firsts in repeats(chunk):
                twins.add(records(_TWIN, key=rows["node"], at=rows["at"], twin=firsts["node"]))
        twins.close()

    def _filter(self, shard: int, work: PhaseWork, partitions: int) -> Iterator[list[Document]]:
        runs = runs_of(work, "compare", partitions, _TWIN, shard)
        for batch, places in joined(work, shard, runs):
            kept = []
            for place, document in enumerate(batch):
                if self.unit != "document" and document.roles is not None:
                    work.tally.count("exact_dedup", "conversation left alone")
                twins = places.get(place)
                if twins is None or self._keeps(document, twins, work):
                    kept.append(document)
            yield kept

    def _keeps(self, document: Document, twins: np.ndarray, work: PhaseWork) -> bool:
        """Whether a document that repeats something stays; it is changed then."""
        first = int(twins["twin"][0])

        def note() -> str:
            return f"same as {id_of(work, 'hash', first)}"

        if self.unit == "document":
            work.tally.drop(document, "duplicate", note)
            return False
        texts = self._without(document.texts, set(twins["at"].tolist()))
        if not any(text.strip() for text in texts):
            work.tally.drop(document, f"only_repeated_{self.unit}s", note)
            return False
        before = document.text
        document.texts[:] = texts
        work.tally.change(document, f"repeated_{self.unit}", before, document.text, times=len(twins), note=note)
        return True

    def _without(self, texts: list[str], removed: set[int]) -> list[str]:
        number = 0
        left = []
        for text in texts:
            pieces = cut(text, self.unit)
            units = (len(pieces) + 1) // 2
            left.append(without(pieces, {which - number for which in removed if number <= which < number + units}))
            number += units
        return left
