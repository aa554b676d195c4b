"""A loss whose gradients were worked out together with it, as a tensor that autograd can go on from.

Each input gets a node of its own. So a backward pass for some of the inputs only, as pipelines without gaps run it
(first for hidden states, later for weights), multiplies and frees just what it asks for, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, gradient: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.gradient, ctx.dtype = gradient, tensor.dtype
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        gradient, ctx.gradient = ctx.gradient, None
        factor = grad.reshape(grad.shape + (1,) * (gradient.ndim - grad.ndim))
        # in the loss's own precision: the factor is 1 / (target tokens), and half precision would round it
        return gradient.to(grad.dtype).mul_(factor).to(ctx.dtype), None, None


def with_gradients(
    loss: torch.Tensor, inputs: Sequence[torch.Tensor | None], gradients: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """`loss` with these gradients with respect to `inputs`; None for inputs that need none.

    `loss` is a scalar, or [n] where each element depends on the same row of its one input alone: the gradient's row is
    then that of the element.

    The gradients' memory is used for the result of the backward pass.
    """
    value = loss
    for tensor, gradient in zip(inputs, gradients, strict=True):
        if tensor is not None and gradient is not None:
            known = _Known.apply(tensor, gradient, value)
            loss = known if value is loss else loss + known
            value = torch.zeros_like(value)
    return loss
