"""An output head that is applied to a chunk of tokens at a time, in forward and backward.

A loss that can say its gradient with respect to a chunk's logits asks for these logits, hands the gradient back, and
the logits are forgotten; at the end the loss's value gets the gradients of hidden states and head, collected over the
chunks, as in `linear_cross_entropy`. One matrix (with bias, scale and soft cap), whole or cut along the vocabulary over
ranks, is multiplied here; any other head runs under autograd, a chunk at a time. Knows nothing of what is made of the
logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from swift.distributed.collectives import all_gather, sum_backward
from swift.distributed.mesh import Axis
from swift.distributed.spread import local_tensor
from swift.models.gemm import times, times_transposed
from swift.models.head import OutputHead
from swift.objectives.known_gradients import with_gradients
from swift.objectives.linear_cross_entropy import chunk_rows
from swift.objectives.vocab_parallel import first_row, require_matrix


class ChunkedHead:
    """Logits of one chunk after another, and what their gradients add up to.

    Args:
        hidden: [tokens, hidden]; with a cut head the same on all ranks, and its gradient is the whole one on each.
        head: how states become logits.
        chunk: tokens at a time; 0 chooses by the size of the vocabulary.
        buffers: how many arrays of the size of a chunk's logits the caller holds.

    Attributes:
        axis: over which the vocabulary is cut; of size 1 where it isn't.
        width: tokens of the whole vocabulary, padding columns included.
        share: tokens of a rank's part (the last may have fewer); start: the first of this rank's.
        dtype: of logits and sums, fp64 for fp64 states, else fp32.
        learning: whether any gradient is wanted.

    Raises:
        ModelError: a cut head that is more than a matrix and a bias.
    """

    def __init__(self, hidden: torch.Tensor, head: OutputHead, *, chunk: int = 0, buffers: int = 1) -> None:
        if head.axis:
            require_matrix(head)
        self.head, self.axis = head, head.axis or Axis("tp")
        self.dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self.inputs: list[torch.Tensor | None]
        if head.plain:
            if torch.is_autocast_enabled(hidden.device.type):
                hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
            module = head.module
            assert isinstance(module, nn.Linear)  # what `plain` means
            weight: torch.Tensor = module.weight
            bias: torch.Tensor | None = module.bias
            self.width = len(weight)
            if self.axis:
                weight, bias = local_tensor(weight), None if bias is None else local_tensor(bias)
            self.inputs = [sum_backward(hidden, self.axis), weight, bias]
            self._matrix = weight.detach().to(hidden.dtype)
        else:
            self.inputs = [hidden, *(p for p in head.module.parameters() if p.requires_grad)]
            self.width = head_width(head, hidden)
        self.share = -(-self.width // self.axis.size)
        self.start = first_row(self.width, self.axis)
        states = self.inputs[0]
        assert states is not None  # the others may be
        self.hidden = states.detach()
        self._needs = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in self.inputs]
        self.learning = any(self._needs)
        self._gradients: list[torch.Tensor | None] = [
            torch.zeros_like(t, dtype=self.hidden.dtype if t is states else self.dtype) if need else None  # type: ignore[arg-type]
            for t, need in zip(self.inputs, self._needs, strict=True)
        ]
        self._rows = chunk_rows(self.share * buffers, chunk, device_type=hidden.device.type)
        self._capped: torch.Tensor | None = None
        self._graph: tuple[torch.Tensor, torch.Tensor] | None = None

    def chunks(self) -> Iterator[slice]:
        """The tokens of each chunk; there is one at least, if an empty one: all ranks then know the same metrics."""
        return (slice(start, start + self._rows) for start in range(0, max(1, len(self.hidden)), self._rows))

    def logits(self, rows: slice) -> torch.Tensor:
        """This rank's logits of a chunk, [tokens, own vocab], without a graph; the caller must not change them."""
        if not self.head.plain:
            with torch.set_grad_enabled(self.learning):
                states = self.hidden[rows].requires_grad_(self._needs[0])
                logits = self.head.logits(states).to(self.dtype)
            self._graph = states, logits
            return logits.detach()
        with torch.no_grad(), torch.autocast(self.hidden.device.type, enabled=False):
            logits, self._capped = _product(self.hidden[rows], self._matrix, self.inputs[2], self.head, self.dtype)
        return logits

    def backward(self, rows: slice, gradient: torch.Tensor) -> None:
        """Add what a chunk's gradient with respect to its logits, [tokens, own vocab], contributes; it is consumed."""
        if not self.head.plain:
            self._backward_graph(rows, gradient)
            return
        with torch.no_grad(), torch.autocast(self.hidden.device.type, enabled=False):
            if self._capped is not None:
                gradient *= 1 - self._capped * self._capped
            if self.head.scale != 1.0:
                gradient *= self.head.scale
            to_hidden, to_weight, to_bias = self._gradients
            if to_bias is not None:
                to_bias += gradient.sum(0)
            gradient = gradient.to(self.hidden.dtype)
            if to_hidden is not None:
                to_hidden[rows] = times(gradient, self._matrix)
            if to_weight is not None and gradient.dtype == to_weight.dtype:
                to_weight.addmm_(gradient.T, self.hidden[rows])
            elif to_weight is not None:
                to_weight += gradient.T @ self.hidden[rows]

    def _backward_graph(self, rows: slice, gradient: torch.Tensor) -> None:
        assert self._graph is not None  # of this chunk
        (states, logits), self._graph = self._graph, None
        wanted = [i for i, need in enumerate(self._needs) if need]
        leaves = [states if i == 0 else self.inputs[i] for i in wanted]
        found = torch.autograd.grad(logits, leaves, gradient, allow_unused=True)  # type: ignore[arg-type]
        for i, grad in zip(wanted, found, strict=True):
            total = self._gradients[i]
            if grad is None or total is None:
                continue
            if i == 0:
                total[rows] = grad.to(total.dtype)
            else:
                total += grad

    def finish(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss`, a scalar without a graph, with the gradients that were collected."""
        return with_gradients(loss, self.inputs, self._gradients)


def _product(
    states: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, head: OutputHead, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits, and tanh(logits / cap) where there is a cap."""
    logits = times_transposed(states, matrix)
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    logits = logits.to(dtype)
    if head.scale != 1.0:
        logits = logits * head.scale
    if head.softcap is None:
        return logits, None
    capped = torch.tanh(logits / head.softcap)
    return capped * head.softcap, capped


@torch.no_grad()
def head_width(head: OutputHead, hidden: torch.Tensor) -> int:
    """Tokens of a head's whole vocabulary, padding columns included."""
    if head.plain:
        return int(head.module.weight.shape[0])  # type: ignore[index]
    return head.logits(hidden[:0]).shape[1]


class Columns(NamedTuple):
    """Tokens start .. stop of the vocabulary; each rank of the asker's axis has `share` of them, the last one fewer."""

    start: int
    stop: int
    share: int


@torch.no_grad()
def columns_of(head: OutputHead, states: torch.Tensor, columns: Columns, dtype: torch.dtype) -> torch.Tensor:
    """The logits of some tokens of the vocabulary by a head that is not trained: [tokens, stop - start].

    Args:
        head: whole, or cut over ranks, in shares that may differ from the asker's: they are gathered then, a chunk at a
            time. So all ranks of its axis must ask at once, with the same states.

    Raises:
        ModelError: a cut head that is more than a matrix and a bias.
    """
    if head.axis:
        require_matrix(head)
    start, stop, share = columns
    if not head.plain:
        return head.logits(states)[:, start:stop].to(dtype)
    module, axis = head.module, head.axis
    assert isinstance(module, nn.Linear)  # what `plain` means
    weight, bias = module.weight, module.bias
    with torch.autocast(states.device.type, enabled=False):
        if not axis:
            part = None if bias is None else bias[start:stop]
            return _product(states, weight[start:stop].to(states.dtype), part, head, dtype)[0]
        own = -(-len(weight) // axis.size)
        local = local_tensor(weight).to(states.dtype)
        logits, _ = _product(states, local, None if bias is None else local_tensor(bias), head, dtype)
        if own == share:
            return logits[:, : stop - start]
        return all_gather(nn.functional.pad(logits, (0, own - len(local))), axis, 1)[:, start:stop]
