"""Cross-entropy where each rank has a part of the vocabulary: no rank ever has a token's whole row of logits.

The ranks of an axis hold consecutive rows of the head's matrix. A chunk of tokens at a time, each takes the logits of
its own part and five numbers per token: the largest logit, which token that is, Σ exp of the others relative to it, the
target's logit and the sum of all (for label smoothing). One all-gather of these is all that the loss, the first guess
and the probabilities of the own part need; the gradient follows as in `linear_cross_entropy`, whose options and
formulas these are. The gradient with respect to the hidden states is a sum over ranks, taken once for all tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from swift.core.errors import ModelError
from swift.distributed.collectives import all_gather, sum_backward
from swift.distributed.mesh import Axis
from swift.distributed.spread import local_tensor
from swift.models.gemm import times, times_transposed
from swift.models.head import OutputHead
from swift.objectives.known_gradients import with_gradients
from swift.objectives.linear_cross_entropy import LossSums, TokenLoss, chunk_rows, weighted_sums


class _Part(NamedTuple):
    """This rank's part of the vocabulary and the head's settings."""

    axis: Axis
    start: int
    vocab_size: int
    scale: float
    softcap: float | None
    options: TokenLoss
    chunk: int


class PartSummary(NamedTuple):
    """Over the whole vocabulary, [tokens] each."""

    logsumexp: torch.Tensor
    target_logit: torch.Tensor
    mean_logit: torch.Tensor
    guess: torch.Tensor


def vocab_parallel_cross_entropy(
    hidden: torch.Tensor,
    head: OutputHead,
    targets: torch.Tensor,
    weights: torch.Tensor,
    options: TokenLoss,
    *,
    chunk: int = 0,
) -> LossSums:
    """`linear_cross_entropy` for a head that is cut over `head.axis`; every rank gets the same, complete sums.

    Args:
        hidden: [tokens, hidden], the same on all ranks; its gradient is the whole one on each.
        head: a plain linear head whose weight (and bias) are DTensors cut along the vocabulary.
        targets: int64 [tokens], in the whole vocabulary; weights: [tokens].

    Raises:
        ModelError: the head is more than a matrix and a bias.
    """
    module, axis = head.module, head.axis
    assert axis is not None
    require_matrix(head)
    assert isinstance(module, torch.nn.Linear)  # what `plain` means
    vocab_size, start = module.weight.shape[0], first_row(module.weight.shape[0], axis)
    part = _Part(axis, start, vocab_size, head.scale, head.softcap, options, chunk)
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    weight, bias = local_tensor(module.weight), None if module.bias is None else local_tensor(module.bias)
    with torch.autocast(hidden.device.type, enabled=False):
        hidden = sum_backward(hidden, axis)
        inputs = (hidden, weight, bias)
        needs = [torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in inputs]
        sums, gradients = _fused(*inputs, (targets, weights), part, needs)
        return sums._replace(loss=with_gradients(sums.loss, inputs, gradients))


def require_matrix(head: OutputHead) -> None:
    """See that a head that is cut over ranks is a matrix and perhaps a bias.

    Raises:
        ModelError: it is more than that.
    """
    if not head.plain:
        raise ModelError(
            f"an output head of the kind {type(head.module).__name__} can't be cut over ranks",
            where="--tensor_parallel_size",
            fix="--tensor_parallel_size 1",
        )


def first_row(vocab_size: int, axis: Axis) -> int:
    """The first token of this rank's part of the vocabulary."""
    return axis.rank * -(-vocab_size // axis.size)


@torch.no_grad()
def _fused(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    batch: tuple[torch.Tensor, torch.Tensor],
    part: _Part,
    needs: list[bool],
) -> tuple[LossSums, list[torch.Tensor | None]]:
    """The sums, and this rank's gradients with respect to hidden states, weight and bias, as far as needed."""
    targets, token_weights = batch
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    matrix = weight.to(hidden.dtype)
    grad_hidden = torch.empty_like(hidden) if needs[0] else None
    grad_weight = torch.zeros_like(weight, dtype=wide) if needs[1] else None
    grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needs[2] else None
    sums = torch.zeros(2, dtype=wide, device=hidden.device)
    num_correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
    chunk = chunk_rows(len(weight), part.chunk, device_type=hidden.device.type)
    for start in range(0, len(targets), chunk):
        rows = slice(start, start + chunk)
        logits = times_transposed(hidden[rows], matrix)
        if bias is not None:
            logits = logits + bias.to(logits.dtype)
        logits = logits.to(wide)
        if part.scale != 1.0:
            logits = logits * part.scale
        capped = None
        if part.softcap is not None:
            capped = torch.tanh(logits / part.softcap)
            logits = capped * part.softcap
        summary, inside, own = summarize_part(logits, targets[rows], part.axis, part.start, part.vocab_size)
        mean_logit = summary.mean_logit if part.options.smoothing else None
        chunk_sums, factor = weighted_sums(
            summary.logsumexp, summary.target_logit, mean_logit, token_weights[rows], part.options
        )
        sums += torch.stack(chunk_sums)
        num_correct += (summary.guess == targets[rows]).sum()
        if not any(needs):
            continue
        gradient = logits.sub_(summary.logsumexp[:, None]).exp_()
        if part.options.smoothing:
            gradient -= part.options.smoothing / part.vocab_size
        gradient.scatter_add_(1, own, (inside.to(wide) * -(1 - part.options.smoothing)))
        gradient *= factor[:, None]
        if capped is not None:
            gradient *= 1 - capped * capped
        if part.scale != 1.0:
            gradient *= part.scale
        if grad_bias is not None:
            grad_bias += gradient.sum(0)
        gradient = gradient.to(hidden.dtype)
        if grad_hidden is not None:
            grad_hidden[rows] = times(gradient, matrix)
        if grad_weight is not None:
            grad_weight += gradient.T @ hidden[rows]
    return LossSums(sums[0], sums[1], num_correct), [grad_hidden, grad_weight, grad_bias]


def summarize_part(
    logits: torch.Tensor, targets: torch.Tensor, axis: Axis, start: int, vocab_size: int
) -> tuple[PartSummary, torch.Tensor, torch.Tensor]:
    """The summary of all ranks' logits [tokens, own vocab]; whether each target is this rank's, and its column here.

    The last two are [tokens, 1]; the column of another rank's target is 0.
    """
    peak, guess = logits.max(dim=1)
    total = (logits - peak[:, None]).exp_().sum(1)
    own = (targets - start)[:, None]
    inside = (own >= 0) & (own < logits.shape[1])
    own = own.masked_fill(~inside, 0)
    target = logits.gather(1, own).masked_fill(~inside, 0.0)[:, 0]
    # a token's number is exact in fp32 below 2^24
    numbers = torch.stack([peak, (guess + start).to(peak.dtype), total, target, logits.sum(1)])
    peaks, guesses, totals, target_logits, logit_sums = all_gather(numbers[:, None], axis, 1).unbind(0)
    highest, rank = peaks.max(0)  # [ranks, tokens]
    logsumexp = (totals * (peaks - highest).exp()).sum(0).log() + highest
    first_guess = guesses.gather(0, rank[None])[0].long()
    summary = PartSummary(logsumexp, target_logits.sum(0), logit_sums.sum(0) / vocab_size, first_guess)
    return summary, inside, own
