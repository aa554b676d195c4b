"""Python scripts that start worker processes without a guard: an error, never a wait without end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PREPARE = """
import sys
from swift.config.data import DataConfig, TemplateConfig
from swift.data.dataset import prepare_datasets

class Encoder:
    supports_messages = True
    counts, notices = {}, []

    def __init__(self):
        self.weight = b"x" * (8 << 20)  # more than a pipe holds

    def fingerprint(self):
        return "encoder"

    def encode_batch(self, rows):
        raise NotImplementedError

prepare_datasets(DataConfig(dataset=[sys.argv[1]], dataset_num_proc=2), TemplateConfig(), Encoder(), seed=1)
"""
STREAM = """
import sys
from swift.data.pipeline import Workers

class Task:
    def __init__(self):
        self.weight = b"x" * (8 << 20)

    def run(self, chunk):
        return chunk

workers = Workers(Task(), 2, "--dataloader_num_workers")
with workers:
    print(workers.result(workers.submit(["x" * (8 << 20)])))
"""
RECIPE = """
import sys
from swift import run_recipe

recipe = {
    "input": [sys.argv[1]], "output": {"path": sys.argv[1] + ".out"}, "shard_size": "1KB",
    "executor": {"num_proc": 2}, "steps": [{"filter": {"field": "n", "any_of": list(range(100_000))}}],
}
run_recipe(recipe)
"""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": "word " * 20, "n": n}) + "\n" for n in range(3000)))
    return path


@pytest.mark.parametrize("script", [PREPARE, STREAM, RECIPE], ids=["prepare", "stream", "recipe"])
def test_a_script_without_a_guard_ends_with_an_error(script: str, rows: Path, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(script)
    done = subprocess.run([sys.executable, str(path), str(rows)], capture_output=True, text=True, timeout=40)
    assert done.returncode != 0
    assert "__name__ == '__main__'" in done.stderr.splitlines()[-1], done.stderr
