"""Prompts computed ahead of the first request, so that requests that begin alike find them in the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator

from swift.config.data import RowsConfig
from swift.core.errors import SwiftError, UsageError
from swift.core.logging import get_logger
from swift.inference.engine import Engine
from swift.inference.inputs import Inputs
from swift.inference.requests import SamplingParams

log = get_logger("inference")


def warm_up(engine: Engine, file: str) -> None:
    """Compute the prompts of a file's rows.

    Args:
        engine: with a prefix cache.
        file: rows as `swift infer` reads them.

    Raises:
        SwiftError: there is no such file, or a row has no prompt that can be computed.
    """
    inputs = Inputs([file], RowsConfig(), 0)

    def asked() -> Iterator[tuple[int, list[int], SamplingParams]]:
        for row in inputs.read(engine.encoder, range(inputs.num_rows)):
            if row.problem is not None:
                raise UsageError(f"{row.ref}: {row.problem[1]}", where="--warmup_file", fix="correct or remove the row")
            yield row.index, row.prompt or [], SamplingParams(max_new_tokens=1)

    tokens = 0
    for index, answer in engine.answer(asked()):
        if isinstance(answer, SwiftError):
            raise UsageError(f"row {index + 1} of {file}: {answer.message}", where="--warmup_file") from answer
        tokens += answer.num_prompt_tokens
    log.info("%d prompts of %d tokens were computed ahead", inputs.num_rows, tokens)
