"""Answers that a model writes while it is trained, or a teacher for it.

Two ways to the same tokens. A process that holds the whole model runs the model's own `generate`, which keeps keys and
values. Where each process has a part of it, all of them run the whole text again for each token (`Strategy.measure`):
slow, but the same under every way of spreading a model.

The random numbers of an answer are those of its seed, so an answer doesn't depend on which others are written with it,
on micro-batches or on the number of processes, but for rounding. Knows nothing of losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig as ModelGenerationConfig
from transformers import LogitsProcessor, PreTrainedModel

from swift.data.loading.batch import Layout, Tokens, make_batch
from swift.distributed import ProcessGroup
from swift.inference.requests import SamplingParams
from swift.inference.sampling import FiniteCheck, RowSampler, row_draws
from swift.methods.probes import DRAW, next_tokens
from swift.models.attention import VARLEN
from swift.models.loading import usual_attention
from swift.models.quiet import quiet_transformers
from swift.training.module import decoder_owner
from swift.training.strategy import Strategy

_TOGETHER = 32  # answers written at a time


@dataclass(frozen=True)
class Writing:
    """How answers are written.

    Attributes:
        sampling: temperature 0 takes the likeliest token.
        stops: ids that end an answer; they belong to it.
        vocab_size: ids that the tokenizer has; a model's further columns are never chosen.
        context: tokens that prompt and answer may have together; None where there is no limit.
    """

    sampling: SamplingParams
    stops: tuple[int, ...]
    vocab_size: int
    context: int | None = None
    pad_token_id: int = 0

    def limit(self, prompt: Sequence[int]) -> int:
        """Tokens that the answer to a prompt may have."""
        most = self.sampling.max_new_tokens
        assert most is not None  # training always has one
        return max(0, most if self.context is None else min(most, self.context - len(prompt)))

    def cut(self, tokens: Sequence[int], limit: int) -> list[int]:
        """The answer: as far as the first id that ends it."""
        end = next((place for place, token in enumerate(tokens[:limit]) if token in self.stops), limit - 1)
        return list(tokens[: end + 1])


def context_of(causal_lm: PreTrainedModel) -> int | None:
    """Tokens that a model takes in all; None when it names no limit."""
    return getattr(causal_lm.config.get_text_config(), "max_position_embeddings", None)


# --- with the whole model ---


def write_cached(
    whole: nn.Module,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[str],
    writing: Writing,
    autocast: Callable[[], AbstractContextManager],
) -> list[list[int]]:
    """The answer to each prompt, by the model's own `generate`.

    Args:
        whole: the model with its adapters, all of it in this process.
        seeds: of each answer; equal seeds, equal answers.
    """
    limits = [writing.limit(prompt) for prompt in prompts]
    order = sorted((n for n in range(len(prompts)) if limits[n]), key=lambda n: (-limits[n], -len(prompts[n]), n))
    answers: list[list[int]] = [[] for _ in prompts]
    was_training = whole.training
    whole.eval()
    try:
        with torch.no_grad(), autocast(), quiet_transformers(), _attending_padded(decoder_owner(whole)):
            for some in _runs(order, limits):
                rows = _generate(whole, [prompts[n] for n in some], [seeds[n] for n in some], limits[some[0]], writing)
                for number, row in zip(some, rows, strict=True):
                    answers[number] = writing.cut(row, limits[number])
    finally:
        whole.train(was_training)
    return answers


def _runs(order: list[int], limits: list[int]) -> Iterator[list[int]]:
    """Answers to write at a time; `generate` runs all of them to the same length."""
    some: list[int] = []
    for number in order:
        if some and (len(some) == _TOGETHER or limits[some[0]] != limits[number]):
            yield some
            some = []
        some.append(number)
    if some:
        yield some


def _generate(
    whole: nn.Module, prompts: list[Sequence[int]], seeds: list[str], limit: int, writing: Writing
) -> list[list[int]]:
    width = max(map(len, prompts))
    pad, device = writing.pad_token_id, next(whole.parameters()).device
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    processors: list[LogitsProcessor] = [FiniteCheck(), _KnownTokens(writing.vocab_size)]
    if writing.sampling.temperature > 0:
        processors.append(RowSampler(writing.sampling, seeds))
    settings = ModelGenerationConfig(
        do_sample=False,  # `RowSampler` does
        num_beams=1,
        repetition_penalty=1.0,
        max_new_tokens=limit,
        use_cache=True,
        pad_token_id=pad,
        eos_token_id=list(writing.stops) or None,
    )
    generate: Callable[..., torch.Tensor] = whole.generate  # type: ignore[assignment]
    output = generate(input_ids=ids, attention_mask=mask, generation_config=settings, logits_processor=processors)
    return output[:, width:].tolist()


class _KnownTokens(LogitsProcessor):
    """Leaves out the columns that a model has beyond the tokenizer's ids."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores, [batch, vocab]."""
        scores[:, self._vocab_size :] = -torch.inf
        return scores


@contextmanager
def _attending_padded(causal_lm: PreTrainedModel) -> Iterator[None]:
    """Inside, a model that attends to examples laid end to end attends to padded rows."""
    before = causal_lm.config._attn_implementation
    if before == VARLEN:
        causal_lm.set_attn_implementation(usual_attention(causal_lm.config))
    try:
        yield
    finally:
        if before == VARLEN:
            causal_lm.set_attn_implementation(before)


# --- with a part of it ---


def write_anew(
    strategy: Strategy,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[str],
    writing: Writing,
    around: tuple[Layout, ProcessGroup],
) -> list[list[int]]:
    """The same answers, by a forward pass over the whole text for each token. All processes call it at once.

    Args:
        around: how texts share a batch; and all processes, which go on until none has an answer left to write.
    """
    layout, world = replace(around[0], units=False, targets="last"), around[1]
    probe = next_tokens(writing.sampling, writing.vocab_size)
    draws, limits = row_draws(writing.sampling, seeds), [writing.limit(prompt) for prompt in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    while True:
        open_ones = [n for n, answer in enumerate(answers) if not _ended(answer, limits[n], writing)]
        if not world.sum([float(len(open_ones))])[0]:
            return answers
        texts = [np.array([*prompts[n], *answers[n]], dtype=np.int32) for n in open_ones]
        batch = make_batch([Tokens(ids, np.zeros(len(ids), np.float32)) for ids in texts], [], layout)
        batch.facts[DRAW] = torch.tensor([draws[n].random() for n in open_ones], dtype=torch.float32)
        for number, token in zip(open_ones, strategy.measure(batch, probe).tolist(), strict=True):
            answers[number].append(token)


def _ended(answer: list[int], limit: int, writing: Writing) -> bool:
    return len(answer) >= limit or (bool(answer) and answer[-1] in writing.stops)
