"""What a model with a head of its own says of rows: labels, entities, vectors, scores of documents, rewards.

Rows are encoded as in training, and the model's states are read where training read them, so the numbers are those of
an evaluation. One forward pass answers a batch; nothing is generated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from peft import PeftModel

from swift.core.errors import SwiftError
from swift.data.encoding.encode import Encoded
from swift.data.loading.batch import Batch, Layout, Tokens, make_batch
from swift.data.rows import Row, RowProblem, RowRef
from swift.inference.inputs import Inputs
from swift.inference.score_words import Answerer, Asked
from swift.models.head import OutputHead, find_decoder, find_head
from swift.models.prepare import first_position
from swift.objectives.predictions import Prediction, Report, predictions

Probe = Callable[[torch.Tensor, OutputHead, Batch], torch.Tensor]
WINDOW_BATCHES = 4  # rows are sorted by length among so many batches of them


@dataclass(frozen=True)
class ScoredRow:
    """A row to judge, and what is asked about it; or what is wrong with it."""

    index: int
    ref: RowRef
    asked: Asked | None = None
    problem: tuple[str, str] | None = None

    def result(self) -> dict[str, Any]:
        """The fields of its result line that the row itself gives."""
        fields: dict[str, Any] = {"index": self.index, "source": str(self.ref)}
        if self.asked is not None:
            row = self.asked.row
            fields |= {"words": row.words} if row.words is not None else {"messages": row.messages}
            if row.extra:
                fields["extra"] = row.extra
        return fields


@dataclass
class Scorer:
    """Judges rows with one model.

    Args:
        model: with the head of the task, or an adapter around it.
        answerer: makes units of rows, and result lines of what the model says.
        probe: what of each state is wanted.
        targets: whose state (`Layout.targets`).
        max_batch_size: rows judged together.
        pad_token_id: what fills up rows.

    Attributes:
        judged: predictions of the rows that came with labels, for metrics.
        num_rows: rows that were read.
    """

    model: Any
    answerer: Answerer
    probe: Probe
    targets: Literal["next", "last", "each"]
    max_batch_size: int = 8
    pad_token_id: int = 0
    judged: list[Prediction] = field(default_factory=list)
    num_rows: int = 0

    def __post_init__(self) -> None:
        inner: Any = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        self._decoder, self._head = find_decoder(inner), find_head(inner)
        self._first = first_position(self._decoder)
        self._device = next(self.model.parameters()).device
        self._layout = Layout(padding_free=False, units=True, targets=self.targets, pad_token_id=self.pad_token_id)

    def read(self, inputs: Inputs, indices: range) -> Iterator[ScoredRow]:
        """The rows at `indices`, encoded."""
        for index, (ref, row) in enumerate(inputs.rows()):
            if index in indices:
                yield self.asked(index, ref, row)

    def asked(self, index: int, ref: RowRef, row: Row | RowProblem) -> ScoredRow:
        """A row with its units, or its problem."""
        self.num_rows += 1
        try:
            if isinstance(row, RowProblem):
                raise row
            return ScoredRow(index, ref, self.answerer.ask(row))
        except RowProblem as problem:
            words = " ".join(filter(None, [problem.message, problem.fix and f"({problem.fix})"]))
            return ScoredRow(index, ref, problem=(problem.reason, words))
        except SwiftError as error:
            return ScoredRow(index, ref, problem=("not_encodable", error.message))

    def answer(self, rows: Iterable[ScoredRow]) -> Iterator[tuple[int, dict[str, Any]]]:
        """(place, result) of every row, as they come."""
        numbered = enumerate(rows)
        while window := list(itertools.islice(numbered, WINDOW_BATCHES * self.max_batch_size)):
            yield from self._answer_window(window)

    def _answer_window(self, window: list[tuple[int, ScoredRow]]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Rows of like length together."""
        for number, row in window:
            if row.problem is not None:
                reason, message = row.problem
                yield number, {**row.result(), "status": "error", "reason": reason, "error": message}
        good = [(number, row, row.asked) for number, row in window if row.asked is not None]
        good.sort(key=lambda each: max(len(unit.input_ids) for unit in each[2].units))
        for start in range(0, len(good), self.max_batch_size):
            together = good[start : start + self.max_batch_size]
            said = iter(self.predict([unit for _, _, asked in together for unit in asked.units]))
            for number, row, asked in together:
                found = [next(said) for _ in asked.units]
                self.judged += found if asked.labelled else []
                yield number, {**row.result(), "status": "ok", **self.answerer.answer(asked, found)}

    @torch.no_grad()
    def predict(self, units: Sequence[Encoded]) -> list[Prediction]:
        """What the model says of units; a batch that doesn't fit into memory is halved."""
        examples = [Tokens(unit.input_ids, unit.loss_weights, unit.notes) for unit in units if unit.notes is not None]
        batch = make_batch(examples, [RowRef("", 0)] * len(examples), self._layout).to(self._device)
        try:
            hidden = self._decoder(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids + self._first,
                attention_mask=batch.attention_mask,
                use_cache=False,
            ).last_hidden_state
        except torch.OutOfMemoryError:
            if len(units) == 1:
                raise
            middle = len(units) // 2
            return [*self.predict(units[:middle]), *self.predict(units[middle:])]
        outputs = self.probe(hidden.flatten(0, 1)[batch.target_index], self._head, batch)
        return predictions(batch, outputs, means=self.answerer.means)

    def report(self) -> Report | None:
        """Metrics of the rows that came with labels; None where there were none."""
        return self.answerer.report(self.judged) if self.judged else None
