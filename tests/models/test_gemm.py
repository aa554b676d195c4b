"""Both products are the plain ones; the faster library's call is not what a compiler sees."""

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


def test_a_compiler_sees_plain_products(monkeypatch):
    def refuse(*arguments):
        raise AssertionError

    monkeypatch.setattr(gemm, "_onednn", refuse)
    monkeypatch.setattr(gemm, "_prefers_onednn", lambda: True)
    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    with torch.no_grad():
        with pytest.raises(AssertionError):
            gemm.times_transposed(x, weight)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert gemm.times_transposed(x, weight).shape == (2, 4) == (*gemm.times(torch.ones(2, 3), weight.t()).shape,)
