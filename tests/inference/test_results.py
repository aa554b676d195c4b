"""The result file: what is kept of an interrupted one, what is refused, who may write it."""

from __future__ import annotations

import json

import pytest

from swift.core.errors import CheckpointError, SwiftError, UsageError
from swift.inference.batch import BatchJob
from swift.inference.results import ResultFile, Share, merge_parts, meta_path, part_path, read_meta, unfinished_results

SETTINGS = {"model": "m", "seed": 1}


def result(index, status="ok"):
    return {"index": index, "status": status, "response": f"antwort {index} 🤖"}


def write(path, indices, *, finish=False, settings=SETTINGS, share=None):
    with ResultFile(path, settings, share=share) as results:
        results.append(result(i) for i in indices)
        if finish:
            results.finish()


@pytest.mark.parametrize(
    "tail",
    [
        b"",
        b'{"index": 3, "stat',
        b'{"index": 3, "status": "ok"}',
        b'{"index": 3}\n',
        b"\x00\x00\x00\n",
        b'{"index": 9, "status": "ok"}\n',
    ],
)
def test_what_follows_the_last_complete_line_is_cut(tmp_path, tail):
    path = tmp_path / "r.jsonl"
    write(path, range(3))
    with path.open("ab") as file:
        file.write(tail)
    with ResultFile(path, SETTINGS) as results:
        assert results.num_lines == 3
        assert results.statuses == {"ok": 3}
        assert not results.complete
        results.append([result(3, "error")])
        results.finish()
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert lines == [result(0), result(1), result(2), result(3, "error")]
    assert read_meta(path)["statuses"] == {"ok": 3, "error": 1}


def test_other_settings_are_refused_and_named(tmp_path):
    path = tmp_path / "r.jsonl"
    write(path, range(2))
    before = path.read_bytes()
    with pytest.raises(UsageError) as caught:
        ResultFile(path, {**SETTINGS, "seed": 2, "top_p": 0.5})
    assert "seed 1 there, 2 now" in str(caught.value) and "top_p" in str(caught.value)
    assert "--resume false" in str(caught.value)
    assert path.read_bytes() == before
    with ResultFile(path, {**SETTINGS, "seed": 2}, resume=False) as results:
        assert results.num_lines == 0
    assert path.read_bytes() == b""


def test_a_file_of_something_else_is_not_overwritten(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("precious\n")
    with pytest.raises(UsageError, match="wasn't written by this command"):
        ResultFile(path, SETTINGS)
    assert path.read_text() == "precious\n"


def test_an_empty_file_is_taken(tmp_path):
    path = tmp_path / "r.jsonl"
    path.touch()
    write(path, range(1))
    assert read_meta(path)["settings"] == SETTINGS


def test_a_second_writer_is_refused(tmp_path):
    path = tmp_path / "r.jsonl"
    with ResultFile(path, SETTINGS):
        with pytest.raises(CheckpointError, match="another process"):
            ResultFile(path, SETTINGS)
        assert unfinished_results(tmp_path, SETTINGS) is None
    assert unfinished_results(tmp_path, SETTINGS) == path


def test_a_complete_file_that_lost_lines_is_not_complete(tmp_path):
    path = tmp_path / "r.jsonl"
    write(path, range(3), finish=True)
    with ResultFile(path, SETTINGS) as results:
        assert results.complete
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    with ResultFile(path, SETTINGS) as results:
        assert not results.complete and results.num_lines == 2


def test_unfinished_results_finds_the_newest_of_the_same_settings(tmp_path):
    assert unfinished_results(tmp_path / "none", SETTINGS) is None
    write(tmp_path / "done.jsonl", range(2), finish=True)
    write(tmp_path / "other.jsonl", range(2), settings={"model": "n"})
    assert unfinished_results(tmp_path, SETTINGS) is None
    write(tmp_path / "open.jsonl", range(2))
    assert unfinished_results(tmp_path, SETTINGS) == tmp_path / "open.jsonl"


@pytest.mark.parametrize("total", [1, 4, 5, 6])
def test_parts_are_merged_in_row_order(tmp_path, total):
    path = tmp_path / "r.jsonl"
    parts = [part_path(path, Share(rank, 3)) for rank in range(3)]
    for rank, part in enumerate(parts):
        write(part, range(rank, total, 3), finish=True, share=Share(rank, 3))
    merge_parts(path, SETTINGS, 3)
    assert [json.loads(line)["index"] for line in path.read_text(encoding="utf-8").splitlines()] == list(range(total))
    assert read_meta(path)["complete"] and read_meta(path)["statuses"] == {"ok": total}
    assert sorted(tmp_path.iterdir()) == [path, meta_path(path)]


def test_a_part_that_ends_early_is_noticed(tmp_path):
    path = tmp_path / "r.jsonl"
    for rank in range(2):
        write(part_path(path, Share(rank, 2)), range(rank, 6, 2), finish=True, share=Share(rank, 2))
    part = part_path(path, Share(1, 2))
    part.write_bytes(part.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="row 5 is missing"):
        merge_parts(path, SETTINGS, 2)
    assert not path.exists()


def test_a_place_that_can_t_be_written_is_found_before_the_model_is_loaded(tmp_path):
    (tmp_path / "file").write_text("x")

    def load():
        raise AssertionError("the model was loaded")

    for path in (tmp_path / "file/results.jsonl", tmp_path / "file/far/results.jsonl", tmp_path):
        job = BatchJob(start=load, inputs=None, settings=SETTINGS, path=path)
        with pytest.raises(SwiftError, match="could not write"):
            job.run()
