"""The engine without its thread: sequences in, steps, updates out.

One step: the scheduler plans pieces, the runner computes them, the chooser chooses tokens, and each sequence is told.
The same requests in the same order give the same answers, and an answer doesn't depend on what else is computed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from swift.core.errors import NumericsError, SwiftError, UsageError
from swift.core.logging import get_logger
from swift.core.memory import return_free_memory
from swift.inference.backends.base import EngineStats
from swift.inference.choosing.chooser import Choice, Chooser, Run
from swift.inference.decoding import AnswerText
from swift.inference.paged.adapters import AdapterSlots
from swift.inference.paged.beam_search import BeamSearch
from swift.inference.paged.guess import Guesser
from swift.inference.paged.pace import Pace
from swift.inference.paged.scheduler import Scheduler
from swift.inference.paged.sequence import Piece, Sequence
from swift.inference.requests import FinishReason, Request, Sink, Update

log = get_logger("inference")

# requests after which freed memory goes back to the system; ever other sizes of steps leave holes in it
_TIDY_EVERY = 256


def tell(sink: Sink, update: Update) -> None:
    """Hand an update to a request's owner, whose faults are the owner's alone."""
    try:
        sink(update)
    except Exception:  # a boundary: what others wrote is called here
        log.exception("what takes the answer of request %s failed", update.request_id)


class Runs(Protocol):
    """What computes steps: `ModelRunner`, or another library's way."""

    def run(self, pieces: list[Piece[Sequence]]) -> torch.Tensor: ...

    def copy_block(self, source: int, target: int) -> None: ...


@dataclass
class Parts:
    """What an engine is made of.

    Attributes:
        runner, scheduler, chooser, adapters: see there.
        tokenizer: makes text.
        stop_token_ids: what ends an answer.
        context_length: most tokens of prompt and answer.
        guesser: guesses tokens; None for none.
        pace: adapts the limits of steps; None leaves them.
    """

    runner: Runs
    scheduler: Scheduler
    chooser: Chooser
    adapters: AdapterSlots
    tokenizer: Any
    stop_token_ids: frozenset[int]
    context_length: int
    guesser: Guesser | None = None
    pace: Pace | None = None


