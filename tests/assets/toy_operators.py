"""Operators for the tests of the engine: small, slow where asked, and failing where asked."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from swift.config.fields import setting
from swift.core.errors import UsageError
from swift.data.engine.operator import OPERATORS, GlobalOperator, MapOperator


@OPERATORS.register("toy_upper")
@dataclass
class ToyUpper(MapOperator):
    """Write texts in capitals.

    More about it.
    """

    suffix: str = setting("", help="put behind the text")
    mode: Literal["upper", "title"] = setting("upper", help="which capitals")
    rate: float = setting(1.0, help="share of the documents", aliases=("share",))
    words: list[str] = setting(help="unused", factory=list)
    maybe: int | None = setting(None, help="unused")

    def check(self):
        if not 0 <= self.rate <= 1:
            raise UsageError(f"rate is {self.rate}: a share lies between 0 and 1", fix="rate: 0.5")

    def run(self, batch, tally):
        for document in batch:
            if self.context.uniform(document) < self.rate:
                before = document.texts[0]
                document.texts[0] = (before.upper() if self.mode == "upper" else before.title()) + self.suffix
                tally.change(document, "capitals", before, document.texts[0])
        return batch


@OPERATORS.register("toy_length")
@dataclass
class ToyLength(MapOperator):
    """Drop short documents."""

    least: int = setting(5, help="characters")

    def run(self, batch, tally):
        kept = []
        for document in batch:
            tally.observe("length", len(document.text))
            if len(document.text) < self.least:
                tally.drop(document, "too_short", f"{len(document.text)} characters")
            else:
                kept.append(document)
        return kept


@OPERATORS.register("toy_slow")
@dataclass
class ToySlow(MapOperator):
    """Write a line into a log (a folder named by TOY_LOG) for each batch, and take a while.

    The folder is no setting: what a recipe names belongs to its input, and this one changes.
    """

    seconds: float = setting(0.0, help="for each batch")

    def run(self, batch, tally):
        with (Path(os.environ["TOY_LOG"]) / str(os.getpid())).open("a") as file:
            file.write(f"{batch[0].id}\n")
        time.sleep(self.seconds)
        return batch


@OPERATORS.register("toy_fail")
@dataclass
class ToyFail(MapOperator):
    """Fail at a document whose text holds a word, in one of several ways."""

    word: str = setting("poison", help="the word")
    how: Literal["raise", "lose", "die"] = setting("raise", help="what happens then")

    def run(self, batch, tally):
        for document in batch:
            if self.word in document.text:
                if self.how == "raise":
                    raise KeyError("no such thing")
                if self.how == "die":
                    os.kill(os.getpid(), 9)
                return [other for other in batch if other is not document]
        return batch


@OPERATORS.register("toy_dedup")
@dataclass
class ToyDedup(GlobalOperator):
    """Drop texts that came before; TOY_LOG names a folder that is told of each task."""

    unused: str = setting("", help="nothing")
    needed: str = field(default="", metadata={"help": "unused"})

    def phases(self, num_shards):
        return [("hash", num_shards), ("merge", 1), ("drop", num_shards)]

    def run_phase(self, phase, index, work):
        if "TOY_LOG" in os.environ:
            with (Path(os.environ["TOY_LOG"]) / "tasks").open("a") as file:
                file.write(f"{phase} {index}\n")
        if phase == "hash":
            texts = [[d.text, d.id] for batch in work.documents(index) for d in batch]
            (work.output / "texts.json").write_text(json.dumps(texts))
        elif phase == "merge":
            first: dict[str, str] = {}
            for shard in range(work.num_shards):
                for text, doc_id in json.loads((work.result("hash", shard) / "texts.json").read_text()):
                    first.setdefault(text, doc_id)
            (work.output / "first.json").write_text(json.dumps(first))
        else:
            first = json.loads((work.result("merge", 0) / "first.json").read_text())
            work.write(self._kept(work, index, first))

    @staticmethod
    def _kept(work, index, first):
        for batch in work.documents(index):
            kept = []
            for document in batch:
                if first[document.text] == document.id:
                    kept.append(document)
                else:
                    work.tally.drop(document, "repeated", first[document.text])
            yield kept


@OPERATORS.register("toy_sink")
@dataclass
class ToySink:
    """Write the lengths of texts."""

    unit: Literal["characters", "words"] = setting("characters", help="what is counted")

    def open(self, context):
        self.context = context

    def write(self, folder, name, batches):
        lengths = [self._length(d.text) for batch in batches for d in batch]
        (folder / f"{name}.lengths").write_text(" ".join(map(str, lengths)))
        return {"rows": len(lengths), "total": sum(lengths)}

    def _length(self, text):
        return len(text) if self.unit == "characters" else len(text.split())

    def finish(self, output, facts):
        (output / "all.lengths").write_text(
            " ".join((output / f"part-{i:05d}.lengths").read_text() for i in range(len(facts)))
        )
        return {"total": sum(fact["total"] for fact in facts)}
