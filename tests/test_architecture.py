"""The house rules of docs/architecture.md, checked on the import graph."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

PACKAGE = Path(__file__).parent.parent / "swift"

FLOORS = [
    {"core"},
    {"config"},
    {"data", "models", "distributed"},
    {"objectives", "optim", "checkpoint", "monitor", "quantization"},
    {"training", "inference"},
    {"methods", "serving", "rl", "planner", "resilience", "evaluation", "export", "federated"},
    {"commands"},
    {"cli", "studio"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
HEAVY = ("torch", "transformers", "peft", "pyarrow", "pandas", "matplotlib", "huggingface_hub")


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("swift", exclude_type_checking_imports=True, cache_dir=None)


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def test_every_room_has_a_floor():
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms <= set(FLOOR_OF), f"on no floor: {rooms - set(FLOOR_OF)}"


def test_rooms_import_downwards_only(graph):
    upward = []
    for module in graph.modules:
        room = room_of(module)
        if room is None:
            continue
        for imported in graph.find_modules_directly_imported_by(module):
            other = room_of(imported)
            if other is not None and FLOOR_OF[other] > FLOOR_OF[room]:
                upward.append(f"{module} imports {imported}")
    assert not upward, "\n".join(sorted(upward))


def test_the_graph_sees_the_rooms(graph):
    """A guard for the test above: an empty graph would pass it."""
    assert "swift.config.resolve" in graph.find_modules_directly_imported_by("swift.config.build")


def private_imports() -> list[str]:
    found = []
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("swift."):
                continue
            other = room_of(node.module or "")
            names = [alias.name for alias in node.names if alias.name.startswith("_") and alias.name != "__version__"]
            names += [part for part in (node.module or "").split(".") if part.startswith("_")]
            if other != room and names:
                found.append(f"{path}:{node.lineno} takes {', '.join(names)} from {node.module}")
    return found


def test_no_room_takes_private_names_from_another():
    assert not private_imports(), "\n".join(private_imports())


def loaded_after(statement: str) -> set[str]:
    """Which heavy packages a fresh interpreter has loaded after a statement."""
    code = f"{statement}\nimport sys\nprint(' '.join(m for m in {HEAVY!r} if m in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def modules_below(room: str) -> list[str]:
    paths = sorted((PACKAGE / room).glob("*.py"))
    return [f"swift.{room}.{path.stem}" for path in paths if path.stem not in ("__init__", "__main__")]


@pytest.mark.parametrize(
    "modules",
    [
        pytest.param(["swift"], id="swift"),
        pytest.param(modules_below("core"), id="core"),
        pytest.param(modules_below("config"), id="config"),
        pytest.param(modules_below("cli"), id="cli"),
        pytest.param(["swift.commands.precheck"], id="precheck"),
    ],
)
def test_imports_nothing_heavy(modules):
    assert loaded_after("import " + ", ".join(modules)) == set()


def test_the_probe_for_heavy_imports_works():
    assert loaded_after("import pyarrow") >= {"pyarrow"}


def test_files_stay_readable():
    long = {p: n for p in PACKAGE.rglob("*.py") if (n := len(p.read_text(encoding="utf-8").splitlines())) > 520}
    assert not long, f"over ~500 lines, a file is two rooms: {long}"
