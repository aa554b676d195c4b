"""Answers from an unmodified Hugging Face causal language model, through its own `generate`.

An `Engine` takes prompts as token ids and gives back completions; it batches, streams, stops and counts. It knows
nothing of files, conversations on a terminal, or how the model was loaded. Anything with `generate_each` and
`stream` of the same meaning can take its place.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import GenerationConfig as ModelGenerationConfig
from transformers.generation.streamers import BaseStreamer

from swift.config.inference import GenerationConfig
from swift.core.errors import DataError, SwiftError, UsageError
from swift.core.logging import get_logger
from swift.data.encoding.encode import ChatEncoder
from swift.inference.decoding import IncrementalDecoder, StopScanner, decode, find_stop
from swift.inference.sampling import (
    FiniteCheck,
    LogprobRecorder,
    LogprobWatcher,
    RowSampler,
    Sampling,
    TextStop,
    resolve_sampling,
)
from swift.models.quiet import quiet_transformers

log = get_logger("inference")

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer.

    Attributes:
        tokens: the generated ids; the token that ended the answer is the last one.
        text: their text, without special tokens, cut before a stop word. Thoughts and tool calls are left in.
        finish_reason: `stop` (an end token or a stop word), `length` (out of tokens), `cancelled` (by the caller).
        num_prompt_tokens: length of the prompt.
        logprobs: log-probability of each of `tokens` before temperature and filters, if asked for.
    """

    tokens: list[int]
    text: str
    finish_reason: FinishReason
    num_prompt_tokens: int
    logprobs: list[float] | None = None


