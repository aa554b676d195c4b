"""Answers for those who have prompts: many at once as they come, one piece by piece, or all in order.

An `Engine` puts defaults into settings, keeps its backend busy, and collects what comes back. It works on any
`Backend`, and knows nothing of files, conversations on a terminal, or how a model is run.
"""

from __future__ import annotations

import itertools
import queue
import uuid
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Generic, TypeVar

from swift.config.inference import GenerationConfig
from swift.core.errors import DataError, SwiftError, UsageError
from swift.data.encoding.encode import ChatEncoder
from swift.inference.backends.base import Backend
from swift.inference.backends.prompt import check_prompt
from swift.inference.decoding import IncrementalDecoder, StopScanner, decode, find_stop
from swift.inference.requests import Completion, FinishReason, Request, SamplingParams, TokenLogprob, Update
from swift.inference.sampling import resolve_sampling

__all__ = ["AnswerStream", "Completion", "Engine"]

K = TypeVar("K")


class Engine:
    """Generates with one model.

    Args:
        backend: runs the model; it has been started. The engine's `close` closes it.
        tokenizer: the model's tokenizer.
        encoder: turns conversations into prompts.
        max_in_flight: prompts that the backend is given at a time.
        max_ahead: prompts begun after the first that isn't answered yet: one long answer doesn't hold up more.
        defaults: the model's own `generation_config`; None for none.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Any,
        encoder: ChatEncoder,
        *,
        max_in_flight: int = 128,
        max_ahead: int = 1024,
        defaults: Any = None,
    ) -> None:
        self.backend = backend
        self.tokenizer = tokenizer
        self.encoder = encoder
        self.max_in_flight = max_in_flight
        self.max_ahead = max_ahead
        self._defaults = defaults
        self._special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        self._ids = (f"{uuid.uuid4().hex[:8]}-{number}" for number in itertools.count())

    def close(self) -> None:
        """End what is still being answered, and give the model back."""
        self.backend.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def context_length(self) -> int | None:
        """Tokens that prompt and answer may have together; None when the model names no limit."""
        return self.backend.info.context_length

    @property
    def stop_token_ids(self) -> list[int]:
        """What ends an answer."""
        return list(self.backend.info.stop_token_ids)

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Refuse a prompt that can't be answered.

        Raises:
            DataError: it is empty, leaves no room for an answer, or has ids that the model doesn't know.
        """
        check_prompt(prompt, self.backend.info)

    def generate(
        self,
        prompts: Sequence[list[int]],
        config: GenerationConfig,
        *,
        seeds: Sequence[int | str] | None = None,
        logprobs: bool = False,
    ) -> list[Completion]:
        """Answer every prompt, in order; see `generate_each`.

        Raises:
            SwiftError: of the first prompt, in order, that can't be answered. Nothing else is returned then.
        """
        for prompt in prompts:
            self.check_prompt(prompt)
        answers: dict[int, Completion] = {}
        for index, answer in self.generate_each(prompts, config, seeds=seeds, logprobs=logprobs):
            if isinstance(answer, SwiftError):
                raise answer
            answers[index] = answer
        return [answers[index] for index in range(len(prompts))]

    def generate_each(
        self,
        prompts: Sequence[list[int]],
        config: GenerationConfig,
        *,
        seeds: Sequence[int | str] | None = None,
        logprobs: bool = False,
    ) -> Iterator[tuple[int, Completion | SwiftError]]:
        """Answer every prompt; yields (index, answer) as they are complete, longest prompts begun first.

        An answer doesn't depend on which prompts are answered beside it. Leaving the loop early (Ctrl-C as well)
        cancels what is still being answered.

        Args:
            prompts: token ids.
            config: how to generate.
            seeds: one per prompt, mixed with `config.seed`; default: its index. Equal seeds, equal answers.
            logprobs: also return log-probabilities of the generated tokens.

        Yields:
            For each prompt its completion, or the error that concerns this prompt alone.

        Raises:
            UsageError: what `config` asks for isn't possible.
        """
        params = self.sampling(config)
        if logprobs and params.logprobs is None:
            if params.num_beams > 1:
                raise UsageError(
                    "log-probabilities of single tokens don't exist in beam search", fix="use --num_beams 1"
                )
            params = replace(params, logprobs=0)
        seeds = range(len(prompts)) if seeds is None else seeds
        usable: list[int] = []
        for index, prompt in enumerate(prompts):
            try:
                self.check_prompt(prompt)
            except DataError as error:
                yield index, error
            else:
                usable.append(index)
        usable.sort(key=lambda i: (-len(prompts[i]), i))
        yield from self.answer((i, prompts[i], replace(params, seed=f"{config.seed}/{seeds[i]}")) for i in usable)

    def answer(
        self, asked: Iterable[tuple[K, list[int], SamplingParams]]
    ) -> Iterator[tuple[K, Completion | SwiftError]]:
        """Answer what is asked, taking more whenever an answer is complete, so that the backend is never out of work.

        Args:
            asked: (key, prompt, settings with the seed). Read `max_ahead` at most beyond the first that isn't complete.

        Yields:
            (key, answer) as they are complete: the completion, or the error that concerns this one alone.

        Raises:
            UsageError: settings aren't possible.
        """
        asked = iter(asked)
        ready: queue.SimpleQueue[tuple[int, _Answer]] = queue.SimpleQueue()
        open_ones: dict[int, _Open[K]] = {}  # by number, in order
        taken = 0
        try:
            while True:
                while len(open_ones) < self.max_in_flight and taken - next(iter(open_ones), taken) < self.max_ahead:
                    item = next(asked, None)
                    if item is None:
                        break
                    key, prompt, params = item
                    answer, number = _Answer(len(prompt)), taken
                    request = Request(next(self._ids), list(prompt), self._without_words(params))
                    try:
                        self.backend.submit(request, answer.sink(lambda done, n=number: ready.put((n, done))))
                    except DataError as error:
                        yield key, error
                        continue
                    open_ones[number] = _Open(key, request.id, params)
                    taken += 1
                if not open_ones:
                    return
                number, answer = ready.get()
                done = open_ones.pop(number)
                yield done.key, answer.error or self._cut(answer.completion(), done.params)
        finally:
            for left in open_ones.values():
                self.backend.cancel(left.request_id)

    def stream(self, prompt: list[int], config: GenerationConfig, *, seed: int | str = 0) -> AnswerStream:
        """Answer one prompt piece by piece.

        Returns:
            An iterator over text pieces: whole characters, nothing of a stop word. Closing it (or an exception inside
            the loop, such as Ctrl-C) ends the generation.

        Raises:
            DataError: the prompt can't be answered.
            UsageError: beam search, which has no answer before its end.
        """
        self.check_prompt(prompt)
        params = self.sampling(config)
        if params.num_beams > 1:
            raise UsageError(
                f"--num_beams {params.num_beams} can't stream: the best beam is known at the end only",
                where="--stream",
                fix="--stream false, or --num_beams 1",
            )
        request = Request(next(self._ids), list(prompt), replace(params, seed=f"{config.seed}/{seed}"))
        return AnswerStream(self.backend, request)

    def sampling(self, config: GenerationConfig) -> SamplingParams:
        """The settings in force for `config`, defaults taken from the model's own generation settings."""
        return resolve_sampling(config, self._defaults)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of generated tokens, special tokens left out."""
        return decode(self.tokenizer, tokens)

    def end_tokens(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that end an answer: the model's, and stop words that are special tokens (they never show in text)."""
        own = () if params.ignore_eos else self.stop_token_ids
        words = {self._special[word] for word in params.stop if word in self._special}
        return frozenset(own) | frozenset(params.stop_token_ids) | words

    def _without_words(self, params: SamplingParams) -> SamplingParams:
        """Beam search knows nothing of stop words: the best answer is cut when it is there."""
        if params.num_beams == 1 or not params.stop:
            return params
        return replace(params, stop=(), stop_token_ids=tuple(self.end_tokens(params) - set(self.stop_token_ids)))

    def _cut(self, answer: Completion, params: SamplingParams) -> Completion:
        cut = find_stop(answer.text, params.stop) if params.num_beams > 1 else None
        if cut is None:
            return answer
        decoder, scanner = IncrementalDecoder(self.tokenizer), StopScanner(params.stop)
        count = 0
        while count < len(answer.tokens) and not scanner.stopped:
            scanner.push(decoder.push(answer.tokens[count]))
            count += 1
        return replace(answer, tokens=answer.tokens[:count], text=answer.text[:cut], finish_reason="stop")


