"""Cross-entropy of a linear head without ever holding the logits of all tokens.

The head is applied to a chunk of tokens at a time; the chunk's loss and its gradients with respect to the hidden
states, the matrix and the bias are taken at once, in the forward pass, and the logits are forgotten. The backward pass
only multiplies by the incoming gradient. The arithmetic is the exact one; memory is one chunk of logits. A frozen head
on a CPU in full precision needs even less, and a fifth less time: `vocab_stream` (in half precision, dz must be rounded
as a whole, which a pass in blocks can't do).

With logits z = cap * tanh(scale * (W h + b) / cap), p = softmax(z), target y, smoothing e over V classes and weight w:

    loss  = w * c * [ (1 - e) * (lse(z) - z_y) + e * (lse(z) - mean(z)) ]
    dz    = w * c * [ p - (1 - e) * onehot(y) - e / V ]

c is 1, or the target's own probability held constant for DFT ("On the Generalization of SFT", arXiv 2508.05629, eq. 9).
Label smoothing is Szegedy et al., arXiv 1512.00567, section 7.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from swift.models.gemm import times, times_transposed
from swift.models.head import OutputHead
from swift.objectives.known_gradients import with_gradients
from swift.objectives.vocab_stream import ROWS, summarize_vocabulary


class TokenLoss(NamedTuple):
    """Options of the per-token loss."""

    smoothing: float = 0.0
    dft: bool = False


PLAIN = TokenLoss()


class LossSums(NamedTuple):
    """Sums over tokens: the weighted loss, the weighted plain negative log-likelihood, and right first guesses."""

    loss: torch.Tensor
    nll: torch.Tensor
    num_correct: torch.Tensor


def chunk_rows(vocab_size: int, requested: int = 0, *, device_type: str = "cpu") -> int:
    """Tokens per chunk: what was asked for, else about 48 MiB of fp32 logits (512 MiB on an accelerator)."""
    budget = (48 if device_type == "cpu" else 512) << 20
    return requested or max(16, min(8192, budget // (4 * vocab_size)))


def token_loss_and_gradient(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, options: TokenLoss
) -> tuple[LossSums, torch.Tensor]:
    """Loss of one chunk and its gradient with respect to the logits, which overwrites `logits`.

    Args:
        logits: fp32 or fp64 [tokens, vocab]; consumed.
        targets: int64 [tokens].
        weights: [tokens].
    """
    row = torch.arange(len(targets), device=logits.device)
    peak, guess = logits.max(dim=1, keepdim=True)
    target_logit = logits[row, targets]
    mean_logit = logits.mean(dim=1) if options.smoothing else None
    probabilities = logits.sub_(peak).exp_()
    total = probabilities.sum(dim=1, keepdim=True)
    logsumexp = (total.log() + peak).squeeze(1)
    probabilities.div_(total)
    sums, factor = weighted_sums(logsumexp, target_logit, mean_logit, weights, options)
    gradient = probabilities
    if options.smoothing:
        gradient -= options.smoothing / gradient.shape[1]
    gradient[row, targets] -= 1 - options.smoothing
    gradient *= factor[:, None]
    return LossSums(*sums, (guess.squeeze(1) == targets).sum()), gradient


def weighted_sums(
    logsumexp: torch.Tensor,
    target_logit: torch.Tensor,
    mean_logit: torch.Tensor | None,
    weights: torch.Tensor,
    options: TokenLoss,
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """(sum of losses, sum of plain ones), and the factor w * c of each token.

    Args:
        logsumexp, target_logit, mean_logit: fp32 or fp64 [tokens], over the whole vocabulary; the mean is for label
            smoothing, else None.
        weights: [tokens].
    """
    nll = logsumexp - target_logit
    loss = nll
    if mean_logit is not None:
        loss = (1 - options.smoothing) * nll + options.smoothing * (logsumexp - mean_logit)
    factor = weights.to(nll.dtype)
    plain = (factor * nll).sum()
    if options.dft:
        factor = factor * torch.exp(-nll)
    return ((factor * loss).sum(), plain), factor


class _Frozen(NamedTuple):
    """A frozen head: z = scale * (matrix h + bias)."""

    matrix: torch.Tensor
    bias: torch.Tensor | None
    scale: float


def _stream(
    hidden: torch.Tensor,
    head: _Frozen,
    batch: tuple[torch.Tensor, torch.Tensor],
    options: TokenLoss,
    chunk: int,
    learning: bool,
) -> tuple[LossSums, torch.Tensor | None]:
    """Sums over `batch` (targets, weights); when learning, the gradient with respect to `hidden` [tokens, hidden]."""
    matrix, bias, scale = head
    average = matrix.mean(0) if options.smoothing else None
    gradients, parts = [], []
    for states, targets, weights in zip(hidden.split(chunk), *(t.split(chunk) for t in batch), strict=True):
        summary = summarize_vocabulary(states, matrix, bias, targets, scale=scale, gradient=learning)
        mean_logit = None
        if average is not None:
            mean_logit = (states @ average + (0.0 if bias is None else bias.mean())) * scale
        sums, factor = weighted_sums(summary.logsumexp, summary.target_logit, mean_logit, weights, options)
        parts.append(LossSums(*sums, (summary.guess == targets).sum()))
        gradient = summary.mean_row
        if gradient is not None:
            gradient.sub_(matrix[targets], alpha=1 - options.smoothing)
            if average is not None:
                gradient.sub_(average, alpha=options.smoothing)
            gradients.append(gradient.mul_(factor[:, None] * scale))
    total = LossSums(*(torch.stack(column).sum(0) for column in zip(*parts, strict=True)))
    return total, torch.cat(gradients) if gradients else None


_Gradients = list[torch.Tensor | None]


@torch.no_grad()
def _fused(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    batch: tuple[torch.Tensor, torch.Tensor],
    settings: tuple[float, float | None, TokenLoss, int],
    needs: list[bool],
) -> tuple[LossSums, _Gradients]:
    """The sums, and the gradients with respect to hidden states, weight and bias, as far as needed.

    Args:
        batch: targets and weights; settings: the head's scale and soft cap, options, tokens per chunk.
    """
    targets, token_weights = batch
    scale, softcap, options, chunk = settings
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    matrix = weight.to(hidden.dtype)
    if hidden.dtype == wide and hidden.device.type == "cpu" and softcap is None and not any(needs[1:]):
        frozen = _Frozen(matrix, None if bias is None else bias.to(wide), scale)
        total, gradient = _stream(hidden, frozen, batch, options, chunk or ROWS, needs[0])
        return total, [gradient, None, None]
    chunk = chunk_rows(len(weight), chunk, device_type=hidden.device.type)
    grad_hidden = torch.empty_like(hidden) if needs[0] else None
    grad_weight = torch.zeros_like(weight, dtype=wide) if needs[1] else None
    grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needs[2] else None
    sums = torch.zeros(2, dtype=wide, device=hidden.device)
    num_correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
    for start in range(0, len(targets), chunk):
        rows = slice(start, start + chunk)
        logits = times_transposed(hidden[rows], matrix)
        if bias is not None:
            logits = logits + bias.to(logits.dtype)
        logits = logits.to(wide)
        if scale != 1.0:
            logits = logits * scale
        capped = None
        if softcap is not None:
            capped = torch.tanh(logits / softcap)
            logits = capped * softcap
        part, gradient = token_loss_and_gradient(logits, targets[rows], token_weights[rows], options)
        sums += torch.stack([part.loss, part.nll])
        num_correct += part.num_correct
        if capped is not None:
            gradient *= 1 - capped * capped
        if scale != 1.0:
            gradient *= scale
        if grad_bias is not None:
            grad_bias += gradient.sum(0)
        gradient = gradient.to(hidden.dtype)
        if grad_hidden is not None:
            grad_hidden[rows] = times(gradient, matrix)
        if grad_weight is not None:
            if gradient.dtype == wide:
                grad_weight.addmm_(gradient.T, hidden[rows])
            else:
                grad_weight += gradient.T @ hidden[rows]
    return LossSums(sums[0], sums[1], num_correct), [grad_hidden, grad_weight, grad_bias]


def linear_cross_entropy(
    hidden: torch.Tensor,
    head: OutputHead,
    targets: torch.Tensor,
    weights: torch.Tensor,
    options: TokenLoss = PLAIN,
    *,
    chunk: int = 0,
) -> LossSums:
    """Weighted sum of the tokens' losses.

    Args:
        hidden: [tokens, hidden], the states that predict.
        head: how states become logits; a plain linear head is fused, any other is recomputed chunk by chunk; one whose
            vocabulary is cut over ranks goes to `vocab_parallel`.
        targets: int64 [tokens]; weights: [tokens].
        chunk: tokens per chunk; 0 chooses by vocabulary size.

    Returns:
        `LossSums`; only `loss` carries a gradient. Reductions are fp32 (fp64 for fp64 inputs).
    """
    if head.axis:
        from swift.objectives.vocab_parallel import vocab_parallel_cross_entropy

        return vocab_parallel_cross_entropy(hidden, head, targets, weights, options, chunk=chunk)
    if head.plain:
        module = head.module
        assert isinstance(module, torch.nn.Linear)  # what `plain` means
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        inputs = (hidden, module.weight, module.bias)
        needs = [torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in inputs]
        settings = (head.scale, head.softcap, options, chunk)
        with torch.autocast(hidden.device.type, enabled=False):
            sums, gradients = _fused(*inputs, (targets, weights), settings, needs)
            return sums._replace(loss=with_gradients(sums.loss, inputs, gradients))
    return _recomputed_cross_entropy(hidden, head, (targets, weights), options, chunk or 1024)


def _recomputed_cross_entropy(
    hidden: torch.Tensor,
    head: OutputHead,
    batch: tuple[torch.Tensor, torch.Tensor],
    options: TokenLoss,
    chunk: int,
) -> LossSums:
    from torch.utils.checkpoint import checkpoint

    targets, weights = batch

    def one_chunk(states, target, weight):
        logits = head.logits(states)
        logprobs = logits.log_softmax(1)
        nll = -logprobs.gather(1, target[:, None]).squeeze(1)
        loss = nll
        if options.smoothing:
            loss = (1 - options.smoothing) * nll - options.smoothing * logprobs.mean(1)
        factor = weight.to(nll.dtype)
        plain = (factor * nll).sum().detach()
        if options.dft:
            factor = factor * torch.exp(-nll.detach())
        return (factor * loss).sum(), plain, (logits.argmax(1) == target).sum()

    totals: LossSums | None = None
    for start in range(0, max(len(targets), 1), chunk):
        rows = slice(start, start + chunk)
        part = LossSums(*checkpoint(one_chunk, hidden[rows], targets[rows], weights[rows], use_reentrant=False))
        totals = part if totals is None else LossSums(*(a + b for a, b in zip(totals, part, strict=True)))
    assert totals is not None  # there is one chunk at least, if an empty one
    return totals
