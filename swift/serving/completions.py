"""/v1/completions: texts to be continued, as they are. Prompts may be texts or token ids, one or many.

With `echo` and `logprobs` an answer holds the log-probabilities of its prompt, which is how benchmarks of multiple
choice score models.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from swift.inference.requests import TokenLogprob, Update
from swift.serving.errors import ApiError, JsonResponse
from swift.serving.exchange import exchange_of
from swift.serving.generation import Generation, Wanted
from swift.serving.params import check_context, check_logprobs, sampling_params, seeds, structure_of
from swift.serving.schema import TextRequest, refuse
from swift.serving.served import Talker
from swift.serving.services import Services, services_of
from swift.serving.sse import EventStream, event

_USUAL_MAX_TOKENS = 16  # OpenAI's


@dataclass
class _Choice:
    """One answer as far as it is there.

    Attributes:
        prompt: its ids. echo: its text, where the answer repeats it.
        offset: characters of the text that log-probabilities were given for.
    """

    prompt: list[int]
    echo: str | None = None
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    offset: int = 0

    def add(self, update: Update) -> None:
        self.text.append(update.text)
        self.tokens += update.tokens
        self.logprobs += update.logprobs or []
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs
        if update.finish_reason is not None:
            self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason

    def mean_logprob(self) -> float:
        found = [each.logprob for each in self.logprobs if each is not None]
        return sum(found) / max(1, len(found))


@dataclass(frozen=True)
class _Form:
    """How the answers to one request are written."""

    talker: Talker
    body: TextRequest
    head: dict[str, Any]
    num_shown: int

    def choice(self, index: int, choice: _Choice, first: bool) -> dict[str, Any]:
        """What is there of an answer since it was written last, and forget it.

        Args:
            first: nothing of it was written before: the prompt comes with it.
        """
        body, texts = self.body, self.talker.texts
        tokens, found = choice.tokens, choice.logprobs
        if body.max_tokens == 0:  # one token had to be computed
            tokens, found, choice.text = [], [], []
            choice.finish_reason = choice.finish_reason and "length"
        written = tokens
        text = "".join(choice.text)
        if choice.echo is not None and first:
            text = choice.echo + text
            written = choice.prompt + tokens
            found = [*(choice.prompt_logprobs or [None] * len(choice.prompt)), *found]
        result: dict[str, Any] = {"text": text, "index": index, "logprobs": None, "finish_reason": choice.finish_reason}
        if body.logprobs is not None:
            result["logprobs"] = texts.completion_logprobs(found, written, choice.offset)
            choice.offset += sum(len(texts.text(token)) for token in written)
        if choice.stop_reason is not None:
            result["stop_reason"] = choice.stop_reason
        if body.prompt_logprobs is not None and first:
            result["prompt_logprobs"] = [texts.prompt_entry(each) for each in choice.prompt_logprobs or []]
        if body.return_token_ids:
            result["token_ids"] = list(tokens)
            if first:
                result["prompt_token_ids"] = choice.prompt
        choice.text, choice.tokens, choice.logprobs = [], [], []
        return result


async def completions(http: HttpRequest, body: TextRequest) -> Response:
    """Continue texts."""
    services = services_of(http)
    model, talker = services.models.talker(body.model)
    exchange = exchange_of(http.scope)
    exchange.model = model.name
    refuse(body, {"suffix": ("",)})
    check_logprobs(body.logprobs, services.config.max_logprobs, "logprobs")
    check_logprobs(body.prompt_logprobs, services.config.max_logprobs, "prompt_logprobs")
    num_shown, num_made = body.n or 1, max(body.best_of or 1, body.n or 1)
    if body.best_of is not None and body.best_of < num_shown:
        raise ApiError(400, f"best_of is {body.best_of}, and n {num_shown}", param="best_of")
    if body.stream and num_made > num_shown:
        raise ApiError(400, "the best of several answers can't be streamed: best_of has to be n", param="best_of")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens is 0: nothing is asked for without echo", param="max_tokens")
    prompts = await _prompts(services, talker, body)
    wanted, choices = [], []
    logprobs = body.logprobs
    if num_made > num_shown and logprobs is None:
        logprobs = 0  # to find the best
    limit = _USUAL_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)  # of 0, one isn't shown
    params = sampling_params(body, talker, structure=structure_of(body), max_tokens=limit, logprobs=logprobs)
    if body.echo and body.logprobs is not None:
        params = replace(params, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
    for group, prompt in enumerate(prompts):
        check_context(len(prompt), body.max_tokens, talker.backend.info.context_length, "prompt")
        echo = talker.tokenizer.decode(prompt, skip_special_tokens=False) if body.echo else None
        for each in seeds(params, body.seed, num_made):
            wanted.append(Wanted(prompt, each, group))
            choices.append(_Choice(prompt, echo))
    head = {
        "id": f"cmpl-{exchange.id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model.name,
        "system_fingerprint": model.fingerprint,
    }
    form = _Form(talker, body, head, num_shown)
    generation = Generation(services, model, talker, wanted, http, body.priority or 0)
    try:
        await generation.begin()
        if body.stream:
            return EventStream(_events(generation, choices, form), generation)
        async for items in generation.updates():
            for index, update in items:
                choices[index].add(update)
    except BaseException:
        generation.close()
        raise
    generation.close()
    if services.config.log_contents:
        exchange.contents = {"prompt": body.prompt, "answers": ["".join(choice.text) for choice in choices]}
    best: list[_Choice] = []
    for start in range(0, len(choices), num_made):
        made = choices[start : start + num_made]
        if num_made > num_shown:
            made = sorted(made, key=_Choice.mean_logprob, reverse=True)[:num_shown]
        best += made
    shown = [form.choice(index, choice, True) for index, choice in enumerate(best)]
    return JsonResponse({**head, "choices": shown, "usage": generation.usage.body()})


async def _events(generation: Generation, choices: list[_Choice], form: _Form) -> AsyncIterator[bytes]:
    options = form.body.stream_options
    with_usage = bool(options and options.include_usage)
    head = {**form.head, "usage": None} if with_usage else form.head
    begun: set[int] = set()
    async for items in generation.updates():
        chunks = []
        for index, update in items:
            choice = choices[index]
            choice.add(update)
            shown = form.choice(index, choice, index not in begun)
            if shown["text"] or shown["finish_reason"] or form.body.logprobs is not None or form.body.return_token_ids:
                begun.add(index)
                chunks.append(event({**head, "choices": [shown]}))
        if chunks:
            yield b"".join(chunks)
    if with_usage:
        yield event({**form.head, "choices": [], "usage": generation.usage.body()})


async def _prompts(services: Services, talker: Talker, body: TextRequest) -> list[list[int]]:
    """The prompts' ids.

    Raises:
        ApiError: 400, ids that the model doesn't have.
    """
    given: Any = body.prompt
    texts = [given] if isinstance(given, str) else given
    if isinstance(texts[0], str):

        def encode() -> list[list[int]]:
            if body.add_special_tokens is False:
                return [talker.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
            return [talker.encoder.encode_text(text) for text in texts]

        return await services.run(encode)
    prompts = [given] if isinstance(given[0], int) else given
    size = talker.backend.info.vocab_size
    for prompt in prompts:
        if min(prompt) < 0 or max(prompt) >= size:
            wrong = min(prompt) if min(prompt) < 0 else max(prompt)
            raise ApiError(400, f"the model has no token {wrong}: ids are 0 to {size - 1}", param="prompt")
    return prompts
