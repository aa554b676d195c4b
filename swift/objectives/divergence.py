"""Divergences between two next-token distributions, student S and teacher T, with their gradients written out.

The generalised Jensen-Shannon divergence (Agarwal et al., arXiv 2306.13649, eq. 1) with M = beta T + (1 - beta) S is

    D = beta KL(T || M) + (1 - beta) KL(S || M)        0 < beta < 1
    D = KL(T || S)  for beta = 0,    D = KL(S || T)  for beta = 1

The two ends are definitions of their own: the formula itself goes to 0 there, and divided by beta or by 1 - beta to
these. There is no factor of temperature². The gradient with respect to the student's logits over the temperature:

    S - T                                 beta = 0
    S (log S/T - KL(S || T))              beta = 1
    (1 - beta) S (log S/M - KL(S || M))   between

A teacher that is known only by its k best tokens is compared in k + 1 buckets: each of these tokens, and the rest. That
never exceeds the divergence over the whole vocabulary, since merging outcomes loses information. Without the rest, both
are renormalised over the k tokens, as ms-swift does; for k = 1 that is always 0.

The vocabulary may be cut over ranks; sums over it are completed by `axis`. Knows nothing of models, heads or batches.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from swift.distributed.collectives import all_gather, all_reduce
from swift.distributed.mesh import Axis

# log of a probability that counts for nothing: exp of it is 0 in every precision, and differences stay finite
_NOTHING = -1e4


class Compared(NamedTuple):
    """Two distributions compared, for each token.

    Attributes:
        value: [tokens], the divergence.
        slope: [tokens, own vocab], its gradient with respect to the student's logits at temperature 1.
    """

    value: torch.Tensor
    slope: torch.Tensor


class TopK(NamedTuple):
    """What is known of a teacher: its best tokens.

    Attributes:
        ids: int64 [tokens, k], in the whole vocabulary, no token twice; an entry below 0 says nothing.
        logps: [tokens, k], log-probabilities over the whole vocabulary at the temperature of the comparison; -inf says
            nothing.
    """

    ids: torch.Tensor
    logps: torch.Tensor


def generalized_jsd(log_s: torch.Tensor, log_t: torch.Tensor, beta: float, axis: Axis | None = None) -> Compared:
    """D between distributions given by finite log-probabilities [tokens, own vocab], normalised over all ranks."""
    s = log_s.exp()
    if beta == 0:
        t = log_t.exp()
        return Compared(_complete((t * (log_t - log_s)).sum(1), axis), s - t)
    if beta == 1:
        gap = log_s - log_t
        value = _complete((s * gap).sum(1), axis)
        return Compared(value, s.mul_(gap.sub_(value[:, None])))
    log_m = torch.logaddexp(log_t + math.log(beta), log_s + math.log1p(-beta))
    gap = log_s - log_m
    to_student = (s * gap).sum(1)
    to_teacher = (log_t.exp() * (log_t - log_m)).sum(1)
    to_student, to_teacher = _complete(torch.stack([to_student, to_teacher]), axis)
    slope = s.mul_(gap.sub_(to_student[:, None])).mul_(1 - beta)
    return Compared(beta * to_teacher + (1 - beta) * to_student, slope)


def top_k_divergence(
    log_s: torch.Tensor, teacher: TopK, beta: float, part: tuple[int, int], *, tail: bool, axis: Axis | None = None
) -> Compared:
    """D between a student and what is known of its teacher.

    Args:
        log_s: log-probabilities [tokens, own vocab], normalised over the ranks' parts.
        part: this rank's first token, and the size of the whole vocabulary. Entries of the teacher outside the
            vocabulary belong to the rest.
        tail: compare the rest as one more bucket; else renormalise over the k tokens.

    A position of which the teacher says nothing has divergence 0. The rest has at least eight roundings' probability
    with the teacher: rounded log-probabilities may add up to more than 1.
    """
    start, vocab_size = part
    width = log_s.shape[1]
    if not width:  # a rank that has only padding takes part with a token that has no probability
        log_s = log_s.new_full((len(log_s), 1), _NOTHING)
    known = (teacher.logps > -math.inf) & (teacher.ids >= 0) & (teacher.ids < vocab_size)
    own = teacher.ids - start
    here = known & (own >= 0) & (own < width)
    own = own.masked_fill(~here, 0)
    picked = log_s.gather(1, own).masked_fill(~here, 0.0)
    rest = log_s.exp()
    rest.scatter_add_(1, own, -picked.exp().masked_fill(~here, 0.0))  # exactly 0 is left of them
    numbers = _complete(torch.cat([picked, rest.sum(1, keepdim=True)], 1), axis)
    student, remainder = numbers[:, :-1].masked_fill(~known, _NOTHING), numbers[:, -1:]
    teacher_logps = teacher.logps.to(log_s.dtype).masked_fill(~known, _NOTHING)
    if tail:
        whole = (known.sum(1, keepdim=True) >= vocab_size).expand_as(remainder)  # there is no rest
        least = math.log1p(-8 * torch.finfo(log_s.dtype).eps)
        unknown = torch.log(-torch.expm1(teacher_logps.logsumexp(1, keepdim=True).clamp_max(least)))
        left = remainder.clamp_min(torch.finfo(log_s.dtype).tiny).log()
        student = torch.cat([student, left.masked_fill(whole, _NOTHING)], 1)
        teacher_logps = torch.cat([teacher_logps, unknown.masked_fill(whole, _NOTHING)], 1)
    else:
        student, teacher_logps = (
            logps.log_softmax(1).masked_fill(~known, _NOTHING) for logps in (student, teacher_logps)
        )
    value, slope = generalized_jsd(student, teacher_logps, beta)
    k = teacher.ids.shape[1]
    # the rest's slope is shared out by the student's probabilities inside it
    share = slope[:, k:] / remainder.clamp_min(torch.finfo(log_s.dtype).tiny) if tail else torch.zeros_like(remainder)
    spread = rest.mul_(share)
    spread.scatter_add_(1, own, slope[:, :k].masked_fill(~here, 0.0))
    return Compared(value, spread[:, :width])


def log_normalizer(logits: torch.Tensor, axis: Axis | None = None) -> torch.Tensor:
    """log Σ exp over the whole vocabulary: [tokens, own vocab] -> [tokens, 1]; a rank's part may be empty."""
    own = logits.logsumexp(1) if logits.shape[1] else logits.new_full((len(logits),), -math.inf)
    return all_gather(own[:, None], axis, 1).logsumexp(1, keepdim=True) if axis else own[:, None]


def _complete(sums: torch.Tensor, axis: Axis | None) -> torch.Tensor:
    return all_reduce(sums, axis) if axis else sums
