"""Near-duplicate removal by MinHash and locality-sensitive hashing, out of core.

Four phases: signatures of each shard give a key for each band; keys are partitioned and equal ones become edges,
checked against the full signatures; edges become clusters; of each cluster one document stays. Documents are numbers
(shard and row) throughout. Memory is bounded in every phase by the run's setting. `dedup.tokens` says what an n-gram is
made of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from swift.config.fields import setting
from swift.core.errors import UsageError
from swift.data.dedup.clusters import Keepers, Signatures, write_clusters
from swift.data.dedup.components import EDGE
from swift.data.dedup.minhash import EMPTY, band_keys, choose_bands, set_apart, signatures
from swift.data.dedup.nodes import IdWriter, node_of, shard_cuts
from swift.data.dedup.runs import RunWriter, hash_cuts, records
from swift.data.dedup.stages import check_partitions, id_of, joined, partitions_of, runs_of
from swift.data.dedup.units import digest
from swift.data.engine.document import Document, beside_texts
from swift.data.engine.operator import OPERATORS, GlobalOperator, PhaseWork

_BAND = np.dtype([("key", "<u8"), ("node", "<u8")])
_BATCH_CHARACTERS = 2 << 20


@OPERATORS.register("near_dedup")
@dataclass
class NearDedup(GlobalOperator):
    """Drops documents nearly equal to another one: MinHash of token n-grams, bands, clusters.

    Conversations are compared only with those that have the same tools, tool calls and pictures.
    """

    ngram: int = setting(5, help="tokens in an n-gram: words, or code points of scripts without spaces")
    bands: int = setting(14, help="groups of hashes; documents that agree in one of them are compared")
    rows: int = setting(8, help="hashes in a band")
    threshold: float | None = setting(
        None, help="chooses bands and rows so that the chance to be found rises steeply at this Jaccard similarity"
    )
    verify: float | None = setting(
        None,
        help="least similarity, estimated from all hashes, of a pair that shares a band; None: 0.8 times the "
        "similarity at which the chance to be found is steepest; 0: pairs aren't verified",
    )
    keep: Literal["first", "longest"] = setting(
        "first", help="which document of a cluster stays: first or longest (of equals the first)"
    )
    partitions: int | None = setting(None, help="tasks that share the bands; None: by the bytes of the input")

    def check(self) -> None:
        for name, value in (("ngram", self.ngram), ("bands", self.bands), ("rows", self.rows)):
            if value < 1:
                raise UsageError(f"{name} is {value}: at least 1", where=f"near_dedup.{name}")
        if self.bands * self.rows > 256:
            raise UsageError(
                f"{self.bands} bands of {self.rows} rows are {self.bands * self.rows} hashes: at most 256",
                where="near_dedup.bands",
                fix="lower one of them",
            )
        if self.threshold is not None and not 0 < self.threshold < 1:
            raise UsageError(f"threshold is {self.threshold}: between 0 and 1", where="near_dedup.threshold")
        if self.verify is not None and not 0 <= self.verify <= 1:
            raise UsageError(f"verify is {self.verify}: from 0 to 1", where="near_dedup.verify")
        check_partitions(self.partitions)

    def shape(self) -> tuple[int, int]:
        """Bands and rows."""
        return choose_bands(self.threshold) if self.threshold is not None else (self.bands, self.rows)

    def least_similarity(self) -> float:
        """Estimated similarity below which a pair isn't one; 0 if pairs aren't verified."""
        if self.verify is not None:
            return self.verify
        bands, rows = self.shape()
        return 0.8 * (1 / bands) ** (1 / rows)

    def phases(self, num_shards: int) -> list[tuple[str, int]]:
        partitions = partitions_of(num_shards, self.partitions, self.num_partitions)
        return [("signatures", num_shards), ("edges", partitions), ("clusters", 1), ("filter", num_shards)]

    def run_phase(self, phase: str, index: int, work: PhaseWork) -> None:
        partitions = partitions_of(work.num_shards, self.partitions, self.num_partitions)
        if phase == "signatures":
            self._signatures(index, work, partitions)
        elif phase == "edges":
            self._edges(index, work)
        elif phase == "clusters":
            self._clusters(work, partitions)
        else:
            work.write(self._filter(index, work))

    def _signatures(self, shard: int, work: PhaseWork, partitions: int) -> None:
        bands, rows = self.shape()
        keys = RunWriter(work.output / "bands", _BAND, hash_cuts(partitions), work.context.memory_bytes // 4)
        ids = IdWriter(work.output)
        kept = Keepers(work.output, signatures=self.least_similarity() > 0, lengths=self.keep == "longest")
        for texts, batch_ids, beside in _by_characters(work.documents(shard)):
            found = signatures(texts, self.ngram, bands * rows)
            for row, key in beside.items():
                found[row] = set_apart(found[row], key)
            full = np.flatnonzero((found != EMPTY).any(axis=1))
            nodes = node_of(shard, ids.count) + full.astype(np.uint64)
            band = band_keys(found[full], bands, rows)
            keys.add(records(_BAND, key=band.ravel(), node=np.repeat(nodes, bands)))
            kept.add(found, texts)
            ids.add(batch_ids)
        keys.close()
        ids.close()
        kept.close()

    def _edges(self, partition: int, work: PhaseWork) -> None:
        bands, rows = self.shape()
        memory = work.context.memory_bytes
        edges = RunWriter(work.output, EDGE, np.zeros(0, dtype=np.uint64), memory // 8, unique=True)
        folders = [work.result("signatures", shard) for shard in range(work.num_shards)]
        known = Signatures(folders, bands * rows, memory // 8)
        runs = runs_of(work, "signatures", work.num_shards, _BAND, partition, "bands")
        for pairs in known.pairs(runs, self.least_similarity()):
            edges.add(pairs)
        edges.close()

    def _clusters(self, work: PhaseWork, partitions: int) -> None:
        edges = runs_of(work, "edges", partitions, EDGE, 0)
        folders = [work.result("signatures", shard) for shard in range(work.num_shards)]
        lengths = folders if self.keep == "longest" else None
        write_clusters(edges, work.output, shard_cuts(work.num_shards), lengths, work.context.memory_bytes)

    def _filter(self, shard: int, work: PhaseWork) -> Iterator[list[Document]]:
        runs = runs_of(work, "clusters", 1, EDGE, shard, "dropped")
        for batch, places in joined(work, shard, runs):
            kept = []
            for place, document in enumerate(batch):
                twins = places.get(place)
                if twins is None:
                    kept.append(document)
                    continue
                twin = int(twins["other"][0])
                work.tally.drop(document, "near_duplicate", partial(_note, work, twin))
            yield kept


def _note(work: PhaseWork, twin: int) -> str:
    return f"like {id_of(work, 'signatures', twin)}"


def _by_characters(batches: Iterator[list[Document]]) -> Iterator[tuple[list[str], list[str], dict[int, int]]]:
    """Texts and ids in batches of some megabytes, however the documents were grouped.

    The third is, for conversations (by their number in the batch) that have tools, calls or pictures, a hash of those.
    """
    texts: list[str] = []
    ids: list[str] = []
    beside: dict[int, int] = {}
    characters = 0
    for batch in batches:
        for document in batch:
            others = beside_texts(document)
            if others:
                beside[len(texts)] = digest(others.decode())[0]
            texts.append(document.text)
            ids.append(document.id)
            characters += len(texts[-1])
            if characters >= _BATCH_CHARACTERS:
                yield texts, ids, beside
                texts, ids, beside, characters = [], [], {}, 0
    yield texts, ids, beside
