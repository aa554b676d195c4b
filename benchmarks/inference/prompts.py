"""What the inference benchmark asks: 32 different questions of about 45 tokens each, the same every time."""

from __future__ import annotations

from typing import Any

_TASKS = (
    "Explain to a curious child, with an example from everyday life, {}.",
    "Write a short and friendly letter to a neighbour about {}.",
    "List the most common mistakes that people make about {}.",
    "Tell me the history of {}, beginning with the oldest thing known.",
)
_SUBJECTS = (
    "how bread rises",
    "why the tides come twice a day",
    "keeping bees on a flat roof",
    "learning to play the violin late",
    "repairing an old bicycle",
    "how maps are drawn",
    "growing tomatoes in a cold country",
    "what a library is for",
)


def texts() -> list[str]:
    """The questions."""
    return [task.format(subject) for subject in _SUBJECTS for task in _TASKS]


def token_ids(tokenizer: Any) -> list[list[int]]:
    """The questions as the chat template renders them."""
    chats = [[{"role": "user", "content": text}] for text in texts()]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
