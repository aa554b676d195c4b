"""Products of a step's rows with weights on a CPU, compiled by numba: fast for few rows, exact for any number.

The weights lie in panels, a few vectors of columns wide, in the order in which the innermost loop reads them. Each
result is one multiply-add after the other along the inner dimension, in fp32. So a row's bits depend on nothing but
that row: neither on how many there are, nor on the processor's vectors, nor on which thread computes it. Weights held
in fewer bits are widened where they are read, which costs little: the memory is what a small step waits for.

The innermost loop is written in LLVM's language, since nothing less says which numbers stay in registers.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from swift.data.compiled import kernel


class Registers(NamedTuple):
    """What a processor has for the innermost loop.

    Attributes:
        lanes: fp32 numbers of a vector.
        rows, vectors: of the largest tile whose sums fit.
    """

    lanes: int
    rows: int
    vectors: int


@cache
def registers() -> Registers | None:
    """This processor's; None where it has no multiply-add of vectors."""
    if platform.machine() in ("aarch64", "arm64"):
        return Registers(4, 8, 3)
    features = binding.get_host_cpu_features()
    if features.get("avx512f") and features.get("f16c"):
        return Registers(16, 8, 3)
    if features.get("avx2") and features.get("fma") and features.get("f16c"):
        return Registers(8, 4, 3)
    return None


LANES, _ROWS, _VECTORS = registers() or Registers(4, 4, 3)
_HALF = _ROWS // 2
WIDTH = LANES * _VECTORS
"""Columns of a panel."""

# of the inner dimension at a time: a panel's share stays in the cache while all rows go over it
_DEPTH = 1024

_FLOAT, _INT32, _INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
# how weights are held, by the type of their array -> their type in LLVM's language
_HELD = {
    types.float32: _FLOAT,
    types.uint16: ir.IntType(16),  # bfloat16
    types.int16: ir.HalfType(),  # float16
    types.int8: ir.IntType(8),
}


def _widened(builder: Any, loaded: Any, held: Any, lanes: int) -> Any:
    """A vector of weights as fp32."""
    wide, whole = ir.VectorType(_FLOAT, lanes), ir.VectorType(_INT32, lanes)
    if held == types.float32:
        return loaded
    if held == types.int16:
        return builder.fpext(loaded, wide)
    if held == types.int8:
        return builder.sitofp(builder.sext(loaded, whole), wide)
    shifted = builder.shl(builder.zext(loaded, whole), ir.Constant(whole, [16] * lanes))
    return builder.bitcast(shifted, wide)


