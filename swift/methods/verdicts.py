"""Judges that look at answers one by one and take their time: a language model that gives marks, and marks for steps.

Pure but for the client that is handed in; the command decides what is judged where.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Literal

from swift.core.chat_client import ChatClient, NoAnswer

Aggregate = Literal["min", "mean", "last", "product"]

JUDGE_PROMPT = (
    "You mark an answer to a question. 10 is an answer that is right, complete and clear; 0 is one that is wrong or "
    'says nothing. Think briefly, then end with one line of JSON and nothing after it: {{"score": NUMBER}}\n\n'
    "[Conversation]\n{conversation}\n\n[Reference, if there is one]\n{reference}\n\n[Answer]\n{answer}"
)
_MOST = 10.0
_SCORE = re.compile(r'\{\s*"score"\s*:\s*(-?\d+(?:\.\d+)?)\s*\}\s*`*\s*$')
_TRIES = 3  # at an answer that holds no mark


def mark_of(text: str) -> float | None:
    """The mark that a judge's answer ends with, 0 to 1; None where there is none, or one that can't be."""
    found = _SCORE.search(text.strip())
    value = math.nan if found is None else float(found[1])
    return value / _MOST if 0 <= value <= _MOST else None


def judge_question(prompt: str, messages: Sequence[dict[str, Any]], reference: str | None, answer: str) -> str:
    """What a judge is asked.

    Args:
        prompt: a text with {conversation}, {reference} and {answer}; other braces doubled.
    """
    conversation = "\n".join(f"{each['role']}: {_text(each.get('content'))}" for each in messages)
    return prompt.format(conversation=conversation, reference=reference or "none", answer=answer)


def ask_marks(
    client: ChatClient, model: str, questions: Iterable[str], *, concurrency: int = 8
) -> Iterator[float | None]:
    """The mark of each question in order, 0 to 1; None where the judge gave none after several tries.

    Raises:
        SwiftError: the endpoint refuses.
    """

    def ask(question: str) -> float | None:
        for attempt in range(_TRIES):
            body = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0.0}
            if attempt:  # the same question would get the same answer
                body |= {"temperature": 1.0, "seed": attempt}
            try:
                mark = mark_of(client.text(body))
            except NoAnswer:
                return None
            if mark is not None:
                return mark
        return None

    waiting = iter(questions)
    with ThreadPoolExecutor(concurrency) as pool:
        while batch := list(islice(waiting, 4 * concurrency)):
            yield from pool.map(ask, batch)


def steps_of(answer: str, separator: str) -> list[str]:
    """The beginnings of an answer, each one step longer; the last one is all of it.

    Args:
        separator: regular expression between two steps.
    """
    ends = [found.start() for found in re.finditer(separator, answer) if answer[: found.start()].strip()]
    beginnings = [answer[:end] for end in ends]
    whole = answer.rstrip() if ends and not answer[ends[-1] :].strip() else answer
    if ends and not answer[ends[-1] :].strip():
        beginnings.pop()
    return [*beginnings, whole]


def together(marks: Sequence[float], how: Aggregate) -> float:
    """One number for the marks of all steps; NaN where a step has none."""
    if any(math.isnan(mark) for mark in marks):
        return math.nan
    if how == "min":
        return min(marks)
    if how == "mean":
        return sum(marks) / len(marks)
    return marks[-1] if how == "last" else math.prod(marks)


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
