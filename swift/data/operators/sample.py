"""Keeping a random part of the documents; which ones is a function of the seed and the document alone."""

from __future__ import annotations

from dataclasses import dataclass

from swift.config.fields import setting
from swift.core.errors import UsageError
from swift.data.engine.document import Document
from swift.data.engine.operator import OPERATORS, MapOperator
from swift.data.engine.tally import Tally
from swift.data.operators.rules import check_shares, field_of, wrong


@OPERATORS.register("sample")
@dataclass
class Sample(MapOperator):
    """Keep a random share of the documents, the same for each or by a number that each one has.

    A document stays if a number in [0, 1) that is made of the seed, the operator's place and the document's id lies
    below `share`, or below `share` times the document's own weight. So a smaller share keeps a subset of a larger one,
    and neither shards nor processes matter. A document is never repeated: above 1, a weight means 1.
    """

    share: float = setting(1.0, help="share of the documents that stay, 0 to 1")
    weight: str | None = setting(
        None, help="field with each document's own share, such as `meta.language_score`; multiplied with `share`"
    )

    def check(self) -> None:
        check_shares(self, ("share",))
        if self.share == 1 and self.weight is None:
            raise UsageError("sample would keep every document", fix="set share below 1, or weight")
        if self.weight == "":
            raise wrong("weight", self.weight, "the name of a field")

    def run(self, batch: list[Document], tally: Tally) -> list[Document]:
        kept = []
        for document in batch:
            share = self.share
            if self.weight is not None:
                weight = field_of(document, self.weight)
                if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight >= 0:
                    tally.drop(document, "no_weight", f"{self.weight} is {weight!r}, not a number of at least 0")
                    continue
                share *= weight
            if self.context.uniform(document) < share:
                kept.append(document)
            else:
                tally.drop(document, "not_drawn")
        return kept
