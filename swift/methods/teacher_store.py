"""A teacher that was asked long ago: its best tokens lie on disk. And asking one about all rows, to put them there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from swift.core.errors import DataError
from swift.data.loading.batch import Examples, Tokens, tokens_of
from swift.data.rows import RowRef
from swift.data.token_files.shards import checksum
from swift.data.units import Kind, Unit
from swift.methods.distill_rows import Lesson, unit_texts
from swift.methods.teacher import Facts, Form, best_facts
from swift.methods.teacher_model import ModelTeacher
from swift.methods.topk_store import MANIFEST, BestTokens, StoreHeader, TopkStore, TopkWriter, finish_store
from swift.models.head import OutputHead
from swift.training.session import Session
from swift.training.strategy import Strategy

_TOKENS_AT_ONCE = 4096


@dataclass
class StoreTeacher:
    """Reads what a teacher said of each text."""

    store: TopkStore
    form: Form
    head: OutputHead | None = field(default=None, init=False)

    def tell(self, strategy: Strategy, lessons: Sequence[Lesson]) -> Facts:
        asked = [lesson.student for lesson in lessons if lesson.answered]
        found = [self.store.read(text.ids, text.weights) for text in asked]
        return best_facts(found, self.form, stored=self.store.header.temperature)


def is_finished(folder: Path) -> bool:
    """Whether a folder holds a whole store."""
    return (folder / MANIFEST).is_file()


def open_store(folder: Path, vocab_size: int, sets: Sequence[Examples]) -> TopkStore:
    """The store, which must know every example of these sets.

    Raises:
        DataError: it belongs to another tokenizer or to other rows.
    """
    store = TopkStore(folder)
    if store.header.vocab_size != vocab_size:
        raise DataError(
            f"the teacher's tokenizer had {store.header.vocab_size:,} ids, and the model's has {vocab_size:,}",
            where=str(folder),
            fix="take a teacher with the model's tokenizer",
        )
    for examples in sets:
        sums = [checksum(text.ids, text.weights) for text, _ in _answered(examples)]
        store.require(np.array(sums, dtype=np.uint64))
    return store


def ask_about_all(teacher: ModelTeacher, form: Form, sets: Sequence[Examples], session: Session, folder: Path) -> None:
    """Write a teacher's best tokens for all texts; each data-parallel rank asks about its share.

    Args:
        form: how many tokens, and at which temperature.
    """
    mesh = session.mesh
    data, writes = mesh["dp"], not (mesh["tp"].rank or mesh["pp"].rank or mesh["cp"].rank)
    header = StoreHeader(form.k, form.vocab_size, form.temperature, teacher=folder.name)
    writer = TopkWriter(folder, header, part=data.rank) if writes else None
    chunks = _chunks([pair for examples in sets for pair in _answered(examples)])
    try:
        for turn in range(-(-len(chunks) // data.size)):
            number = turn * data.size + data.rank
            pairs = chunks[number] if number < len(chunks) else []
            lessons = [Lesson(student, teacher, True, RowRef("", 0)) for student, teacher in pairs]
            facts = teacher.tell(teacher.strategy, lessons)
            ids, logps = facts["teacher_topk_ids"].numpy(), facts["teacher_topk_logps"].float().numpy()
            at = 0
            for text, _ in pairs if writer is not None else ():
                here = slice(at, at + int(np.count_nonzero(text.weights[1:])))
                at = here.stop
                assert writer is not None
                writer.add(text.ids, text.weights, BestTokens(ids[here], logps[here]))
        if writer is not None:
            writer.close()
    except BaseException:
        if writer is not None:
            writer.drop()
        raise
    session.group.barrier()
    session.group.from_main(lambda: finish_store(folder, parts=data.size))


def _answered(examples: Examples) -> Iterator[tuple[Tokens, Tokens]]:
    """What student and teacher read of each example that has an answer."""
    for index in range(len(examples)):
        example = tokens_of(examples, index)
        if Unit.read(example.notes).kinds[0] == Kind.CHOSEN:
            texts = unit_texts(example)
            yield texts[0], texts[min(1, len(texts) - 1)]


def _chunks(pairs: list[tuple[Tokens, Tokens]]) -> list[list[tuple[Tokens, Tokens]]]:
    chunks: list[list[tuple[Tokens, Tokens]]] = []
    room = 0
    for student, teacher in pairs:
        if len(teacher.ids) > room or not chunks:
            chunks.append([])
            room = max(_TOKENS_AT_ONCE, len(teacher.ids))
        chunks[-1].append((student, teacher))
        room -= len(teacher.ids)
    return chunks
