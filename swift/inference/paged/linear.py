"""Linear layers as the engine multiplies by them: weights packed once, and each request's adapter added to its rows.

On a CPU oneDNN multiplies by weights that were laid out for it: up to 1.9 times as fast as plain products at the sizes
of a step, and with them a row's result is the same, bit for bit, for any number of rows but one. So fewer than
`MIN_ROWS` rows are filled up. Elsewhere products stay as they are.

Layers are found by their class alone, and get a class of their own, so the model isn't rewritten and can be restored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from swift.core.errors import UsageError
from swift.inference.paged.step import current_step

# fewer rows take other kernels, whose additions have another order
MIN_ROWS = 4
# rows that the layout is chosen for; from 8 up all choices are the same one
_PACKED_FOR = 32
_PACKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ServedLinear(nn.Linear):
    """A linear layer of an engine's model. Made by `serve_linears`, never directly.

    Attributes:
        packed: the weight in oneDNN's layout; None where plain products are used, or while it is let go of.
        packs: whether it multiplies by a packed weight.
        format: the packed weight's type; what comes in is rounded to it, what goes out is the model's type again.
        deltas: of each adapter's slot that changes this layer.
    """

    packed: torch.Tensor | None
    packs: bool
    format: torch.dtype
    deltas: dict[int, LowRank]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        output = super().forward(x) if self.packed is None else self._multiply(x, self.packed)
        if self.deltas:
            self._add_deltas(x, output)
        return output

    def _multiply(self, x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        if x.dtype == self.format:
            return multiply(x, packed, self.bias)
        output = multiply(x.to(self.format), packed, None).to(x.dtype)
        return output if self.bias is None else output + self.bias

    def replace(self, weight: torch.Tensor) -> None:
        """Take another weight, [out, in]."""
        if self.packs:
            self.packed = pack(weight.to(self.format))
        if self.weight.device.type != "meta":
            self.weight.data.copy_(weight)
        elif not self.packs:
            self.weight = nn.Parameter(weight, requires_grad=False)

    def let_go(self) -> None:
        """Give the weight's memory back; `replace` brings another one."""
        self.packed = None

    def _add_deltas(self, x: torch.Tensor, output: torch.Tensor) -> None:
        step = current_step()
        if step is None:
            return
        rows_in, rows_out = x.view(-1, x.shape[-1]), output.view(-1, output.shape[-1])
        for slot, first, count in step.adapter_rows:
            delta = self.deltas.get(slot)
            if delta is not None:
                rows_out[first : first + count] += delta(rows_in[first : first + count])


class LowRank:
    """What a LoRA adapter adds to a layer: B (A x) * scale.

    Args:
        down: A, [rank, in].
        up: B, [out, rank].
        scale: factor.
    """

    def __init__(self, down: torch.Tensor, up: torch.Tensor, scale: float) -> None:
        up = up * scale
        packed = pack(down), pack(up)
        self._packed = packed
        self._plain = (down, up) if packed[0] is None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [rows, out]."""
        down, up = self._packed
        if down is not None and up is not None:
            return multiply(multiply(x, down, None), up, None)
        assert self._plain is not None
        down, up = self._plain
        return x @ down.t() @ up.t()


def pack(weight: torch.Tensor) -> torch.Tensor | None:
    """A weight [out, in] in oneDNN's layout, or None where there is no such thing."""
    if weight.device.type != "cpu" or weight.dtype not in _PACKED_DTYPES or not _has_packing(weight.dtype):
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _PACKED_FOR)


def multiply(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., in] times a packed weight: [..., out]; a row's result doesn't depend on how many there are."""
    rows = x.numel() // x.shape[-1]
    if rows >= MIN_ROWS:
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    filled = x.new_zeros(MIN_ROWS, x.shape[-1])
    filled[:rows] = x.view(rows, -1)
    output = torch.ops.mkldnn._linear_pointwise(filled, packed, bias, "none", [], "")
    return output[:rows].view(*x.shape[:-1], -1)


def serve_linears(model: nn.Module, *, weight_format: str = "auto", owned: bool = True) -> int:
    """Make all plain linear layers of a model served ones.

    Args:
        weight_format: see `EngineConfig.weight_format`.
        owned: the packed weight is the only one from now on; the parameter becomes an empty one of the same shape. A
            matrix that something else uses too (tied embeddings) stays.

    Returns:
        how many layers multiply by packed weights.

    Raises:
        UsageError: the format is bfloat16, and this processor has no such products.
    """
    if weight_format == "bfloat16" and not _has_packing(torch.bfloat16):
        raise UsageError(
            "this processor doesn't multiply bfloat16 by itself (avx512_bf16 or amx_bf16)",
            where="--weight_format bfloat16",
            fix="leave it out",
        )
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    elsewhere = _weights_used_elsewhere(model)
    num_packed = 0
    for module in linears:
        served: Any = module
        served.__class__ = ServedLinear
        served.deltas = {}
        served.format = torch.bfloat16 if weight_format == "bfloat16" else module.weight.dtype
        served.packed = pack(module.weight.to(served.format))
        served.packs = served.packed is not None
        num_packed += served.packs
        if owned and served.packed is not None and id(module.weight) not in elsewhere:
            empty = torch.empty_like(module.weight, device="meta")
            module.weight = nn.Parameter(empty, requires_grad=False)
    if owned and num_packed:
        _let_go_of_file(model)
    return num_packed


def _let_go_of_file(model: nn.Module) -> None:
    """Copy what is left of a model. It is read as one mapped file, which stays as long as one weight lies in it."""
    for parameter in model.parameters():
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()


def _weights_used_elsewhere(model: nn.Module) -> set[int]:
    """Parameters that modules other than plain linear layers hold, by id."""
    return {
        id(parameter)
        for module in model.modules()
        if not isinstance(module, nn.Linear)
        for parameter in module.parameters(recurse=False)
    }


def _has_packing(dtype: torch.dtype) -> bool:
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return True
