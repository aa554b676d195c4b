"""What may be in the answers of one model, by its chat template and what a request asks for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from swift.core.errors import UsageError
from swift.data.encoding.encode import ChatEncoder
from swift.data.encoding.probe import CLOSE, OPEN
from swift.inference.answers.forms import CallForm, find_form, probe_answer
from swift.inference.answers.reader import AnswerForm
from swift.inference.requests import Structure

_TAIL = 16  # last tokens of a prompt, enough to see whether it opens a thought


class AnswerForms:
    """The forms of one template.

    Args:
        encoder: makes the prompts.
    """

    def __init__(self, encoder: ChatEncoder) -> None:
        self._encoder = encoder

    @cached_property
    def calls(self) -> CallForm | None:
        """How the template writes tool calls, if it does in a way that can be read back."""
        form = find_form(self._encoder)
        if form is None:
            return None
        text, wanted = probe_answer(self._encoder, 1)
        read = AnswerForm(calls=form).parse(text).calls
        return form if [(name, json.loads(arguments)) for name, arguments in read] == wanted else None

    @property
    def thinks(self) -> bool:
        """Whether the template knows thoughts."""
        return CLOSE in (self._encoder.template or "")

    def form(self, prompt: Sequence[int], tools: Sequence[dict[str, Any]] | None) -> AnswerForm:
        """What may be in the answer to a prompt.

        Args:
            tools: that the prompt shows.

        Raises:
            UsageError: there are tools, and how the model calls them isn't known.
        """
        tail = self._encoder.tokenizer.decode(list(prompt[-_TAIL:]), skip_special_tokens=False).rstrip()
        return AnswerForm(
            calls=self._required() if tools else None,
            thinks=self.thinks,
            begins_in_thought=self.thinks and tail.endswith(OPEN),
            schemas={tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools or ()},
        )

    def skips_special_tokens(self, tools: Sequence[dict[str, Any]] | None) -> bool:
        """Whether the marks of the form are plain text, so that special tokens needn't show."""
        marks = [OPEN, CLOSE] if self.thinks else []
        if tools and self.calls is not None:
            marks += self.calls.marks
        special = self._encoder.tokenizer.all_special_tokens
        return not any(token in mark for mark in marks for token in special)

    def forced(self, tools: Sequence[dict[str, Any]], *, parallel: bool) -> Structure:
        """The form of an answer that calls at least one of the tools, and says nothing else.

        Raises:
            UsageError: the model's way to call tools isn't known, or can't be forced.
        """
        form = self._required()
        if not self.skips_special_tokens(tools):
            raise _unforced("its marks are special tokens")
        calls = [_call(form, tool["function"]) for tool in tools]
        one: dict[str, Any] = {"type": "or", "elements": calls} if len(calls) > 1 else calls[0]
        elements = [_text(form.section[0]), one]
        if parallel and form.kind != "list" and (form.opening.strip() or form.section[0].strip()):
            elements.append({"type": "star", "content": _sequence([_text("\n"), one])})
        elements.append(_text(form.section[1]))
        return Structure("tag", json.dumps({"type": "structural_tag", "format": _sequence(elements)}))

    def _required(self) -> CallForm:
        if self.calls is None:
            raise UsageError(
                "how this model calls tools isn't known: its chat template writes no calls, or none that can be read",
                where="tools",
                fix="name a template that does with --template FILE.jinja",
            )
        return self.calls


def _call(form: CallForm, function: dict[str, Any]) -> dict[str, Any]:
    """One call of one tool."""
    schema = function.get("parameters") or {"type": "object"}
    if form.kind == "tagged":
        raise _unforced("it writes arguments key by key")
    if form.kind == "named":
        head = f"{form.opening}{function['name']}{form.middle}"
        return _sequence([_text(head), {"type": "json_schema", "json_schema": schema}, _text(form.closing)])
    if form.text_arguments:
        raise _unforced("it writes arguments as JSON inside of JSON")
    name, arguments = form.keys
    whole: dict[str, Any] = {
        "type": "object",
        "properties": {name: {"const": function["name"]}, arguments: schema},
        "required": [name, arguments],
        "additionalProperties": False,
    }
    if form.kind == "list":
        whole = {"type": "array", "items": whole, "minItems": 1, "maxItems": 1}
    return _sequence([_text(form.opening), {"type": "json_schema", "json_schema": whole}, _text(form.closing)])


def _text(value: str) -> dict[str, Any] | None:
    return {"type": "const_string", "value": value} if value else None


def _sequence(elements: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    return {"type": "sequence", "elements": [element for element in elements if element is not None]}


def _unforced(why: str) -> UsageError:
    return UsageError(
        f"this model can't be made to call a tool: {why}", where="tool_choice", fix="leave tool_choice at auto"
    )
