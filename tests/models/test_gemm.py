"""Both products, eager and compiled, are the plain ones; compiled code keeps the faster library's call."""

from __future__ import annotations

import pytest
import torch

from swift.models import gemm


@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("shape", [(5, 6), (1, 4, 6)], ids=str)
def test_products_are_the_plain_ones(compiling, shape, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 6, generator=generator)
    x = torch.randn(shape, generator=generator)
    with torch.no_grad():
        torch.testing.assert_close(gemm.times_transposed(x, weight), x @ weight.t())
        torch.testing.assert_close(gemm.times(x, weight), x @ weight)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of PyTorch has no oneDNN")
def test_the_opaque_operation_tells_its_shape():
    weight = torch.randn(7, 6)
    for x, back in ((torch.randn(1, 4, 6), False), (torch.randn(4, 7), True)):
        torch.library.opcheck(gemm._in_compiled, (x, weight, back), test_utils=("test_schema", "test_faketensor"))
