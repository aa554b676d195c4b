"""Where operators come from: the modules of this package, and the modules that a recipe names under `plugins`.

Importing a module is enough: its operators register themselves in `OPERATORS`. Knows nothing of recipes.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from functools import cache
from pathlib import Path
from typing import Any

from swift.core.errors import UsageError
from swift.core.version import __version__
from swift.data.engine.operator import OPERATORS, GlobalOperator, MapOperator

BUILTIN_MODULES = (
    "normalise",
    "language",
    "quality",
    "repetition",
    "pii",
    "blocklist",
    "html_text",
    "sample",
    "chat",
    "length",
    "c4",
    "filter",
    "perplexity",
    "exact_dedup",
    "near_dedup",
    "substring_dedup",
    "decontaminate",
    "augment",
    "tokenise",
    "pack_tokens",
)


@cache
def load_builtin() -> None:
    """Register the operators that come with the program."""
    for name in BUILTIN_MODULES:
        importlib.import_module(f"swift.data.operators.{name}")


def load_plugin(name: str, folder: Path) -> None:
    """Import a module of operators: a file ending in .py (relative to `folder`), or a module's dotted name.

    Raises:
        UsageError: it isn't there, or fails while it is imported.
    """
    path = Path(name).expanduser()
    if name.endswith(".py"):
        path = path if path.is_absolute() else folder / path
        if not path.is_file():
            raise UsageError(f"there is no plugin file {path}", fix="the path is taken from the recipe's folder")
        module = plugin_module_name(path)
        if module in sys.modules:
            return
        spec = importlib.util.spec_from_file_location(module, path)
        assert spec is not None and spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[module] = loaded  # dataclasses look their module up there
        try:
            spec.loader.exec_module(loaded)
        except Exception as error:  # somebody else's code: whatever it raises is told with its place
            del sys.modules[module]
            raise UsageError(f"the plugin fails when it is imported: {_told(error)}", where=str(path)) from error
        return
    try:
        importlib.import_module(name)
    except Exception as error:  # as above
        raise UsageError(
            f"the plugin {name!r} can't be imported: {_told(error)}",
            fix="a plugin is a file ending in .py, or a module that Python finds",
        ) from error


def plugin_module_name(path: Path) -> str:
    """Under which name a plugin file is imported: the same in every process, different for each file."""
    return f"swift_plugin_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"


def is_sink(operator: Any) -> bool:
    """Whether an operator (or its class) takes the documents at the end of a recipe."""
    kind = operator if isinstance(operator, type) else type(operator)
    return not issubclass(kind, (MapOperator, GlobalOperator)) and all(
        hasattr(kind, name) for name in ("open", "write", "finish")
    )


def kind_of(operator: Any) -> str:
    """`map`, `global` or `sink`."""
    kind = operator if isinstance(operator, type) else type(operator)
    return "global" if issubclass(kind, GlobalOperator) else "sink" if is_sink(kind) else "map"


@cache
def version_of(name: str) -> str:
    """What stands for an operator's code in fingerprints: this program's version and a hash of the module's source."""
    module = inspect.getmodule(OPERATORS[name])
    source = Path(module.__file__).read_bytes() if module is not None and module.__file__ else b""
    return f"{__version__} {hashlib.sha256(source).hexdigest()[:16]}"


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
