"""Where the assistant's turns are in a rendered conversation.

A turn is what the model has to generate: it begins where the generation prompt of the messages before it ends, and
ends with the token that closes it. A turn may be trained inside the whole conversation only when the conversation's
rendering begins with exactly that prompt and that text. Where a template renders a turn differently once more messages
follow (thoughts dropped from the history, an empty thought block only on the last answer, tools moved to the last
question), the turn *diverges*, and `history_turns` says what happens to it:

- `split`: it becomes an example of its own, the conversation up to and with that turn, in which it is the last;
- `mask`: it isn't trained;
- `keep`: it is trained as the history shows it, found by replacing its text and comparing the renderings.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from swift.core.errors import TemplateError
from swift.data.encoding.probe import CLOSE, OPEN, QUESTION, TemplateFacts
from swift.data.encoding.template import Refusal, Renderer
from swift.data.rows import RowProblem

_STAND_IN = "\ue0f5Zq\ue0f6"  # private-use characters: no answer starts with them


@dataclass(slots=True)
class Conversation:
    """A conversation ready for the template: prepared messages, tools and template variables.

    `inserted` system messages were put before the row's own.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    kwargs: dict[str, Any]
    inserted: int = 0

    def number(self, index: int) -> int:
        """The message's number in the user's row, from 1."""
        return index + 1 - self.inserted


@dataclass(slots=True)
class Rendered:
    """The text of one example and the turns in it.

    Attributes:
        text: what is tokenised.
        turns: message index -> character spans [start, end) that are trained, the closing token included.
        append_eos: the last turn isn't closed by the template: eos follows the text, trained with that turn.
        continued: the text is the generation prompt of the last turn and that turn, because the template's rendering
            of the whole conversation doesn't begin with that prompt.
        diverging: message indexes that aren't trained in this example because the rendering differs from what the
            model would generate.
    """

    text: str
    turns: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    append_eos: bool = False
    continued: bool = False
    diverging: list[int] = field(default_factory=list)


def split_thoughts(message: dict[str, Any]) -> tuple[str, str]:
    """The thoughts of an assistant message and the answer without them; thoughts are "" where there are none."""
    content = message.get("content")
    content = content if isinstance(content, str) else ""
    reasoning = message.get("reasoning_content")
    if isinstance(reasoning, str) and reasoning.strip():
        return reasoning.strip("\n"), content
    head, found, tail = content.partition(CLOSE)
    if not found:
        return "", content
    return head.split(OPEN)[-1].strip("\n") if head.split(OPEN)[-1].strip() else "", tail.lstrip("\n")


