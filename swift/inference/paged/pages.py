"""Memory for what every step reads from end to end: weights, side by side in pages of 2 MiB where the system has them.

With pages of 4 KiB a small step spends a good part of its time on finding them. Few matrices fill a large page, so
they share some memory, which goes back to the system when the last of them is gone. The pages are asked for before
anything is written, so nothing is moved later.
"""

from __future__ import annotations

import math
import mmap
import weakref

import torch

PAGE = 2 << 20
# most that is set aside at once; what isn't written to is never given
_SOME = 64 * PAGE
_LINE = 64  # bytes that a processor reads at once


class Pages:
    """Memory that tensors share."""

    def __init__(self) -> None:
        # what is shared now: held by its tensors alone
        self._current: weakref.ref[mmap.mmap] | None = None
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the CPU whose numbers are yet to be written."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if not num_bytes or not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.empty(shape, dtype=dtype)
        memory = None if self._current is None else self._current()
        if memory is None or self._used + num_bytes > len(memory):
            memory = _asked_for(max(num_bytes, _SOME) + PAGE)
            self._current = weakref.ref(memory)
            self._used = -_address(memory) % PAGE
        tensor = torch.frombuffer(memory, dtype=torch.uint8, offset=self._used, count=num_bytes)
        self._used += -(-num_bytes // _LINE) * _LINE
        return tensor.view(dtype).view(shape)


def _asked_for(num_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them: small pages then
        return memory
    return memory


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
