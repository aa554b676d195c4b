"""What `swift data check` says of rows that are more than a conversation: pairs, labelled answers, labels.

Counts what single rows say (`UnitFacts`) and draws the conclusions: which answers are longer, whether both kinds of
answers are there in a proportion that KTO can use, how often each label occurs. Reads no rows itself.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import orjson

from swift.data.columns import Layout
from swift.data.preference_shapes import conversation_start
from swift.data.rows import Row

_SHOWN_LABELS = 20
_KTO_LOW, _KTO_HIGH = 1.0, 4 / 3  # Ethayarajh et al. 2024, KTO, section 4.2: weighted desirable : undesirable


@dataclass
class UnitFacts:
    """What one row says beyond its messages.

    Attributes:
        prompt: hash of what comes before the answer.
        answer: characters of the answer. rejected: of each rejected one. margins: as in the row.
        labels: of the row, or of its words or spans.
        positives, negatives: how many texts of each kind.
    """

    prompt: bytes
    answer: int
    rejected: list[int]
    margins: list[float]
    labels: list[Any]
    positives: int
    negatives: int


def unit_facts(row: Row) -> UnitFacts:
    """The facts of a row."""
    start = row.answer_at or conversation_start(row.messages)
    digest = hashlib.blake2b(orjson.dumps([row.messages[:start], row.tools], option=orjson.OPT_SORT_KEYS)).digest()[:16]
    labels = row.label if isinstance(row.label, list) else [] if row.label is None else [row.label]
    if row.spans is not None:
        labels = [name for _, _, name in row.spans]
    answers = [row.messages[start:], *row.rejected]
    sizes = [sum(len(message["content"]) for message in answer) for answer in answers]
    return UnitFacts(digest, sizes[0], sizes[1:], row.margins, labels, len(row.positives), len(row.negatives))


@dataclass
class UnitReport:
    """The counts of all rows of one layout.

    Attributes:
        pairs: rejected answers. longer: how often the chosen answer is longer. even: how often both are as long.
        margins: of all pairs. labels: label -> rows (or words, or spans).
        positives, negatives: texts. without_negatives: rows that have no negative.
    """

    layout: Layout
    rows: int = 0
    pairs: int = 0
    longer: int = 0
    even: int = 0
    margins: list[float] = field(default_factory=list)
    labels: Counter[Any] = field(default_factory=Counter)
    positives: int = 0
    negatives: int = 0
    without_negatives: int = 0
    _prompts: Counter[bytes] = field(default_factory=Counter)

    def add(self, facts: UnitFacts) -> None:
        """Count a row."""
        self.rows += 1
        self._prompts[facts.prompt] += 1
        self.pairs += len(facts.rejected)
        self.longer += sum(facts.answer > size for size in facts.rejected)
        self.even += sum(facts.answer == size for size in facts.rejected)
        self.margins += facts.margins
        self.labels.update(facts.labels)
        self.positives += facts.positives
        self.negatives += facts.negatives
        self.without_negatives += not facts.negatives

    @property
    def repeated_prompts(self) -> int:
        """Rows whose prompt an earlier row has too."""
        return self._prompts.total() - len(self._prompts)

    def kto_weights(self) -> tuple[float, float] | None:
        """(desirable_weight, undesirable_weight) that balance the rows; None where 1 and 1 do, or one kind is missing.

        KTO wants desirable_weight * desirable / (undesirable_weight * undesirable) in [1, 4/3]; the rarer kind is
        weighed up to the nearer end of that.
        """
        wanted, unwanted = self.labels[True], self.labels[False]
        if not wanted or not unwanted or _KTO_LOW <= wanted / unwanted <= _KTO_HIGH:
            return None
        if wanted < unwanted:
            return _up(_KTO_LOW * unwanted / wanted), 1.0
        return 1.0, _up(wanted / (_KTO_HIGH * unwanted))

    def summary(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        weights = self.kto_weights() if self.layout == "binary" else None
        return {
            "layout": self.layout,
            "rows": self.rows,
            "pairs": self.pairs,
            "chosen_longer": self.longer,
            "equally_long": self.even,
            "repeated_prompts": self.repeated_prompts,
            "margins": len(self.margins),
            "labels": {str(label): count for label, count in self.labels.most_common()},
            "kto_weights": list(weights) if weights else None,
            "positives": self.positives,
            "negatives": self.negatives,
        }

    def lines(self) -> list[str]:
        """The findings as text."""
        if not self.rows:
            return []
        lines = [f"read as {self.layout}"]
        if self.layout == "pairs":
            lines += self._pair_lines()
        if self.layout == "binary":
            lines += self._binary_lines()
        if self.layout in ("labelled", "tokens"):
            lines += self._label_lines()
        if self.layout in ("embedding", "rerank"):
            lines.append(
                f"texts: {self.positives:,} positive, {self.negatives:,} negative; "
                f"{self.without_negatives:,} rows have no negative"
            )
        if self.layout in ("pairs", "binary", "prompts") and self.repeated_prompts:
            lines.append(f"rows whose prompt an earlier row has too: {self.repeated_prompts:,}")
        return lines

    def _pair_lines(self) -> list[str]:
        share = (self.longer + self.even / 2) / max(1, self.pairs)
        lines = [
            f"pairs: {self.pairs:,}; the chosen answer is the longer one in {self.longer / max(1, self.pairs):.1%}"
        ]
        if self.pairs >= 20 and not 0.35 <= share <= 0.65:
            lines.append(
                f"warning: {'longer' if share > 0.5 else 'shorter'} answers are preferred, and a model may learn that "
                "rather than what makes them better (--ld_alpha, or simpo, lessens it)"
            )
        if self.margins:
            low, high = min(self.margins), max(self.margins)
            mean = sum(self.margins) / len(self.margins)
            lines.append(f"margins: {len(self.margins):,}, from {low:.4g} to {high:.4g}, mean {mean:.4g}")
            negative = sum(margin < 0 for margin in self.margins)
            if negative:
                lines.append(f"warning: {negative:,} margins are negative: the rejected answer would be the better one")
        return lines

    def _binary_lines(self) -> list[str]:
        wanted, unwanted = self.labels[True], self.labels[False]
        lines = [f"answers: {wanted:,} desirable, {unwanted:,} undesirable"]
        if not wanted or not unwanted:
            return [*lines, "warning: all labels are the same, so there is nothing to tell apart"]
        weights = self.kto_weights()
        if weights is None:
            return [*lines, "kto: desirable_weight and undesirable_weight 1 suit that proportion"]
        flag = f"--desirable_weight {weights[0]:g}" if weights[0] != 1 else f"--undesirable_weight {weights[1]:g}"
        return [
            *lines,
            f"kto: weighted, there should be 1 to 1.33 desirable answers for each undesirable one, and there are "
            f"{wanted / unwanted:.2f}: {flag}",
        ]

    def _label_lines(self) -> list[str]:
        total = max(1, self.labels.total())
        shown = self.labels.most_common(_SHOWN_LABELS)
        lines = [f"labels: {len(self.labels):,}"]
        lines += [f"  {label}: {count:,} ({count / total:.1%})" for label, count in shown]
        if len(self.labels) > len(shown):
            lines.append(f"  and {len(self.labels) - len(shown):,} more")
        if len(self.labels) == 1 and self.rows > 1:
            lines.append("warning: all labels are the same, so there is nothing to learn")
        return lines


def _up(weight: float) -> float:
    """Rounded up to two digits behind the point, so that the proportion isn't missed by rounding."""
    return -(-round(weight * 100, 6) // 1) / 100