class TurnFinder:
    """Finds the turns of conversations rendered with one template.

    Args:
        name: the template's name, for errors.
        added: matches any added token.
        allow_empty_thought: an answer without thoughts may get the empty thought that the template's prompt opens.
    """

    def __init__(
        self, render: Renderer, facts: TemplateFacts, added: re.Pattern[str], name: str, *, allow_empty_thought: bool
    ) -> None:
        self.render = render
        self.facts = facts
        self.added = added
        self.name = name
        self.allow_empty_thought = allow_empty_thought

    def find(self, talk: Conversation, wanted: Sequence[int], *, history_turns: str) -> Rendered:
        """Render `talk` and find the turns of the messages `wanted`.

        Raises:
            Refusal: the template doesn't take the conversation.
            RowProblem: the row contradicts the template (thoughts where it has none).
            TemplateError: a turn can't be proven; names the template and the message.
        """
        if self.facts.marks:
            return self._from_marks(talk, wanted)
        messages = talk.messages
        last = len(messages) - 1
        result = Rendered(self.render(messages, talk.tools, talk.kwargs))
        own: tuple[str, str] | None = None
        if last in wanted:
            own = self._generated(talk, last, result.text)
            if not result.text.startswith(own[0] + own[1]):  # the template can't show this turn: prompt + completion
                result.text = own[0] + own[1]
                result.continued = True
        for index in wanted:
            prompt, text = own if own and index == last else self._generated(talk, index, None)
            end = len(prompt) + len(text)
            if result.text.startswith(prompt + text):
                if self.facts.opener_closes:
                    end = self._opener_end(talk, result, end, index)
                result.turns[index] = [(len(prompt), end)]
            elif history_turns == "keep":
                start, end = self._as_shown(result.text, talk, index, own[1] if own and result.continued else None)
                lead = text[: len(text) - len(text.lstrip())]  # white space that the template writes before an answer
                if result.text.endswith(lead, 0, start):
                    start -= len(lead)
                result.turns[index] = [(start, end)]
            else:
                result.diverging.append(index)
        return result

    def _generated(self, talk: Conversation, index: int, whole: str | None) -> tuple[str, str]:
        """The generation prompt of turn `index` and what the model has to generate after it.

        `whole` is the rendering of the messages up to and with the turn, where it is known already.
        """
        messages = talk.messages
        try:
            prompt = self.render(messages[:index], talk.tools, talk.kwargs, prompt=True)
        except Refusal:
            if index:
                raise
            prompt = "\0"  # begins no rendering
        if whole is None:
            whole = self.render(messages[: index + 1], talk.tools, talk.kwargs)
        thoughts, _ = split_thoughts(messages[index])
        if whole.startswith(prompt):
            end = self._turn_end(talk, whole, len(prompt), index)
            if thoughts.strip() in whole[len(prompt) : end]:
                return prompt, whole[len(prompt) : end]
        if index == 0:
            raise RowProblem(
                "assistant_first",
                f"the conversation begins with the assistant, and {self.name} has no prompt for that",
                'put a user message first, or give the first message `"loss": false`',
            )
        completion = self._completion(talk, prompt, index)
        if completion is None:
            return prompt, self._alone(talk, index)
        return prompt, completion + self.facts.suffix[: self.facts.cut]

    def _turn_end(self, talk: Conversation, whole: str, start: int, index: int) -> int:
        """Where the turn that ends the rendering `whole` is closed, behind its closing token."""
        suffix = self.facts.suffix
        if not suffix or (whole.endswith(suffix) and len(whole) - len(suffix) >= start):
            return len(whole) - len(suffix) + self.facts.cut
        closers = list(self.added.finditer(whole, start))
        if closers and not whole[closers[-1].end() :].strip():
            return closers[-1].end()
        raise self._unproven(talk, index, f"its turn doesn't end with {suffix!r} or another special token")

    def _completion(self, talk: Conversation, prompt: str, index: int) -> str | None:
        """The turn as the model would generate it, without its close, where the template's rendering of the
        conversation doesn't continue its own prompt.

        Mostly thinking templates are like that: the prompt opens (or closes) a thought and the rendering of an answer
        drops it. The turn is then the thoughts and the answer in the form that the prompt has begun. None when
        thoughts have nothing to do with it.
        """
        message = talk.messages[index]
        number = talk.number(index)
        thoughts, answer = split_thoughts(message)
        stem = prompt.rstrip()
        gap = prompt[len(stem) :]
        shown = not message.get("tool_calls")
        if shown and stem.endswith(OPEN):
            if not thoughts and not self.allow_empty_thought:
                raise RowProblem(
                    "no_thoughts",
                    f"message {number}: {self.name} opens a thought in every prompt and the answer has none",
                    "give thoughts in `reasoning_content`, or allow empty ones: --add_non_thinking_prefix true",
                )
            return f"{thoughts}{gap}{CLOSE}{gap * 2}{answer}"
        if shown and stem.endswith(CLOSE):
            if not thoughts:
                return answer
            raise RowProblem(
                "thinking_off",
                f"message {number} has thoughts but thinking is switched off for this row",
                "leave enable_thinking unset: rows with thoughts then use the thinking prompt",
            )
        if thoughts and shown and CLOSE in str(message.get("content")) and CLOSE in self.render.template:
            return str(message["content"])
        if thoughts:
            raise RowProblem(
                "thoughts_dropped",
                f"message {number}: {self.name} doesn't show the message's thoughts, so they would be lost",
                "write them into `content` as <think>…</think>, or use a template that shows them",
            )
        return None

    def _alone(self, talk: Conversation, index: int) -> str:
        """The turn as the template renders it behind a bare question, where its rendering continues the prompt.

        For templates that write an earlier part of the conversation differently once it is answered (Mistral shows a
        system message only while the question is last).
        """
        bare = [{"role": "user", "content": QUESTION}, talk.messages[index]]
        try:
            prompt = self.render(bare[:1], talk.tools, talk.kwargs, prompt=True)
            whole = self.render(bare, talk.tools, talk.kwargs)
        except Refusal as error:
            raise self._unproven(talk, index, f"the turn can't be rendered alone ({error})") from error
        if not whole.startswith(prompt):
            raise self._unproven(talk, index, "its rendering doesn't continue the generation prompt")
        end = self._turn_end(talk, whole, len(prompt), index)
        return whole[len(prompt) : end]

    def _opener_end(self, talk: Conversation, result: Rendered, end: int, index: int) -> int:
        opener = self.added.match(result.text, end)
        if opener:
            return opener.end()
        if end == len(result.text):
            result.append_eos = True
            return end
        raise self._unproven(talk, index, "nothing closes its turn")

    def _as_shown(self, full: str, talk: Conversation, index: int, completion: str | None) -> tuple[int, int]:
        """The turn's span as the whole conversation shows it: replace its text, and see what changes.

        `completion` is the last turn where `full` is prompt + completion rather than one rendering.
        """
        messages = list(talk.messages)
        messages[index] = {"role": "assistant", "content": _STAND_IN}
        try:
            if completion is None:
                other = self.render(messages, talk.tools, talk.kwargs)
            else:
                other = self.render(messages[:-1], talk.tools, talk.kwargs, prompt=True) + completion
        except Refusal as error:
            raise self._unproven(talk, index, f"replacing its text is refused ({error})") from error
        before, found, after = other.partition(_STAND_IN)
        close = self.facts.suffix[: self.facts.cut]
        end = len(full) - len(after)
        if not (found and full.startswith(before) and full.endswith(after) and end >= len(before)):
            raise self._unproven(talk, index, "its text can't be told from the rest of the rendering")
        if self.facts.opener_closes:
            opener = self.added.match(after)
            close = opener.group() if opener else ""
        if not (close and after.startswith(close)):
            raise self._unproven(talk, index, "nothing closes its turn")
        return len(before), end + len(close)

    def _from_marks(self, talk: Conversation, wanted: Sequence[int]) -> Rendered:
        """Turns from `{% generation %}` marks, without the header that the prompt already holds, and with the close."""
        messages = talk.messages
        text, spans = self.render.marked(messages, talk.tools, talk.kwargs)
        result = Rendered(text)
        for (start, end), index in zip(spans, self._owners(talk, len(spans)), strict=True):
            if index not in wanted:
                continue
            if index:
                prompt = self.render(messages[:index], talk.tools, talk.kwargs, prompt=True)
                if start < len(prompt) <= end and text.startswith(prompt):
                    start = len(prompt)
            end = self._marked_end(text, start, end)
            result.append_eos |= self.facts.opener_closes and end == len(text)
            result.turns.setdefault(index, []).append((start, end))
        result.diverging = [index for index in wanted if index not in result.turns]
        return result

    def _marked_end(self, text: str, start: int, end: int) -> int:
        """End at the closing token: drop what follows it inside the mark, take it in when it follows the mark."""
        suffix, cut = self.facts.suffix, self.facts.cut
        if not cut:
            return end
        if text.startswith(suffix[:cut], end):
            return end + cut
        for rest in range(len(suffix) - cut, 0, -1):
            if text.endswith(suffix[: cut + rest], start, end):
                return end - rest
        return end

    def _owners(self, talk: Conversation, num_spans: int) -> list[int]:
        """The message that each mark belongs to."""
        turns = [i for i, message in enumerate(talk.messages) if message["role"] == "assistant"]
        if num_spans == len(turns):
            return turns
        owners: list[int] = []
        for index in turns:
            _, spans = self.render.marked(talk.messages[: index + 1], talk.tools, talk.kwargs)
            owners += [index] * (len(spans) - len(owners))
        if len(owners) != num_spans:
            raise self._unproven(talk, turns[-1], "its {% generation %} marks change when more messages follow")
        return owners

    def _unproven(self, talk: Conversation, index: int, why: str) -> TemplateError:
        return TemplateError(
            f"{self.name}: the tokens of message {talk.number(index)} (assistant) can't be told for certain: {why}",
            fix="choose another template with --template FILE.jinja, or mark the answers in it with {% generation %}",
        )
