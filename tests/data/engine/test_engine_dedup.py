"""Deduplication and decontamination in real runs: the same output for any number of processes and any memory."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pytest

WORDS = [f"{a}{b}" for a in "bdfgklmnprst" for b in ("an", "el", "in", "or", "usk", "at", "ive", "ous", "ing", "er")]


@pytest.fixture
def repeating(tmp_path: Path) -> dict[str, Path]:
    """Three files in which texts, nearly the same texts and passages repeat, and a test set that two of them hold."""
    rng = random.Random(8)

    def words(count: int) -> list[str]:
        return [rng.choice(WORDS) for _ in range(count)]

    question = " ".join(words(20))
    passage = " ".join(words(60))
    texts = []
    for number in range(60):
        base = words(120)
        texts.append(" ".join(base))
        if number % 3 == 0:
            texts.append(" ".join(base).upper() if number % 2 else "  ".join(base))
        if number % 4 == 0:
            base[60] = "changed"
            texts.append(" ".join(base))
        if number % 7 == 0:
            texts.append(" ".join([*words(40), passage, *words(40)]))
        if number % 30 == 0:
            texts.append(" ".join([*words(30), question, *words(30)]))
    rng.shuffle(texts)
    folder = tmp_path / "repeating"
    folder.mkdir()
    for number in range(3):
        part = texts[number::3]
        (folder / f"s{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    test_set = tmp_path / "test.jsonl"
    test_set.write_text(json.dumps({"question": question}) + "\n")
    return {"rows": folder, "test": test_set}


def outputs(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.glob("part-*"))}


def test_all_of_them_in_one_recipe(run, recipe_of, repeating, ledger_of, rows_of, tmp_path):
    steps = [
        {"exact_dedup": {"lower": True}},
        {"decontaminate": {"test_sets": [str(repeating["test"])]}},
        "near_dedup",
        {"substring_dedup": {"min_length": 100}},
    ]
    found = []
    for name, procs, memory in (("a", 1, "300MB"), ("b", 2, "100KB")):
        recipe = recipe_of(
            steps, name, input=[str(repeating["rows"] / "*.jsonl")], executor={"num_proc": procs}, max_memory=memory
        )
        result = run(recipe)
        ledger = ledger_of(result.output)
        found.append((outputs(Path(result.output)), {label: entry["tally"] for label, entry in ledger.items()}))
    assert found[0] == found[1]
    tally = found[0][1]
    assert tally["exact_dedup"]["dropped"] == {"duplicate": 20}
    assert tally["decontaminate"]["dropped"] == {"contaminated": 2}
    assert tally["near_dedup"]["dropped"] == {"near_duplicate": 15}
    assert tally["substring_dedup"]["changes"] == {"repeated_stretch": 8}
    for operator, reason, said in (
        ("exact_dedup", "duplicate", "same as "),
        ("near_dedup", "near_duplicate", "like "),
        ("decontaminate", "contaminated", f"20 tokens of {repeating['test']}:1"),
        ("substring_dedup", "repeated_stretch", "first in "),
    ):
        samples = tally[operator]["samples"][reason]
        assert samples and all(sample["note"].startswith(said) for sample in samples)
    twin = tally["exact_dedup"]["samples"]["duplicate"][0]
    texts = {
        f"{path}:{n}": json.loads(line)["text"]
        for path in repeating["rows"].iterdir()
        for n, line in enumerate(path.open(), 1)
    }
    first = texts[twin["note"].removeprefix("same as ")]
    assert " ".join(first.lower().split()) == " ".join(texts[twin["id"]].lower().split())
