"""Runs of recipes: what comes out, that nothing but the recipe decides it, and what is redone."""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path

import pytest
import zstandard

from swift.core.errors import SwiftError, UsageError
from swift.data.engine.recipe import recipe_from
from swift.data.engine.run import plan_text

STEPS = [{"toy_length": {"least": 5}}, "toy_dedup", {"toy_upper": {"rate": 0.5}}]


def expected(rows_folder: Path) -> tuple[list[dict], dict[str, list[str]]]:
    """What STEPS make of the rows (without the capitals), and the ids of what they drop, computed in one go."""
    seen: set[str] = set()
    kept, dropped = [], {"too_short": [], "repeated": []}
    for path in sorted(rows_folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            row = json.loads(line)
            if len(row["text"]) < 5:
                dropped["too_short"].append(f"{path}:{number}")
            elif row["text"] in seen:
                dropped["repeated"].append(f"{path}:{number}")
            else:
                seen.add(row["text"])
                kept.append(row)
    return kept, dropped


def files_of(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.glob("part-*"))}


def test_rows_come_out_in_order_and_everything_is_counted(recipe_of, run, rows_folder, rows_of, ledger_of, tmp_path):
    result = run(recipe_of(STEPS, keep_dropped=True))
    rows = rows_of(result.output)
    kept, dropped = expected(rows_folder)
    assert [{**row, "text": row["text"].lower()} for row in rows] == [
        {**row, "text": row["text"].lower()} for row in kept
    ]
    raised = sum(row["text"].isupper() for row in rows)
    assert 0.35 * len(rows) < raised < 0.65 * len(rows)
    ledger = ledger_of(result.output)
    assert list(ledger) == ["read", "toy_length", "toy_dedup", "toy_upper", "output"]
    counts = {label: (e["tally"]["read"], e["tally"]["kept"]) for label, e in ledger.items()}
    long = 1000 - len(dropped["too_short"])
    assert counts == {
        "read": (1000, 1000),
        "toy_length": (1000, long),
        "toy_dedup": (long, len(kept)),
        "toy_upper": (len(kept), len(kept)),
        "output": (len(kept), len(kept)),
    }
    assert ledger["toy_length"]["tally"]["dropped"] == {"too_short": len(dropped["too_short"])}
    assert ledger["toy_dedup"]["tally"]["dropped"] == {"repeated": len(dropped["repeated"])}
    assert ledger["toy_upper"]["tally"]["changed"] == raised == ledger["toy_upper"]["tally"]["changes"]["capitals"]
    assert ledger["read"]["tally"]["labels"]["domain"] == {"site0.org": 336, "site1.org": 332, "site2.org": 332}
    characters = sum(len(row["text"]) for row in kept)
    assert ledger["output"]["tally"]["characters_out"] == ledger["toy_dedup"]["tally"]["characters_out"] == characters
    listed = [json.loads(line) for line in unpacked(result.output / "_dropped.jsonl.zst").splitlines()]
    for reason, ids in dropped.items():
        assert [item["id"] for item in listed if item["reason"] == reason] == ids
    assert result.manifest["rows"] == len(rows) == sum(file["rows"] for file in result.manifest["files"])
    for file in result.manifest["files"]:
        data = (result.output / file["name"]).read_bytes()
        assert (file["bytes"], file["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert not (result.output / ".work").exists()


def unpacked(path: Path) -> bytes:
    with path.open("rb") as file:
        return zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read()


def test_the_number_of_processes_changes_nothing(recipe_of, run):
    one = run(recipe_of(STEPS, folder="one", keep_dropped=True))
    two = run(recipe_of(STEPS, folder="two", keep_dropped=True, executor={"num_proc": 2}))
    assert files_of(one.output) == files_of(two.output)
    assert one.manifest["sha256"] == two.manifest["sha256"]
    assert (one.output / "_dropped.jsonl.zst").read_bytes() == (two.output / "_dropped.jsonl.zst").read_bytes()
    tallies = [
        [entry["tally"] for entry in json.loads((r.output / "_ledger.json").read_text())["operators"]]
        for r in (one, two)
    ]
    assert tallies[0] == tallies[1]


@pytest.mark.slow
def test_a_ray_cluster_changes_nothing(recipe_of, run):
    one = run(recipe_of(STEPS, folder="one"))
    ray = run(recipe_of(STEPS, folder="ray", executor={"kind": "ray", "num_proc": 3}))
    assert files_of(one.output) == files_of(ray.output)
    with pytest.raises(SwiftError) as caught:
        run(recipe_of([{"toy_fail": {"word": "document 7"}}], folder="bad", executor={"kind": "ray", "num_proc": 2}))
    assert "the operator toy_fail failed: KeyError" in caught.value.message


def test_how_the_input_is_cut_changes_no_row(recipe_of, run, rows_of):
    whole = run(recipe_of(STEPS, folder="whole"))
    pieces = run(recipe_of(STEPS, folder="pieces", shard_size="8KB"))
    assert len(pieces.manifest["files"]) >= 2 * len(whole.manifest["files"])
    assert rows_of(pieces.output) == rows_of(whole.output)


def test_output_files_of_a_wanted_size(recipe_of, run, rows_of):
    whole = run(recipe_of(STEPS, folder="whole"))
    merged = run(recipe_of(STEPS, folder="merged", output={"shard_bytes": "100MB"}))
    assert [file["name"] for file in merged.manifest["files"]] == ["part-00000.jsonl.zst"]
    assert rows_of(merged.output) == rows_of(whole.output)


def test_large_shards_are_split_the_same_way_by_any_number_of_processes(run, recipe_of, rows_of, tmp_path):
    text = "many words " * 2000
    rows = [json.dumps({"text": f"{n} {text}"}) for n in range(300)]
    (tmp_path / "large.jsonl").write_text("\n".join(rows))
    outputs = []
    for number in (1, 2):
        keys = {
            "input": [str(tmp_path / "large.jsonl")],
            "output": {"path": str(tmp_path / f"o{number}"), "shard_bytes": "2MB"},
            "executor": {"num_proc": number},
        }
        outputs.append(run({**recipe_of([]), **keys}))
    assert files_of(outputs[0].output) == files_of(outputs[1].output)
    sizes = [file["rows"] for file in outputs[0].manifest["files"]]
    assert sizes == [96, 96, 96, 12]  # blocks of 48 rows, just above 1 MiB
    assert [json.loads(row) for row in rows] == rows_of(outputs[0].output)


@pytest.mark.parametrize("format", ["jsonl", "jsonl.gz", "parquet"])
def test_formats(recipe_of, run, format, rows_folder):
    from swift.data.readers import FileTally, parse_raw, read_raw
    from swift.data.sources import parse_source

    result = run(recipe_of(["toy_length"], output={"format": format}))
    (source,) = [parse_source(str(result.output))]
    read = [parse_raw(raw) for file in source.files for _, raw in read_raw(file, FileTally())]
    wanted = []
    for path in sorted(rows_folder.glob("*.jsonl")):
        wanted += [row for row in map(json.loads, path.read_text().splitlines()) if len(row["text"]) >= 5]
    assert read == wanted
    assert all(file["name"].endswith("." + format) for file in result.manifest["files"])


def test_conversations_keep_everything_that_is_no_text(run, recipe_of, tmp_path, rows_of):
    row = {
        "messages": [
            {"role": "user", "content": "hello there", "id": 3},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "content": "42"},
        ],
        "score": 0.1,
        "nested": {"a": [1, None]},
    }
    (tmp_path / "chat.jsonl").write_text(json.dumps(row) + "\n")
    recipe = {**recipe_of(["toy_dedup", "toy_upper"]), "input": [str(tmp_path / "chat.jsonl")]}
    (out,) = rows_of(run(recipe).output)
    assert out == {**row, "messages": [{**row["messages"][0], "content": "HELLO THERE"}, *row["messages"][1:]]}


def test_a_source_label_is_written_and_counted(run, recipe_of, rows_folder, rows_of, ledger_of):
    inputs = [{"path": str(rows_folder / "s0.jsonl"), "source": "a"}, str(rows_folder / "s1.jsonl")]
    result = run({**recipe_of([]), "input": inputs})
    rows = rows_of(result.output)
    assert [row.get("meta") for row in rows] == [{"source": "a"}] * 250 + [None] * 250
    assert ledger_of(result.output)["read"]["tally"]["labels"]["source"] == {"a": 250}


def test_a_number_of_rows_is_drawn_with_the_seed(run, recipe_of, rows_folder, rows_of):
    def chosen(seed: int, folder: str) -> list[dict]:
        recipe = recipe_of([], folder=folder, seed=seed)
        return rows_of(run({**recipe, "input": [f"{rows_folder}#300"]}).output)

    first = chosen(1, "a")
    assert len(first) == 300 and first == chosen(1, "b") != chosen(2, "c")
    numbers = [row["n"] for row in first]
    assert sum(a > b for a, b in pairwise(numbers)) == 3  # in the order of the four files
    with pytest.raises(UsageError) as caught:
        run({**recipe_of([], folder="d"), "input": [f"{rows_folder}#5000"]})
    assert "there are 1000" in caught.value.message


def test_a_sink_writes_the_output(run, recipe_of):
    result = run(recipe_of(["toy_length", {"toy_sink": {"unit": "words"}}]))
    assert result.manifest["output_format"] == "tokens"
    names = [file["name"] for file in result.manifest["files"]]
    assert names == [*(f"part-{n:05d}.lengths" for n in range(4)), "all.lengths"]
    lengths = (result.output / "all.lengths").read_text().split()
    assert len(lengths) == 800 == result.manifest["rows"]
    assert result.manifest["sink"] == {"total": sum(map(int, lengths))}


def test_the_same_file_twice_is_refused(run, recipe_of, rows_folder):
    recipe = {**recipe_of([]), "input": [str(rows_folder), str(rows_folder / "s1.jsonl")]}
    with pytest.raises(UsageError) as caught:
        run(recipe)
    assert "read twice" in caught.value.message


def test_a_plan_lists_stages_and_tasks(recipe_of, tmp_path):
    text = plan_text(recipe_from(recipe_of(STEPS, output={"shard_bytes": "10MB"})))
    assert "in 4 shard(s)" in text
    assert "read + toy_length: 4 task(s)" in text
    assert "toy_dedup: merge: 1 task(s)" in text
    assert "toy_dedup: drop + toy_upper: 4 task(s)" in text
    assert "collect: as many tasks as output files" in text
    assert not (tmp_path / "out").exists()
