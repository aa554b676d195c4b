"""Answers by transformers' own `generate`, a batch of waiting requests at a time.

What runs a model that the paged engine can't run: whatever transformers can generate with, unmodified. `generate` runs
its greedy loop; a `Chooser` leaves it one candidate per row, so that requests of different settings share a batch and
an answer is what the other engines would give. A batch runs until its longest answer has ended; what comes meanwhile
waits. Knows nothing of conversations or files.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import GenerationConfig as ModelGenerationConfig

from swift.core.errors import DataError, SwiftError, UsageError
from swift.core.logging import get_logger
from swift.inference.backends.base import EngineStats, ModelInfo
from swift.inference.backends.hooks import Choosing, Done, Row, Unwanted
from swift.inference.backends.prompt import check_prompt
from swift.inference.choosing.checks import check_params
from swift.inference.choosing.chooser import Choice, Chooser, Run
from swift.inference.decoding import AnswerText
from swift.inference.requests import FinishReason, Request, SamplingParams, Sink, Update
from swift.inference.sampling import FiniteCheck
from swift.models.quiet import quiet_transformers

log = get_logger("inference")

_GATHER_S = 0.005  # requests that come so soon after one another share the first batch


class TransformersBackend:
    """See `Backend`.

    Args:
        model: a causal language model of transformers, or a PEFT model around one. It isn't changed.
        tokenizer: of the model.
        stop_token_ids: what ends an answer.
        max_batch_size: prompts generated together at most. Halved for good when the device runs out of memory.
    """

    name = "transformers"

    def __init__(self, model: Any, tokenizer: Any, stop_token_ids: Sequence[int], *, max_batch_size: int = 8) -> None:
        if max_batch_size < 1:
            raise UsageError(
                f"--max_batch_size {max_batch_size} is not possible", where="--max_batch_size", fix="give 1 or more"
            )
        text_config = model.config.get_text_config(decoder=True)
        self._info = ModelInfo(
            context_length=getattr(text_config, "max_position_embeddings", None),
            vocab_size=model.get_input_embeddings().weight.shape[0],
            stop_token_ids=tuple(stop_token_ids),
            features=frozenset({"logprobs", "structure", "beams", "penalties", "logit_bias", "min_p"}),
            max_logprobs=1000,
        )
        self._worker = _Worker(model, tokenizer, self._info, max_batch_size)
        # a thread inside of torch while the interpreter ends would crash it
        self._finalizer = weakref.finalize(self, self._worker.close)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def max_batch_size(self) -> int:
        """Prompts generated together at most, by now."""
        return self._worker.max_batch_size

    def start(self) -> None:
        self._worker.start()

    def close(self) -> None:
        self._finalizer()

    def submit(self, request: Request, sink: Sink) -> None:
        check_prompt(request.prompt, self._info)
        check_params(request.params, self._info)
        self._worker.check(request.params)
        _check_beams(request)
        if request.adapter is not None:
            self._refuse("adapters by name")
        self._worker.submit(request, sink)

    def cancel(self, request_id: str) -> None:
        self._worker.cancel(request_id)

    def stats(self) -> EngineStats:
        return self._worker.stats()

    def load_adapter(self, name: str, folder: Path) -> None:
        self._refuse("adapters by name")

    def unload_adapter(self, name: str) -> None:
        self._refuse("adapters by name")

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._refuse("new weights while it runs")

    def sleep(self, level: int = 1) -> None:
        self._refuse("sleep")

    def wake(self) -> None:
        self._refuse("sleep")

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"transformers' generate offers no {what}",
            where="--infer_backend transformers",
            fix="--infer_backend swift",
        )


def _check_beams(request: Request) -> None:
    """`generate` searches by its own scores."""
    params = request.params
    given = {
        "presence_penalty": params.presence_penalty != 0,
        "frequency_penalty": params.frequency_penalty != 0,
        "logit_bias": bool(params.logit_bias),
    }
    for name in (name for name, wanted in given.items() if wanted and params.num_beams > 1):
        raise UsageError(
            f"num_beams {params.num_beams} and {name} don't go together here",
            where="num_beams",
            fix=f"leave out num_beams or {name}, or use --infer_backend swift",
        )


class _Worker:
    """The thread that generates."""

    def __init__(self, model: Any, tokenizer: Any, info: ModelInfo, max_batch_size: int) -> None:
        self.max_batch_size = max_batch_size
        self._model, self._tokenizer, self._info = model, tokenizer, info
        self._chooser = Chooser(info.vocab_size, model.device, tokenizer)
        self._special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        self._changed = threading.Condition()
        self._waiting: list[Row] = []
        self._running: list[Row] = []
        self._arrivals = 0
        self._closing = False
        self._stats = EngineStats()
        self._thread = threading.Thread(target=self._run, name="generate", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End all requests as cancelled, and the thread."""
        with self._changed:
            self._closing = True
            for row in self._running:
                row.cancelled = True
            self._changed.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def check(self, params: SamplingParams) -> None:
        """Refuse a form of answers that isn't possible."""
        self._chooser.check(params)

    def submit(self, request: Request, sink: Sink) -> None:
        params = request.params
        context = self._info.context_length
        most = [context] if context is not None else []
        if params.max_new_tokens is not None:
            most.append(len(request.prompt) + params.max_new_tokens)
        if not most:
            raise UsageError("max_new_tokens is needed: the model names no limit of its own", where="max_new_tokens")
        # a stop word that is a special token never shows in the text
        ends = frozenset(() if params.ignore_eos else self._info.stop_token_ids) | frozenset(params.stop_token_ids)
        ends |= {self._special[word] for word in params.stop if word in self._special}
        text = AnswerText(self._tokenizer, params.stop, skip_special_tokens=params.skip_special_tokens)
        state = self._chooser.begin(request, ends)
        with self._changed:
            if self._closing:
                raise SwiftError("the engine is closed", fix="make a new one")
            self._arrivals += 1
            row = Row(request, sink, self._arrivals, list(request.prompt), min(most), ends, state, text)
            self._waiting.append(row)
            self._changed.notify()

    def cancel(self, request_id: str) -> None:
        with self._changed:
            for row in self._running:
                row.cancelled = row.cancelled or row.request.id == request_id
            found = [row for row in self._waiting if row.request.id == request_id]
            self._waiting = [row for row in self._waiting if row.request.id != request_id]
        for row in found:
            self._end(row, "cancelled")

    def stats(self) -> EngineStats:
        with self._changed:
            running = sum(not row.done for row in self._running)
            return replace(self._stats, num_running=running, num_waiting=len(self._waiting))

    # --- in the thread ---

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._closing):
                    self._changed.wait()
                while not self._closing and len(self._waiting) < self.max_batch_size:
                    if not self._changed.wait(_GATHER_S):
                        break
                if self._closing:
                    break
                batch = self._running = self._next_batch()
            self._answer(batch)
        for row in self._waiting:
            self._end(row, "cancelled")
        self._waiting = []

    def _next_batch(self) -> list[Row]:
        """The oldest waiting request and those of like length, longest first; they wait no longer."""
        if not self._waiting:  # cancelled
            return []
        first = min(self._waiting, key=lambda row: (row.request.priority, row.arrival))
        alike = [row for row in self._waiting if row.beam_key() == first.beam_key()]
        alike.sort(key=lambda row: (-len(row.tokens), row.arrival))
        start = alike.index(first) // self.max_batch_size * self.max_batch_size
        batch: list[Row] = []
        for row in [first, *alike[start : start + self.max_batch_size]]:
            if row not in batch and self._fits([*batch, row]):
                batch.append(row)
        self._waiting = [row for row in self._waiting if row not in batch]
        return sorted(batch, key=lambda row: (-len(row.tokens), row.arrival))

    def _fits(self, rows: list[Row]) -> bool:
        """`generate` runs all rows of a batch to the same length: rows near the end of the context go apart."""
        context = self._info.context_length
        longest = max(len(row.tokens) for row in rows)
        return len(rows) == 1 or context is None or longest + max(row.room for row in rows) <= context

    def _answer(self, batch: list[Row]) -> None:
        if not batch:
            return
        try:
            if batch[0].request.params.num_beams > 1:
                self._search(batch)
            else:
                self._generate(batch, [Choosing(self, batch)], [Done(batch)], {})
        except torch.OutOfMemoryError as error:
            self._out_of_memory([row for row in batch if not row.done], error)
        except Exception as error:  # the thread's boundary: everyone who waits is told
            if not isinstance(error, SwiftError):
                log.error("generation failed", exc_info=error)
                error = SwiftError(f"generation failed: {type(error).__name__}: {error}")
            for row in batch:
                self._end(row, "error", error=error)
        with self._changed:
            self._running = []

    def _generate(self, batch: list[Row], processors: list[Any], criteria: list[Any], settings: dict[str, Any]) -> Any:
        """One call of the model's `generate`; [batch, seq] and the width of the prompts."""
        device = self._model.device
        width = max(len(row.tokens) for row in batch)
        pad = self.pad_token_id
        self._stats.steps += 1
        self._stats.prompt_tokens += sum(len(row.tokens) for row in batch)
        was_training = self._model.training
        self._model.eval()
        try:
            # quiet: the model's own settings may hold a length as well, which `generate` remarks on each time
            with torch.no_grad(), quiet_transformers():
                output = self._model.generate(
                    input_ids=torch.tensor([[pad] * (width - len(r.tokens)) + r.tokens for r in batch], device=device),
                    attention_mask=torch.tensor(
                        [[0] * (width - len(r.tokens)) + [1] * len(r.tokens) for r in batch], device=device
                    ),
                    generation_config=ModelGenerationConfig(
                        **{
                            "do_sample": False,
                            "num_beams": 1,
                            "repetition_penalty": 1.0,
                            "min_new_tokens": 0,
                            "max_new_tokens": max(row.room for row in batch),
                            "use_cache": True,
                            "pad_token_id": pad,
                            "eos_token_id": [self._info.vocab_size],  # none: `Done` knows when a row has ended
                            **settings,
                        }
                    ),
                    logits_processor=processors,
                    stopping_criteria=criteria,
                )
        finally:
            self._model.train(was_training)
        return output[:, width:].tolist()

    def _search(self, batch: list[Row]) -> None:
        """Beam search, whose answer is known at its end only."""
        params, ends = batch[0].request.params, batch[0].ends
        settings = {
            "num_beams": params.num_beams,
            "length_penalty": params.length_penalty,
            "repetition_penalty": params.repetition_penalty,
            "min_new_tokens": params.min_new_tokens,
            "eos_token_id": sorted(ends) or [self._info.vocab_size],
        }
        for row, tokens in zip(batch, self._generate(batch, [FiniteCheck()], [Unwanted(batch)], settings), strict=True):
            end = next((i for i, token in enumerate(tokens) if token in ends), None)
            tokens = tokens if end is None else tokens[: end + 1]
            reason: FinishReason = "cancelled" if row.cancelled else "length" if end is None else "stop"
            text = "".join(row.text.push(token) for token in (tokens if end is None else tokens[:-1]))
            row.tokens += tokens
            self._stats.generated_tokens += len(tokens)
            self._end(row, reason, Update(row.request.id, tokens=tokens, text=text))

    def choose(self, rows: list[Row], scores: torch.Tensor) -> list[list[Choice] | SwiftError]:
        """The next token of each row; scores [rows, vocab]."""
        return self._chooser.choose(scores, [Run(row.state) for row in rows])

    def take(self, row: Row, choice: Choice) -> None:
        """Give a row its next token, and its owner the news."""
        params = row.request.params
        row.tokens.append(choice.token)
        self._stats.generated_tokens += 1
        ended = choice.token in row.ends
        update = Update(row.request.id, tokens=[choice.token], num_prompt_tokens=len(row.request.prompt))
        update.logprobs = None if params.logprobs is None or choice.logprob is None else [choice.logprob]
        update.text = "" if ended else row.text.push(choice.token)
        if ended or row.text.stopped_by is not None:
            update.stop_reason = self._stop_reason(row)
            self._end(row, "stop", update)
        elif row.room <= 0:
            self._end(row, "length", update)
        else:
            row.sink(update)

    def end(self, row: Row, error: SwiftError | None = None) -> None:
        """A row that goes on no more: cancelled, or with an error."""
        self._end(row, "cancelled" if error is None else "error", error=error)

    @property
    def pad_token_id(self) -> int:
        """Any token does: padding is masked, and what follows the end of an answer isn't looked at."""
        own = self._tokenizer.pad_token_id
        return own if own is not None else next(iter(self._info.stop_token_ids), 0)

    def _stop_reason(self, row: Row) -> str | int | None:
        """The request's own stop that ended the answer; None for the model's end."""
        if row.text.stopped_by is not None:
            return row.text.stopped_by
        last, params = row.tokens[-1], row.request.params
        word = next((word for word in params.stop if self._special.get(word) == last), None)
        return word if word is not None else last if last in params.stop_token_ids else None

    def _end(
        self, row: Row, reason: FinishReason, update: Update | None = None, error: SwiftError | None = None
    ) -> None:
        if row.done:
            return
        row.done = True
        update = update or Update(row.request.id)
        update.num_prompt_tokens = len(row.request.prompt)
        update.text += row.text.flush()
        update.finish_reason, update.error = reason, error
        row.sink(update)

    def _out_of_memory(self, rows: list[Row], error: Exception) -> None:
        """Go on with fewer at a time, from where the answers are; a row that doesn't fit alone gets the error."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if len(rows) == 1:
            self._end(rows[0], "error", error=_too_large(len(rows[0].tokens), error))
            return
        self.max_batch_size = max(1, len(rows) // 2)
        log.warning("out of memory with %d prompts together; going on with %d", len(rows), self.max_batch_size)
        with self._changed:
            self._waiting += rows


def _too_large(num_tokens: int, error: Exception) -> DataError:
    first_line = str(error).splitlines()[0] if str(error) else "out of memory"
    return DataError(
        f"out of memory while answering a prompt of {num_tokens} tokens: {first_line}",
        fix="shorten the prompt, lower --max_new_tokens, or use --torch_dtype bfloat16",
    )
