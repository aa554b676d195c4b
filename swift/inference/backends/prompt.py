"""Whether a model can answer a prompt at all; every backend asks here, so that a refusal has the same words."""

from __future__ import annotations

from collections.abc import Sequence

from swift.core.errors import DataError
from swift.inference.backends.base import ModelInfo


def check_prompt(prompt: Sequence[int], info: ModelInfo) -> None:
    """Refuse a prompt that can't be answered.

    Raises:
        DataError: it is empty, leaves no room for an answer, or has ids that the model doesn't know.
    """
    if not prompt:
        raise DataError("the prompt is empty", fix="give at least one token of text")
    if info.context_length is not None and len(prompt) >= info.context_length:
        raise DataError(
            f"the prompt has {len(prompt)} tokens; the model's context is {info.context_length} for prompt and answer",
            fix="shorten it, or stretch the context with --rope_scaling",
        )
    largest, smallest = max(prompt), min(prompt)
    if largest >= info.vocab_size or smallest < 0:
        raise DataError(
            f"the prompt has the token id {smallest if smallest < 0 else largest}, "
            f"but the model has {info.vocab_size} tokens",
            fix="use the tokenizer that belongs to the model",
        )