@dataclass(frozen=True)
class _Open(Generic[K]):
    """What is being answered."""

    key: K
    request_id: str
    params: SamplingParams


class _Answer:
    """Collects the updates of one request.

    Attributes:
        error: why there is no answer.
    """

    def __init__(self, num_prompt_tokens: int) -> None:
        self.error: SwiftError | None = None
        self._num_prompt_tokens = num_prompt_tokens
        self._num_cached_tokens = 0
        self._tokens: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] | None = None
        self._reason: FinishReason = "cancelled"

    def sink(self, when_complete: Any) -> Any:
        """Takes updates; calls `when_complete(self)` after the last one."""

        def take(update: Update) -> None:
            self.take(update)
            if update.finish_reason is not None:
                when_complete(self)

        return take

    def take(self, update: Update) -> None:
        """One more update."""
        self._tokens += update.tokens
        self._text.append(update.text)
        self._num_cached_tokens = max(self._num_cached_tokens, update.num_cached_tokens)
        if update.logprobs is not None:
            self._logprobs = [*(self._logprobs or []), *update.logprobs]
        if update.finish_reason is not None:
            self._reason, self.error = update.finish_reason, update.error

    def completion(self) -> Completion:
        """All of it."""
        tops = [each.top for each in self._logprobs or []]
        return Completion(
            tokens=self._tokens,
            text="".join(self._text),
            finish_reason=self._reason,
            num_prompt_tokens=self._num_prompt_tokens,
            logprobs=None if self._logprobs is None else [each.logprob for each in self._logprobs],
            num_cached_tokens=self._num_cached_tokens,
            top_logprobs=None if not tops or not any(tops) else tops,
        )


class AnswerStream(Iterator[str]):
    """The pieces of one answer. `completion` is set once the generation has ended, whichever way."""

    def __init__(self, backend: Backend, request: Request) -> None:
        self.completion: Completion | None = None
        self._backend = backend
        self._request = request
        self._pieces: Generator[str] = self._iterate()

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """End the generation now; `completion` then holds what there is."""
        self._pieces.close()

    def _iterate(self) -> Generator[str]:
        updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
        answer, ended = _Answer(len(self._request.prompt)), False
        self._backend.submit(self._request, updates.put)
        try:
            while not ended:
                update = updates.get()
                answer.take(update)
                ended = update.finish_reason is not None
                if update.text:
                    yield update.text
        finally:
            if not ended:
                self._backend.cancel(self._request.id)
            while not ended:
                update = updates.get()
                answer.take(update)
                ended = update.finish_reason is not None
            if answer.error is None:
                self.completion = answer.completion()
        if answer.error is not None:
            raise answer.error
