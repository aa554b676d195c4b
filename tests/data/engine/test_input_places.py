"""How an input is named: by any path and link once, with the same draws, and with its line where it is wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from swift.core.errors import SwiftError, UsageError
from swift.data.engine.recipe import read_recipe
from swift.data.engine.shards import list_shards

DRAWS = [{"sample": {"share": 0.5}}, {"augment": {"text": {"random_swap": {"prob": 0.5}}}}, "exact_dedup"]


def write_rows(folder: Path, name: str = "a.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("".join(json.dumps({"text": f"this is the row number {n} of {name}"}) + "\n" for n in range(200)))
    return path


def test_draws_depend_neither_on_the_spelling_nor_on_the_folder(recipe_of, run, rows_of, tmp_path, monkeypatch):
    path = write_rows(tmp_path / "d")
    moved = write_rows(tmp_path / "elsewhere" / "deep")
    (tmp_path / "link").symlink_to(tmp_path / "d")
    monkeypatch.chdir(tmp_path)
    spellings = [str(path), "d/a.jsonl", "./d/../d/a.jsonl", "d", "d/*.jsonl", "link/a.jsonl", str(moved)]
    results = []
    for number, spelling in enumerate(spellings):
        found = rows_of(run(recipe_of(DRAWS, f"out{number}", input=[spelling])).output)
        for row in found:
            row.get("meta", {}).pop("augmented", None)  # which tells the id
        results.append(found)
    assert 100 < len(results[0]) < 300
    assert all(found == results[0] for found in results[1:])


def test_files_of_one_name_draw_differently(recipe_of, run, rows_of, tmp_path):
    for folder in ("x", "y"):
        write_rows(tmp_path / folder)
    inputs = [str(tmp_path / "x"), str(tmp_path / "y")]
    rows = rows_of(run(recipe_of([{"sample": {"share": 0.5}}], input=inputs)).output)
    half = next(place for place in range(1, len(rows)) if rows[place]["text"] < rows[place - 1]["text"] and place > 60)
    assert [row["text"] for row in rows[:half]] != [row["text"] for row in rows[half:]]


def test_a_file_is_read_once_whatever_leads_to_it(recipe_of, run, tmp_path, monkeypatch):
    path = write_rows(tmp_path / "d")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="is read twice"):
        run(recipe_of([], input=["d/a.jsonl", str(path)]))
    (tmp_path / "other.jsonl").symlink_to(path)
    with pytest.raises(UsageError, match=r"other\.jsonl is read twice \(d/a\.jsonl is the same file\)"):
        run(recipe_of([], input=["d/a.jsonl", "other.jsonl"]))
    links = tmp_path / "links"
    links.mkdir()
    for name in ("one.jsonl", "two.jsonl"):
        (links / name).symlink_to(path)
    with pytest.raises(UsageError, match=r"two\.jsonl is read twice"):
        run(recipe_of([], input=["links"]))
    (links / "two.jsonl").unlink()
    assert run(recipe_of([], input=["links"])).manifest["rows"] == 200


def test_equal_files_of_a_data_set_in_a_hub_cache_are_two(recipe_of, run, tmp_path):
    blob = write_rows(tmp_path / "blobs", "0123")
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for name in ("one.jsonl", "two.jsonl"):
        (snapshot / name).symlink_to(blob)
    assert run(recipe_of([], input=[str(snapshot)])).manifest["rows"] == 400
    with pytest.raises(UsageError, match="is read twice"):
        run(recipe_of([], "twice", input=[str(snapshot), str(snapshot / "one.jsonl")]))


@pytest.mark.parametrize("missing", ["nothing.jsonl", "nothing/*.jsonl", "void"])
def test_an_input_that_is_not_there_is_told_with_its_line(tmp_path, monkeypatch, missing):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "d")
    (tmp_path / "void").mkdir()
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"input:\n  - d\n  - {{path: {missing}}}\noutput: out\nsteps: []\n")
    with pytest.raises(SwiftError) as caught:
        list_shards(read_recipe(recipe))
    assert f"{recipe}:3" in caught.value.where
    assert "taken from" in caught.value.fix and os.fspath(tmp_path) in caught.value.fix
    with pytest.raises(SwiftError) as caught:
        list_shards(read_recipe(recipe, {"input": ["gone.jsonl"]}))
    assert "--input" in caught.value.where


def test_an_empty_file_is_not_told_with_a_flag_that_recipes_lack(recipe_of, run, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(SwiftError) as caught:
        run(recipe_of([], input=[str(tmp_path / "empty.jsonl")]))
    assert "--dataset" not in caught.value.fix and "on_bad_shard: skip" in caught.value.fix


def test_data_in_the_place_of_a_recipe(tmp_path):
    with pytest.raises(UsageError, match="is data, and a recipe is wanted") as caught:
        read_recipe(write_rows(tmp_path))
    assert "swift data check" in caught.value.fix
