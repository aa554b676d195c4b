"""Linear layers as the engine multiplies by them: weights packed once, and each request's adapter added to its rows.

On a CPU weights are laid out for products of few rows: by our own loops where numba is installed (`products`), else by
oneDNN. With both a row's result is the same, bit for bit, whatever is computed beside it. Elsewhere products stay as
they are.

Layers are found by their class alone, and get a class of their own, so the model isn't rewritten and can be restored.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import torch
from torch import nn

from swift.core.errors import UsageError
from swift.data.compiled import has_numba
from swift.inference.paged.pages import Pages
from swift.inference.paged.step import current_step
from swift.inference.paged.threads import pool, shares

# fewer rows take other kernels of oneDNN, whose additions have another order
MIN_ROWS = 4
# rows that oneDNN's layout is chosen for; from 8 up all choices are the same one
_REORDERED_FOR = 32
_AS_NUMPY = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
_HELD = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


class ServedLinear(nn.Linear):
    """A linear layer of an engine's model. Made by `serve_linears`, never directly.

    Attributes:
        packed: the weight laid out for products; None where plain ones are used, or while it is let go of.
        packs: whether it multiplies by a packed weight.
        held: as what that one is kept. What comes in and goes out is of the model's type.
        pages: where it is kept, beside the model's others.
        deltas: of each adapter's slot that changes this layer.
    """

    packed: Packed | None
    packs: bool
    held: torch.dtype
    pages: Pages
    deltas: dict[int, LowRank]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        if self.packed is None:
            output = super().forward(x)
        else:
            output = self.packed(x)
            output = output if self.bias is None else output + self.bias
        if self.deltas:
            self._add_deltas(x, output)
        return output

    def replace(self, weight: torch.Tensor) -> None:
        """Take another weight, [out, in]."""
        if isinstance(self.packed, Panels):
            self.packed.fill(weight)
        elif self.packs:
            self.packed = pack(weight, self.held, self.pages)
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
            return up(down(x))
        assert self._plain is not None
        down_plain, up_plain = self._plain
        return x @ down_plain.t() @ up_plain.t()


class Packed(Protocol):
    """A weight laid out for products, and what multiplies by it."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]; a row's result doesn't depend on how many there are."""
        ...


class Panels:
    """A weight as our own compiled loops read it (`products`).

    Args:
        weight: [out, in], on a CPU.
        held: as what it is kept: fp32, bfloat16, float16, or int8 with a factor for each of its rows.
        pages: where it is kept; default: in memory of its own.
    """

    def __init__(self, weight: torch.Tensor, held: torch.dtype, pages: Pages | None = None) -> None:
        from swift.inference.paged.products import WIDTH, product

        self._product = product
        self._columns, size = weight.shape
        self._factors: torch.Tensor | None = None
        shape = (-(-self._columns // WIDTH), size, WIDTH)
        self._kept = torch.empty(shape, dtype=held) if pages is None else pages.empty(shape, held)
        self._panels = self._kept.view(_AS_NUMPY.get(held, held)).numpy()
        self.fill(weight)

    def fill(self, weight: torch.Tensor) -> None:
        """Take another weight of the same shape, where the old one was."""
        if self._kept.dtype == torch.int8:
            largest = weight.float().abs().amax(1).clamp_(min=torch.finfo(torch.float32).tiny)
            self._factors = largest / 127
            weight = (weight.float() / self._factors[:, None]).round_()
        _, size, width = self._kept.shape
        whole = self._columns // width
        full, rest = weight.split([whole * width, self._columns - whole * width])
        self._kept[:whole] = full.reshape(whole, width, size).transpose(1, 2)
        self._kept[whole:] = 0
        self._kept[whole:, :, : len(rest)] = rest.t()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        given = x
        if x.dtype != torch.float32:
            x = x.float()
        if not x.is_contiguous():
            x = x.contiguous()
        output = torch.empty(*x.shape[:-1], self._columns)
        size = x.shape[-1]
        rows = x.numel() // size
        arguments = x.numpy().reshape(rows, size), self._panels, output.numpy().reshape(rows, self._columns)
        first, *others = shares(len(self._panels), self._panels.size * -(-rows // 8))
        running = [pool(len(others)).submit(self._product, *arguments, part) for part in others]
        self._product(*arguments, first)
        for other in running:
            other.result()
        if self._factors is not None:
            output *= self._factors
        return output.to(given.dtype) if given.dtype != torch.float32 else output


class Reordered:
    """A weight in oneDNN's layout: up to 1.9 times as fast as plain products.

    With it a row's result is the same, bit for bit, for any number of rows but few, so these are filled up.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _REORDERED_FOR)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // x.shape[-1]
        if rows >= MIN_ROWS:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
        filled = x.new_zeros(MIN_ROWS, x.shape[-1])
        filled[:rows] = x.view(rows, -1)
        output = torch.ops.mkldnn._linear_pointwise(filled, self._weight, None, "none", [], "")
        return output[:rows].view(*x.shape[:-1], -1)


def pack(weight: torch.Tensor, held: torch.dtype | None = None, pages: Pages | None = None) -> Packed | None:
    """A weight [out, in] laid out for products, or None where there is no such thing.

    Args:
        held: as what it is kept; default: as it is. Only our own loops can keep it as something else.
        pages: where our own loops' layout is kept; default: in memory of its own.
    """
    if weight.device.type != "cpu":
        return None
    held = held or weight.dtype
    if held in _HELD and has_products():
        return Panels(weight.detach(), held, pages)
    return Reordered(weight) if held == weight.dtype and _can_reorder(held) else None


@cache
def has_products() -> bool:
    """Whether our own loops run here: numba is installed, and the processor is one they are written for."""
    if not has_numba():
        return False
    from swift.inference.paged.products import registers

    return registers() is not None


def serve_linears(model: nn.Module, *, weight_format: str = "auto", owned: bool = True) -> int:
    """Make all plain linear layers of a model served ones.

    Args:
        weight_format: see `EngineConfig.weight_format`.
        owned: the packed weight is the only one from now on; the parameter becomes an empty one of the same shape. A
            matrix that something else uses too (tied embeddings) stays.

    Returns:
        how many layers multiply by packed weights.

    Raises:
        UsageError: the format isn't the model's own, and there is nothing that multiplies by it.
    """
    if weight_format != "auto" and not has_products():
        raise UsageError(
            f"weights are held as {weight_format} by compiled loops, which can't be had here"
            + ("" if has_numba() else ": numba is not installed"),
            where=f"--weight_format {weight_format}",
            fix="leave it out" if has_numba() else 'pip install "swift-llm[serve]", or leave it out',
        )
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    elsewhere = _weights_used_elsewhere(model)
    num_packed, pages = 0, Pages()
    for module in linears:
        served: Any = module
        served.__class__ = ServedLinear
        served.deltas = {}
        served.held = module.weight.dtype if weight_format == "auto" else getattr(torch, weight_format)
        served.pages = pages
        served.packed = pack(module.weight, served.held, pages)
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


def _can_reorder(dtype: torch.dtype) -> bool:
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return dtype == torch.float32
