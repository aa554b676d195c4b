"""Chooses the next tokens of many requests from one batch of scores.

What a request gets depends on its own scores, settings and draws, bit for bit: never on which rows are beside it, nor
on whether tokens were guessed ahead. Guesses are held against what would have been chosen without them, each place
with its own draw, so an answer with them is the answer without them. Knows nothing of models, caches or text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from swift.core.errors import NumericsError, SwiftError, UsageError
from swift.inference.choosing.filters import Filters, row_argmax, sample_tokens, take_rows
from swift.inference.choosing.penalties import Counts, add_bias, forbid, has_penalties, penalise
from swift.inference.choosing.structured import Matcher, Structures, apply_masks
from swift.inference.requests import Request, SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token; `logprob` where the request asks for it."""

    token: int
    logprob: TokenLogprob | None = None


@dataclass(slots=True)
class RowState:
    """What is kept of one request between its tokens.

    Attributes:
        params: its settings.
        ends: ids that end the answer.
        draws: its random numbers, one of which chooses each sampled token.
        counts: its tokens, where penalties need them.
        matcher: follows its structure, if it has one.
        tokens_so_far: of the answer.
    """

    params: SamplingParams
    ends: frozenset[int]
    draws: random.Random
    counts: Counts | None = None
    matcher: Matcher | None = None
    tokens_so_far: list[int] = field(default_factory=list)

    @property
    def plain(self) -> bool:
        """Whether the next token is the one of the highest score as it stands."""
        processed = self.counts is not None or self.matcher is not None or bool(self.params.logit_bias)
        return self.params.temperature == 0 and not processed and not self.ends_forbidden

    @property
    def complete(self) -> bool:
        """Whether the answer has the structure asked for and nothing but an end can follow."""
        return self.matcher is not None and self.matcher.complete

    @property
    def ends_forbidden(self) -> bool:
        """Whether the answer is too short to end."""
        return len(self.tokens_so_far) < self.params.min_new_tokens and bool(self.ends)

    def take(self, token: int) -> None:
        """Add a token to the answer."""
        self.tokens_so_far.append(token)
        if self.matcher is not None:
            self.matcher.take(token)
        if self.counts is not None:
            self.counts.add(token)


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows of scores of one request: one, and one more for each guessed token."""

    state: RowState
    drafts: tuple[int, ...] = ()


class Chooser:
    """Chooses tokens for any number of requests.

    Args:
        vocab_size: columns of the scores.
        device: where tokens are chosen.
        tokenizer: whose tokens they are; only structures ask for it.
    """

    def __init__(self, vocab_size: int, device: torch.device | str, tokenizer: Any = None) -> None:
        self.vocab_size = vocab_size
        self._device = torch.device(device)
        self._structures = None if tokenizer is None else Structures(tokenizer, vocab_size)

    def check(self, params: SamplingParams) -> None:
        """Prepare what the settings need, in the caller's thread; `check_params` has passed them.

        Raises:
            UsageError: the structure is not possible.
        """
        if params.structure is None:
            return
        if self._structures is None:
            raise UsageError("a structure needs the model's tokenizer", where="structure", fix="leave it out")
        self._structures.check(params.structure)

    def begin(self, request: Request, end_tokens: frozenset[int]) -> RowState:
        """The state of a request that has no answer yet.

        Args:
            request: its settings passed `check_params` and `check`.
            end_tokens: ids that end the answer: the model's own (without `ignore_eos`) and the request's.
        """
        params = request.params
        matcher = None
        if params.structure is not None and self._structures is not None:
            matcher = self._structures.begin(params.structure, end_tokens)
        return RowState(
            params=params,
            ends=end_tokens,
            draws=random.Random(params.seed),
            counts=Counts(request.prompt) if has_penalties(params) else None,
            matcher=matcher,
        )

    def choose(self, logits: torch.Tensor, runs: Sequence[Run]) -> list[list[Choice] | SwiftError]:
        """The next tokens of each run: its drafts as far as they are right, and one more.

        Nothing is chosen after a token that ends the answer, or once its structure is complete. The states take the
        tokens.

        Args:
            logits: [rows, vocab] fp32, not changed; row i of a run holds the scores of the token after its first i
                drafts.
            runs: whose rows they are, in order.

        Returns:
            for each run its tokens, or the error that ends it alone: its scores are NaN or infinite, or its structure
            can't be followed.
        """
        scores = self._as_scores(logits)
        firsts = [0]
        for run in runs:
            firsts.append(firsts[-1] + len(run.drafts) + 1)
        if firsts[-1] != scores.shape[0]:
            raise ValueError(f"{scores.shape[0]} rows of scores for {firsts[-1]} places")
        plain = self._plain_tokens(scores, runs, firsts)
        chosen: list[list[int]] = [[] for _ in runs]
        errors: dict[int, SwiftError] = {}
        active, place = list(range(len(runs))), 0
        while active:
            tokens = self._choose_place(scores, [(runs[i].state, firsts[i] + place) for i in active], plain)
            going = []
            for i, token in zip(active, tokens):
                if isinstance(token, SwiftError):
                    errors[i] = token
                    continue
                chosen[i].append(token)
                try:
                    if _goes_on(runs[i], place, token):
                        going.append(i)
                except SwiftError as error:
                    errors[i] = error
            active, place = going, place + 1
        logprobs = self._logprobs_of(scores, runs, firsts, chosen)
        return [
            errors.get(i) or [Choice(token, logprobs.get((i, k))) for k, token in enumerate(chosen[i])]
            for i in range(len(runs))
        ]

    def prompt_logprobs(self, logits: torch.Tensor, targets: Sequence[int], num: int) -> list[TokenLogprob]:
        """Log-probabilities of given tokens.

        Args:
            logits: [rows, vocab] fp32.
            targets: for each row the token that came.
            num: how many of the likeliest tokens to tell besides.

        Raises:
            NumericsError: the scores are NaN or infinite.
        """
        scores = self._as_scores(logits)
        if not bool(_sound(scores).all()):
            raise _broken()
        return _logprobs(scores, targets, num)

    def beam_logprobs(
        self, logits: torch.Tensor, request: Request, end_tokens: frozenset[int], beams: Sequence[list[int]]
    ) -> torch.Tensor:
        """What `BeamGroup.advance` takes: log-probabilities, changed by the request's bias and penalties.

        As transformers does, the settings are applied to log-probabilities here, not to the scores.

        Args:
            logits: [beams, vocab] fp32, not changed.
            request: whose beams.
            end_tokens: ids that end a beam.
            beams: the tokens of each beam's answer.

        Returns:
            [beams, vocab] fp32.

        Raises:
            NumericsError: the scores are NaN or infinite.
        """
        scores = self._as_scores(logits)
        if not bool(_sound(scores).all()):
            raise _broken()
        logprobs = scores.log_softmax(dim=-1)
        states = [self.begin(request, end_tokens) for _ in beams]
        for state, tokens in zip(states, beams):
            for token in tokens:
                state.take(token)
        self._process(logprobs, states)
        return logprobs

    def _as_scores(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.to(self._device, torch.float32).contiguous()

    def _plain_tokens(
        self, scores: torch.Tensor, runs: Sequence[Run], firsts: list[int]
    ) -> dict[int, int | SwiftError]:
        """The likeliest token of every row of runs that take it as it is, by row."""
        rows = [row for i, run in enumerate(runs) if run.state.plain for row in range(firsts[i], firsts[i + 1])]
        return dict(zip(rows, _likeliest(_rows(scores, rows)))) if rows else {}

    def _choose_place(
        self, scores: torch.Tensor, places: list[tuple[RowState, int]], plain: dict[int, int | SwiftError]
    ) -> list[int | SwiftError]:
        """One token for each (state, row), or why there is none."""
        found: dict[int, int | SwiftError] = {row: plain[row] for _, row in places if row in plain}
        rest = [(state, row) for state, row in places if row not in plain]
        if rest:
            rows = [row for _, row in rest]
            found.update(zip(rows, self._choose_processed(take_rows(scores, rows), [state for state, _ in rest])))
        return [found[row] for _, row in places]

    def _choose_processed(self, scores: torch.Tensor, states: list[RowState]) -> list[int | SwiftError]:
        """One token for each state from its row of `scores`, which are changed."""
        whole = _sound(scores)
        errors = self._process(scores, states)
        sound = (whole & _sound(scores)).tolist()  # something is left to choose from
        tokens: list[int | SwiftError] = [errors.get(i) or _broken() for i in range(len(states))]
        able = [i for i in range(len(states)) if sound[i] and i not in errors]
        greedy = [i for i in able if states[i].params.temperature == 0]
        if greedy:
            for i, token in zip(greedy, _likeliest(_rows(scores, greedy))):
                tokens[i] = token
        sampled = [i for i in able if states[i].params.temperature > 0]
        if sampled:
            filters = [_filters(states[i].params) for i in sampled]
            draws = [states[i].draws.random() for i in sampled]
            for i, token in zip(sampled, sample_tokens(_rows(scores, sampled), draws, filters).tolist()):
                tokens[i] = token
        return tokens

    def _process(self, scores: torch.Tensor, states: list[RowState]) -> dict[int, SwiftError]:
        """What the settings do to the scores, in place; row i is of state i. Returns what went wrong, by row."""
        masks: dict[int, np.ndarray] = {}
        errors: dict[int, SwiftError] = {}
        for row, state in enumerate(states):
            if state.matcher is not None:
                try:
                    masks[row] = state.matcher.mask()
                except SwiftError as error:
                    errors[row] = error
        if masks:
            apply_masks(scores, list(masks), list(masks.values()))
        for row, state in enumerate(states):
            if state.params.logit_bias:
                add_bias(scores, row, state.params.logit_bias)
            if state.ends_forbidden and row not in errors and not state.complete:
                forbid(scores, row, state.ends)
        counted = [row for row, state in enumerate(states) if state.counts is not None]
        if counted:
            counts = [each for row in counted if (each := states[row].counts) is not None]
            penalise(scores, counted, counts, [states[row].params for row in counted])
        return errors

    def _logprobs_of(
        self, scores: torch.Tensor, runs: Sequence[Run], firsts: list[int], chosen: list[list[int]]
    ) -> dict[tuple[int, int], TokenLogprob]:
        """Log-probabilities of what was chosen, where asked for: {(run, place): ...}."""
        wanted: dict[int, list[tuple[int, int]]] = {}
        for i, run in enumerate(runs):
            if run.state.params.logprobs is not None:
                wanted.setdefault(run.state.params.logprobs, []).extend((i, k) for k in range(len(chosen[i])))
        found: dict[tuple[int, int], TokenLogprob] = {}
        for num, places in wanted.items():
            if places:
                rows = _rows(scores, [firsts[i] + k for i, k in places])
                found.update(zip(places, _logprobs(rows, [chosen[i][k] for i, k in places], num)))
        return found


def _rows(scores: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Some rows of `scores`; no copy when it is all of them."""
    return scores if rows == list(range(scores.shape[0])) else take_rows(scores, rows)