def make_tile(rows: int, vectors: int, lanes: int = LANES) -> Callable[..., None]:
    """A loop over the inner dimension for so many rows and vectors of columns, to be called from compiled code.

    `tile(x, x_step, panels, panel, panel_step, out, out_step, depth, go_on)` computes
    out[r, c] = sum over i of x[r, i] * panel[i, c], on top of what `out` holds if `go_on`. x, panel and out are
    addresses, with `*_step` numbers from row to row; x and out are fp32, panel is of the type of the array `panels`;
    depth is above 0.
    """
    vector = ir.VectorType(_FLOAT, lanes)

    def write(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, x_step, _, panel, panel_step, out, out_step, depth, go_on = arguments
        held = signature.args[2].dtype
        item = held.bitwidth // 8
        weights = ir.VectorType(_HELD[held], lanes)
        function = ir.FunctionType(vector, [vector] * 3)
        multiply_add = cgutils.get_or_insert_function(builder.module, function, f"llvm.fma.v{lanes}f32")

        def number(value: int) -> Any:
            return ir.Constant(_INT64, value)

        def pointer(base: Any, count: Any, size: int, kind: Any) -> Any:
            """To what comes `count` numbers of `size` bytes after `base`."""
            return builder.inttoptr(builder.add(base, builder.mul(count, number(size))), kind.as_pointer())

        sources = [pointer(x, builder.mul(x_step, number(r)), 4, _FLOAT) for r in range(rows)]
        targets = []
        for r in range(rows):
            line = builder.mul(out_step, number(r))
            targets += [pointer(out, builder.add(line, number(v * lanes)), 4, vector) for v in range(vectors)]
        begun = []
        for target in targets:
            there = builder.load(target)
            there.align = 4
            begun.append(builder.select(go_on, there, ir.Constant(vector, [0.0] * lanes)))

        entry = builder.block
        loop, done = builder.append_basic_block("along"), builder.append_basic_block("done")
        builder.branch(loop)
        builder.position_at_end(loop)
        i = builder.phi(_INT64)
        sums = [builder.phi(vector) for _ in targets]
        columns = []
        for v in range(vectors):
            at = builder.add(builder.mul(i, panel_step), number(v * lanes))
            loaded = builder.load(pointer(panel, at, item, weights))
            loaded.align = item
            columns.append(_widened(builder, loaded, held, lanes))
        nothing = ir.Constant(vector, ir.Undefined)
        everywhere = ir.Constant(ir.VectorType(_INT32, lanes), [0] * lanes)
        grown = []
        for r in range(rows):
            loaded = builder.load(builder.gep(sources[r], [i]))
            loaded.align = 4
            first = builder.insert_element(nothing, loaded, ir.Constant(_INT32, 0))
            spread = builder.shuffle_vector(first, nothing, everywhere)
            grown += [builder.call(multiply_add, [spread, columns[v], sums[r * vectors + v]]) for v in range(vectors)]
        following = builder.add(i, number(1))
        for phi, start, after in [(i, number(0), following), *zip(sums, begun, grown, strict=True)]:
            phi.add_incoming(start, entry)
            phi.add_incoming(after, loop)
        builder.cbranch(builder.icmp_signed("<", following, depth), loop, done)
        builder.position_at_end(done)
        for value, target in zip(grown, targets, strict=True):
            stored = builder.store(value, target)
            stored.align = 4
        return context.get_dummy_value()

    def typed(typing_context: Any, x: Any, x_step: Any, panels: Any, panel: Any, panel_step: Any, out: Any,
              out_step: Any, depth: Any, go_on: Any) -> Any:  # fmt: skip
        whole = types.int64
        return types.void(whole, whole, panels, *[whole] * 5, types.boolean), write

    made: Callable[..., None] = intrinsic(typed)
    return made


_large, _middle, _small = make_tile(_ROWS, _VECTORS), make_tile(_HALF, _VECTORS), make_tile(1, _VECTORS)


@kernel
def product(x, panels, out, share):
    """out = x times the weights.

    Args:
        x: fp32 [rows, size], contiguous.
        panels: [panels, size, WIDTH], contiguous: fp32, bfloat16 as uint16, float16 as int16, or int8. Columns beyond
            those of `out` aren't used.
        out: fp32 [rows, columns], contiguous.
        share: the panels computed, from here to before there.
    """
    rows, size = x.shape
    columns = out.shape[1]
    from_x, from_panels = np.int64(x.ctypes.data), np.int64(panels.ctypes.data)
    for panel in range(share[0], share[1]):
        first = panel * WIDTH
        whole = first + WIDTH <= columns
        rest = np.empty((0 if whole else rows, WIDTH), dtype=np.float32)
        target = np.int64(out.ctypes.data) + first * 4 if whole else np.int64(rest.ctypes.data)
        step = columns if whole else WIDTH
        for begin in range(0, size, _DEPTH):
            depth, go_on = min(_DEPTH, size - begin), begin > 0
            at = from_panels + (panel * size + begin) * WIDTH * panels.itemsize
            row = 0
            while row < rows:
                source, goal = from_x + (row * size + begin) * 4, target + row * step * 4
                if row + _ROWS <= rows:
                    _large(source, size, panels, at, WIDTH, goal, step, depth, go_on)
                    row += _ROWS
                elif row + _HALF <= rows:
                    _middle(source, size, panels, at, WIDTH, goal, step, depth, go_on)
                    row += _HALF
                else:
                    _small(source, size, panels, at, WIDTH, goal, step, depth, go_on)
                    row += 1
        if not whole:
            out[:, first:] = rest[:, : columns - first]
