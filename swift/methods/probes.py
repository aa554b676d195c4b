"""What distillation reads off a model's states: its best tokens, how likely the targets are, which token comes next.

Probes for `Strategy.measure`, so they run wherever the head is, also where its vocabulary is cut over ranks, a chunk of
states at a time. Log-probabilities are taken at the temperature of the loss and over the tokens that the tokenizer has,
as in `swift.objectives.distill`. Knows nothing of teachers and students.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from swift.data.loading.batch import Batch
from swift.distributed.collectives import all_gather, all_reduce
from swift.inference.requests import SamplingParams
from swift.inference.sampling import choose_tokens
from swift.models.head import OutputHead
from swift.objectives.chunked_head import ChunkedHead
from swift.objectives.divergence import log_normalizer
from swift.training.module import Probe

DRAW = "draw"  # a batch's random number for each target, fp32 [targets], from 0 to below 1


def states(hidden: torch.Tensor, head: OutputHead, batch: Batch) -> torch.Tensor:
    """A probe: the states themselves, [targets, hidden]."""
    return hidden


def best_tokens(k: int, vocab_size: int, temperature: float) -> Probe:
    """A probe for the `k` likeliest tokens: [targets, 2 k], their ids (as numbers) and their log-probabilities."""

    def probe(hidden: torch.Tensor, head: OutputHead, batch: Batch) -> torch.Tensor:
        found = []
        for _, logits, reader in _chunks(hidden, head, vocab_size, temperature):
            own = min(k, logits.shape[1])
            best, places = (logits - log_normalizer(logits, reader.axis)).topk(own, 1)
            missing = (0, k - own)  # a rank that has few of the tokens
            best = all_gather(nn.functional.pad(best, missing, value=-torch.inf), reader.axis, 1)
            places = all_gather(nn.functional.pad(places + reader.start, missing), reader.axis, 1)
            best, order = best.topk(k, 1)
            found.append(torch.cat([places.gather(1, order).to(best.dtype), best], 1))
        return torch.cat(found)

    return probe


def scaled_logprobs(vocab_size: int, temperature: float) -> Probe:
    """A probe for the log-probability of each target, [targets]."""

    def probe(hidden: torch.Tensor, head: OutputHead, batch: Batch) -> torch.Tensor:
        found = []
        for rows, logits, reader in _chunks(hidden, head, vocab_size, temperature):
            own = (batch.target_ids[rows] - reader.start)[:, None]
            here = (own >= 0) & (own < logits.shape[1])
            padded = logits if logits.shape[1] else logits.new_zeros(len(logits), 1)
            target = padded.gather(1, own.masked_fill(~here, 0)).masked_fill(~here, 0.0)
            found.append((all_reduce(target, reader.axis) - log_normalizer(logits, reader.axis))[:, 0])
        return torch.cat(found)

    return probe


def next_tokens(sampling: SamplingParams, vocab_size: int) -> Probe:
    """A probe for the token that comes next: int64 [targets], by the batch's random numbers, or the likeliest."""

    def probe(hidden: torch.Tensor, head: OutputHead, batch: Batch) -> torch.Tensor:
        found = []
        for rows, own, reader in _chunks(hidden, head, 0, 1.0):
            missing = (0, reader.share - own.shape[1] if reader.axis else 0)
            logits = all_gather(nn.functional.pad(own, missing), reader.axis, 1)[:, : reader.width].float()
            logits[:, vocab_size:] = -torch.inf
            if sampling.temperature > 0:
                found.append(choose_tokens(logits, batch.facts[DRAW][rows], sampling)[:, 0])
            else:
                found.append(logits.argmax(1))
        return torch.cat(found)

    return probe


def _chunks(
    hidden: torch.Tensor, head: OutputHead, vocab_size: int, temperature: float
) -> Iterator[tuple[slice, torch.Tensor, ChunkedHead]]:
    """Some targets at a time, and this rank's logits of the first `vocab_size` tokens (0: all) over the temperature."""
    reader = ChunkedHead(hidden, head, buffers=2)
    for rows in reader.chunks():
        logits = reader.logits(rows)
        own = min(max((vocab_size or reader.width) - reader.start, 0), logits.shape[1])
        yield rows, logits[:, :own] / temperature, reader
