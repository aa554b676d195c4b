"""What may be in the answers of one model, by its chat template and what a request asks for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from swift.core.errors import UsageError
from swift.data.encoding.encode import ChatEncoder
from swift.inference.answers.forms import PROBES, Call, CallForm, find_form, probe_calls, shown_instead, written
from swift.inference.answers.reader import AnswerForm
from swift.inference.answers.thoughts import ThoughtForm, find_thoughts
from swift.inference.choosing.structured import MAX_SPACES
from swift.inference.choosing.vetting import vet_schema
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
        return form if form is not None and self._reads_back(form) else None

    @cached_property
    def thoughts(self) -> ThoughtForm | None:
        """How the template writes thoughts, if it knows any."""
        return find_thoughts(self._encoder)

    def _reads_back(self, form: CallForm) -> bool:
        """Whether the template's own renderings are read as what they were made of. What it can't show at all (a
        second call, an object among the values) isn't asked for."""
        reader = AnswerForm(calls=form, schemas={probe["function"]["name"]: _parameters(probe) for probe in PROBES})
        variants: list[list[Call]] = [probe_calls(1), [(name, {}) for name, _ in probe_calls(1)]]
        variants += [probe_calls(count, hard=True, nested=nested) for count in (1, 2) for nested in (False, True)]
        read = 0
        for calls in variants:
            text = written(self._encoder, calls)
            if text is None:
                continue
            read += 1
            found = reader.parse(text)
            if found.content.strip() or [(name, json.loads(given)) for name, given in found.calls] != calls:
                return False
        return read > 0

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
            thoughts=self.thoughts,
            begins_in_thought=self.thoughts is not None and tail.endswith(self.thoughts.opening.strip()),
            schemas={tool["function"]["name"]: _parameters(tool) for tool in tools or ()},
            ignored=self._ignored,
        )

    def skips_special_tokens(self, tools: Sequence[dict[str, Any]] | None) -> bool:
        """Whether the marks of the form are plain text, so that special tokens needn't show."""
        marks = [*self.thoughts.marks] if self.thoughts is not None else []
        if tools and self.calls is not None:
            marks += self.calls.marks
        special = self._encoder.tokenizer.all_special_tokens
        return not any(token in mark for mark in marks for token in special)

    def forced(self, tools: Sequence[dict[str, Any]], *, parallel: bool, begins_in_thought: bool = False) -> Structure:
        """The form of an answer that calls at least one of the tools, and says nothing else.

        Args:
            begins_in_thought: the prompt has opened a thought, which comes first.

        Raises:
            UsageError: the model's way to call tools isn't known, or can't be forced.
        """
        form = self._required()
        if not self.skips_special_tokens(tools):
            raise _unforced("its marks are special tokens")
        if any(character < " " and character not in "\r\n" for mark in form.marks for character in mark):
            raise _unforced("there are control characters in its marks")
        calls = [_call(form, tool["function"]) for tool in tools]
        one: dict[str, Any] = {"type": "or", "elements": calls} if len(calls) > 1 else calls[0]
        elements = [self._rest_of_thought() if begins_in_thought else None, _text(form.section[0]), one]
        if parallel and form.kind != "list" and (form.opening.strip() or form.section[0].strip()):
            elements.append({"type": "star", "content": _sequence([_text("\n"), one])})
        elements.append(_text(form.section[1]))
        return Structure("tag", json.dumps({"type": "structural_tag", "format": _sequence(elements)}))

    def _rest_of_thought(self) -> dict[str, Any]:
        """Any text up to the mark that ends thoughts, with the line breaks that follow it."""
        assert self.thoughts is not None
        ends = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": self.thoughts.closing.strip()}
        return _sequence([ends, {"type": "regex", "pattern": "\\n{0,2}"}, _text(self.thoughts.heading)])

    @cached_property
    def _ignored(self) -> tuple[str, ...]:
        """Special tokens that the template knows: Llama 3 writes one before the JSON of some calls."""
        template = self._encoder.template or ""
        return tuple(token for token in self._encoder.tokenizer.all_special_tokens if token in template)

    def _required(self) -> CallForm:
        if self.calls is None:
            raise UsageError(
                "how this model calls tools isn't known: its chat template writes no calls, or none that can be read "
                f"back: {shown_instead(self._encoder)}",
                where="tools",
                fix="name a template that does with --template FILE.jinja",
            )
        return self.calls


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    return tool["function"].get("parameters") or {}


def _call(form: CallForm, function: dict[str, Any]) -> dict[str, Any]:
    """One call of one tool."""
    schema = function.get("parameters") or {"type": "object"}
    if form.kind == "tagged":
        raise _unforced("it writes arguments key by key")
    if form.kind == "named":
        name = function["name"]
        id_mark, identity = form.id_mark, "[a-zA-Z0-9]{9}"
        if form.name_in_id:
            name, id_mark, identity = f"functions.{name}", ":", "[0-9]{1,3}"
        head = [_text(form.opening + name + id_mark), {"type": "regex", "pattern": identity} if id_mark else None]
        return _sequence([*head, _text(form.middle), _json(schema), _text(form.closing)])
    if form.text_arguments:
        raise _unforced("it writes arguments as JSON inside of JSON")
    properties: dict[str, Any] = {form.keys[0]: {"const": function["name"]}, form.keys[1]: schema}
    if form.id_key:
        properties[form.id_key] = {"type": "string", "pattern": "^[a-zA-Z0-9]{9}$"}
    whole: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    if form.kind == "list":
        whole = {"type": "array", "items": whole, "minItems": 1, "maxItems": 1}
    return _sequence([_text(form.opening), _json(whole), _text(form.closing)])


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    """JSON of a schema that is kept to as where an answer's form is asked for."""
    vetted = json.loads(vet_schema(json.dumps(schema)))
    return {"type": "json_schema", "json_schema": vetted, "max_whitespace_cnt": MAX_SPACES}


def _text(value: str) -> dict[str, Any] | None:
    return {"type": "const_string", "value": value} if value else None


def _sequence(elements: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    return {"type": "sequence", "elements": [element for element in elements if element is not None]}


def _unforced(why: str) -> UsageError:
    return UsageError(
        f"this model can't be made to call a tool: {why}", where="tool_choice", fix="leave tool_choice at auto"
    )
