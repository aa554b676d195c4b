"""What is redone when a recipe is run again: nothing that is done, and everything that something has changed for."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from swift.core.errors import DataError, SwiftError, UsageError
from swift.data.engine import plugins
from swift.data.engine.plugins import _imported, load_builtin, version_of

STEPS = [{"toy_length": {"least": 5}}, "toy_dedup", {"toy_upper": {"rate": 0.5}}]


def files_of(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.glob("part-*"))}


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


def test_a_helper_beside_a_plugin_counts_as_its_code(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "__init__.py").write_text("")
    plugin, helper, deeper, other = (
        tmp_path / name for name in ("p.py", "sub/helper.py", "sub/deeper.py", "sub/other.py")
    )
    for path in (helper, deeper, other):
        path.write_text("X = 1\n")
    plugin.write_text(
        "import os, json\n\n\ndef f():\n    from sub import (\n        helper,\n    )\n    return helper\n"
    )
    helper.write_text("from .deeper import X\n")
    files = _imported(plugin, tmp_path, tmp_path)
    assert files == {plugin, helper, deeper, tmp_path / "sub" / "__init__.py"}


def test_fingerprints_take_in_the_helpers_of_operators():
    load_builtin()
    root = Path(plugins.__file__).parents[1]
    files = _imported(root / "operators" / "exact_dedup.py", root.parents[1], root)
    assert {root / name for name in ("dedup/units.py", "dedup/runs.py", "engine/document.py", "messages.py")} <= files
    assert not any("transformers" in str(path) or "models" in str(path) for path in files)
    before = version_of("exact_dedup")
    changed = root / "dedup" / "units.py"
    version_of.cache_clear()
    read = Path.read_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda path: read(path) + (b"#" if path == changed else b""))
        assert version_of("exact_dedup") != before
        assert version_of("sample")
    version_of.cache_clear()
    assert version_of("exact_dedup") == before
