"""Numbers that are known although tensors are fake: borders, counts and flags that the host has made itself.

A fake tensor has a shape and no numbers. Code that reads a few integers back from a tensor (where segments begin, which
micro-batch it is) still must get the right ones. So small tensors of integers that are made from constants are made a
second time for real, and whatever is computed from such tensors alone too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.weak import WeakIdKeyDictionary

_LARGEST = 1 << 14  # elements
_EXACT = (torch.int64, torch.int32, torch.uint8, torch.bool)
_NO_NUMBERS = ("empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "rand", "randint", "randperm")


class KnownValues:
    """Follows operations, and tells what numbers a fake tensor has."""

    def __init__(self) -> None:
        self._values: Any = WeakIdKeyDictionary()

    def scalar(self, tensor: torch.Tensor) -> int | float | bool:
        """The tensor's one number; 1 where it isn't known."""
        value = self._values.get(tensor)
        if value is None:
            return True if tensor.dtype == torch.bool else 1 if not tensor.is_floating_point() else 1.0
        with _disable_current_modes():
            return value.item()

    def follow(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        """Compute the result's numbers from those of the arguments, if all of these are known."""
        if func.namespace == "c10d":  # what others send
            for tensor in tree_iter(args[0]):
                if isinstance(tensor, FakeTensor):
                    self._values.pop(tensor, None)
            return
        results = [t for t in tree_iter(result) if isinstance(t, FakeTensor)]
        if not results or any(t.dtype not in _EXACT or t.numel() > _LARGEST for t in results):
            return
        name = func._overloadpacket.__name__
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        known = all(not isinstance(t, FakeTensor) or t in self._values for t in given)
        if not known or func.namespace != "aten" or name in _NO_NUMBERS:
            for tensor in results:
                self._values.pop(tensor, None)  # it may have been written to
            return
        if any(t.numel() > _LARGEST or t.device.type != "cpu" for t in given):
            return
        with _disable_current_modes():
            real_args, real_kwargs = tree_map(self._real, (args, kwargs))
            real = func(*real_args, **real_kwargs)
        for fake, value in zip(results, (t for t in tree_iter(real) if isinstance(t, torch.Tensor)), strict=True):
            self._values[fake] = value

    def _real(self, argument: Any) -> Any:
        return self._values[argument] if isinstance(argument, FakeTensor) else argument
