"""What a loss needs of the logits, in one pass over the vocabulary that never holds more than a block of them.

With logits z = scale * (W h + b), a cross-entropy needs per token log Σ exp z, the target's own z, the first guess, and
for the gradient with respect to h the mean of W's rows under softmax(z). The last is attention with W as keys and
values, so it can be taken block by block of the vocabulary with a running maximum, as flash attention does (arXiv
2205.14135, algorithm 1). That is exact, reads W once for many tokens, and keeps the logits in the processor's cache.

It can't give W's own gradient, which needs the final sum before the first block: a trained head goes another way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from swift.models.gemm import times, times_transposed

# Tokens at a time, and logits of each at a time: 8 MiB in fp32, and large enough for products at full speed.
ROWS = 512
BLOCK = 4096


class VocabSummary(NamedTuple):
    """Of each token: log Σ exp z, z of the target, index of the largest z, Σ softmax(z)_v W_v, log Σ softmax(z)_v².

    The last two are None if not asked for. Shapes: [tokens], [tokens], int64 [tokens], [tokens, hidden], [tokens].
    """

    logsumexp: torch.Tensor
    target_logit: torch.Tensor
    guess: torch.Tensor
    mean_row: torch.Tensor | None
    log_collision: torch.Tensor | None = None


def summarize_vocabulary(
    hidden: torch.Tensor,
    matrix: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    scale: float = 1.0,
    gradient: bool = True,
    collision: bool = False,
) -> VocabSummary:
    """The summary of z = scale * (hidden matrixᵀ + bias). Runs without autograd.

    Args:
        hidden: fp32 or fp64 [tokens, hidden]; matrix: [vocab, hidden] and bias: [vocab], of the same dtype.
        targets: int64 [tokens].
        gradient: whether `mean_row` is wanted, which costs as much again; collision: whether `log_collision` is.
    """
    tokens = len(targets)
    peak = hidden.new_full((tokens, 1), float("-inf"))
    total, target_logit = hidden.new_zeros(tokens, 1), hidden.new_zeros(tokens, 1)
    guess = torch.zeros(tokens, 1, dtype=torch.int64, device=hidden.device)
    mean_row = torch.zeros_like(hidden) if gradient else None
    squares = hidden.new_zeros(tokens, 1) if collision else None
    for start in range(0, len(matrix), BLOCK):
        rows = matrix[start : start + BLOCK]
        logits = times_transposed(hidden, rows)
        if bias is not None:
            logits += bias[start : start + BLOCK]
        if scale != 1.0:
            logits *= scale
        local = targets[:, None] - start
        inside = (local >= 0) & (local < len(rows))
        target_logit = torch.where(inside, logits.gather(1, local.clamp(0, len(rows) - 1)), target_logit)
        block_peak, block_guess = logits.max(dim=1, keepdim=True)
        guess = torch.where(block_peak > peak, block_guess + start, guess)
        new_peak = torch.maximum(peak, block_peak)
        shrink = (peak - new_peak).exp_()
        peak = new_peak
        powers = logits.sub_(peak).exp_()
        total.mul_(shrink).add_(powers.sum(dim=1, keepdim=True))
        if mean_row is not None:
            mean_row.mul_(shrink).add_(times(powers, rows))
        if squares is not None:
            squares.mul_(shrink * shrink).add_(powers.square_().sum(dim=1, keepdim=True))
    if mean_row is not None:
        mean_row.div_(total)
    log_collision = None if squares is None else (squares.log() - 2 * total.log())[:, 0]
    return VocabSummary((total.log() + peak)[:, 0], target_logit[:, 0], guess[:, 0], mean_row, log_collision)
