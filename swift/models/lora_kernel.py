"""LoRA on a linear layer as one autograd function: the same function as peft's forward, with less kept and less to do.

peft computes `base(x) + lora_B(lora_A(dropout(x))) * s` as separate operations. With dropout, autograd then keeps the
noise and the dropped copy of x for every layer, both as large as x. Here x itself is kept, which neighbours such as the
query, key and value projections share, with one byte per element for the mask; and the update is added to the base
output in place of a third tensor of the output's size.

    y  = x Wᵀ + b + s/(1-p) · (m∘x) Aᵀ Bᵀ        x [.., in], W [out, in], A [r, in], B [out, r], m [.., in] of 0 and 1

On a CPU, drawing m the way torch does costs more than the LoRA matrices themselves; here 16 random bits decide about an
element, so p is rounded to a multiple of 2^-16 (and 1/(1-p) is that of the rounded p: the mean is exact). The draws
come from torch's generator, so seeds and saved generator states work as ever; they are other draws than peft's.

The narrow products are written with r as the number of rows, [r, k] times [k, n]: with r as the number of columns, MKL
takes two to six times as long for the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import nn

from swift.models.gemm import times, times_transposed

_LEVELS = 1 << 16


def keep_mask(x: torch.Tensor, dropout: float) -> tuple[torch.Tensor, float]:
    """A boolean mask of x's shape, False with probability `dropout`; and the exact probability of True."""
    if x.device.type != "cpu":
        return torch.rand(x.shape, device=x.device) >= dropout, 1 - dropout
    dropped_levels = round(dropout * _LEVELS)
    kept = 1 - dropped_levels / _LEVELS
    if torch.compiler.is_compiling():
        return _draw_compiled(x.detach(), torch.empty(1), dropped_levels), kept
    return _draw(x, dropped_levels), kept