def _sound(scores: torch.Tensor) -> torch.Tensor:
    """Whether the highest score of each row is a number; NaN and +inf anywhere in a row show in its maximum. [rows]"""
    return torch.isfinite(scores.amax(dim=-1))


def _likeliest(scores: torch.Tensor) -> list[int | SwiftError]:
    """The first token of the highest score in each row; an error where that is NaN or infinite."""
    values, tokens = row_argmax(scores)
    return [token if sound else _broken() for token, sound in zip(tokens.tolist(), torch.isfinite(values).tolist())]


def _goes_on(run: Run, place: int, token: int) -> bool:
    """Give a run its token; whether the next one can be chosen already, since it was guessed.

    Raises:
        SwiftError: the structure can't be followed any further.
    """
    run.state.take(token)
    guessed = place < len(run.drafts) and token == run.drafts[place]
    return not run.state.complete and guessed and token not in run.state.ends


def _filters(params: SamplingParams) -> Filters:
    return Filters(params.temperature, params.top_k, params.top_p, params.min_p)


def _logprobs(scores: torch.Tensor, targets: Sequence[int], num: int) -> list[TokenLogprob]:
    """Of one token of each row, and of the `num` likeliest ones."""
    logprobs = scores.log_softmax(dim=-1)
    column = torch.tensor(list(targets), device=scores.device)[:, None]
    own = logprobs.gather(1, column)[:, 0].tolist()
    if num == 0:
        return [TokenLogprob(token, value) for token, value in zip(targets, own)]
    values, tokens = logprobs.topk(min(num, scores.shape[1]), dim=-1)
    tops = [tuple(zip(*pair)) for pair in zip(tokens.tolist(), values.tolist())]
    return [TokenLogprob(token, value, top) for token, value, top in zip(targets, own, tops)]


def _broken() -> NumericsError:
    return NumericsError(
        "the model's scores are NaN or infinite while generating",
        fix="with float16, use --torch_dtype bfloat16 or float32; otherwise the weights hold NaN: "
        "take an earlier checkpoint",
    )
