"""Compiling loops over arrays with numba, and keeping the machine code where that is possible.

Numba costs a third of a second to import, so only modules that hold kernels import this one, and those are imported
where the kernel is first needed. Results never depend on numba: who uses a kernel has a plain implementation of the
same function, and a test that compares the two.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def has_numba() -> bool:
    """Whether numba is installed; doesn't import it."""
    return importlib.util.find_spec("numba") is not None


def kernel(function: F) -> F:
    """Compile `function` on its first call. The machine code is kept beside the source file, else in the user's cache
    folder (`NUMBA_CACHE_DIR` names another); where neither can be written it is made anew in each process.
    """
    return _compiled(function)


def numeric_kernel(function: F) -> F:
    """`kernel` for arithmetic with floats: a product and a sum may become one operation, and dividing by zero is no
    error. Additions keep their order.
    """
    return _compiled(function, fastmath={"contract"}, error_model="numpy")


def _compiled(function: F, **options: Any) -> F:
    import numba

    try:
        compiled: Any = numba.njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:  # numba's answer where no folder for the cache is writable
        compiled = numba.njit(nogil=True, **options)(function)
    return compiled
