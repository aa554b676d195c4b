"""Exact substring deduplication: stretches that occurred before are cut out, wherever in the corpus they occurred.

A window of `min_length` bytes (or words) is repeated if the same one begins earlier in the corpus and doesn't overlap
it; what any repeated window covers is cut. So the first occurrence of everything stays (Lee et al. 2021, "Deduplicating
training data makes language models better", who cut every stretch of 50 tokens that occurs twice).

Two ways to find the windows, with the same result. `hashes` works out of core in five phases: anchors of each shard
(see `dedup.windows`), anchors that occur twice, 128-bit hashes of the windows around those, windows that aren't the
first of their hash, and the cutting. `suffix_array` sorts the suffixes of the corpus in memory, in one task.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from swift.config.fields import setting
from swift.core.errors import UsageError
from swift.core.files import disk_errors, human_bytes
from swift.data.dedup import windows
from swift.data.dedup.components import EDGE
from swift.data.dedup.nodes import IdWriter, node_of, shard_cuts
from swift.data.dedup.runs import RunWriter, hash_cuts, records
from swift.data.dedup.stages import check_partitions, id_of, joined, partitions_of, repeats, runs_of
from swift.data.dedup.suffixes import BYTES_PER_SYMBOL, repeated_windows, window_ranks
from swift.data.engine.document import Document
from swift.data.engine.operator import OPERATORS, GlobalOperator, PhaseWork

_WINDOW = np.dtype([("key", "<u8"), ("low", "<u8"), ("node", "<u8"), ("at", "<u4")])
_SPAN = np.dtype([("key", "<u8"), ("at", "<u4"), ("twin", "<u8")])
_TEXT = np.dtype([("node", "<u8"), ("base", "<u4"), ("length", "<u8")])


@OPERATORS.register("substring_dedup")
@dataclass
class SubstringDedup(GlobalOperator):
    """Cuts stretches of text that occurred earlier in the corpus, word for word."""

    min_length: int = setting(200, help="a stretch must have at least so many bytes (or words)")
    unit: Literal["bytes", "words"] = setting(
        "bytes", help="what min_length counts, and what is compared: bytes, or words whatever the spaces between them"
    )
    max_share: float = setting(
        1.0,
        help="a document is dropped, not cut, if a larger share of its bytes is repeated; 0 drops on any repetition",
    )
    method: Literal["hashes", "suffix_array"] = setting(
        "hashes", help="hashes: out of core, any size; suffix_array: sorts suffixes, the corpus must fit into memory"
    )
    partitions: int | None = setting(None, help="tasks that share the comparing; None: by the bytes of the input")

    def check(self) -> None:
        if self.min_length < 2:
            raise UsageError(f"min_length is {self.min_length}: at least 2", where="substring_dedup.min_length")
        if not 0 <= self.max_share <= 1:
            raise UsageError(f"max_share is {self.max_share}: from 0 to 1", where="substring_dedup.max_share")
        check_partitions(self.partitions)

    def phases(self, num_shards: int) -> list[tuple[str, int]]:
        if self.method == "suffix_array":
            return [("texts", num_shards), ("spans", 1), ("filter", num_shards)]
        partitions = partitions_of(num_shards, self.partitions, self.num_partitions)
        return [
            ("texts", num_shards),
            ("anchors", partitions),
            ("windows", num_shards),
            ("spans", partitions),
            ("filter", num_shards),
        ]

    def run_phase(self, phase: str, index: int, work: PhaseWork) -> None:
        if phase == "texts":
            (self._texts if self.method == "suffix_array" else self._anchors)(index, work)
        elif phase == "anchors":
            self._repeated_anchors(index, work)
        elif phase == "windows":
            self._windows(index, work)
        elif phase == "spans":
            (self._spans_in_memory if self.method == "suffix_array" else self._spans)(index, work)
        else:
            work.write(self._filter(index, work))

    # --- out of core -------------------------------------------------------------------------------------------------

    def _anchors(self, shard: int, work: PhaseWork) -> None:
        cuts = hash_cuts(partitions_of(work.num_shards, self.partitions, self.num_partitions))
        found = RunWriter(work.output, EDGE, cuts, work.context.memory_bytes // 2)
        ids = IdWriter(work.output)
        for batch in work.documents(shard):
            for place, document in enumerate(batch):
                node = node_of(shard, ids.count + place)
                for _, symbols in self._symbols(document):
                    for _, piece in windows.pieces(symbols.values, self.min_length):
                        values = windows.anchors(piece, self.min_length)
                        found.add(records(EDGE, key=values, other=np.full(len(values), node, dtype=np.uint64)))
            ids.add([document.id for document in batch])
        found.close()
        ids.close()

    def _repeated_anchors(self, partition: int, work: PhaseWork) -> None:
        """For each shard, the anchors of its documents that are at more than one place of the corpus."""
        memory = work.context.memory_bytes
        out = RunWriter(work.output, EDGE, shard_cuts(work.num_shards), memory // 4, unique=True)
        for chunk in runs_of(work, "texts", work.num_shards, EDGE, partition).chunks():
            for rows in chunk.parts():
                if chunk.whole:
                    same = rows["key"][1:] == rows["key"][:-1]
                    rows = rows[np.append(same, False) | np.append(False, same)]
                out.add(records(EDGE, key=rows["other"], other=rows["key"]))
        out.close()

    def _windows(self, shard: int, work: PhaseWork) -> None:
        partitions = partitions_of(work.num_shards, self.partitions, self.num_partitions)
        found = RunWriter(work.output, _WINDOW, hash_cuts(partitions), work.context.memory_bytes // 2)
        row = 0
        for batch, places in joined(work, shard, runs_of(work, "anchors", partitions, EDGE, shard)):
            for place, anchors in places.items():
                node = node_of(shard, row + place)
                for base, symbols in self._symbols(batch[place]):
                    for start, piece in windows.pieces(symbols.values, self.min_length):
                        for rows in self._candidates(piece, np.unique(anchors["other"])):
                            rows["node"] = node
                            rows["at"] += np.uint32(base + start)
                            found.add(rows)
            row += len(batch)
        found.close()

    def _candidates(self, piece: np.ndarray, anchors: np.ndarray) -> Iterator[np.ndarray]:
        """`_WINDOW`, by place in the piece, of the windows whose anchor is among those given."""
        wanted = np.isin(windows.least_anchors(piece, self.min_length), anchors)
        edges = np.flatnonzero(np.diff(wanted.astype(np.int8), prepend=0, append=0))
        for start, end in zip(edges[::2].tolist(), edges[1::2].tolist()):
            high, low = windows.window_hashes(piece[start : end + self.min_length - 1], self.min_length)
            yield records(_WINDOW, key=high, low=low, node=np.zeros_like(high), at=np.arange(start, end))

    def _spans(self, partition: int, work: PhaseWork) -> None:
        spans = RunWriter(work.output, _SPAN, shard_cuts(work.num_shards), work.context.memory_bytes // 4)
        for chunk in runs_of(work, "windows", work.num_shards, _WINDOW, partition).chunks():
            for rows, firsts in repeats(chunk):
                apart = (rows["node"] != firsts["node"]) | (rows["at"] >= firsts["at"] + np.uint32(self.min_length))
                rows, firsts = rows[apart], firsts[apart]
                spans.add(records(_SPAN, key=rows["node"], at=rows["at"], twin=firsts["node"]))
        spans.close()

    # --- in memory ---------------------------------------------------------------------------------------------------

    def _texts(self, shard: int, work: PhaseWork) -> None:
        ids = IdWriter(work.output)
        table: list[tuple[int, int, int]] = []
        with disk_errors(work.output), (work.output / "symbols.bin").open("wb") as file:
            for batch in work.documents(shard):
                for place, document in enumerate(batch):
                    for base, symbols in self._symbols(document):
                        file.write(symbols.values.tobytes())
                        table.append((node_of(shard, ids.count + place), base, len(symbols.values)))
                ids.add([document.id for document in batch])
            np.save(work.output / "texts.npy", np.array(table, dtype=_TEXT))
        ids.close()

    def _spans_in_memory(self, _: int, work: PhaseWork) -> None:
        folders = [work.result("texts", shard) for shard in range(work.num_shards)]
        texts = np.concatenate([np.load(folder / "texts.npy") for folder in folders])
        needed = int(texts["length"].sum()) * BYTES_PER_SYMBOL
        if needed > work.context.memory_bytes:
            raise UsageError(
                f"sorting the suffixes of {int(texts['length'].sum())} {self.unit} needs {human_bytes(needed)}, "
                f"a task may hold {human_bytes(work.context.memory_bytes)}",
                where="substring_dedup.method",
                fix="method: hashes, or raise the memory of a task",
            )
        dtype = np.uint8 if self.unit == "bytes" else np.uint64
        values = np.concatenate([np.fromfile(folder / "symbols.bin", dtype=dtype) for folder in folders])
        ends = np.cumsum(texts["length"].astype(np.int64))
        ranks = window_ranks(values, self.min_length)
        owners = np.searchsorted(ends, np.arange(len(ranks)), side="right")
        inside = np.arange(len(ranks)) + self.min_length <= ends[owners] if len(ends) else np.zeros(0, dtype=bool)
        found, first = repeated_windows(ranks, self.min_length, inside)
        at = found - (ends - texts["length"].astype(np.int64))[owners[found]] + texts["base"][owners[found]]
        spans = RunWriter(work.output, _SPAN, shard_cuts(work.num_shards), work.context.memory_bytes // 4)
        spans.add(records(_SPAN, key=texts["node"][owners[found]], at=at, twin=texts["node"][owners[first]]))
        spans.close()

    # --- cutting -----------------------------------------------------------------------------------------------------

    def _symbols(self, document: Document) -> Iterator[tuple[int, windows.Symbols]]:
        """Each text's symbols, and how many the document's texts before it have."""
        base = 0
        for text in document.texts:
            symbols = windows.symbols_of(text.encode("utf-8", "surrogatepass"), self.unit)
            yield base, symbols
            base += len(symbols.values)

    def _filter(self, shard: int, work: PhaseWork) -> Iterator[list[Document]]:
        tasks = (
            1 if self.method == "suffix_array" else partitions_of(work.num_shards, self.partitions, self.num_partitions)
        )
        for batch, places in joined(work, shard, runs_of(work, "spans", tasks, _SPAN, shard)):
            yield [
                document
                for place, document in enumerate(batch)
                if place not in places or self._goes_on(document, places[place], work)
            ]

    def _goes_on(self, document: Document, spans: np.ndarray, work: PhaseWork) -> bool:
        """Whether a document with repeated windows stays; its texts are cut then."""
        twin = int(spans["twin"][np.argmin(spans["at"])])
        note = partial(_note, work, twin)
        cut_bytes = all_bytes = 0
        texts = []
        for (base, symbols), text in zip(self._symbols(document), document.texts):
            data = text.encode("utf-8", "surrogatepass")
            at = np.unique(spans["at"][(spans["at"] >= base) & (spans["at"] < base + len(symbols.values))])
            left = _without(data, symbols, at.astype(np.int64) - base, self.min_length)
            cut_bytes += len(data) - len(left)
            all_bytes += len(data)
            texts.append(left.decode("utf-8", "surrogatepass"))
        if not cut_bytes:
            return True
        if cut_bytes > self.max_share * all_bytes:
            work.tally.drop(document, "mostly_repeated", note)
            return False
        emptied = [not after.strip() and bool(before.strip()) for before, after in zip(document.texts, texts)]
        if all(emptied) or (document.roles is not None and any(emptied)):
            work.tally.drop(document, "only_repeated", note)
            return False
        before = document.text
        document.texts[:] = texts
        work.tally.change(document, "repeated_stretch", before, document.text, note=note)
        work.tally.observe("repeated_share", cut_bytes / all_bytes, share=True)
        return True


def _without(data: bytes, symbols: windows.Symbols, at: np.ndarray, width: int) -> bytes:
    """A text without the windows that begin at the symbols `at` (ascending); no code point is cut in two."""
    if not len(at):
        return data
    apart = np.flatnonzero(np.diff(at) > width)
    firsts, lasts = at[np.append(0, apart + 1)], at[np.append(apart, len(at) - 1)]
    kept = []
    done = 0
    for first, last in zip(firsts.tolist(), lasts.tolist()):
        start, end = symbols.byte_span(first, last + width)
        while start < end and data[start] & 0xC0 == 0x80:  # the code point began before the stretch: it stays
            start += 1
        while end > start and end < len(data) and data[end] & 0xC0 == 0x80:  # the last one isn't all in it: it stays
            end -= 1
        kept.append(data[done:start])
        done = max(done, end)
    return b"".join([*kept, data[done:]])


def _note(work: PhaseWork, twin: int) -> str:
    return f"first in {id_of(work, 'texts', twin)}"