class EngineCore:
    """Runs requests step by step.

    Args:
        parts: see `Parts`.

    Attributes:
        stats: counts since the start.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._sequences: dict[str, list[Sequence]] = {}  # of each request; several only in beam search
        self._leaders: dict[str, Sequence] = {}
        self._roots: dict[int, int] = {}  # adapter slot -> where its texts begin
        self._arrivals = 0
        self._computed = self._ended = 0
        self._most_requests = parts.scheduler.limits.requests
        self.stats = EngineStats()
        special = zip(parts.tokenizer.all_special_tokens, parts.tokenizer.all_special_ids, strict=True)
        self._special = dict(special)

    @property
    def scheduler(self) -> Scheduler:
        """Who waits and who runs."""
        return self._parts.scheduler

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._sequences)

    def has(self, request_id: str) -> bool:
        """Whether a request is here."""
        return request_id in self._sequences

    def add(self, request: Request, sink: Sink) -> None:
        """Take a request."""
        parts, params = self._parts, request.params
        try:
            if self.has(request.id):
                raise UsageError(f"there is a request called {request.id!r} already", fix="give each an id of its own")
            adapter = 0 if request.adapter is None else parts.adapters.slot(request.adapter)
            # a stop word that is a special token never shows in the text
            ends = frozenset(() if params.ignore_eos else parts.stop_token_ids) | frozenset(params.stop_token_ids)
            ends |= {self._special[word] for word in params.stop if word in self._special}
            state = parts.chooser.begin(request, ends)
        except SwiftError as error:  # an adapter that was unloaded meanwhile
            tell(sink, Update(request.id, finish_reason="error", error=error, num_prompt_tokens=len(request.prompt)))
            return
        most = math.inf if params.max_new_tokens is None else params.max_new_tokens
        root = self._root(adapter)
        limit = int(min(parts.context_length, len(request.prompt) + most))
        sequence = Sequence(
            request=request,
            sink=sink,
            arrival=self._next_arrival(),
            tokens=list(request.prompt),
            limit=limit,
            ends=ends,
            root=root,
            node=root,
            adapter=adapter,
            state=state,
            text=self._text(request),
            leader=self._leader(request),
            beams=BeamSearch(parts.chooser, request, ends, limit) if params.num_beams > 1 else None,
            prompt_logprobs=None if params.prompt_logprobs is None else [None] * len(request.prompt),
        )
        if request.group is not None and sequence.leader is None:
            self._leaders[request.group] = sequence
        self._sequences[request.id] = [sequence]
        parts.scheduler.add(sequence)

    def cancel(self, request_id: str) -> None:
        """End a request, if it is still there."""
        for sequence in self._sequences.get(request_id, [])[:1]:
            self._end(sequence, "cancelled", text=sequence.text.flush())

    def end_all(self, error: SwiftError | None = None) -> None:
        """End every request: as cancelled, or with an error."""
        for sequences in list(self._sequences.values()):
            self._end(sequences[0], "cancelled" if error is None else "error", error=error)

    def step(self) -> None:
        """Compute one step and send what is new."""
        begun = time.perf_counter()
        pieces = self._compute()
        if self._parts.pace is not None and pieces:
            tokens = sum(len(piece.tokens) for piece in pieces)
            self._parts.scheduler.limits = self._parts.pace.limits_after(tokens, time.perf_counter() - begun)

    def _compute(self) -> list[Piece[Sequence]]:
        """Plan, compute and hand out; returns what was computed."""
        parts = self._parts
        self._guess()
        pieces = parts.scheduler.plan()
        if not pieces:
            self._give_one_up()
            return []
        self._count(pieces)
        logits = parts.runner.run(pieces)
        answering: list[tuple[Piece[Sequence], torch.Tensor]] = []
        for piece, rows in zip(pieces, logits.split([len(piece.wants) for piece in pieces]), strict=True):
            sequence = piece.sequence
            if sequence not in self._sequences.get(sequence.request.id, ()):
                continue  # a beam computed again after it lost its blocks; the search has moved on without it
            if sequence.prompt_logprobs is not None:
                self._take_prompt_logprobs(piece, rows)
            if piece.start + len(piece.tokens) - piece.num_drafts < len(sequence.tokens):  # the prompt isn't complete
                parts.scheduler.done(piece)
            elif sequence.beams is not None:
                parts.scheduler.done(piece)
                self._advance_beams(sequence, rows[-1:])
            else:
                answering.append((piece, rows[len(rows) - 1 - piece.num_drafts :]))
        if answering:
            self._choose(answering, logits)
        return pieces

    def _give_one_up(self) -> None:
        """Nobody can go on: those who have blocks wait for others of their search, for whom there are none."""
        last = max((self._sequences[name][0] for name in self._sequences), key=Sequence.order)
        reason = UsageError(
            "the KV cache is too small for this request's beams",
            fix="fewer --num_beams, a shorter answer, or more --kv_cache_gib",
        )
        self._end(last, "error", error=reason)

    def _choose(self, answering: list[tuple[Piece[Sequence], torch.Tensor]], logits: torch.Tensor) -> None:
        """Choose the next tokens of those whose text is complete, and tell them."""
        runs = [
            Run(piece.sequence.state, tuple(piece.tokens[len(piece.tokens) - piece.num_drafts :]))
            for piece, _ in answering
        ]
        all_rows = sum(len(rows) for _, rows in answering) == len(logits)
        scores = logits if all_rows else torch.cat([rows for _, rows in answering])
        for (piece, _), chosen in zip(answering, self._parts.chooser.choose(scores, runs), strict=True):
            self._take(piece, chosen)

    def _take(self, piece: Piece[Sequence], chosen: list[Choice] | SwiftError) -> None:
        """Give a sequence its new tokens, and its owner the news."""
        sequence = piece.sequence
        if isinstance(chosen, SwiftError):
            self._end(sequence, "error", error=chosen)
            return
        params = sequence.request.params
        update = self._update(sequence)
        update.logprobs = None if params.logprobs is None else []
        text: list[str] = []
        for choice in chosen:
            sequence.tokens.append(choice.token)
            update.tokens.append(choice.token)
            if update.logprobs is not None and choice.logprob is not None:
                update.logprobs.append(choice.logprob)
            ended = choice.token in sequence.ends
            if not ended:
                text.append(sequence.text.push(choice.token))
            reason = self._reason(sequence, choice.token, ended)
            if reason is not None:
                update.finish_reason = reason
                break
        self._parts.scheduler.done(piece, len(update.tokens) - 1)
        self.stats.generated_tokens += len(update.tokens)
        self.stats.draft_tokens += piece.num_drafts
        self.stats.accepted_tokens += len(update.tokens) - 1
        if update.finish_reason is None:
            update.text = "".join(text)
            sequence.begun = True
            tell(sequence.sink, update)
            return
        update.stop_reason = self._stop_reason(sequence)
        self._end(sequence, update.finish_reason, update=update, text="".join(text) + sequence.text.flush())

    def _reason(self, sequence: Sequence, token: int, ended: bool) -> FinishReason | None:
        if ended or sequence.text.stopped_by is not None or sequence.state.complete:
            return "stop"
        return "length" if len(sequence.tokens) >= sequence.limit else None

    def _stop_reason(self, sequence: Sequence) -> str | int | None:
        """The request's own stop that ended the answer; None for the model's end."""
        if sequence.text.stopped_by is not None:
            return sequence.text.stopped_by
        last, params = sequence.tokens[-1], sequence.request.params
        for word in params.stop:
            if self._special.get(word) == last:
                return word
        return last if last in params.stop_token_ids else None

    def _take_prompt_logprobs(self, piece: Piece[Sequence], rows: torch.Tensor) -> None:
        """Rows of the prompt tell its next tokens; kept by position, since a prompt may be computed twice."""
        sequence = piece.sequence
        assert sequence.prompt_logprobs is not None
        first = piece.start + piece.wants.start
        count = min(len(rows), sequence.num_prompt - 1 - first)
        if count <= 0:
            return
        targets = sequence.tokens[first + 1 : first + 1 + count]
        num = sequence.request.params.prompt_logprobs or 0
        found = self._parts.chooser.prompt_logprobs(rows[:count], targets, num)
        sequence.prompt_logprobs[first + 1 : first + 1 + count] = found

    def _advance_beams(self, sequence: Sequence, row: torch.Tensor) -> None:
        """Beams move on together, once each has its scores."""
        search: BeamSearch = sequence.beams
        members = self._sequences[sequence.request.id]
        try:
            moved = search.advance(members, sequence, row)
        except NumericsError as error:
            self._end(sequence, "error", error=error)
            return
        if moved is None:
            return
        if moved == []:
            tokens = search.best()
            update = self._update(sequence)
            text = self._text(sequence.request)
            ended = bool(tokens) and tokens[-1] in sequence.ends
            pieces = [text.push(token) for token in (tokens[:-1] if ended else tokens)]
            update.tokens = tokens
            self.stats.generated_tokens += len(tokens)
            self._end(sequence, "stop" if ended else "length", update=update, text="".join(pieces) + text.flush())
            return
        self._replace_beams(members, moved)

    def _replace_beams(self, members: list[Sequence], moved: list[tuple[Sequence, int]]) -> None:
        """New beams take the cached tokens of those that they go on from."""
        scheduler = self._parts.scheduler
        beams = []
        for parent, token in moved:
            beam = Sequence(
                request=parent.request,
                sink=parent.sink,
                arrival=parent.arrival,
                tokens=[*parent.tokens],
                limit=parent.limit,
                ends=parent.ends,
                root=parent.root,
                node=parent.root,
                adapter=parent.adapter,
                state=parent.state,
                text=parent.text,
                beams=parent.beams,
                begun=True,
            )
            copied = scheduler.fork(parent, beam)
            if copied is not None:
                self._parts.runner.copy_block(*copied)
            beam.tokens.append(token)
            beams.append(beam)
        for member in members:
            scheduler.remove(member)
        for beam in beams:
            scheduler.adopt(beam)
        self._sequences[beams[0].request.id] = beams

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        error: SwiftError | None = None,
        update: Update | None = None,
        text: str = "",
    ) -> None:
        """The last update of a request, and its blocks back."""
        request = sequence.request
        update = update or self._update(sequence)
        for member in self._sequences.pop(request.id):
            self._parts.scheduler.remove(member)
        if request.group is not None and self._leaders.get(request.group) is sequence:
            del self._leaders[request.group]
        update.finish_reason, update.error, update.text = reason, error, text
        tell(sequence.sink, update)
        self._ended += 1
        if self._ended % _TIDY_EVERY == 0:
            return_free_memory()

    def _update(self, sequence: Sequence) -> Update:
        request = sequence.request
        first = not sequence.begun
        return Update(
            request.id,
            num_prompt_tokens=len(request.prompt),
            num_cached_tokens=sequence.num_cached,
            prompt_logprobs=sequence.prompt_logprobs if first else None,
        )

    def _guess(self) -> None:
        """Guess the next tokens of those who are answering."""
        guesser, running = self._parts.guesser, self._parts.scheduler.running
        if guesser is None:
            return
        guesser.keep_only(running)
        answering = [s for s in running if s.num_pending == 1 and s.prompt_done and s.beams is None]
        if answering:
            guesser.guess(answering)

    def _leader(self, request: Request) -> Sequence | None:
        leader = self._leaders.get(request.group) if request.group is not None else None
        return leader if leader is not None and leader.request.prompt == request.prompt else None

    def _text(self, request: Request) -> AnswerText:
        params = request.params
        return AnswerText(self._parts.tokenizer, params.stop, skip_special_tokens=params.skip_special_tokens)

    def _root(self, adapter: int) -> int:
        if adapter not in self._roots:
            self._roots[adapter] = self._parts.scheduler.pool.new_root()
        return self._roots[adapter]

    def _next_arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals

    def forget_texts(self, adapters: Iterable[int] | None = None) -> None:
        """What was computed is out of date: of some adapters, or (None) everything."""
        if adapters is None:
            self._parts.scheduler.pool.forget()
            self._roots.clear()
            return
        for adapter in adapters:
            self._roots.pop(adapter, None)

    def _count(self, pieces: list[Piece[Sequence]]) -> None:
        stats, scheduler = self.stats, self._parts.scheduler
        stats.steps += 1
        self._computed += len(pieces)
        stats.utilisation = self._computed / (stats.steps * self._most_requests)
        stats.preemptions = scheduler.preemptions
        for piece in pieces:
            sequence = piece.sequence
            if not sequence.begun and piece.start + len(piece.tokens) >= sequence.num_prompt:
                stats.prompt_tokens += sequence.num_prompt
                stats.cached_tokens += sequence.num_cached
