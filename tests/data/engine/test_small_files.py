"""Many small files are read in one task, and the result is what one file with the same rows would give."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest

from swift.core.errors import DataError
from swift.data.engine.recipe import recipe_from
from swift.data.engine.run import plan_text
from swift.data.engine.shards import list_shards, num_partitions

STEPS = [{"toy_length": {"least": 5}}, "exact_dedup", {"sample": {"share": 0.5}}]


def write_files(folder: Path, count: int, rows: int = 1) -> list[str]:
    folder.mkdir(parents=True)
    lines = [
        json.dumps({"text": f"row {n * 7 % (count * rows * 3 // 4)} of them", "n": n}) for n in range(count * rows)
    ]
    for number in range(count):
        part = lines[number * rows : (number + 1) * rows]
        (folder / f"f{number:05d}.jsonl").write_text("\n".join(part) + "\n")
    return lines


def counts_of(ledger: dict) -> dict:
    names = ("read", "kept", "changed", "characters_in", "characters_out", "dropped", "changes")
    return {label: {name: entry["tally"][name] for name in names} for label, entry in ledger.items()}


def test_small_files_give_what_one_file_gives(recipe_of, run, rows_of, ledger_of, tmp_path):
    lines = write_files(tmp_path / "many", 40, rows=3)
    (tmp_path / "one.jsonl").write_text("\n".join(lines) + "\n")
    steps = [*STEPS[:2], "near_dedup"]
    many = run(recipe_of(steps, input=[str(tmp_path / "many")], join_files="16MB", keep_dropped=True))
    one = run(recipe_of(steps, "one", input=[str(tmp_path / "one.jsonl")], join_files="16MB"))
    assert 0 < len(rows_of(many.output)) < len(lines)
    assert rows_of(many.output) == rows_of(one.output)
    assert counts_of(ledger_of(many.output)) == counts_of(ledger_of(one.output))
    assert [file["name"] for file in many.manifest["files"]] == ["part-00000.jsonl.zst"]
    assert len(many.manifest["inputs"]) == 40
    sample = ledger_of(many.output)["exact_dedup"]["tally"]["samples"]["duplicate"][0]
    path, _, line = sample["id"].rpartition(":")
    assert json.loads(Path(path).read_text().splitlines()[int(line) - 1])["text"] == sample["text"]


def test_tasks_are_cut_by_bytes(recipe_of, tmp_path):
    write_files(tmp_path / "many", 30)
    recipe = recipe_of(["near_dedup"], input=[str(tmp_path / "many")])
    sizes = {}
    for size in ("0", "16KB", "16MB"):
        shards = list_shards(recipe_from({**recipe, "join_files": size}))
        sizes[size] = [len(shard.pieces) for shard in shards]
        assert num_partitions(recipe_from(recipe), shards) == 1
    assert sizes == {"0": [1] * 30, "16KB": [4] * 7 + [2], "16MB": [30]}
    assert "near_dedup: edges: 1 task(s)" in plan_text(recipe_from(recipe))


def test_large_files_are_not_put_together_and_order_stays(recipe_of, run, rows_of, tmp_path):
    folder = tmp_path / "mixed"
    write_files(folder, 6)
    (folder / "f00002.jsonl").write_text("".join(json.dumps({"text": f"large {n}" * 40}) + "\n" for n in range(200)))
    recipe = recipe_of([], input=[str(folder)], join_files="40KB", shard_size="40KB")
    shards = list_shards(recipe_from(recipe))
    assert [[piece.file.name[-11:] for piece in shard.pieces] for shard in shards] == [
        ["00000.jsonl", "00001.jsonl"],
        ["00002.jsonl"],
        ["00002.jsonl"],
        ["00003.jsonl", "00004.jsonl", "00005.jsonl"],
    ]
    expected = [json.loads(line) for path in sorted(folder.iterdir()) for line in path.read_text().splitlines()]
    assert rows_of(run(recipe).output) == expected


def test_damaged_files_among_small_ones_are_left_out_by_themselves(recipe_of, run, rows_of, ledger_of, tmp_path):
    folder = tmp_path / "many"
    write_files(folder, 8, rows=2)
    rows = [json.dumps({"text": f"unlike any other {n} {n * n}"}) for n in range(5000)]
    torn = gzip.compress("\n".join(rows).encode())
    (folder / "f00003.jsonl.gz").write_bytes(torn[: len(torn) // 2])
    (folder / "f00005.jsonl").write_text("")
    recipe = recipe_of(STEPS[:1], input=[str(folder)], join_files="16MB")
    with pytest.raises(DataError, match=r"f00003\.jsonl\.gz"):
        run(recipe)
    result = run({**recipe, "on_bad_shard": "skip"})
    assert [row["n"] for row in rows_of(result.output)] == [n for n in range(16) if n // 2 != 5]
    ledger = json.loads((result.output / "_ledger.json").read_text())
    assert ledger["bad_shards"] == {str(folder / "f00003.jsonl.gz"): 1, str(folder / "f00005.jsonl"): 1}
    assert ledger_of(result.output)["read"]["tally"]["read"] == 14


def test_a_small_file_that_changed_is_refused(recipe_of, run, tmp_path):
    folder = tmp_path / "many"
    write_files(folder, 5)
    recipe = recipe_of(["toy_dedup"], input=[str(folder)], join_files="16MB", keep_work=True)
    run(recipe)
    (folder / "f00002.jsonl").write_text(json.dumps({"text": "another row than before"}) + "\n")
    with pytest.raises(DataError, match="an input file has changed") as caught:
        run(recipe)
    assert caught.value.where == str(folder / "f00002.jsonl")


def test_two_thousand_files_take_seconds(recipe_of, run, tmp_path):
    write_files(tmp_path / "many", 2000)
    start = time.process_time()
    result = run(recipe_of(["normalise", "exact_dedup"], input=[str(tmp_path / "many")], join_files="16MB"))
    assert result.manifest["rows"] == 1500
    assert time.process_time() - start < 30  # one task for each file took 350
