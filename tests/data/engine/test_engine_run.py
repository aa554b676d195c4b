"""Runs of recipes: what comes out, that nothing but the recipe decides it, and what is redone."""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path

import pytest
import zstandard

from swift.core.errors import DataError, SwiftError, UsageError
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


def test_a_finished_run_is_not_run_again(run, recipe_of):
    recipe = recipe_of(STEPS)
    first = run(recipe)
    again = run(recipe)
    assert again.already_complete and again.tasks_run == 0
    assert again.manifest == first.manifest
    (first.output / "part-00002.jsonl.zst").write_bytes(b"x")
    with pytest.raises(SwiftError) as caught:
        run(recipe)
    assert "part-00002.jsonl.zst has changed since" in caught.value.message
    assert run(recipe, restart=True).manifest["sha256"] == first.manifest["sha256"]


def test_another_recipe_does_not_overwrite_a_result(run, recipe_of):
    first = run(recipe_of(STEPS))
    with pytest.raises(UsageError) as caught:
        run(recipe_of(["toy_length"]))
    assert "--restart" in caught.value.fix
    other = run(recipe_of(["toy_length"]), restart=True)
    assert other.manifest["sha256"] != first.manifest["sha256"]


def test_a_folder_with_other_files_is_not_touched(run, recipe_of, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    for restart in (False, True):
        with pytest.raises(UsageError) as caught:
            run(recipe_of(STEPS), restart=restart)
        assert "thesis.txt" in caught.value.message
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_a_changed_operator_redoes_from_its_stage_on(run, recipe_of, tmp_path, rows_of, monkeypatch):
    monkeypatch.setenv("TOY_LOG", str(tmp_path))
    log = tmp_path / "tasks"
    steps = [{"toy_length": {"least": 5}}, "toy_dedup", {"toy_upper": {"suffix": "!"}}]
    first = run(recipe_of(steps, keep_work=True))
    assert first.tasks_run == 13
    log.unlink()
    steps[2] = {"toy_upper": {"suffix": "?"}}
    second = run(recipe_of(steps, keep_work=True))
    assert (second.tasks_run, second.tasks_done_before) == (4, 9)  # the last phase and the capitals are one stage
    assert sorted(log.read_text().splitlines()) == [f"drop {n}" for n in range(4)]
    assert {row["text"][-1] for row in rows_of(second.output)} == {"?"}
    steps[0] = {"toy_length": {"least": 16}}
    third = run(recipe_of(steps, keep_work=True))
    assert third.tasks_run == 13
    fresh = run(recipe_of(steps, folder="fresh"))
    assert files_of(third.output) == files_of(fresh.output)
    assert not (fresh.output / ".work").exists() and (third.output / ".work").exists()


def test_a_changed_file_that_an_operator_names_counts_as_a_change(run, recipe_of, tmp_path):
    (tmp_path / "list").mkdir()
    for named in (tmp_path / "list" / "words.txt", tmp_path / "list"):
        (tmp_path / "list" / "words.txt").write_text("one")
        recipe = recipe_of(["toy_length", {"toy_dedup": {"unused": str(named)}}], keep_work=True)
        run(recipe)
        (tmp_path / "list" / "words.txt").write_text("one two")
        again = run(recipe)
        assert (again.tasks_run, again.tasks_done_before) == (9, 4)


def test_a_plugin_whose_code_has_changed_is_run_again(run, recipe_of, tmp_path):
    """In processes of their own, since a module is imported once."""
    import subprocess
    import sys

    toys = Path(recipe_of([])["plugins"][0]).read_text()
    plugin = tmp_path / "mine.py"
    plugin.write_text(toys)
    recipe = recipe_of(["toy_length"], keep_work=True, plugins=[str(plugin)])
    (tmp_path / "r.json").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "swift.cli", "data", "run", str(tmp_path / "r.json")]
    subprocess.run(command, check=True, capture_output=True)
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "nothing to do" in done.stderr
    plugin.write_text(toys.replace("< self.least", "<= self.least"))
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "read + toy_length: 4 task(s)\n" in done.stderr


def test_a_changed_input_file_is_refused_until_restart(run, recipe_of, rows_folder, rows_of):
    recipe = recipe_of([{"toy_fail": {"word": '"never"'}}, "toy_dedup", {"toy_fail": {"word": "document 39"}}])
    with pytest.raises(SwiftError):
        run(recipe)
    path = rows_folder / "s1.jsonl"
    path.write_text(path.read_text().replace("document 39", "document 99"))
    with pytest.raises(DataError) as caught:
        run(recipe)
    assert caught.value.message == "an input file has changed since this run began"
    assert caught.value.where == str(path) and "--restart" in caught.value.fix
    for other in ("s0", "s2", "s3"):
        other_path = rows_folder / f"{other}.jsonl"
        other_path.write_text(other_path.read_text().replace("document 39", "document 99"))
    assert all("document 39" not in row["text"] for row in rows_of(run(recipe, restart=True).output))


def test_a_file_that_comes_or_goes_is_refused(run, recipe_of, rows_folder):
    recipe = recipe_of([{"toy_fail": {"word": "document 7"}}])
    with pytest.raises(SwiftError):
        run(recipe)
    (rows_folder / "s9.jsonl").write_text('{"text": "new one"}\n')
    with pytest.raises(DataError) as caught:
        run(recipe)
    assert "has got a file" in caught.value.message and caught.value.where.endswith("s9.jsonl")


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


def test_a_result_that_is_not_there_in_full_is_made_again(run, recipe_of, tmp_path):
    steps = ["toy_length", "toy_dedup", {"toy_fail": {"word": "document"}}]
    with pytest.raises(SwiftError):
        run(recipe_of(steps))
    results = sorted((tmp_path / "out/.work/00-read").glob("*/results/documents.zst"))
    assert len(results) == 4
    results[1].write_bytes(results[1].read_bytes()[:-10])
    results[2].unlink()
    steps[2] = "toy_upper"
    again = run(recipe_of(steps))
    assert again.tasks_done_before == 2 + 4 + 1  # two shards read; the phases that don't depend on the failing operator
    assert files_of(again.output) == files_of(run(recipe_of(steps, folder="fresh")).output)
