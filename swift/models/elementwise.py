"""RMS norm and SwiGLU of Hugging Face models as autograd functions: the same numbers, less kept and less to do.

Autograd keeps what each small operation needs. For `act(gate) * up` that is gate, up and act(gate), all of the
feed-forward size; here act(gate) is computed again. For an RMS norm it walks back through five operations and as many
tensors; here the gradient is one formula.

    y = w * x * r,  r = (mean(x²) + eps)^(-1/2)      dx = r * (w * dy) - x * r³ * mean(w * dy * x),  dw = Σ dy * x * r

A module is taken only if its `forward` is Llama's instruction for instruction, which many families share (Qwen,
Mistral, SmolLM, Granite and others): then what it computes is known. It gets a subclass of its own class with another
forward, as peft's layers do in `lora_kernel`; any other module stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm


class SwiGLUFunction(torch.autograd.Function):
    """silu(gate) * up, all of one shape; keeps gate and up only."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        gate, up = inputs
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        grad = gradients[0]
        if torch.is_grad_enabled():  # a second derivative is wanted, and `silu_backward` has none
            sigmoid = torch.sigmoid(gate)
            return grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid
        return torch.ops.aten.silu_backward(grad * up, gate), nn.functional.silu(gate).mul_(grad)


class RMSNormFunction(torch.autograd.Function):
    """weight * x / rms(x) over the last dimension; fp32 inside, as the library's modules have it (fp64 for fp64)."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        x, weight, eps = inputs
        wide = _widened(x)
        scale = _inverse_rms(wide, eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.eps = eps
        return (wide * scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        wide = _widened(x)
        if torch.is_grad_enabled():  # a second derivative is wanted: it has to know where the scale came from
            scale = _inverse_rms(wide, ctx.eps)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (gradients[0] * (wide * scale).to(x.dtype)).flatten(0, -2).sum(0)
        if ctx.needs_input_grad[0]:
            inner = _widened(gradients[0] * weight)
            along = (inner * wide).sum(-1, keepdim=True) * (scale**3 / -x.shape[-1])
            grad_x = (inner * scale).addcmul_(wide, along).to(x.dtype)
        return grad_x, grad_weight, None


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _inverse_rms(wide: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def _wanted(x: torch.Tensor) -> bool:
    """Where the functions are worth it: compiled code fuses by itself, and the library rounds fp64 to fp32 inside."""
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    )


def _fast_mlp(base: Callable) -> Callable:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not _wanted(x) or type(self.act_fn) not in (SiLUActivation, nn.SiLU) or self.act_fn._forward_hooks:
            return base(self, x)
        return self.down_proj(SwiGLUFunction.apply(self.gate_proj(x), self.up_proj(x)))

    return forward


def _fast_norm(base: Callable) -> Callable:
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        if not _wanted(hidden_states) or hidden_states.dtype != self.weight.dtype:
            return base(self, hidden_states)
        return RMSNormFunction.apply(hidden_states, self.weight, self.variance_epsilon)

    return forward


_FAST = ((LlamaMLP.forward, _fast_mlp), (LlamaRMSNorm.forward, _fast_norm))


@cache
def _fast_class(kind: Any) -> Any:
    """A subclass of the module class `kind` with the fast forward, or None if `kind` computes something else."""
    for known, fast in _FAST:
        if _same_code(kind.forward, known):
            return type(f"Fast{kind.__name__}", (kind,), {"forward": fast(kind.forward), "__module__": __name__})
    return None


def _same_code(one: Any, other: Any) -> bool:
    """Whether two functions are the same instructions on the same names and constants."""
    left, right = getattr(one, "__code__", None), getattr(other, "__code__", None)
    if left is None or right is None:
        return False
    parts = ("co_code", "co_names", "co_consts", "co_varnames", "co_freevars")
    return all(getattr(left, part) == getattr(right, part) for part in parts)


def enable_fast_elementwise(model: nn.Module) -> int:
    """Give every RMS norm and gated MLP of `model` that is known the fast forward; returns how many got it."""
    count = 0
    for module in model.modules():
        kind: Any = type(module)
        fast = None if "forward" in vars(module) else _fast_class(kind)
        if fast is not None:
            module.__class__ = fast
            count += 1
    return count


def disable_fast_elementwise(model: nn.Module) -> None:
    """Give the modules their own forward back."""
    for module in model.modules():
        kind: Any = type(module)
        if kind.__module__ == __name__:
            module.__class__ = kind.__bases__[0]
