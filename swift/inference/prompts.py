"""Prompts exactly as training wrote them, for conversations and for plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swift.data.encode import ChatEncoder


def conversation_prompt(
    encoder: ChatEncoder,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> list[int]:
    """Token ids that the model continues with its answer to `messages`.

    Raises:
        RowProblem: the template refuses the conversation.
    """
    if not encoder.use_chat_template:
        return text_prompt(encoder, encoder.render_prompt(messages, tools, template_kwargs))
    return encoder.encode_prompt(messages, tools, template_kwargs)


def text_prompt(encoder: ChatEncoder, text: str) -> list[int]:
    """Token ids of a plain text to be continued: with what the tokenizer puts before it, without what it puts after."""
    tokenizer = encoder.tokenizer
    ids = list(tokenizer(text, add_special_tokens=True).input_ids)
    bare = list(tokenizer(text, add_special_tokens=False).input_ids)
    return _without_ending(ids, bare)


def _without_ending(ids: Sequence[int], bare: Sequence[int]) -> list[int]:
    """`ids` up to the end of `bare`, which is in them."""
    for start in range(len(ids) - len(bare) + 1):
        if list(ids[start : start + len(bare)]) == list(bare):
            return list(ids[: start + len(bare)])
    return list(ids)
