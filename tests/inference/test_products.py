"""The innermost loop of products: the same bits for vectors of any length, whatever the tile."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

numba = pytest.importorskip("numba")

from swift.inference.paged.products import make_tile, registers  # noqa: E402

if registers() is None:
    pytest.skip("no multiply-add of vectors on this processor", allow_module_level=True)


def tiled(x: np.ndarray, panel: np.ndarray, rows: int, vectors: int, lanes: int, start: np.ndarray | None = None):
    """x times panel by one tile size, whose rows and columns divide those of the product."""
    tile = make_tile(rows, vectors, lanes)

    @numba.njit
    def run(x, panel, out, go_on):
        size, columns = panel.shape
        for row in range(0, x.shape[0], rows):
            for column in range(0, columns, vectors * lanes):
                tile(
                    np.int64(x.ctypes.data) + row * size * 4, size,
                    panel, np.int64(panel.ctypes.data) + column * panel.itemsize, columns,
                    np.int64(out.ctypes.data) + (row * columns + column) * 4, columns, size, go_on,
                )  # fmt: skip

    out = np.full((len(x), panel.shape[1]), np.nan, np.float32) if start is None else start.copy()
    run(x, panel, out, start is not None)
    return out


def one_after_the_other(x: np.ndarray, panel: np.ndarray) -> float:
    """The sum of products with one rounding to fp32 after each multiply-add, exactly."""
    total = np.float32(0)
    for a, b in zip(x, panel, strict=True):
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(total))
        near = np.float32(exact.numerator / exact.denominator)  # to double first: corrected below
        around = [near, np.nextafter(near, np.float32(math.inf)), np.nextafter(near, np.float32(-math.inf))]
        total = min(around, key=lambda each: abs(Fraction(float(each)) - exact))
    return float(total)


def test_any_vectors_and_tiles_give_the_same_bits():
    draw = np.random.default_rng(0)
    x = draw.standard_normal((8, 37), dtype=np.float32)
    panel = draw.standard_normal((37, 48), dtype=np.float32)
    found = [tiled(x, panel, *size) for size in ((1, 1, 1), (4, 3, 4), (8, 3, 16), (2, 1, 8))]
    for other in found[1:]:
        assert np.array_equal(found[0], other)
    assert np.allclose(found[0], x.astype(np.float64) @ panel, atol=1e-5)


def test_a_number_is_one_multiply_add_after_the_other():
    draw = np.random.default_rng(1)
    x = draw.standard_normal((1, 60), dtype=np.float32)
    panel = draw.standard_normal((60, 16), dtype=np.float32)
    out = tiled(x, panel, 1, 1, 16)
    for column in range(0, 16, 5):
        assert float(out[0, column]) == one_after_the_other(x[0], panel[:, column])


def test_a_product_may_be_cut_along_its_inner_dimension():
    draw = np.random.default_rng(2)
    x = draw.standard_normal((4, 50), dtype=np.float32)
    panel = draw.standard_normal((50, 16), dtype=np.float32)
    whole = tiled(x, panel, 4, 1, 16)
    begun = tiled(np.ascontiguousarray(x[:, :21]), panel[:21].copy(), 4, 1, 16)
    assert np.array_equal(tiled(np.ascontiguousarray(x[:, 21:]), panel[21:].copy(), 2, 1, 8, start=begun), whole)
