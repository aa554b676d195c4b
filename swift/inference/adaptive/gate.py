"""What quality a running backend has: the loss of given answers, from the log-probabilities that it serves.

Rows become tokens and weights as they do for training, so the loss is that of an evaluation during training.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass

from swift.config.data import RowsConfig
from swift.core.errors import SwiftError, UsageError
from swift.data.encoding.encode import ChatEncoder
from swift.data.rows import RowProblem
from swift.data.selection import iter_rows
from swift.inference.backends.base import Backend
from swift.inference.requests import Request, SamplingParams, Update

_AT_A_TIME = 64
_WHERE = "--adaptive_eval_file"


@dataclass(frozen=True)
class GateText:
    """One text that the loss is taken of.

    Attributes:
        source: file and line.
        tokens: prompt and answer.
        weights: of each token; 0 for the prompt.
    """

    source: str
    tokens: list[int]
    weights: list[float]


def gate_texts(file: str, encoder: ChatEncoder) -> list[GateText]:
    """The rows of an evaluation file.

    Args:
        file: as `swift infer` takes files; `FILE#100` for a sample of 100 rows.

    Raises:
        UsageError: a row has no answer or can't be encoded, or there are none. Nothing is left out silently.
    """
    texts: list[GateText] = []
    for ref, row in iter_rows([file], RowsConfig(), need_answer=True):
        try:
            if isinstance(row, RowProblem):
                raise row
            examples = encoder.encode(row)
        except RowProblem as problem:
            raise UsageError(f"{ref}: {problem.message}", where=_WHERE, fix=problem.fix) from problem
        except SwiftError as error:
            raise UsageError(f"{ref}: {error.message}", where=_WHERE, fix=error.fix) from error
        found = [
            GateText(str(ref), example.input_ids.tolist(), example.loss_weights.tolist())
            for example in examples
            if example.loss_weights.any()
        ]
        if not found:
            raise UsageError(f"{ref}: the row has no answer", where=_WHERE, fix="add one, or leave the row out")
        texts += found
    if not texts:
        raise UsageError(f"{file} has no rows", where=_WHERE)
    return texts


def mean_loss(backend: Backend, texts: Sequence[GateText]) -> float:
    """Mean negative log-probability of the answers' tokens, in nats.

    Args:
        backend: a started one that tells `prompt_logprobs`.

    Raises:
        SwiftError: a text can't be computed, because it is longer than the context, say.
    """
    updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
    logprobs: dict[int, list[float]] = {}
    waiting, running = list(range(len(texts)))[::-1], 0
    params = SamplingParams(max_new_tokens=1, prompt_logprobs=0)
    while waiting or running:
        while waiting and running < _AT_A_TIME:
            number = waiting.pop()
            try:
                backend.submit(Request(f"gate-{number}", texts[number].tokens, params), updates.put)
            except SwiftError as error:
                raise UsageError(f"{texts[number].source}: {error.message}", where=_WHERE, fix=error.fix) from error
            running += 1
        update = updates.get()
        if update.error is not None:
            raise update.error
        if update.prompt_logprobs is not None:
            number = int(update.request_id.removeprefix("gate-"))
            logprobs[number] = [0.0 if entry is None else entry.logprob for entry in update.prompt_logprobs]
        running -= update.finish_reason is not None
    total = weight = 0.0
    for number, text in enumerate(texts):
        pairs = list(zip(text.weights, logprobs[number], strict=True))
        total -= sum(share * logprob for share, logprob in pairs)
        weight += sum(text.weights)
    return total / weight
