"""A filter on a value that a row has or that an earlier operator found out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from swift.config.fields import setting
from swift.core.errors import UsageError
from swift.data.engine.document import Document
from swift.data.engine.operator import OPERATORS, MapOperator
from swift.data.engine.tally import Tally
from swift.data.operators.rules import check_choice, check_range, field_of, wrong


@OPERATORS.register("filter")
@dataclass
class Filter(MapOperator):
    """Drop documents by the value of a field: out of bounds, not among the wanted, or among the unwanted.

    Nothing is evaluated: a value is only compared. Text and numbers are never equal to each other (`"1"` isn't 1).
    """

    field: str = setting(help="dotted name of the field: `source`, `meta.language_score`")
    min: float | None = setting(None, help="least number")
    max: float | None = setting(None, help="largest number")
    any_of: list[Any] = setting(factory=list, help="the values that stay")
    none_of: list[Any] = setting(factory=list, help="the values that go")
    missing: Literal["drop", "keep"] = setting(
        "drop", help="what happens where the field is missing or of another kind: drop or keep"
    )

    def check(self) -> None:
        if not self.field:
            raise wrong("field", self.field, "the name of a field")
        if self.min is None and self.max is None and not self.any_of and not self.none_of:
            raise UsageError("filter has no condition", fix="set min, max, any_of or none_of")
        check_range(self, "min", "max")
        check_choice(self, "missing", ("drop", "keep"))

    def run(self, batch: list[Document], tally: Tally) -> list[Document]:
        kept = []
        for document in batch:
            value = field_of(document, self.field)
            reason = self._reason(value)
            if reason is None or (reason == "missing" and self.missing == "keep"):
                kept.append(document)
            else:
                tally.drop(document, reason, f"{self.field} is {value!r}"[:200])
        return kept

    def _reason(self, value: Any) -> str | None:
        if value is None:
            return "missing"
        if self.min is not None or self.max is not None:
            if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
                return "missing"
            if self.min is not None and value < self.min:
                return "below_min"
            if self.max is not None and value > self.max:
                return "above_max"
        if self.any_of and not _is_in(value, self.any_of):
            return "not_wanted"
        return "unwanted" if _is_in(value, self.none_of) else None


def _is_in(value: Any, choices: list[Any]) -> bool:
    return any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in choices)
