"""`swift data run`, `report` and `operators` as typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swift import Recipe, cli, run_recipe
from swift.data.engine.run import RunOptions

TOYS = str(Path(__file__).parents[1] / "assets" / "toy_operators.py")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    rows = [json.dumps({"text": f"text number {n}"}) for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join([*rows, '{"text": "hi"}']) + "\n")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"input: {tmp_path}/rows.jsonl\noutput: {tmp_path}/out\nplugins: [{TOYS}]\n"
        "steps:\n  - toy_length\n  - toy_upper: {suffix: '!'}\n"
    )
    return path


def test_a_run_and_its_report(recipe, tmp_path, capsys):
    assert cli.main(["data", "run", str(recipe), "--num_proc", "1"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path}/out\n"
    assert "read + toy_length + toy_upper: 1 task(s)" in err and "done: 21 rows read, 20 written" in err
    page = (tmp_path / "out/_report.html").read_text()
    assert cli.main(["data", "report", str(tmp_path / "out"), "--html", str(tmp_path / "again.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/again.html\n"
    assert (tmp_path / "again.html").read_text() == page


def test_flags_win_over_the_recipe(recipe, tmp_path, capsys):
    (tmp_path / "other.jsonl").write_text('{"text": "just one"}\n')
    flags = ["-i", str(tmp_path / "other.jsonl"), "--output", str(tmp_path / "new"), "--seed", "5", "--keep_work"]
    assert cli.main(["data", "run", str(recipe), *flags, "--max_memory", "1GB", "--num_proc", "1"]) == 0
    manifest = json.loads((tmp_path / "new/_manifest.json").read_text())
    assert (manifest["rows"], manifest["seed"]) == (1, 5)
    assert manifest["recipe"]["max_memory"] == "1GB"
    assert (tmp_path / "new/.work").exists() and not (tmp_path / "out").exists()
    capsys.readouterr()


def test_a_dry_run_only_plans(recipe, tmp_path, capsys):
    assert cli.main(["data", "run", str(recipe), "--dry_run"]) == 0
    assert "stage   read + toy_length + toy_upper: 1 task(s)" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run"], "needs RECIPE.yaml"),
        (["run", "nowhere.yaml"], "there is no recipe nowhere.yaml"),
        (["run", "RECIPE", "--nm_proc", "2"], "did you mean --num_proc?"),
        (["run", "RECIPE", "--rank", "1"], "--rank needs to know of how many"),
        (["run", "RECIPE", "--executor", "slurm"], "'slurm' is not one of its values"),
        (["run", "RECIPE", "-i", "no-such-folder"], "there is no file or folder 'no-such-folder'"),
        (["report", "."], "there is no finished run"),
        (["operators", "gopher_qualty"], "did you mean gopher_quality?"),
        (["rn"], "did you mean run?"),
    ],
)
def test_wrong_words_are_answered_with_what_helps(recipe, capsys, words, told):
    code = cli.main(["data", *(str(recipe) if word == "RECIPE" else word for word in words)])
    err = capsys.readouterr().err
    assert told in err and "Traceback" not in err
    assert code == (1 if "no-such-folder" in words else 2)


def test_operators_are_listed_with_their_settings(capsys):
    assert cli.main(["data", "operators", "--plugins", TOYS]) == 0
    listed = capsys.readouterr().out
    assert "toy_length" in listed and "Drop short documents." in listed and "gopher_quality" in listed
    assert cli.main(["data", "operators", "toy_upper", "--plugins", TOYS]) == 0
    shown = capsys.readouterr().out
    assert "mode upper|title  [upper]" in shown and "which capitals" in shown and "More about it." in shown
    assert cli.main(["data", "operators", "toy_dedup", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)["toy_dedup"]
    assert described["kind"] == "global" and described["settings"]["unused"]["default"] == ""


def test_from_python(recipe, tmp_path):
    result = run_recipe(recipe, {"output.path": str(tmp_path / "py")}, RunOptions(quiet=True))
    assert result.output == tmp_path / "py" and result.manifest["rows"] == 20
    assert Recipe().seed == 42


def test_the_end_of_a_run_tells_what_became_of_the_rows(recipe, tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_text('{"text": "number of bad"}\nnot json\n')
    (tmp_path / "empty.jsonl").write_text("")
    recipe.write_text(
        f"input: [{tmp_path}/rows.jsonl, {tmp_path}/bad.jsonl, {tmp_path}/empty.jsonl]\noutput: {tmp_path}/out\n"
        f"on_bad_row: drop\nmax_bad_rows: 3\non_bad_shard: skip\nplugins: [{TOYS}]\nsteps: [toy_length, exact_dedup]\n"
    )
    assert cli.main(["data", "run", str(recipe), "--num_proc", "1"]) == 0
    err = capsys.readouterr().err
    assert err[err.index("done:") :].splitlines()[1:] == [
        f"  1 file(s) skipped: {tmp_path}/empty.jsonl",
        "  1 bad row(s) left out: not_json 1",
        "  toy_length dropped 1: too_short 1",
        f"report: {tmp_path}/out/_report.html",
        f"next:   swift data check {tmp_path}/out",
        f"        swift pt --dataset {tmp_path}/out   (conversations: swift sft)",
    ]


def test_a_run_that_leaves_no_row_fails(recipe, capsys):
    recipe.write_text(recipe.read_text().replace("- toy_length", "- toy_length: {least: 1000}"))
    for words in ("warning: no row is left", "warning: the output has no rows"):  # and so does the same once more
        assert cli.main(["data", "run", str(recipe), "--num_proc", "1"]) == 1
        assert words in capsys.readouterr().err


def test_data_is_told_from_a_recipe(tmp_path, capsys):
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n')
    assert cli.main(["data", "run", str(tmp_path / "data.jsonl")]) == 2
    assert "data.jsonl is data, and a recipe is wanted" in capsys.readouterr().err