def _draw(like: torch.Tensor, dropped_levels: int) -> torch.Tensor:
    """True where 16 random bits, as a number, are at least `dropped_levels`."""
    words = torch.empty((like.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)  # all 64 bits are random
    levels = words.view(torch.int16)[: like.numel()].view(like.shape)
    return levels >= dropped_levels - _LEVELS // 2


@torch.library.custom_op("swift::keep_mask", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _draw_compiled(like: torch.Tensor, token: torch.Tensor, dropped_levels: int) -> torch.Tensor:
    """`_draw` as one opaque operation for compiled code, whose own generator is many times slower on a CPU.

    The compiler replaces equal calls by one, and does so with random custom operations too; but it never takes two
    uninitialised tensors for equal, so an empty `token` in each call keeps the calls apart.
    """
    return _draw(like, dropped_levels)


@_draw_compiled.register_fake
def _(like: torch.Tensor, token: torch.Tensor, dropped_levels: int) -> torch.Tensor:
    return torch.empty(like.shape, dtype=torch.bool)


class LoRALinearFunction(torch.autograd.Function):
    """y = x Wᵀ + b + scale · (m∘x) Aᵀ Bᵀ. W is frozen and gets no gradient; x, b, A and B do. m None: no dropout."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        x, weight, bias, matrix_a, matrix_b, mask, scale = inputs
        forward = torch.ops.swift.lora_forward if _opaque(x) else _lora_forward
        out, reduced = forward(x, weight, bias, matrix_a, matrix_b, mask, scale)
        ctx.save_for_backward(x, weight, matrix_a, matrix_b, reduced, mask)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, matrix_a, matrix_b, reduced, mask = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted: it has to know where `reduced` came from
            reduced = matrix_a @ _masked(x, mask).flatten(0, -2).t()
        backward = torch.ops.swift.lora_backward if _opaque(x) else _lora_backward
        needs_x, _, needs_bias, *needs = ctx.needs_input_grad[:5]
        grads = backward(gradients[0], x, [weight, matrix_a, matrix_b, reduced], mask, ctx.scale, [needs_x, *needs])
        grad_x, grad_a, grad_b = (
            grad if needed else None for grad, needed in zip(grads, [needs_x, *needs], strict=True)
        )
        grad_bias = gradients[0].flatten(0, -2).sum(0) if needs_bias else None
        return grad_x, None, grad_bias, grad_a, grad_b, None, None


def _lora_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    matrix_a: torch.Tensor,
    matrix_b: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y, and A (m∘x)ᵀ as [r, rows]."""
    out = times_transposed(x, weight)
    if bias is not None:
        out += bias
    reduced = matrix_a @ _masked(x, mask).flatten(0, -2).t()
    out.view(-1, out.shape[-1]).addmm_(reduced.t(), matrix_b.t(), alpha=scale)
    return out, reduced


def _lora_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    others: list[torch.Tensor],
    mask: torch.Tensor | None,
    scale: float,
    needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, A and B; one that isn't needed is an empty tensor. `others` is [W, A, B, A (m∘x)ᵀ]."""
    weight, matrix_a, matrix_b, reduced = others
    needs_x, needs_a, needs_b = needs
    grad = grad.flatten(0, -2)  # [rows, out]
    grad_x, grad_a, grad_b = (grad.new_empty(0) for _ in range(3))
    if needs_b:
        grad_b = (reduced @ grad).t() * scale
    if needs_a or needs_x:
        grad_reduced = (matrix_b.t() @ grad.t()) * scale  # [r, rows]
    if needs_a:
        grad_a = grad_reduced @ _masked(x, mask).flatten(0, -2)
    if needs_x:
        if mask is None:
            grad_x = times(grad, weight).addmm_(grad_reduced.t(), matrix_a)
        else:
            grad_x = times(grad, weight).add_(_masked(grad_reduced.t() @ matrix_a, mask.flatten(0, -2)))
        grad_x = grad_x.view(x.shape)
    return grad_x, grad_a, grad_b


def _opaque(x: torch.Tensor) -> bool:
    """Whether the compiler is to take the function as it is: it would make copies of what is updated in place here."""
    return torch.compiler.is_compiling() and x.device.type == "cpu"


# Operators of `torch.library.custom_op` cost several times as much for each call.
_library = torch.library.Library("swift", "FRAGMENT")
_library.define(
    "lora_forward(Tensor x, Tensor weight, Tensor? bias, Tensor matrix_a, Tensor matrix_b, Tensor? mask, float scale)"
    " -> (Tensor, Tensor)"
)
_library.define(
    "lora_backward(Tensor grad, Tensor x, Tensor[] others, Tensor? mask, float scale, bool[] needs)"
    " -> (Tensor, Tensor, Tensor)"
)
_library.impl("lora_forward", torch.no_grad()(_lora_forward), "CPU")
_library.impl("lora_backward", torch.no_grad()(_lora_backward), "CPU")


@torch.library.register_fake("swift::lora_forward", lib=_library)
def _(x, weight, bias, matrix_a, matrix_b, mask, scale):
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    return out, x.new_empty(matrix_a.shape[0], x.numel() // x.shape[-1])


@torch.library.register_fake("swift::lora_backward", lib=_library)
def _(grad, x, others, mask, scale, needs):
    _, matrix_a, matrix_b, _ = others
    grad_b = matrix_b.new_empty(matrix_b.t().shape).t()
    grads = x.new_empty(x.shape), matrix_a.new_empty(matrix_a.shape), grad_b
    return tuple(grad if needed else x.new_empty(0) for grad, needed in zip(grads, needs, strict=True))


def _masked(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return x if mask is None else torch.where(mask, x, 0.0)


class FastLoRALinear(PeftLinear):
    """peft's LoRA layer with `LoRALinearFunction` as its forward wherever that computes the same.

    Decided at each call: an active single plain adapter, not merged, not disabled, on an ordinary `nn.Linear` whose
    weight is frozen, in one dtype and without autocast or hooks inside. Anything else goes peft's own way.
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        name = None if args or kwargs else self._plain_adapter(x)
        if name is None:
            return super().forward(x, *args, **kwargs)
        base: Any = self.base_layer
        dropout: Any = self.lora_dropout[name]
        mask, kept = None, 1.0
        if isinstance(dropout, nn.Dropout) and dropout.training and dropout.p > 0:
            mask, kept = keep_mask(x, dropout.p)
        matrices = self.lora_A[name].weight, self.lora_B[name].weight
        return LoRALinearFunction.apply(x, base.weight, base.bias, *matrices, mask, self.scaling[name] / kept)

    def _plain_adapter(self, x: torch.Tensor) -> str | None:
        """The adapter that the fast forward can compute, or None."""
        if self.disable_adapters or self.merged or len(self.active_adapters) != 1:
            return None
        name = self.active_adapters[0]
        if name not in self.lora_A or name in self.lora_variant or self.lora_bias[name]:
            return None
        base, matrix_a, matrix_b = self.base_layer, self.lora_A[name], self.lora_B[name]
        dropout = self.lora_dropout[name]
        if type(base) is not nn.Linear or type(matrix_a) is not nn.Linear or type(matrix_b) is not nn.Linear:
            return None
        if type(dropout) is not nn.Identity and not (type(dropout) is nn.Dropout and dropout.p < 1):
            return None
        if base.weight.requires_grad or x.dim() < 2:
            return None
        if not x.dtype == base.weight.dtype == matrix_a.weight.dtype == matrix_b.weight.dtype:
            return None
        if any(part._forward_hooks or part._forward_pre_hooks for part in (base, matrix_a, matrix_b, dropout)):
            return None
        return None if torch.is_autocast_enabled(x.device.type) else name


def enable_fast_lora(model: nn.Module) -> int:
    """Give every plain LoRA linear layer of `model` the fast forward; returns how many got it.

    The layers stay peft's (a subclass, no new state), so saving, merging, switching adapters and copying work as
    before. `disable_fast_lora` undoes it.
    """
    count = 0
    for module in model.modules():
        if type(module) is PeftLinear and not module.fan_in_fan_out:
            module.__class__ = FastLoRALinear
            count += 1
    return count


def disable_fast_lora(model: nn.Module) -> None:
    """Give the layers peft's own forward back."""
    for module in model.modules():
        if type(module) is FastLoRALinear:
            module.__class__ = PeftLinear  # type: ignore[assignment]
