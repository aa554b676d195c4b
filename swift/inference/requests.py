"""What is asked of a model and what comes back, in tokens: the vocabulary that engines, servers and commands share.

Nothing here knows how a model is run. Times and places of a request are its engine's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from swift.core.errors import SwiftError

FinishReason = Literal["stop", "length", "cancelled", "error"]
StructureKind = Literal["json_schema", "json", "regex", "grammar", "choice", "tag"]


@dataclass(frozen=True, slots=True)
class Structure:
    """What the text of an answer has to look like.

    Attributes:
        kind: `json_schema` (`value` is a JSON schema as text), `json` (any JSON object), `regex`, `grammar` (EBNF with
            a rule `root`), `choice` (`value` is a JSON array of strings), `tag` (xgrammar's structural tag as JSON;
            made by the program, not taken from requests).
        value: see `kind`.
    """

    kind: StructureKind
    value: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one answer is generated, every default filled in.

    Attributes:
        max_new_tokens: most tokens of the answer; None: what the context leaves.
        min_new_tokens: tokens before which nothing may end the answer.
        temperature: 0 is greedy.
        top_p, top_k, min_p: filters of the candidates; 1, 0 and 0 are off.
        repetition_penalty: divides (or multiplies negative) logits of tokens in prompt and answer; 1 is off.
        presence_penalty, frequency_penalty: taken from logits of the answer's tokens, once or per occurrence; 0 is off.
        logit_bias: (token id, what is added to its logit).
        seed: of the draws. Equal seeds, equal answers, whatever shares the batch.
        stop: texts that end the answer; they aren't part of it.
        stop_token_ids: ids that end the answer, besides the model's own.
        ignore_eos: the model's own end tokens don't end the answer (and may be chosen).
        logprobs: None for none; 0 for the chosen token's; k for the k likeliest besides. Taken before temperature,
            penalties and filters.
        prompt_logprobs: the same for the prompt's tokens.
        skip_special_tokens: special tokens don't show in `text`.
        structure: what the text has to look like.
        num_beams: above 1: beam search, without sampling.
        length_penalty: exponent of the length that a beam's score is divided by.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: str = "0"
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structure: Structure | None = None
    num_beams: int = 1
    length_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be continued once.

    Attributes:
        id: unique among the requests that an engine holds.
        prompt: token ids.
        params: how.
        adapter: name of a loaded adapter; None for the model alone.
        group: requests of one group with the same prompt wait for the first one's prompt to be computed and share it.
        priority: smaller goes first; equal ones in order of arrival.
    """

    id: str
    prompt: list[int]
    params: SamplingParams = SamplingParams()
    adapter: str | None = None
    group: str | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural) of a token, and of the likeliest ones at its place, likeliest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Update:
    """What is new of a request.

    Attributes:
        request_id: whose.
        tokens: new ids. The token that ended the answer is among them.
        text: new text: whole characters, nothing of a stop text or what may become one. The pieces of all updates
            together are the answer's text.
        logprobs: of `tokens`, where asked for.
        finish_reason: set on the last update only.
        stop_reason: the stop text or token id (of the request's own) that ended the answer; None otherwise.
        error: why there is no answer; then `finish_reason` is `error`.
        prompt_logprobs: of the prompt's tokens, on the first update where asked for; None for its first token.
        num_prompt_tokens: length of the prompt.
        num_cached_tokens: how many of them were found in the prefix cache.
    """

    request_id: str
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: SwiftError | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


Sink = Callable[[Update], None]
"""Takes a request's updates, in the engine's thread: it hands them on and returns at once."""


@dataclass(slots=True)
class Completion:
    """One whole answer.

    Attributes:
        tokens: the generated ids; the token that ended the answer is the last one.
        text: their text, without special tokens, cut before a stop text. Thoughts and tool calls are left in.
        finish_reason: `stop` (an end token or a stop text), `length` (out of tokens), `cancelled` (by the caller).
        num_prompt_tokens: length of the prompt.
        logprobs: log-probability of each of `tokens` before temperature and filters, if asked for.
        num_cached_tokens: prompt tokens found in the prefix cache. It says how, not what was answered: equal answers
            may differ in it.
        top_logprobs: for each of `tokens` the likeliest at its place, likeliest first, if asked for.
    """

    tokens: list[int]
    text: str
    finish_reason: FinishReason
    num_prompt_tokens: int
    logprobs: list[float] | None = None
    num_cached_tokens: int = field(default=0, compare=False)
    top_logprobs: list[tuple[tuple[int, float], ...]] | None = None
