"""Log-probability of each target token, with a gradient, without ever holding the logits of all tokens.

What preference losses need: unlike a cross-entropy they know a token's factor only after all tokens of a sequence have
been seen. With logits z = cap * tanh(scale * (W h + b) / cap), p = softmax(z) and target y:

    l = z_y - lse(z)                dl/dz = onehot(y) - p

The gradient of each l with respect to its own hidden state is taken at once, in the forward pass, and is one row per
token: the backward pass only multiplies it. A trained matrix can't be treated so: its gradient adds up over tokens
whose factors aren't known yet: from the kept log-sum-exp, the backward pass works the logits out once more, a block of
the vocabulary at a time. Hidden states and matrix have nodes of their own in the graph, so that pipelines which ask for
their gradients apart pay for each once.

This file knows nothing of sequences or of losses. A vocabulary that is cut over ranks is a part of `vocab_parallel`'s
kind: only the summary of a token's logits differs.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from swift.distributed.collectives import all_reduce, sum_backward
from swift.distributed.mesh import Axis
from swift.distributed.spread import local_tensor
from swift.models.gemm import times, times_transposed
from swift.models.head import OutputHead
from swift.objectives.known_gradients import with_gradients
from swift.objectives.linear_cross_entropy import chunk_rows
from swift.objectives.vocab_parallel import first_row, require_matrix, summarize_part
from swift.objectives.vocab_stream import BLOCK, ROWS, summarize_vocabulary

LOG_COLLISION = "log_collision"


class TokenLogprobs(NamedTuple):
    """Of each target, [targets].

    Attributes:
        logprobs: fp32 (fp64 for fp64 states), with a gradient to the states and to the head.
        correct: bool, whether the target is the first guess.
        log_collision: log Σ_v p_v², the probability that two draws are the same token; None unless asked for.
    """

    logprobs: torch.Tensor
    correct: torch.Tensor
    log_collision: torch.Tensor | None


class _Head(NamedTuple):
    """This rank's part of the matrix and bias, from token `start` of the vocabulary, and the head's settings."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    scale: float
    softcap: float | None
    axis: Axis
    start: int
    vocab_size: int

    def logits(self, hidden: torch.Tensor, rows: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits in fp32 or fp64 of these tokens of the part; and tanh(..) where there is a soft cap."""
        logits = times_transposed(hidden, self.weight[rows].to(hidden.dtype))
        if self.bias is not None:
            logits = logits + self.bias[rows].to(logits.dtype)
        logits = logits.to(_wide(hidden))
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is None:
            return logits, None
        capped = torch.tanh(logits / self.softcap)
        return capped * self.softcap, capped

    def before_transform(self, gradient: torch.Tensor, capped: torch.Tensor | None) -> torch.Tensor:
        """Carry a gradient with respect to the logits, which is overwritten, through soft cap and scale."""
        if capped is not None:
            gradient *= 1 - capped * capped
        if self.scale != 1.0:
            gradient *= self.scale
        return gradient


class _Measured(NamedTuple):
    """Of each token: its log-probability, log Σ exp z, whether it was guessed, log Σ p², d logprob / d hidden."""

    logprobs: torch.Tensor
    logsumexp: torch.Tensor
    correct: torch.Tensor
    log_collision: torch.Tensor | None
    gradient: torch.Tensor | None


def token_logprobs(
    hidden: torch.Tensor,
    head: OutputHead,
    targets: torch.Tensor,
    *,
    chunk: int = 0,
    extras: Collection[str] = (),
) -> TokenLogprobs:
    """Log-probability of each target.

    Args:
        hidden: [targets, hidden], the states that predict; the same on all ranks of `head.axis`.
        head: how states become logits. A plain linear head is fused, whole or cut over ranks; any other is recomputed
            chunk by chunk in the backward pass.
        targets: int64 [targets].
        chunk: tokens at a time; 0 chooses by vocabulary size.
        extras: `LOG_COLLISION`, if that is wanted.

    Raises:
        ModelError: the head is cut over ranks, and more than a matrix and a bias.
    """
    collision = LOG_COLLISION in extras
    if not head.plain:
        if head.axis:
            require_matrix(head)
        return _recomputed(hidden, head, targets, chunk or 1024, collision)
    module, axis = head.module, head.axis or Axis("tp")
    assert isinstance(module, torch.nn.Linear)  # what `plain` means
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    weight, bias = local_tensor(module.weight), None if module.bias is None else local_tensor(module.bias)
    with torch.autocast(hidden.device.type, enabled=False):
        hidden = sum_backward(hidden, axis)
        needs = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias)]
        vocab_size = module.weight.shape[0]
        fixed = None if bias is None else bias.detach()
        part = _Head(weight.detach(), fixed, head.scale, head.softcap, axis, first_row(vocab_size, axis), vocab_size)
        measured = _measure(hidden.detach(), part, targets, chunk, needs[0], collision)
        logprobs = with_gradients(measured.logprobs, [hidden], [measured.gradient])
        if any(needs[1:]):
            logprobs = logprobs + _HeadGradient.apply(weight, bias, hidden.detach(), part, targets, measured.logsumexp)
    return TokenLogprobs(logprobs, measured.correct, measured.log_collision)


def _wide(hidden: torch.Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


@torch.no_grad()
def _measure(
    hidden: torch.Tensor, head: _Head, targets: torch.Tensor, chunk: int, learning: bool, collision: bool
) -> _Measured:
    """All that is known of the tokens after the forward pass; the gradient when learning."""
    wide = _wide(hidden)
    streams = hidden.dtype == wide and hidden.device.type == "cpu" and head.softcap is None and not head.axis
    one_chunk = _stream if streams else _chunk
    chunk = (chunk or ROWS) if streams else chunk_rows(len(head.weight), chunk, device_type=hidden.device.type)
    parts = [
        one_chunk(states, head, target, learning, collision)
        for states, target in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    columns = [None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)]
    return _Measured(*columns)  # type: ignore[arg-type]


def _stream(hidden: torch.Tensor, head: _Head, targets: torch.Tensor, learning: bool, collision: bool) -> _Measured:
    """A whole head without a soft cap, in full precision on a CPU."""
    matrix = head.weight.to(hidden.dtype)
    bias = None if head.bias is None else head.bias.to(hidden.dtype)
    summary = summarize_vocabulary(
        hidden, matrix, bias, targets, scale=head.scale, gradient=learning, collision=collision
    )
    gradient = summary.mean_row
    if gradient is not None:
        gradient = gradient.neg_().add_(matrix[targets])
        if head.scale != 1.0:
            gradient *= head.scale
    logprobs = summary.target_logit - summary.logsumexp
    return _Measured(logprobs, summary.logsumexp, summary.guess == targets, summary.log_collision, gradient)


def _chunk(hidden: torch.Tensor, head: _Head, targets: torch.Tensor, learning: bool, collision: bool) -> _Measured:
    """Any matrix, also a part of one, with the logits of all these tokens at once."""
    logits, capped = head.logits(hidden)
    if head.axis:
        summary, inside, own = summarize_part(logits, targets, head.axis, head.start, head.vocab_size)
        logsumexp, target_logit, guess = summary.logsumexp, summary.target_logit, summary.guess
        probabilities = logits.sub_(logsumexp[:, None]).exp_() if learning or collision else logits
        hit = inside.to(logits.dtype)
    else:
        own = targets[:, None]
        peak, guesses = logits.max(dim=1, keepdim=True)
        target_logit, guess = logits.gather(1, own)[:, 0], guesses[:, 0]
        probabilities = logits.sub_(peak).exp_()
        total = probabilities.sum(1, keepdim=True)
        logsumexp = (total.log() + peak)[:, 0]
        if learning or collision:
            probabilities.div_(total)
        hit = torch.ones_like(total)
    gradient = log_collision = None
    if collision:
        log_collision = all_reduce(probabilities.square().sum(1), head.axis).log()
    if learning:
        dz = probabilities.neg_().scatter_add_(1, own, hit)
        gradient = times(head.before_transform(dz, capped).to(hidden.dtype), head.weight.to(hidden.dtype))
    return _Measured(target_logit - logsumexp, logsumexp, guess == targets, log_collision, gradient)


class _HeadGradient(torch.autograd.Function):
    """Zeros [targets] whose gradient is that of the log-probabilities with respect to weight and bias."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        weight, bias, hidden, head, targets, logsumexp = inputs
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        # plain attributes: the matrix, gathered for this micro-batch maybe, stays as it was in the forward pass
        ctx.kept = hidden, head, targets, logsumexp
        return torch.zeros_like(logsumexp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        kept, ctx.kept = ctx.kept, None
        dtypes, (needs_weight, needs_bias) = ctx.dtypes, ctx.needs_input_grad[:2]
        grad_weight, grad_bias = _head_gradient(grad, *kept, needs=(needs_weight, needs_bias))
        return (
            grad_weight.to(dtypes[0]) if grad_weight is not None else None,
            grad_bias.to(dtypes[1]) if grad_bias is not None else None,
            *[None] * 4,
        )


def _head_gradient(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    head: _Head,
    targets: torch.Tensor,
    logsumexp: torch.Tensor,
    *,
    needs: tuple[bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Σ over tokens of grad * d logprob / d (weight, bias), in fp32 or fp64."""
    if not len(targets):
        grad = grad.new_zeros(1)
    largest = grad.abs().max().clamp_min(torch.finfo(grad.dtype).tiny)
    factor = (grad / largest)[: len(targets), None]  # half precision then has its finest steps where it matters
    grad_weight = torch.zeros_like(head.weight, dtype=grad.dtype) if needs[0] else None
    grad_bias = torch.zeros(len(head.weight), dtype=grad.dtype, device=grad.device) if needs[1] else None
    rows_at_once = chunk_rows(min(BLOCK, len(head.weight)), device_type=hidden.device.type)
    for start in range(0, len(head.weight), BLOCK):
        block = slice(start, min(start + BLOCK, len(head.weight)))
        for first in range(0, len(targets), rows_at_once):
            rows = slice(first, first + rows_at_once)
            logits, capped = head.logits(hidden[rows], block)
            dz = logits.sub_(logsumexp[rows, None]).exp_().neg_()
            column = (targets[rows] - head.start - start)[:, None]
            inside = (column >= 0) & (column < dz.shape[1])
            dz.scatter_add_(1, column.masked_fill(~inside, 0), inside.to(dz.dtype))
            dz = head.before_transform(dz.mul_(factor[rows]), capped)
            if grad_bias is not None:
                grad_bias[block] += dz.sum(0)
            if grad_weight is not None:
                grad_weight[block] += times(dz.to(hidden.dtype).t(), hidden[rows])
    return tuple(None if total is None else total.mul_(largest) for total in (grad_weight, grad_bias))  # type: ignore[return-value]


def _recomputed(
    hidden: torch.Tensor, head: OutputHead, targets: torch.Tensor, chunk: int, collision: bool
) -> TokenLogprobs:
    """Any head as it is called, its logits worked out again in the backward pass."""
    from torch.utils.checkpoint import checkpoint

    def one_chunk(states: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = head.logits(states)
        logprobs = logits.log_softmax(1)
        found = logprobs.gather(1, target[:, None])[:, 0], logits.argmax(1) == target
        return (*found, (2 * logprobs.detach()).logsumexp(1)) if collision else found

    parts = [
        checkpoint(one_chunk, states, target, use_reentrant=False)
        for states, target in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    logprobs, correct, *rest = (torch.cat(column) for column in zip(*parts, strict=True))
    return TokenLogprobs(logprobs, correct, rest[0] if rest else None)
