"""Streamed data that isn't as it should be: broken files, bad rows, changed files, dead workers; what is counted."""

import gzip
import json
from dataclasses import replace

import pytest
from streams import Ranks, Setup, steps_of, write_shards

from swift.core.errors import DataError
from swift.data.loading.batch import Layout
from swift.data.loading.train_set import difficulty_bins


def count_rows(paths):
    return sum(len(path.read_text().splitlines()) for path in paths)


@pytest.fixture
def torn(tmp_path):
    """Three shards, of which the second, packed, breaks off behind some of its 400 rows."""
    paths = write_shards(tmp_path, "a", [30, 400, 20], seed=1)
    packed = tmp_path / "a-001.jsonl.gz"
    data = gzip.compress(paths[1].read_bytes())
    packed.write_bytes(data[: len(data) // 2])
    return [paths[0], packed, paths[2]]


def test_a_file_that_breaks_off_stops_the_run(torn):
    with pytest.raises(DataError) as caught:
        steps_of(Setup([torn], Layout(8)), 2, 40)
    assert "a-001.jsonl.gz" in caught.value.where
    assert "--on_bad_shard skip" in caught.value.fix


def test_or_is_left_and_counted(torn, tmp_path):
    setup = Setup([torn], Layout(8), skip_bad=True, ledger=tmp_path / "ledger.jsonl")
    steps, state = steps_of(setup, 1, 45)
    first = [ref for epoch, refs in steps if epoch == 0 for ref in refs]
    by_file = [sum(path.name in ref for ref in first) for path in torn]
    assert by_file[0] == 30 and by_file[2] == 20
    assert 0 < by_file[1] < 400
    assert list(state["intake"]["documents"]["flows"][0]["bad"]) == [str(torn[1])]
    summary = json.loads((tmp_path / "ledger.jsonl").read_text().splitlines()[-1])
    assert any("a-001.jsonl.gz was left" in note for note in summary["notes"])
    for cut in (3, 9, 20):  # before, inside and behind the broken file
        begun, state = steps_of(setup, 1, cut)
        assert begun + steps_of(setup, 2, 45 - cut, state)[0] == [
            *steps_of(replace(setup, layout=Layout(8)), 1, cut)[0],
            *steps_of(replace(setup, layout=Layout(8)), 2, 45 - cut, state)[0],
        ]
        rest, _ = steps_of(setup, 1, 45 - cut, state)
        assert begun + rest == steps


def test_an_empty_file_among_others_is_passed_over(tmp_path):
    paths = write_shards(tmp_path, "a", [10, 5], seed=1)
    empty = tmp_path / "a-empty.jsonl"
    empty.write_text("")
    steps, _ = steps_of(Setup([[*paths, empty]], Layout(5)), 1, 3)
    assert len({ref for _, refs in steps for ref in refs}) == 15
    with pytest.raises(DataError, match="empty"):
        steps_of(Setup([[empty]], Layout(5)), 1, 1)


def test_a_file_that_changes_is_refused(tmp_path):
    paths = write_shards(tmp_path, "a", [30], seed=1)
    setup = Setup([paths], Layout(4), block=8, stamps={str(paths[0]): "other"})
    with pytest.raises(DataError, match="changed since the run began"):
        steps_of(setup, 1, 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bad_row_stops_every_rank_by_name(ranks, tmp_path):
    paths = write_shards(tmp_path, "a", [60], texts={41: "0"})
    with pytest.raises(DataError) as caught:
        steps_of(Setup([paths], Layout(4)), ranks, 20)
    assert caught.value.where == f"{paths[0]}:42"


def test_or_is_dropped_and_counted_once_whatever_was_resumed(tmp_path):
    texts = {7: "0", 20: "0", 33: "long", 50: "5 5 5", 55: "0"}
    paths = write_shards(tmp_path, "a", [60], texts=texts)
    whole = Setup([paths], Layout(4), strict=False, ledger=tmp_path / "whole.jsonl")
    steps_of(whole, 1, 40)
    other = replace(whole, ledger=tmp_path / "other.jsonl")
    _, state = steps_of(other, 1, 7)
    steps_of(other, 1, 5, state)  # a process that went on and died: what it wrote is written again
    _, state = steps_of(other, 2, 4, state)
    steps_of(other, 1, 25, state)
    lines, again = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("whole.jsonl", "other.jsonl")
    )
    assert again[:-1] == lines[:-1]
    counts, same = lines[-1]["sources"][0], again[-1]["sources"][0]
    assert {**counts, "unused": None} == {**same, "unused": None}
    assert counts["dropped"]["no_tokens"] >= 6
    assert counts["read"] == counts["kept"] + sum(counts["dropped"].values())
    assert len(lines) >= 10


def test_too_many_bad_rows_stop_the_run(tmp_path):
    paths = write_shards(tmp_path, "a", [40], texts=dict.fromkeys(range(0, 40, 3), "0") | dict.fromkeys(range(12), "0"))
    with pytest.raises(DataError, match=r"rows are bad; --max_bad_rows allows 50.00%"):
        steps_of(Setup([paths], Layout(4), strict=False), 1, 40)


def test_a_worker_that_dies_is_named(tmp_path):
    paths = write_shards(tmp_path, "a", [40], texts={5: "die"})
    with pytest.raises(DataError, match="died") as caught:
        steps_of(Setup([paths], Layout(4), workers=1), 1, 20)
    assert caught.value.where == "--dataloader_num_workers"


def test_nothing_to_train_on_in_a_whole_epoch(tmp_path):
    paths = write_shards(tmp_path, "a", [12], texts=dict.fromkeys(range(12), "long"))
    with pytest.raises(DataError, match="no row is left"):
        steps_of(Setup([paths], Layout(4)), 1, 1)


def test_difficulty_bins():
    import numpy as np

    from swift.config.curriculum import read_curriculum

    values = np.array([5.0, 1.0, 9.0, 3.0, 7.0, 1.0])
    equal = read_curriculum({"difficulty": "length", "bins": 3, "weights": [[0, [1, 1, 1]]]})
    assert [part.tolist() for part in difficulty_bins(values, equal)] == [[1, 5], [0, 3], [2, 4]]
    borders = read_curriculum({"difficulty": "score", "bins": [3, 8], "weights": [[0, [1, 1, 1]]]})
    assert [part.tolist() for part in difficulty_bins(values, borders)] == [[1, 5], [0, 3, 4], [2]]


def test_a_file_that_breaks_off_for_one_rank_alone_is_no_shard_to_skip(torn, tmp_path):
    """Ranks that go on with different rows would lose some and repeat others, in silence."""
    whole = tmp_path / "whole"
    whole.mkdir()
    for path in (torn[0], torn[2]):
        (whole / path.name).write_bytes(path.read_bytes())
    (whole / torn[1].name).write_bytes(gzip.compress((tmp_path / "a-001.jsonl").read_bytes()))
    ranks = Ranks(2)

    def work(rank):
        paths = [whole / path.name for path in torn] if rank else torn
        loader = Setup([paths], Layout(8), skip_bad=True).loader(rank, 2, ranks.exchange(rank))
        try:
            return [len(loader.next_step()) for _ in range(40)]
        finally:
            loader.close()

    with pytest.raises(DataError, match="the same rows on all processes"):
        ranks.run(work)
