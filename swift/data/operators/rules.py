"""What filters share: a rule is a number per document and the bounds it must keep.

Knows nothing of any particular rule. Every value goes into the tally's histogram of its metric, also of documents that
another rule drops; a document is dropped for the first rule that it breaks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from swift.core.errors import UsageError
from swift.data.engine.document import META_KEY, Document
from swift.data.engine.tally import Tally


@dataclass(frozen=True)
class Rule:
    """Bounds of a metric.

    Attributes:
        name: of the metric, and the reason under which a document is dropped.
        values: float64 [documents]; NaN where the rule doesn't apply.
        low, high: the bounds; None for none.
        strict: whether a value that equals a bound breaks the rule.
        share: whether values lie between 0 and 1.
    """

    name: str
    values: np.ndarray
    low: float | None = None
    high: float | None = None
    strict: bool = False
    share: bool = True

    def broken(self) -> np.ndarray:
        """bool [documents]."""
        broken = np.zeros(len(self.values), bool)
        if self.low is not None:
            broken |= self.values <= self.low if self.strict else self.values < self.low
        if self.high is not None:
            broken |= self.values >= self.high if self.strict else self.values > self.high
        return broken

    def note(self, place: int) -> str:
        """What is wrong with a document, with the number and the bound."""
        value = self.values[place]
        low = self.low is not None and (value < self.low or (self.strict and value == self.low))
        return f"{self.name} {value:.4g}, allowed: {'above' if low else 'up to'} {self.low if low else self.high:g}"


def apply_rules(batch: Sequence[Document], rules: Iterable[Rule], tally: Tally) -> list[Document]:
    """The documents that keep every rule; the others are dropped for the first rule they break."""
    rules = [rule for rule in rules if rule.low is not None or rule.high is not None]
    first: list[Rule | None] = [None] * len(batch)
    for rule in rules:
        tally.observe_all(rule.name, rule.values[~np.isnan(rule.values)], share=rule.share)
        for place in np.flatnonzero(rule.broken()).tolist():
            if first[place] is None:
                first[place] = rule
    kept = []
    for place, (document, broken) in enumerate(zip(batch, first)):
        if broken is None:
            kept.append(document)
        else:
            tally.drop(document, broken.name, broken.note(place))
    return kept


def wrong(setting: str, value: Any, allowed: str) -> UsageError:
    """The error for a setting that can't be meant."""
    return UsageError(f"{setting} is {value!r}", fix=f"{setting}: {allowed}")


def check_range(operator: Any, low: str, high: str) -> None:
    """Refuse a minimum above the maximum.

    Raises:
        UsageError: naming both settings.
    """
    least, most = getattr(operator, low), getattr(operator, high)
    if least is not None and most is not None and least > most:
        raise wrong(low, least, f"at most {high}, which is {most:g}")


def check_shares(operator: Any, names: Iterable[str]) -> None:
    """Refuse shares outside 0 ... 1.

    Raises:
        UsageError: naming the setting.
    """
    for name in names:
        value = getattr(operator, name)
        if value is not None and not 0 <= value <= 1:
            raise wrong(name, value, "a share between 0 and 1, or null for no such rule")


def check_choice(operator: Any, name: str, choices: Sequence[str]) -> None:
    """Refuse a value that isn't among the choices.

    Raises:
        UsageError: naming the setting.
    """
    if getattr(operator, name) not in choices:
        raise wrong(name, getattr(operator, name), "one of " + ", ".join(choices))


def field_of(document: Document, path: str) -> Any:
    """A value of a row by its dotted name, or None: `url`, `meta.language_score`, `source.name`.

    What operators found out is under `meta`, before what the row itself has there.
    """
    first, _, rest = path.partition(".")
    if first == META_KEY and rest:
        head = rest.split(".")[0]
        if head in document.meta:
            return _walk(document.meta, rest)
    return _walk(document.record, path)


def _walk(value: Any, path: str) -> Any:
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value
