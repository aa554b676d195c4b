"""Rows to tokens: which ids a row becomes, and which of them are trained.

The ids are those of the tokenizer's own chat template (see `template`), the trained tokens are those of the assistant
turns (see `spans`). A row usually becomes one example. It becomes several when the template shows an earlier answer
differently than it would be generated (`history_turns`), or when a plain text is split into pieces.

Knows nothing of files, batches or models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from swift.config.data import PromptConfig, TemplateConfig
from swift.core.errors import DataError, TemplateError, UsageError
from swift.data.encoding.conversation import last_round_thinks, read_system, shape_calls, turn_weights, without_marks
from swift.data.encoding.probe import PROBE_TOOL, TemplateFacts, dated_renderings, probe
from swift.data.encoding.shown import check_shown
from swift.data.encoding.spans import Conversation, TurnFinder
from swift.data.encoding.template import Refusal, Renderer, install_template
from swift.data.encoding.tokens import Tokens, added_token_pattern
from swift.data.rows import Row, RowProblem
from swift.data.token_files.fast_tokenizer import FastTokenizer
from swift.data.token_files.identity import combined, tokenizer_parts

# Part of the fingerprint: raise it when the same row and template would come out as other tokens or weights.
ENCODING_VERSION = 2


@dataclass(slots=True)
class Encoded:
    """One training example.

    Attributes:
        input_ids: int32 [n].
        loss_weights: float32 [n], the weight of predicting token i from those before it; 0 = not trained. The first is
            always 0.
        truncated: number of tokens that were cut off.
        notes: float64, how the example is divided if it is a unit of several sequences (`swift.data.units`).
    """

    input_ids: np.ndarray
    loss_weights: np.ndarray
    truncated: int = 0
    notes: np.ndarray | None = None


@dataclass(slots=True)
class _Draft:
    """An example before tokenisation: its text and the weight of character spans."""

    text: str
    spans: list[tuple[int, int, float]] = field(default_factory=list)
    base_weight: float = 0.0
    append_eos: bool = False
    plain: bool = False


@dataclass(slots=True)
class _Voice:
    """One chat template with what is known of it."""

    render: Renderer
    facts: TemplateFacts
    finder: TurnFinder


class ChatEncoder:
    """Encodes rows and prompts with one tokenizer.

    Args:
        tokenizer: a fast tokenizer. Its template (and eos, with ChatML) is set from `config`, so that saving it saves
            what was trained.
        config: template settings; those of inference are enough to encode prompts, and leave the rest at its defaults.

    Attributes:
        template: the chat template in force; None when rows are plain text.
        eos_token: the tokenizer's eos after the template was chosen.
        notices: what the user should be told once.
        vocab_size: one more than the highest id.
        counts: what happened while encoding: `own_examples` (turns that became examples of their own), `masked_turns`,
            `continued_prompts` (examples that are generation prompt + answer, because the template can't show them
            whole: thoughts it always drops), `merged_borders` (answers whose first characters would merge with the
            prompt's last token), `special_text` (rows whose messages contain the text of special tokens),
            `asked_thinking` and `asked_not_thinking` (conversations for which the template was given its thinking
            switch with that value; those that are asked in the template's default way count as neither).

    Raises:
        TemplateError: the template can't be trained on; names it. UsageError: settings that contradict each other.
    """

    def __init__(self, tokenizer: Any, config: PromptConfig) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise TemplateError(
                f"the tokenizer {type(tokenizer).__name__} has no fast version; spans need character offsets",
                fix="convert it to tokenizer.json (transformers does so when it can)",
            )
        self.config = config if isinstance(config, TemplateConfig) else TemplateConfig(**asdict(config))
        self.tokenizer = tokenizer
        self._parts: dict[str, str] | None = None
        self.vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1  # some have gaps, so not their number
        self.use_chat_template = config.use_chat_template is not False
        if self.use_chat_template and self.config.truncation_strategy == "split":
            raise UsageError(
                "--truncation_strategy split is for plain text: a conversation can't be cut into pieces",
                where="--truncation_strategy",
                fix="use delete, left or right, or --use_chat_template false",
            )
        self.system = read_system(config.system)
        self.counts: Counter[str] = Counter()
        self.notices: list[str] = []
        self.template: str | None = None
        self._tokens = Tokens(tokenizer)
        self._texts = FastTokenizer(tokenizer)
        self._added = added_token_pattern(tokenizer)
        self._voices: dict[str, _Voice] = {}
        self._name = "plain text"
        if self.use_chat_template:
            self._name, self.notices = install_template(tokenizer, config)
            self._tokens = Tokens(tokenizer)
            self._texts = FastTokenizer(tokenizer)
            voice = self._voice(None)
            self.template = voice.render.template
            self._check_system(voice)
            if config.enable_thinking is not None and voice.facts.thinking_key is None:
                self.notices.append(f"--enable_thinking changes nothing: {self._name} has no such switch")
        self.eos_token: str | None = tokenizer.eos_token
        if self.eos_token is None and (not self.use_chat_template or self._voice(None).facts.opener_closes):
            raise TemplateError(
                "the tokenizer has no eos token, so nothing can end a text",
                fix="set eos_token in tokenizer_config.json",
            )

    # --- public ---

    def encode(self, row: Row) -> list[Encoded]:
        """The examples that `row` becomes. Raises RowProblem when it can't be used, TemplateError when the template
        leaves open which tokens are the assistant's."""
        outcome = self.encode_batch([row])[0]
        if isinstance(outcome, RowProblem):
            raise outcome
        return outcome

    def encode_batch(self, rows: Sequence[Row]) -> list[list[Encoded] | RowProblem]:
        """Like `encode`, row by row in the same order, with one call of the tokenizer. A row that can't be used comes
        back as its problem."""
        outcomes: list[list[Encoded] | RowProblem] = []
        drafts: list[_Draft] = []
        places: list[int] = []
        for number, row in enumerate(rows):
            outcomes.append([])
            try:
                made = self._drafts(row)
            except RowProblem as problem:
                outcomes[number] = problem
                continue
            except TemplateError as error:
                raise TemplateError(error.message, where=str(row.ref), fix=error.fix) from error
            drafts += made
            places += [number] * len(made)
        for number, draft, encoding in zip(places, drafts, self._tokenise(drafts), strict=True):
            outcome = outcomes[number]
            if isinstance(outcome, RowProblem):
                continue
            try:
                outcome += self._finish(rows[number], draft, encoding)
            except RowProblem as problem:
                outcomes[number] = problem
        return outcomes

    def conversation(self, row: Row) -> Conversation:
        """The conversation as the template gets it: system prompt added, tool calls in the form it wants, thinking
        switched. `apply_chat_template` of it gives the ids of the row's (first) example."""
        return self._conversation(row.messages, row.tools, row.template_kwargs, answered=True)

    def encode_prompt(
        self, messages: list[dict], tools: list[dict] | None = None, template_kwargs: dict | None = None
    ) -> list[int]:
        """The ids of the generation prompt after `messages`; without a chat template, those of their plain text.

        Raises:
            RowProblem: the template refuses the conversation.
        """
        text = self.render_prompt(messages, tools, template_kwargs)
        if not self.use_chat_template:
            return self.encode_text(text)
        return list(self._tokens.encode([text], special=False)[0].ids)

    def encode_text(self, text: str) -> list[int]:
        """The ids of a plain text to be continued: those with which the training example of that text begins, with
        what the tokenizer puts before a text and without what ends it."""
        ids = self._tokens.encode([text], special=True)[0].ids
        return list(ids[: len(ids) - self._tokens.num_after])

    def render_prompt(
        self, messages: list[dict], tools: list[dict] | None = None, template_kwargs: dict | None = None
    ) -> str:
        """The text of the generation prompt; without a chat template, the contents one after the other."""
        if not self.use_chat_template:
            return "".join(str(message.get("content") or "") for message in messages)
        talk = self._conversation(messages, tools, template_kwargs or {}, answered=False)
        try:
            return self._voice(tools).render(talk.messages, talk.tools, talk.kwargs, prompt=True)
        except Refusal as error:
            raise self._refused(error, talk) from error

    def stop_token_ids(self) -> list[int]:
        """The ids that end an answer: eos and the tokens with which the template ends an assistant turn."""
        names = [self.eos_token] if self.eos_token else []
        for voice in self._voices.values():
            names += voice.facts.stop_tokens
        ids = [self.tokenizer.convert_tokens_to_ids(name) for name in names]
        return list(dict.fromkeys(int(i) for i in ids if i is not None))

    def tokenizer_parts(self) -> dict[str, str]:
        """A hash for each part of the tokenizer's rules (`token_identity`), as they were when first asked for."""
        if self._parts is None:  # a second for a large vocabulary
            self._parts = tokenizer_parts(self.tokenizer)
        return self._parts

    def settings(self) -> dict[str, Any]:
        """All that decides the ids and weights of a row beside the tokenizer's rules, by the name of its flag: what
        can't matter under the others is left out. Template and system prompt stand as hashes of their texts."""
        config = self.config
        kept: dict[str, Any] = {
            "version": ENCODING_VERSION,
            "use_chat_template": self.use_chat_template,
            "max_length": config.max_length,
            "truncation_strategy": config.truncation_strategy,
            "loss_scale": config.loss_scale,
            "eos_token": self.eos_token,
        }
        if self.use_chat_template:
            kept["history_turns"] = config.history_turns
            kept["enable_thinking"] = config.enable_thinking
            kept["add_non_thinking_prefix"] = config.add_non_thinking_prefix
            kept["system"] = combined({"text": self.system}) if self.system else None
            kept["template"] = combined({"text": self.tokenizer.chat_template})
            kept["special_tokens"] = combined(
                {key: str(value) for key, value in self.tokenizer.special_tokens_map.items()}
            )
        return kept

    def dated(self) -> list[list[str]]:
        """Prompts as they come out today, of templates that write the date; empty for all others."""
        if not self.use_chat_template:
            return []
        templates = {self._template_for(tools) for tools in (None, [PROBE_TOOL])}
        return [dated_renderings(Renderer(self.tokenizer, template)) for template in sorted(templates)]

    def fingerprint(self) -> str:
        """A hash that changes whenever the encoding of some row could: settings, template, tokenizer, and the date
        where the template writes it."""
        return combined({"tokenizer": self.tokenizer_parts(), "settings": self.settings(), "dated": self.dated()})

    # --- conversations ---

    def _voice(self, tools: list[dict] | None) -> _Voice:
        """The template for a conversation with these tools; most tokenizers have one for all."""
        template = self._template_for(tools)
        if template not in self._voices:
            render = Renderer(self.tokenizer, template)
            facts = probe(render, self._added, self._name)
            finder = TurnFinder(
                render, facts, self._added, self._name, allow_empty_thought=self.config.add_non_thinking_prefix
            )
            self._voices[template] = _Voice(render, facts, finder)
            self.notices += [notice for notice in facts.notices if notice not in self.notices]
        return self._voices[template]

    def _template_for(self, tools: list[dict] | None) -> str:
        try:
            return self.tokenizer.get_chat_template(None, tools or None)
        except ValueError as error:
            raise TemplateError(f"{self._name}: {error}", fix="name one with --template FILE.jinja") from error

    def _conversation(
        self, messages: list[dict], tools: list[dict] | None, template_kwargs: dict, *, answered: bool
    ) -> Conversation:
        facts = self._voice(tools).facts
        prepared = [without_marks(message) for message in messages]
        inserted = int(bool(self.system) and not any(message["role"] == "system" for message in prepared[:1]))
        if inserted:
            prepared.insert(0, {"role": "system", "content": self.system})
        if any("tool_calls" in message for message in prepared):
            prepared = shape_calls(prepared, facts)
        kwargs: dict[str, Any] = {}
        if self.config.enable_thinking is not None:
            kwargs["enable_thinking"] = self.config.enable_thinking
            if facts.thinking_key:
                kwargs[facts.thinking_key] = self.config.enable_thinking
        kwargs.update(template_kwargs)
        if answered and facts.thinking_key and facts.thinking_key not in kwargs:
            thinks = last_round_thinks(prepared)
            if thinks or self.config.add_non_thinking_prefix:
                kwargs[facts.thinking_key] = thinks
        if answered and facts.thinking_key in kwargs:
            self.counts["asked_thinking" if kwargs[facts.thinking_key] else "asked_not_thinking"] += 1
        return Conversation(prepared, tools or None, kwargs, inserted)

    def _drafts(self, row: Row) -> list[_Draft]:
        if row.text is not None or not self.use_chat_template:
            return [self._plain_draft(row)]
        weights = turn_weights(row.messages, self.config.loss_scale)
        if not weights and self.config.loss_scale != "all":
            raise _all_masked("no message of it is trained")
        if any(token in str(message.get("content")) for message in row.messages for token in self._tokens.turn_marks):
            self.counts["special_text"] += 1
        talk = self.conversation(row)
        try:
            return self._chat_drafts(row, talk, {i + talk.inserted: w for i, w in weights.items()})
        except Refusal as error:
            raise self._refused(error, talk) from error

    def _chat_drafts(self, row: Row, talk: Conversation, weights: dict[int, float]) -> list[_Draft]:
        voice = self._voice(row.tools)
        mode = self.config.history_turns
        if self.config.loss_scale == "all":
            text = voice.render(talk.messages, talk.tools, talk.kwargs)
            check_shown(voice.render, talk, text, self._name, thoughts=True)
            spans = []
            if weights:
                found = voice.finder.find(talk, list(weights), history_turns="keep")
                text = found.text
                spans = [(*span, weights[index]) for index, each in found.turns.items() for span in each]
            return [_Draft(text, spans, base_weight=1.0, append_eos=voice.facts.opener_closes)]
        found = voice.finder.find(talk, list(weights), history_turns=mode)
        check_shown(voice.render, talk, found.text, self._name)
        self.counts["continued_prompts"] += found.continued
        drafts = []
        if found.turns:
            spans = [(*span, weights[index]) for index, each in found.turns.items() for span in each]
            drafts.append(_Draft(found.text, spans, append_eos=found.append_eos))
        if mode == "mask" or voice.facts.marks:
            self.counts["masked_turns"] += len(found.diverging)
            return drafts
        for index in found.diverging:
            self.counts["own_examples"] += 1
            own = index + 1 - talk.inserted
            head = replace(row, messages=row.messages[:own])
            one = voice.finder.find(self.conversation(head), [index], history_turns="mask")
            self.counts["continued_prompts"] += one.continued
            spans = [(*span, weights[index]) for span in one.turns[index]]
            drafts.append(_Draft(one.text, spans, append_eos=one.append_eos))
        return drafts

    def _plain_draft(self, row: Row) -> _Draft:
        everything = row.text is not None or self.config.loss_scale == "all"
        draft = _Draft(row.text or "", base_weight=float(everything), append_eos=True, plain=True)
        if row.text is None:
            weights = turn_weights(row.messages, self.config.loss_scale)
            for index, message in enumerate(row.messages):
                start = len(draft.text)
                draft.text += str(message.get("content") or "")
                if index in weights:
                    draft.spans.append((start, len(draft.text), weights[index]))
        if not draft.text:
            raise RowProblem("empty", "the text is empty", "remove the row")
        return draft

    # --- tokens ---

    def _tokenise(self, drafts: list[_Draft]) -> list[Any]:
        results: list[Any] = [None] * len(drafts)
        for plain in (False, True):
            chosen = [i for i, draft in enumerate(drafts) if draft.plain == plain]
            texts = [i for i in chosen if plain and not drafts[i].spans]
            for i, ids in zip(texts, self._texts.encode_batch([drafts[i].text for i in texts]), strict=True):
                results[i] = ids
            marked = [i for i in chosen if not plain or drafts[i].spans]
            if marked:
                encodings = self._tokens.encode([drafts[i].text for i in marked], special=plain)
                for i, encoding in zip(marked, encodings, strict=True):
                    results[i] = encoding
        self.counts.update(self._texts.counts)
        self._texts.counts.clear()
        return results

    def _finish(self, row: Row, draft: _Draft, encoding: Any) -> list[Encoded]:
        if isinstance(encoding, np.ndarray):
            return self._finish_text(row, draft, encoding)
        ids: list[int] = encoding.ids
        weights = np.full(len(ids), draft.base_weight, dtype=np.float32)
        examples: list[Encoded] = []
        for start, end, weight in draft.spans:
            first, after, merged = self._tokens.span(encoding, draft.text, start, end)
            if merged and not draft.plain and not draft.base_weight:
                self.counts["merged_borders"] += 1
                if self.config.history_turns == "split":
                    examples.append(self._joined(draft, start, end, weight))
                if self.config.history_turns != "keep":
                    continue
            weights[first:after] = weight
        if draft.append_eos and (not draft.plain or not ids or ids[-1] != self.tokenizer.eos_token_id):
            closing = next((w for s, e, w in draft.spans if e == len(draft.text)), draft.base_weight)
            ids, weights = self._with_eos(ids, weights, closing)
        if weights[1:].any():
            examples.insert(0, Encoded(np.array(ids, dtype=np.int32), weights))
        if not examples:
            raise _all_masked("its assistant messages are empty")
        return self._pieces(row, examples, len(ids))

    def _finish_text(self, row: Row, draft: _Draft, ids: np.ndarray) -> list[Encoded]:
        """A plain text whose tokens all weigh the same."""
        if draft.append_eos and (not len(ids) or ids[-1] != self.tokenizer.eos_token_id):
            ids = np.append(ids, np.int32(self.tokenizer.eos_token_id))
        if len(ids) < 2 or not draft.base_weight:
            raise _all_masked("its assistant messages are empty")
        example = Encoded(ids, np.full(len(ids), draft.base_weight, dtype=np.float32))
        return self._pieces(row, [example], len(ids))

    def _pieces(self, row: Row, examples: list[Encoded], num_tokens: int) -> list[Encoded]:
        """The examples brought to max_length, with nothing trained where nothing precedes."""
        pieces = [piece for example in examples for piece in self._fit(row, example)]
        for piece in pieces:
            piece.loss_weights[0] = 0.0
        pieces = [piece for piece in pieces if piece.loss_weights.any()]
        if not pieces:
            raise RowProblem(
                "masked_by_truncation",
                f"cut to max_length {self.config.max_length}, no trained token is left of {num_tokens}",
                "raise --max_length, or cut the other side (--truncation_strategy left or right)",
            )
        return pieces

    def _joined(self, draft: _Draft, start: int, end: int, weight: float) -> Encoded:
        """The turn [start, end) as prompt tokens + turn tokens: its first characters would merge with the prompt's last
        token when both are tokenised as one text, and the model would never be asked that way."""
        prompt, answer = self._tokens.encode([draft.text[:start], draft.text[start:end]], special=False)
        ids = [*prompt.ids, *answer.ids]
        weights = np.zeros(len(ids), dtype=np.float32)
        weights[len(prompt.ids) :] = weight
        if draft.append_eos and end == len(draft.text):
            ids, weights = self._with_eos(ids, weights, weight)
        return Encoded(np.array(ids, dtype=np.int32), weights)

    def _with_eos(self, ids: list[int], weights: np.ndarray, weight: float) -> tuple[list[int], np.ndarray]:
        return [*ids, self.tokenizer.eos_token_id], np.append(weights, np.float32(weight))

    def _fit(self, row: Row, example: Encoded) -> list[Encoded]:
        """Bring an example to at most max_length tokens by the chosen strategy."""
        limit, num_tokens = self.config.max_length, len(example.input_ids)
        strategy = self.config.truncation_strategy
        if num_tokens <= limit:
            return [example]
        what = f"{num_tokens} tokens, max_length is {limit}"
        if strategy == "raise":
            raise DataError(f"the row has {what}", where=str(row.ref), fix="raise --max_length or shorten the row")
        if strategy == "delete":
            raise RowProblem("too_long", what, "raise --max_length or shorten the row", tokens=num_tokens)
        if strategy == "split":
            return [_piece(example, slice(at, at + limit), 0) for at in range(0, num_tokens, limit)]
        cut = num_tokens - limit
        if strategy == "right":
            return [_piece(example, slice(0, limit), cut)]
        keeps_bos = limit > 1 and example.input_ids[0] == self.tokenizer.bos_token_id
        if not keeps_bos:
            return [_piece(example, slice(cut, None), cut)]
        chosen = np.r_[0, np.arange(cut + 1, num_tokens)]
        return [_piece(example, chosen, cut)]

    # --- refusals ---

    def _refused(self, error: Refusal, talk: Conversation) -> RowProblem:
        if talk.messages and talk.messages[0]["role"] == "system":
            fix = "if it takes no system message, put that text at the head of the first user message"
        else:
            fix = "bring the roles into the order it expects, or choose another with --template FILE.jinja"
        return RowProblem("template_refused", f"{self._name} refuses the conversation: {error}", fix)

    def _check_system(self, voice: _Voice) -> None:
        """A system prompt given for all rows has to be one that the template takes and shows."""
        if not self.system:
            return
        messages = [{"role": "system", "content": self.system}, {"role": "user", "content": "x"}]
        reason = "it leaves the text out"
        try:
            if self.system.strip() in voice.render(messages, None, {}, prompt=True):
                return
        except Refusal as error:
            reason = str(error)
        raise TemplateError(
            f"{self._name} takes no system prompt: {reason}",
            where="--system",
            fix="remove --system, or put its text into the first user message of the rows",
        )


def _piece(example: Encoded, chosen: Any, truncated: int) -> Encoded:
    return Encoded(example.input_ids[chosen].copy(), example.loss_weights[chosen].copy(), truncated)


def _all_masked(why: str) -> RowProblem:
    return RowProblem(
        "all_masked", f"no token of the row would be trained: {why}", "give it an assistant answer, or remove the row"
    )
