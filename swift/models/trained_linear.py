"""Trained linear layers on a CPU, with all three products by the faster library (`gemm`).

    y = x Wᵀ + b        dx = dy W,  dW = dyᵀ x,  db = Σ dy

For full tuning; the frozen layers under LoRA have `lora_kernel`. A layer stays an `nn.Linear`, of a subclass with
another forward and no state of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from swift.models.gemm import times, times_transposed


class LinearFunction(torch.autograd.Function):
    """x [.., in] Wᵀ + b, W [out, in], all of one dtype."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        x, weight, bias = inputs
        ctx.save_for_backward(x, weight)
        out = times_transposed(x, weight)
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = gradients[0]
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        return (
            times(grad, weight) if needs_x else None,
            times(rows.t(), x.flatten(0, -2)) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


class TrainedLinear(nn.Linear):
    """An `nn.Linear` whose training in fp32 on a CPU goes through `LinearFunction`; else the layer's own way."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if (
            torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and self.weight.requires_grad
            and input.device.type == "cpu"
            and input.dim() > 1
            and input.dtype == self.weight.dtype == torch.float32
            and not torch.is_autocast_enabled("cpu")
        ):
            return LinearFunction.apply(input, self.weight, self.bias)
        return super().forward(input)


def enable_trained_linear(decoder: nn.Module) -> int:
    """Give the trained plain linear layers of a decoder without adapters the function; returns how many got it."""
    count = 0
    for module in decoder.modules():
        if type(module) is nn.Linear and "forward" not in vars(module) and module.weight.requires_grad:
            module.__class__ = TrainedLinear
            count += 1
    return count


def disable_trained_linear(decoder: nn.Module) -> None:
    """Give the layers their own forward back."""
    for module in decoder.modules():
        if type(module) is TrainedLinear:
            module.__class__ = nn.Linear  # type: ignore[assignment]
