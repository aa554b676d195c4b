"""From drawn answers and their rewards to a data set: which are kept, as what, and how good the model was.

Pure: a prompt with its scored answers in, rows out. Knows nothing of models and files.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from swift.config.sample import OutputFormat, SampleRunConfig


@dataclass(frozen=True)
class Drawn:
    """The answers to one prompt.

    Attributes:
        messages: the conversation up to the answer.
        answers: texts.
        rewards: of each.
        refused: which are never right, whatever their reward.
    """

    messages: list[dict[str, Any]]
    answers: list[str]
    rewards: list[float]
    refused: frozenset[int] = frozenset()

    def is_right(self, k: int, threshold: float) -> bool:
        """Whether an answer is worth at least the threshold, and isn't refused."""
        return self.rewards[k] >= threshold and k not in self.refused

    def right(self, threshold: float) -> int:
        """How many are right."""
        return sum(self.is_right(k, threshold) for k in range(len(self.answers)))


def rows_of(drawn: Drawn, kind: OutputFormat, config: SampleRunConfig) -> tuple[list[dict[str, Any]], str | None]:
    """The rows that a prompt gives, best first; and why it gives none."""
    right, count = drawn.right(config.reward_threshold), len(drawn.answers)
    if config.easy_query_threshold is not None and right > config.easy_query_threshold * count:
        return [], "too easy"
    # equal rewards keep the order in which they were drawn
    order = sorted(range(count), key=lambda k: -drawn.rewards[k])
    if kind == "all":
        answers = [{"response": drawn.answers[k], "reward": drawn.rewards[k]} for k in order]
        return [{"messages": drawn.messages, "answers": answers}], None
    if kind == "kto":
        return [_row(drawn, k, label=drawn.is_right(k, config.reward_threshold)) for k in range(count)], None
    if kind == "dpo":
        best, worst = order[0], order[-1]
        if drawn.rewards[best] == drawn.rewards[worst] or drawn.answers[best] == drawn.answers[worst]:
            return [], "all alike"
        return [{**_row(drawn, best), "rejected_response": drawn.answers[worst]}], None
    kept: list[int] = []
    for k in order:
        known = {drawn.answers[other] for other in kept}
        if drawn.is_right(k, config.reward_threshold) and drawn.answers[k] not in known and drawn.answers[k].strip():
            kept.append(k)
    rows = [_row(drawn, k) for k in kept[: config.n_best_to_keep]]
    return rows, None if rows else "none right"


def _row(drawn: Drawn, k: int, **more: Any) -> dict[str, Any]:
    messages = [*drawn.messages, {"role": "assistant", "content": drawn.answers[k]}]
    return {"messages": messages, **more}


def pass_at(k: int, drawn: int, right: int) -> float:
    """The chance that at least one of k answers is right, estimated without bias from `drawn` of which `right` are.

    Source: Chen et al. 2021 (https://arxiv.org/abs/2107.03374), eq. 1.
    """
    if k > drawn:
        raise ValueError(f"pass@{k} of {drawn} answers")
    return 1.0 - math.comb(drawn - right, k) / math.comb(drawn, k)


@dataclass
class Summary:
    """How good the answers were.

    Attributes:
        prompts, failed: answered ones, and those that had no answer.
        unjudged: answers without a verdict, which count nowhere.
        rewards: sum of all, and their number.
        passes: k -> sum of pass@k over prompts.
        dropped: format and reason -> prompts that gave no row.
        kept: format -> rows.
    """

    prompts: int = 0
    failed: int = 0
    unjudged: int = 0
    reward_sum: float = 0.0
    num_answers: int = 0
    passes: dict[int, float] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)

    def add(self, drawn: Drawn, threshold: float) -> None:
        """Count one prompt."""
        count = len(drawn.answers)
        self.prompts += 1
        self.num_answers += count
        self.reward_sum += sum(drawn.rewards)
        for k in powers(count):
            self.passes[k] = self.passes.get(k, 0.0) + pass_at(k, count, drawn.right(threshold))

    def numbers(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "prompts": self.prompts,
            "prompts_without_answers": self.failed,
            "answers": self.num_answers,
            "answers_without_verdict": self.unjudged,
            "mean_reward": self.reward_sum / self.num_answers if self.num_answers else None,
            **{f"pass@{k}": total / self.prompts for k, total in sorted(self.passes.items())},
            "rows": dict(self.kept),
            "prompts_without_rows": dict(self.dropped),
        }


def powers(count: int) -> Sequence[int]:
    """1, 2, 4, … up to `count`, and `count` itself."""
    found = [1 << power for power in range(count.bit_length()) if 1 << power <= count]
    return found if found[-1] == count else [*found, count]
