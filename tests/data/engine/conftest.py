"""Fixtures for the tests of the engine: data, recipes with the toy operators, and what a run has left."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import zstandard

from swift.data.engine.run import RunOptions, run_recipe

TOYS = str(Path(__file__).parents[2] / "assets" / "toy_operators.py")


@pytest.fixture
def rows_folder(tmp_path: Path) -> Path:
    """Four files with 250 rows each; one row in five is short, one in three repeats another."""
    folder = tmp_path / "rows"
    folder.mkdir()
    draw = random.Random(3)
    for number in range(4):
        lines = []
        for row in range(250):
            text = "hi" if row % 5 == 0 else f"document {draw.randrange(400)} says é and 中"
            lines.append(json.dumps({"text": text, "n": row, "url": f"https://www.site{row % 3}.org/x"}))
        (folder / f"s{number}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def recipe_of(rows_folder: Path, tmp_path: Path):
    """A function that makes a recipe over the rows."""

    def make(steps: list, folder: str = "out", **keys) -> dict:
        recipe = {
            "name": "toys",
            "input": [str(rows_folder / "*.jsonl")],
            "output": {"path": str(tmp_path / folder)},
            "plugins": [TOYS],
            "executor": {"num_proc": 1},
            "join_files": "0",
            "steps": steps,
        }
        for key, value in keys.items():
            if isinstance(value, dict) and isinstance(recipe.get(key), dict):
                recipe[key] = {**recipe[key], **value}
            else:
                recipe[key] = value
        return recipe

    return make


@pytest.fixture
def run():
    """Run a recipe in silence."""

    def go(recipe, **options):
        return run_recipe(recipe, options=RunOptions(quiet=True, **options))

    return go


@pytest.fixture
def rows_of():
    """A function that reads the rows of an output folder, in the order of its files."""

    def read(folder: Path) -> list[dict]:
        rows = []
        for path in sorted(Path(folder).glob("part-*")):
            data = path.read_bytes()
            if path.suffix == ".zst":
                data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
            rows += [json.loads(line) for line in data.splitlines()]
        return rows

    return read


@pytest.fixture
def ledger_of():
    """A function that gives the ledger's entries of an output folder by label."""

    def read(folder: Path) -> dict[str, dict]:
        ledger = json.loads((Path(folder) / "_ledger.json").read_text())
        return {entry["label"]: entry for entry in ledger["operators"]}

    return read