class Engine:
    """Generates with one model.

    Args:
        model: a causal language model of transformers, or a PEFT model around one.
        tokenizer: the model's tokenizer.
        encoder: turns conversations into prompts; its tokens end answers.
        max_batch_size: prompts generated together at most. Halved for good when the device runs out of memory.
    """

    def __init__(self, model: Any, tokenizer: Any, encoder: ChatEncoder, *, max_batch_size: int = 8) -> None:
        if max_batch_size < 1:
            raise UsageError(
                f"--max_batch_size {max_batch_size} is not possible", where="--max_batch_size", fix="give 1 or more"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.encoder = encoder
        self.max_batch_size = max_batch_size
        self.stop_token_ids = _stop_tokens(encoder, model.generation_config)

    @property
    def context_length(self) -> int | None:
        """Tokens that prompt and answer may have together; None when the model names no limit."""
        text_config = self.model.config.get_text_config(decoder=True)
        return getattr(text_config, "max_position_embeddings", None)

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Refuse a prompt that can't be answered.

        Raises:
            DataError: it is empty, leaves no room for an answer, or has ids that the model doesn't know.
        """
        if not prompt:
            raise DataError("the prompt is empty", fix="give at least one token of text")
        context = self.context_length
        if context is not None and len(prompt) >= context:
            raise DataError(
                f"the prompt has {len(prompt)} tokens; the model's context is {context} for prompt and answer",
                fix="shorten it, or stretch the context with --rope_scaling",
            )
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        if max(prompt) >= vocabulary or min(prompt) < 0:
            raise DataError(
                f"the prompt has the token id {max(prompt)}, but the model has {vocabulary} tokens",
                fix="use the tokenizer that belongs to the model",
            )

    def generate(
        self,
        prompts: Sequence[list[int]],
        config: GenerationConfig,
        *,
        seeds: Sequence[int] | None = None,
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
        seeds: Sequence[int] | None = None,
        logprobs: bool = False,
    ) -> Iterator[tuple[int, Completion | SwiftError]]:
        """Answer every prompt; yields (index, answer) as batches finish, longest prompts first.

        An answer doesn't depend on which prompts share its batch: padding is on the left, positions start at each
        prompt's first token, and every row draws its own random numbers.

        Args:
            prompts: token ids.
            config: how to generate.
            seeds: one number per prompt, mixed with `config.seed`; default: its index. Equal seeds, equal answers.
            logprobs: also return log-probabilities of the generated tokens.

        Yields:
            For each prompt its completion, or the error that concerns this prompt alone.
        """
        sampling = self.sampling(config)
        if logprobs and sampling.num_beams > 1:
            raise UsageError("log-probabilities of single tokens don't exist in beam search", fix="use --num_beams 1")
        seeds = list(range(len(prompts))) if seeds is None else seeds
        usable: list[int] = []
        for index, prompt in enumerate(prompts):
            try:
                self.check_prompt(prompt)
            except DataError as error:
                yield index, error
            else:
                usable.append(index)
        for limit, group in self._groups(prompts, usable, sampling):
            pending = deque([group])
            while pending:
                rows = pending.popleft()
                if len(rows) > self.max_batch_size:
                    pending.appendleft(rows[self.max_batch_size :])
                    rows = rows[: self.max_batch_size]
                request = _Request([prompts[i] for i in rows], sampling, limit, [seeds[i] for i in rows], logprobs)
                try:
                    answers = self._run(request)
                except torch.OutOfMemoryError as error:
                    if len(rows) == 1:
                        yield rows[0], _out_of_memory(len(prompts[rows[0]]), error)
                        continue
                    self._halve_batches(len(rows))
                    pending.appendleft(rows)
                    continue
                yield from zip(rows, answers, strict=True)

    def stream(self, prompt: list[int], config: GenerationConfig, *, seed: int = 0) -> AnswerStream:
        """Answer one prompt piece by piece.

        Returns:
            An iterator over text pieces: whole characters, nothing of a stop word. Closing it (or an exception inside
            the loop, such as Ctrl-C) ends the generation.

        Raises:
            DataError: the prompt can't be answered.
            UsageError: beam search, which has no answer before its end.
        """
        self.check_prompt(prompt)
        sampling = self.sampling(config)
        if sampling.num_beams > 1:
            raise UsageError(
                f"--num_beams {sampling.num_beams} can't stream: the best beam is known at the end only",
                where="--stream",
                fix="--stream false, or --num_beams 1",
            )
        request = _Request([prompt], sampling, self._limit(len(prompt), sampling), [seed], False)
        return AnswerStream(self, request)

    def sampling(self, config: GenerationConfig) -> Sampling:
        """The settings in force for `config`, defaults taken from the model's own generation settings."""
        return resolve_sampling(config, self.model.generation_config)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of generated tokens, special tokens left out."""
        return decode(self.tokenizer, tokens)

    def end_tokens(self, sampling: Sampling) -> frozenset[int]:
        """Tokens that end an answer: the model's, and stop words that are special tokens (they never show in text)."""
        special = dict(zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True))
        return frozenset(self.stop_token_ids) | {special[word] for word in sampling.stop_words if word in special}

    def _limit(self, num_prompt_tokens: int, sampling: Sampling) -> int:
        context = self.context_length
        return sampling.max_new_tokens if context is None else min(sampling.max_new_tokens, context - num_prompt_tokens)

    def _groups(
        self, prompts: Sequence[list[int]], indices: list[int], sampling: Sampling
    ) -> Iterator[tuple[int, list[int]]]:
        """Prompts by how many tokens their answers may have, each group longest first.

        `generate` runs all rows of a batch to the same length, so rows near the end of the context go apart.
        """
        groups: dict[int, list[int]] = {}
        for index in sorted(indices, key=lambda i: (-len(prompts[i]), i)):
            groups.setdefault(self._limit(len(prompts[index]), sampling), []).append(index)
        yield from sorted(groups.items())

    def _halve_batches(self, tried: int) -> None:
        self.max_batch_size = max(1, tried // 2)
        log.warning("out of memory with %d prompts together; going on with %d", tried, self.max_batch_size)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _run(
        self, request: _Request, streamer: BaseStreamer | None = None, cancelled: threading.Event | None = None
    ) -> list[Completion]:
        """One call of the model's `generate`."""
        device = self.model.device
        sampling = request.sampling
        width = max(map(len, request.prompts))
        pad = self._pad_token_id
        input_ids = [[pad] * (width - len(p)) + list(p) for p in request.prompts]  # [batch, width]
        mask = [[0] * (width - len(p)) + [1] * len(p) for p in request.prompts]
        recorder = LogprobRecorder() if request.logprobs else None
        processors: list[Any] = [FiniteCheck()]
        criteria: list[Any] = [TextStop(self._decode_rows, sampling.stop_words, width, cancelled)]
        if recorder is not None:
            processors.append(recorder)
            criteria.append(LogprobWatcher(recorder))
        if sampling.temperature > 0:
            processors.append(RowSampler(sampling, request.seeds))
        was_training = self.model.training
        self.model.eval()
        try:
            # quiet: the model's own settings may hold a length as well, which `generate` remarks on each time
            with torch.no_grad(), quiet_transformers():
                output = self.model.generate(
                    input_ids=torch.tensor(input_ids, device=device),
                    attention_mask=torch.tensor(mask, device=device),
                    generation_config=self._model_settings(sampling, request.limit),
                    logits_processor=processors,
                    stopping_criteria=criteria,
                    streamer=streamer,
                )
        finally:
            self.model.train(was_training)
        was_cancelled = cancelled is not None and cancelled.is_set()
        logprobs = recorder.rows() if recorder is not None else [None] * len(request.prompts)
        return [
            self._completion(tokens, len(prompt), sampling, was_cancelled, row_logprobs)
            for tokens, prompt, row_logprobs in zip(output[:, width:].tolist(), request.prompts, logprobs, strict=True)
        ]

    def _model_settings(self, sampling: Sampling, limit: int) -> ModelGenerationConfig:
        """Settings for the model's `generate`. It runs greedily (or with beams); sampling is `RowSampler`'s work."""
        return ModelGenerationConfig(
            do_sample=False,
            num_beams=sampling.num_beams,
            repetition_penalty=sampling.repetition_penalty,
            max_new_tokens=limit,
            use_cache=True,
            pad_token_id=self._pad_token_id,
            eos_token_id=sorted(self.end_tokens(sampling)) or None,
        )

    @property
    def _pad_token_id(self) -> int:
        """Any token does: padding is masked, and what follows the end of an answer is cut."""
        if self.tokenizer.pad_token_id is not None:
            return self.tokenizer.pad_token_id
        return self.stop_token_ids[0] if self.stop_token_ids else 0

    def _decode_rows(self, rows: list[list[int]]) -> list[str]:
        return [self.decode(row) for row in rows]

    def _completion(
        self,
        tokens: list[int],
        num_prompt_tokens: int,
        sampling: Sampling,
        cancelled: bool,
        logprobs: list[float] | None,
    ) -> Completion:
        """Cut a generated row, which may go on with padding, where the answer ends."""
        reason: FinishReason = "cancelled" if cancelled else "length"
        ends = self.end_tokens(sampling)
        end = next((i for i, token in enumerate(tokens) if token in ends), None)
        if end is not None:
            tokens, reason = tokens[: end + 1], "stop"
        body = tokens if end is None else tokens[:-1]
        text = self.decode(body)
        cut = find_stop(text, sampling.stop_words)
        if cut is not None:
            text, reason = text[:cut], "stop"
            tokens = body[: self._tokens_until_stop(body, sampling.stop_words)]
        return Completion(tokens, text, reason, num_prompt_tokens, logprobs and logprobs[: len(tokens)])

    def _tokens_until_stop(self, tokens: list[int], stop_words: Sequence[str]) -> int:
        """How many tokens it took until the stop word was complete."""
        decoder, scanner = IncrementalDecoder(self.tokenizer), StopScanner(stop_words)
        for count, token in enumerate(tokens, 1):
            scanner.push(decoder.push(token))
            if scanner.stopped:
                return count
        return len(tokens)


@dataclass(frozen=True)
class _Request:
    """What one call of `generate` works on; `limit` is the number of new tokens."""

    prompts: list[list[int]]
    sampling: Sampling
    limit: int
    seeds: list[int]
    logprobs: bool


class AnswerStream(Iterator[str]):
    """The pieces of one answer. `completion` is set once the generation has ended, whichever way.

    The model runs in a thread of its own, since `generate` returns at the end only.
    """

    def __init__(self, engine: Engine, request: _Request) -> None:
        self.completion: Completion | None = None
        self._engine = engine
        self._request = request
        self._cancelled = threading.Event()
        self._tokens: queue.Queue[int | None] = queue.Queue()
        self._error: BaseException | None = None
        self._pieces: Generator[str] = self._iterate()

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """End the generation now; `completion` then holds what there is."""
        self._pieces.close()

    def _iterate(self) -> Generator[str]:
        thread = threading.Thread(target=self._work, name="generate", daemon=True)
        thread.start()
        decoder = IncrementalDecoder(self._engine.tokenizer)
        scanner = StopScanner(self._request.sampling.stop_words)
        ends = self._engine.end_tokens(self._request.sampling)
        try:
            while (token := self._tokens.get()) is not None:
                piece = "" if token in ends else scanner.push(decoder.push(token))
                if piece:
                    yield piece
            rest = scanner.push(decoder.flush()) + scanner.flush()
            if rest:
                yield rest
        finally:
            self._cancelled.set()
            thread.join()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            streamer = _TokenQueue(self._tokens.put)
            self.completion = self._engine._run(self._request, streamer, self._cancelled)[0]
        except BaseException as error:  # the thread's boundary: raised again by the consumer
            self._error = error
        finally:
            self._tokens.put(None)


class _TokenQueue(BaseStreamer):
    """Hands on each generated token; the first thing `generate` puts is the prompt, which is left out."""

    def __init__(self, put: Callable[[int], None]) -> None:
        self._put = put
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self._put(int(value.item()))
        self._prompt_seen = True

    def end(self) -> None:
        """The worker tells the end itself, errors included."""


def _stop_tokens(encoder: ChatEncoder, settings: Any) -> list[int]:
    """End tokens of the chat encoding and of the model's own settings, each once."""
    own = settings.eos_token_id
    own = [] if own is None else own if isinstance(own, list) else [own]
    return list(dict.fromkeys([*encoder.stop_token_ids(), *own]))


def _out_of_memory(num_tokens: int, error: Exception) -> SwiftError:
    first_line = str(error).splitlines()[0] if str(error) else "out of memory"
    return SwiftError(
        f"out of memory while answering a prompt of {num_tokens} tokens: {first_line}",
        fix="shorten the prompt, lower --max_new_tokens, or use --torch_dtype bfloat16",
    )
