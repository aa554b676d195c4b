"""Bad rows, bad files, bad operators, bad disks: each named, none taken for success."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zstandard

from swift.core.errors import DataError, NetworkError, SwiftError, UsageError
from swift.data.engine.blocks import BlockWriter, read_blocks, read_index
from swift.data.engine.document import document_from
from swift.data.engine.pool import Stopped


@pytest.fixture
def bad_rows(tmp_path: Path) -> Path:
    """Twenty rows, three of them bad, in two files."""
    folder = tmp_path / "bad"
    folder.mkdir()
    good = [json.dumps({"text": f"text {n}"}) for n in range(10)]
    (folder / "a.jsonl").write_text("\n".join([*good[:4], "{oops", *good[4:9]]) + "\n")
    (folder / "b.jsonl").write_text("\n".join([*good[:7], '{"no": 1}', "[1]"]) + "\n")
    return folder


def test_a_bad_row_stops_with_its_place(run, recipe_of, bad_rows):
    with pytest.raises(DataError) as caught:
        run({**recipe_of([]), "input": [str(bad_rows)]})
    assert caught.value.where == f"{bad_rows}/a.jsonl:5"
    assert "not_json" in caught.value.message and "on_bad_row: drop" in caught.value.fix


def test_bad_rows_are_dropped_and_counted_where_the_recipe_says_so(run, recipe_of, bad_rows, rows_of, ledger_of):
    keys = {"on_bad_row": "drop", "max_bad_rows": 3, "keep_dropped": True}
    result = run({**recipe_of([], **keys), "input": [str(bad_rows)]})
    assert len(rows_of(result.output)) == 16
    tally = ledger_of(result.output)["read"]["tally"]
    assert (tally["read"], tally["kept"]) == (19, 16)
    assert tally["dropped"] == {"not_json": 1, "no_text": 1, "not_an_object": 1}
    assert tally["samples"]["not_json"][0]["text"] == "{oops"
    with (result.output / "_dropped.jsonl.zst").open("rb") as file:
        listed = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read().splitlines()
    assert [json.loads(line)["id"].rpartition("/")[2] for line in listed] == ["a.jsonl:5", "b.jsonl:8", "b.jsonl:9"]


@pytest.mark.parametrize(("limit", "num_proc"), [(2, 1), (2, 2), (0.1, 1)])
def test_too_many_bad_rows_stop(run, recipe_of, bad_rows, limit, num_proc, tmp_path):
    keys = {"on_bad_row": "drop", "max_bad_rows": limit, "executor": {"num_proc": num_proc}}
    with pytest.raises(DataError) as caught:
        run({**recipe_of([], **keys), "input": [str(bad_rows)]})
    assert "max_bad_rows" in caught.value.message
    assert not list((tmp_path / "out").glob("part-*"))


def torn_gzip(path: Path) -> None:
    import gzip

    data = gzip.compress(b"".join(b'{"text": "row %d"}\n' % n for n in range(5000)))
    path.write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize("kind", ["torn", "empty", "blank", "wrong ending"])
def test_a_bad_shard_stops_or_is_skipped(run, recipe_of, rows_folder, rows_of, ledger_of, kind):
    bad = rows_folder / {"torn": "s1b.jsonl.gz", "wrong ending": "s1b.parquet"}.get(kind, "s1b.jsonl")
    if kind == "torn":
        torn_gzip(bad)
    elif kind == "wrong ending":
        bad.write_text('{"text": "row"}\n')
    else:
        bad.write_text("" if kind == "empty" else "\n\n\n")
    inputs = [str(rows_folder / "s*.jsonl*"), str(bad)] if kind == "wrong ending" else [str(rows_folder / "s*.jsonl*")]
    recipe = {**recipe_of(["toy_length", "toy_dedup"]), "input": inputs}
    with pytest.raises(DataError) as caught:
        run(recipe)
    assert str(bad) in str(caught.value.where) and "on_bad_shard: skip" in caught.value.fix
    result = run({**recipe, "on_bad_shard": "skip"})
    ledger = json.loads((result.output / "_ledger.json").read_text())
    assert ledger["bad_shards"] == {str(bad): 1}
    assert any(str(bad) in note and "skipped" in note for note in ledger["notes"])
    assert ledger_of(result.output)["read"]["tally"]["read"] == 1000  # no row of the bad file
    bad.unlink()
    clean = run(recipe_of(["toy_length", "toy_dedup"], folder="clean"))
    assert rows_of(result.output) == rows_of(clean.output)


def test_a_shard_of_which_nothing_is_left_has_no_file(run, recipe_of, rows_folder, rows_of):
    (rows_folder / "s1.jsonl").write_text('{"text": "a"}\n')
    result = run(recipe_of(["toy_length"]))
    names = [file["name"] for file in result.manifest["files"]]
    assert names == ["part-00000.jsonl.zst", "part-00002.jsonl.zst", "part-00003.jsonl.zst"]
    nothing = run(recipe_of([{"toy_length": {"least": 10**6}}], folder="nothing"))
    assert nothing.manifest["files"] == [] and nothing.manifest["rows"] == 0


@pytest.mark.parametrize("num_proc", [1, 2])
def test_an_operator_that_raises_is_named_with_the_document(run, recipe_of, rows_folder, num_proc, tmp_path):
    lines = (rows_folder / "s2.jsonl").read_text().splitlines()
    lines[137] = json.dumps({"text": "this is poison"})
    (rows_folder / "s2.jsonl").write_text("\n".join(lines))
    recipe = recipe_of(["toy_length", "toy_fail"], executor={"num_proc": num_proc})
    with pytest.raises(SwiftError) as caught:
        run(recipe)
    assert caught.value.message == "the operator toy_fail failed: KeyError: 'no such thing'"
    assert caught.value.where == f"{rows_folder}/s2.jsonl:138"
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_an_operator_that_loses_documents_is_named(run, recipe_of, rows_folder):
    (rows_folder / "s0.jsonl").write_text('{"text": "poison"}\n{"text": "fine"}\n')
    with pytest.raises(SwiftError) as caught:
        run(recipe_of([{"toy_fail": {"how": "lose"}}]))
    assert "toy_fail left out 1 document(s) without saying why" in caught.value.message


def test_a_worker_that_is_killed_is_named_with_its_task(run, recipe_of, rows_folder, rows_of):
    text = (rows_folder / "s2.jsonl").read_text()
    (rows_folder / "s2.jsonl").write_text('{"text": "poison"}\n' + text)
    with pytest.raises(SwiftError) as caught:
        run(recipe_of([{"toy_fail": {"how": "die"}}], executor={"num_proc": 2}))
    assert "SIGKILL" in caught.value.message and "memory" in caught.value.message
    assert caught.value.where == "task 2 of 00-read"
    assert "--num_proc" in caught.value.fix


def test_an_operator_without_one_task_for_each_shard_is_refused(run, recipe_of, monkeypatch):
    from swift.data.engine.operator import OPERATORS

    run(recipe_of([], folder="first"))  # registers the operators
    monkeypatch.setattr(OPERATORS["toy_dedup"], "phases", lambda self, n: [("drop", n + 1)])
    with pytest.raises(SwiftError) as caught:
        run(recipe_of(["toy_dedup"]))
    assert "phases" in caught.value.message


FULL = """
import json, resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
from swift.cli import main
sys.exit(main(["data", "run", sys.argv[1]]))
"""


@pytest.mark.parametrize(
    ("num_proc", "steps"),
    [
        (1, []),
        (2, ["toy_dedup"]),
        pytest.param(2, [], marks=pytest.mark.slow),
        pytest.param(1, ["toy_dedup"], marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_is_named_and_nothing_half_written_counts(run, recipe_of, tmp_path, steps, num_proc, rows_of):
    """A file-size limit refuses as a full disk does."""
    rows = "".join(json.dumps({"text": os.urandom(300).hex()}) + "\n" for _ in range(600))
    (tmp_path / "noise.jsonl").write_text(rows)
    small = tmp_path / "small.jsonl"
    small.write_text('{"text": "small"}\n')
    recipe = recipe_of(steps, executor={"num_proc": num_proc})
    recipe["input"] = [str(small), str(tmp_path / "noise.jsonl")]
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe))
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(path), "100000"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "error: could not write" in done.stderr and "ulimit -f" in done.stderr
    assert "Traceback" not in done.stderr
    out = tmp_path / "out"
    assert not (out / "_manifest.json").exists() and not list(out.glob("part-*")) and not list(out.rglob("*.tmp"))
    result = run(recipe)
    assert result.tasks_done_before == 1  # the small file's
    assert len(rows_of(result.output)) == 601


@pytest.mark.parametrize("place", ["file", "below a file", "/proc/nothing"])
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_read(run, recipe_of, tmp_path, place):
    (tmp_path / "taken").write_text("x")
    path = {"file": str(tmp_path / "taken"), "below a file": str(tmp_path / "taken" / "out")}.get(place, place)
    with pytest.raises(SwiftError) as caught:
        run(recipe_of([], output={"path": path}))
    assert path in caught.value.render()
    assert isinstance(caught.value, UsageError) or "could not write" in caught.value.message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_output(run, recipe_of, tmp_path):
    (tmp_path / "ro").mkdir(mode=0o555)
    with pytest.raises(SwiftError) as caught:
        run(recipe_of([], output={"path": str(tmp_path / "ro" / "out")}))
    assert "no right to write there" in caught.value.fix


def test_documents_between_stages_keep_everything_and_damage_is_noticed(tmp_path):
    rows = [
        {"text": "é\u2028 中 \x85\x1c", "n": 1.5, "list": [1, None, {"a": True}], "meta": {"old": 1}},
        {"messages": [{"role": "user", "content": "q"}, {"from": "gpt", "value": "a"}], "big": 2**63 - 1},
        {"instruction": "i", "output": "o\r\n"},
    ]
    documents = [document_from(row, f"f:{n}") for n, row in enumerate(rows)]
    documents[0].texts[0] += " changed"
    documents[1].meta["score"] = 0.25
    writer = BlockWriter(tmp_path)
    writer.write(documents)
    writer.write([document_from({"text": "x" * (2 << 20)}, "f:9")])
    assert writer.close()["rows"] == 4
    assert [block.rows for block in read_index(tmp_path)] == [4]
    (back,) = read_blocks(tmp_path)
    for before, after in zip(documents, back):
        assert (after.id, after.texts, after.paths, after.roles, after.meta) == (
            before.id,
            before.texts,
            before.paths,
            before.roles,
            before.meta,
        )
        assert after.to_record() == before.to_record()
    path = tmp_path / "documents.zst"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        list(read_blocks(tmp_path))
    assert "damaged" in caught.value.message


def test_a_long_line_goes_through(run, recipe_of, tmp_path, rows_of):
    text = "x" * (20 << 20)
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": text}) + "\n" + '{"text": "short one"}\n')
    result = run({**recipe_of(["toy_length", "toy_dedup"]), "input": [str(tmp_path / "long.jsonl")]})
    assert [len(row["text"]) for row in rows_of(result.output)] == [20 << 20, 9]


def test_what_a_killed_publication_has_left_goes_and_nothing_else(run, recipe_of, monkeypatch, tmp_path):
    """Killed between the moves into the output folder and the manifest."""
    from swift.data.engine import summary

    with monkeypatch.context() as patch:
        patch.setattr(summary, "_sha256", lambda path: 1 / 0)  # after the sink has added its file
        with pytest.raises(ZeroDivisionError):
            run(recipe_of(["toy_length", "toy_sink"]))
    out = tmp_path / "out"
    assert (out / "all.lengths").exists() and not (out / "_manifest.json").exists()
    result = run(recipe_of(["toy_length", "toy_sink"]))
    assert result.tasks_run == 0
    assert [file["name"] for file in result.manifest["files"]][-1] == "all.lengths"
    with monkeypatch.context() as patch:
        patch.setattr(summary, "_sha256", lambda path: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(recipe_of(["toy_length", "toy_sink"]), restart=True)
    (out / ".mine").write_text("x")
    fresh = run(recipe_of(["toy_length"]), restart=True)
    visible = {path.name for path in out.iterdir() if not path.name.startswith("_")}
    assert visible == {".mine", *(file["name"] for file in fresh.manifest["files"])}


def test_a_file_that_somebody_adds_is_left_alone(run, recipe_of, tmp_path):
    run(recipe_of(["toy_length"], keep_work=True))
    (tmp_path / "out/README").write_text("mine")
    again = run(recipe_of([{"toy_length": {"least": 16}}], keep_work=True))
    assert again.tasks_run == 4
    run(recipe_of(["toy_length"]), restart=True)
    assert (tmp_path / "out/README").read_text() == "mine"
    assert "README" not in [file["name"] for file in again.manifest["files"]]


def test_offline_refuses_what_would_have_to_be_fetched(run, recipe_of, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with pytest.raises(NetworkError):
        run({**recipe_of([], offline=True), "input": ["hf::nobody/nothing"]})
    assert os.environ["HF_HUB_OFFLINE"] == "1"  # workers inherit it


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("return None", "NoneType"),
        ("return batch[:1] + batch", "same document twice"),
        ("tally.drop(batch[0], 'why'); return batch", "hands on as well"),
        ("batch[0].texts[0] = 5; return batch", "a text that is none"),
        ("batch[0].texts.clear(); return batch", "0 texts in place of 1"),
    ],
)
def test_an_operator_that_breaks_the_contract_is_named(run, recipe_of, tmp_path, does, told):
    name = f"wrong_{len(does)}"
    plugin = tmp_path / f"{name}.py"
    plugin.write_text(
        "from dataclasses import dataclass\n"
        "from swift.data.engine.operator import OPERATORS, MapOperator\n"
        f"@OPERATORS.register('{name}')\n@dataclass\nclass Wrong(MapOperator):\n"
        f"    '''Wrong.'''\n    def run(self, batch, tally):\n        {does}\n"
    )
    with pytest.raises(SwiftError) as caught:
        run({**recipe_of([name]), "plugins": [str(plugin)]})
    assert name in caught.value.message and told in caught.value.message


@pytest.mark.parametrize("format", ["jsonl", "json"])
def test_a_row_too_deep_to_be_written_is_a_bad_row(run, recipe_of, tmp_path, rows_of, format):
    path = tmp_path / f"deep.{format}"
    good, deep = '{"text": "a good row"}', '{"text": "a deep row", "d": ' + "[" * 300 + "]" * 300 + "}"
    path.write_text(f"[{good},\n{deep}]" if format == "json" else f"{good}\n{deep}\n")
    recipe = {**recipe_of([]), "input": [str(path)]}
    with pytest.raises(DataError, match="too_deep") as caught:
        run(recipe)
    assert caught.value.where == f"{path}:2"
    assert len(rows_of(run({**recipe, "on_bad_row": "drop", "max_bad_rows": 1}).output)) == 1


def test_the_output_is_never_read_as_input(run, recipe_of, rows_folder):
    recipe = {**recipe_of([]), "input": [f"{rows_folder}:all"], "output": {"path": str(rows_folder / "clean")}}
    output = run(recipe).output
    before = sorted(path.name for path in output.iterdir())
    for restart in (False, True):
        with pytest.raises(UsageError, match="lies in the output folder"):
            run(recipe, restart=restart)
    assert sorted(path.name for path in output.iterdir()) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_input_is_listed_stops_at_once(recipe_of, run, monkeypatch, number):
    def slow(recipe):
        os.kill(os.getpid(), number)
        time.sleep(20)

    monkeypatch.setattr("swift.data.engine.run.list_shards", slow)
    start = time.monotonic()
    with pytest.raises(Stopped):
        run(recipe_of([]))
    assert time.monotonic() - start < 10
