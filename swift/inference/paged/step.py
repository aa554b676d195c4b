"""One forward pass as the layers see it: which rows belong to which request, and where their keys and values lie.

A step packs tokens of many requests into one row of `num_rows` tokens. A *span* is what one request has in it:
consecutive tokens, of its prompt or its newest ones. Each token's key and value go to a *slot* of the cache (block
number times block size, plus the place inside), and a token attends to all tokens of its request up to itself, found
through the request's table of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import numpy as np

from swift.inference.paged.cache import KVCache


@dataclass
class Step:
    """What a forward pass is about.

    Attributes:
        cache: where keys and values go and come from.
        num_rows: tokens of the packed row, those that only fill it up included.
        slots: int64 [num_rows], where each token's key and value go; fillers write to the last block, which no request
            ever has.
        spans: int32 [spans, 3]: first row, number of rows, position of the first row in its request. Rows outside all
            spans are fillers; their attention output is zero.
        tables: int32 [spans, width], block numbers of each span's request, in order; unused places hold anything.
        adapter_rows: (adapter's slot, first row, number of rows) where rows go through an adapter; consecutive rows of
            one adapter are one entry.
    """

    cache: KVCache
    num_rows: int
    slots: np.ndarray
    spans: np.ndarray
    tables: np.ndarray
    adapter_rows: list[tuple[int, int, int]] = field(default_factory=list)


_current: ContextVar[Step | None] = ContextVar("step", default=None)


@contextmanager
def running(step: Step) -> Iterator[None]:
    """Make `step` the one that attention and linear layers find while the model runs in this thread."""
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)


def current_step() -> Step | None:
    """The step that runs now in this thread; None outside of one."""
    return _current.get()
