"""Where operators come from: the modules of this package, and the modules that a recipe names under `plugins`.

Importing a module is enough: its operators register themselves in `OPERATORS`. Knows nothing of recipes.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from swift.core.errors import UsageError
from swift.core.version import __version__
from swift.data.engine.operator import OPERATORS, GlobalOperator, MapOperator

_OWN = "swift.data"
_PACKAGE = Path(__file__).resolve().parents[3]  # where `swift` lies
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n#;]+)|import[ \t]+([\w., \t]+))", re.MULTILINE
)

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
    """What stands for an operator's code in fingerprints: this program's version, and a hash of the operator's module
    and of all that it imports, directly or not, from `swift.data` or from below the plugin's folder."""
    module = inspect.getmodule(OPERATORS[name])
    digest = hashlib.sha256()
    if module is not None and module.__file__:
        path = Path(module.__file__).resolve()
        own = module.__name__.startswith(f"{_OWN}.")
        top = _PACKAGE if own else _top(path, module.__name__)
        for found in sorted(_imported(path, top, _PACKAGE / "swift" / "data" if own else path.parent)):
            digest.update(found.read_bytes())
    return f"{__version__} {digest.hexdigest()[:16]}"


def _top(path: Path, name: str) -> Path:
    """The folder from which a module's dotted name leads to its file."""
    levels = name.count(".") + (path.name == "__init__.py")
    return path.parents[levels]


def _imported(path: Path, top: Path, below: Path) -> set[Path]:
    """The files that a module and all that it imports consist of, as far as they lie below a folder."""
    found: set[Path] = set()
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += [other for other in _imports(file, top) if other.is_relative_to(below)]
    return found


@cache
def _imports(file: Path, top: Path) -> tuple[Path, ...]:
    """The source files that a file's import statements may name, wherever they stand in it."""
    found: list[Path] = []
    for dots, name, names, plain in _IMPORT.findall(file.read_text(encoding="utf-8", errors="replace")):
        if plain:
            modules = [(top, word.split()[0]) for word in plain.split(",") if word.strip()]
            modules += [(file.parent, word) for _, word in modules]  # beside a plugin
        else:
            starts = [file.parents[len(dots) - 1]] if dots else [top, file.parent]
            words = [word.split()[0] for word in names.strip("()").split(",") if word.split()]
            modules = [(start, f"{name}.{word}".strip(".")) for start in starts for word in words]
            modules += [(start, name) for start in starts if name]
        for start, dotted in modules:
            place = start.joinpath(*dotted.split("."))
            found += [path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()]
    return tuple(dict.fromkeys(path.resolve() for path in found))


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
