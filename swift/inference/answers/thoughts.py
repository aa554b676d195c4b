"""How a chat template encloses thoughts, found by letting it show some.

`<think>` and `</think>` are known by name: most templates take thoughts out of earlier answers by them and show none.
Other marks are taken from the rendering of an answer with a thought, in whichever field the template reads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from swift.core.errors import TemplateError
from swift.data.encoding.encode import ChatEncoder
from swift.data.encoding.probe import ANSWER, CLOSE, OPEN, QUESTION
from swift.data.rows import RowProblem
from swift.inference.answers.forms import added_to, last_mark

_THOUGHT = "Jxthought5"
_RAW = re.compile(r"""['"]type['"]\s*:""")


@dataclass(frozen=True)
class ThoughtForm:
    """What stands around thoughts.

    Attributes:
        opening, closing: before and after a thought.
        heading: what the model writes before the content that follows, or where there is no thought; isn't content.
    """

    opening: str = OPEN
    closing: str = CLOSE
    heading: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """All of them."""
        return (self.opening, self.closing, self.heading)


def find_thoughts(encoder: ChatEncoder) -> ThoughtForm | None:
    """How the encoder's template encloses thoughts; None when it knows none."""
    if not encoder.use_chat_template:
        return None
    usual = ThoughtForm() if CLOSE in (encoder.template or "") else None
    question = [{"role": "user", "content": QUESTION}]
    try:
        prompt = encoder.render_prompt(question)
    except (RowProblem, TemplateError):
        return usual
    plain = _after(encoder, prompt, {"content": ANSWER})
    for message in _thinking_messages():
        text = _after(encoder, prompt, message)
        if text is None or _THOUGHT not in text or ANSWER not in text[text.index(_THOUGHT) :]:
            continue
        before, _, rest = text.partition(_THOUGHT)
        between = rest[: rest.index(ANSWER)]
        if _RAW.search(before + between):  # a list written out as it is
            continue
        return _form(prompt, before, between, (plain or "").partition(ANSWER)[0]) or usual
    return usual


def _thinking_messages() -> list[dict[str, Any]]:
    """An answer with a thought, in the ways that templates read."""
    parts = [{"type": "thinking", "thinking": _THOUGHT}, {"type": "text", "text": ANSWER}]
    fields = [{key: _THOUGHT, "content": ANSWER} for key in ("reasoning_content", "reasoning", "thinking", "thought")]
    return [*fields, {"content": parts}]


def _after(encoder: ChatEncoder, prompt: str, message: dict[str, Any]) -> str | None:
    """What an answer adds to the prompt; None where the template refuses it."""
    question = [{"role": "user", "content": QUESTION}]
    try:
        text = encoder.render_prompt([*question, {"role": "assistant", **message}])
    except (RowProblem, TemplateError):
        return None
    return added_to(prompt, text)


def _form(prompt: str, before: str, between: str, heading: str) -> ThoughtForm | None:
    """From what stands before the thought, between thought and answer, and before an answer without one."""
    if CLOSE in between:
        return None
    opening = before
    if not opening.strip():  # the prompt opens the thought itself
        opening, heading = last_mark(prompt), ""
    if OPEN in heading or opening.strip() in heading:  # an empty thought before the answer
        heading = ""
    heading = heading.strip()
    if heading and not between.rstrip().endswith(heading):
        return None
    closing = between.rstrip()[: len(between.rstrip()) - len(heading)].strip()
    return ThoughtForm(opening.strip(), closing, heading) if opening.strip() and closing else None
