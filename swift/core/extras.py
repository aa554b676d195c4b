"""Optional packages: import on use, and say how to install what is missing."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from swift.core.errors import DependencyError


def check_installed(module: str, *, extra: str, purpose: str) -> None:
    """Raise what `require` would raise for a package that isn't there, without importing it."""
    if importlib.util.find_spec(module) is None:
        raise DependencyError(
            f"the package {module!r} is needed to {purpose}, and it is not installed",
            fix=f'pip install "swift-llm[{extra}]"',
        )


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import `module`, or raise `DependencyError` that names the extra which brings it.

    Args:
        module: dotted module name, for example ``"gguf"``.
        extra: the extra of this distribution that installs it, for example ``"quickstart"``.
        purpose: what it is needed for; finishes the sentence "<module> is needed to ...".
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DependencyError(
            f"the package {module!r} is needed to {purpose}, and importing it failed: {error}",
            fix=f'pip install "swift-llm[{extra}]"',
        ) from error
