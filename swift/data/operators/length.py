"""Bounds on the length of documents, in characters, words and lines."""

from __future__ import annotations

from dataclasses import dataclass

from swift.config.fields import setting
from swift.core.errors import UsageError
from swift.data.engine.document import Document
from swift.data.engine.operator import OPERATORS, MapOperator
from swift.data.engine.tally import Tally
from swift.data.operators.rules import Rule, apply_rules, check_range, wrong
from swift.data.operators.text_stats import analyse


@OPERATORS.register("length")
@dataclass
class Length(MapOperator):
    """Drop documents that are too short or too long.

    Of a conversation the joined texts count. Where a script is written without spaces each letter is a word; lines of
    white space don't count.
    """

    min_characters: int | None = setting(None, help="fewest characters (code points)")
    max_characters: int | None = setting(None, help="most characters")
    min_words: int | None = setting(None, help="fewest words")
    max_words: int | None = setting(None, help="most words")
    min_lines: int | None = setting(None, help="fewest lines that aren't blank")
    max_lines: int | None = setting(None, help="most lines that aren't blank")

    def check(self) -> None:
        bounds = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if all(bound is None for bound in bounds.values()):
            raise UsageError("length has no bound", fix="set one of " + ", ".join(bounds))
        for name, bound in bounds.items():
            if bound is not None and bound < 0:
                raise wrong(name, bound, "at least 0")
        for unit in ("characters", "words", "lines"):
            check_range(self, f"min_{unit}", f"max_{unit}")

    def run(self, batch: list[Document], tally: Tally) -> list[Document]:
        stats = analyse([document.text for document in batch])
        rules = [
            Rule(
                unit, stats[unit].astype(float), getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}"), share=False
            )
            for unit in ("characters", "words", "lines")
        ]
        return apply_rules(batch, rules, tally)
