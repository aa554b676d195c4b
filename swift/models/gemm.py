"""Large fp32 products on a CPU, by the faster of the two libraries that PyTorch carries.

PyTorch multiplies fp32 matrices by MKL, whose kernels reach about a tenth less than oneDNN's on AMD processors
(measured at a 135M model's shapes: 101 against 109 GFLOP/s). Both compute in fp32; only the order of additions differs,
as it does between MKL's own kernels. Which one is used depends on the processor alone, so a run and its continuation on
the same machine are equal bit for bit. Code that is being compiled gets plain products; `lora_kernel` keeps its own
ones out of the compiler's sight.
"""

from __future__ import annotations

from functools import cache

import torch

from swift.core.devices import cpu_vendor

# oneDNN lays the weight out anew for each product; above this the copy costs too much memory (an output head's).
_LARGEST_WEIGHT = 1 << 24


@cache
def _prefers_onednn() -> bool:
    return (
        cpu_vendor() == "AuthenticAMD"
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def times_transposed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [.., in] times weight [out, in] transposed: [.., out]. No bias, no autograd of its own on the fast way."""
    if _suits_onednn(x, weight):
        return _onednn(x, weight)
    return x @ weight.t()


def times(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [.., out] times weight [out, in]: [.., in]; the product that carries a gradient back through a linear layer."""
    if _suits_onednn(x, weight):
        return _onednn(x, weight.t())
    return x @ weight


def _suits_onednn(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and weight.numel() <= _LARGEST_WEIGHT
        and _prefers_onednn()
    )


def _onednn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
