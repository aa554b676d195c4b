"""Sorted runs on disk: every record comes back once, in whole groups, however little memory there is."""

from __future__ import annotations

import numpy as np
import pytest

from swift.core.errors import DataError
from swift.data.dedup.nodes import IdWriter, node_of, read_id, row_of, shard_cuts, shard_of
from swift.data.dedup.runs import KeyReader, Runs, RunWriter, hash_cuts, records, sort_records

PAIR = np.dtype([("key", "<u8"), ("other", "<u8")])


def written(tmp_path, rows, cuts, memory, tasks=3, **options):
    folders = []
    for task, part in enumerate(np.array_split(rows, tasks)):
        writer = RunWriter(tmp_path / str(task), PAIR, cuts, memory, **options)
        for piece in np.array_split(part, 5):
            writer.add(piece)
        writer.close()
        folders.append(tmp_path / str(task))
    return folders


@pytest.mark.parametrize("memory", [1, 64 * 7, 64 * 50, 1 << 20])
@pytest.mark.parametrize("spread", [3, 200, 2**64 - 1])
def test_partitions_give_every_record_once_in_whole_groups(tmp_path, memory, spread):
    rng = np.random.default_rng(spread % 1000)
    keys = rng.integers(0, spread, 500, dtype=np.uint64, endpoint=True)
    rows = records(PAIR, key=keys, other=rng.integers(0, 9, 500, dtype=np.uint64))
    folders = written(tmp_path, rows, hash_cuts(4), memory)
    found, keys_seen = [], []
    for partition in range(4):
        runs = Runs(folders, PAIR, partition, memory)
        assert len(runs) == sum(int(key) * 4 >> 64 == partition for key in keys)
        for chunk in runs.chunks():
            parts = list(chunk.parts())
            assert [part.tolist() for part in parts] == [part.tolist() for part in chunk.parts()]
            keys_seen += sorted({int(key) for part in parts for key in part["key"]})
            if chunk.whole:
                assert len(parts) == 1
                assert parts[0].tolist() == sorted(parts[0].tolist())
            else:
                assert chunk.least == chunk.most
                assert all(len(part) <= max(1, memory // 64) for part in parts)
            found += parts
        if len(runs) > max(1, memory // 64) and len(set(keys.tolist())) > 4:
            assert runs.splits > 0
    assert sorted(np.concatenate(found).tolist()) == sorted(rows.tolist())
    assert keys_seen == sorted(set(keys.tolist()))  # ascending, and no key in two chunks


def test_sorting_by_all_fields():
    rng = np.random.default_rng(1)
    dtype = np.dtype([("key", "<u8"), ("low", "<u8"), ("at", "<u4")])
    rows = records(dtype, **{name: rng.integers(0, 4, 300) for name in ("key", "low", "at")})
    assert sort_records(rows).tolist() == sorted(rows.tolist())
    assert len(sort_records(rows[:0])) == 0


def test_equal_records_are_written_once_in_a_run_if_asked(tmp_path):
    rows = records(PAIR, key=np.array([5, 5, 2, 5]), other=np.array([1, 1, 1, 2]))
    folders = written(tmp_path, rows, hash_cuts(1), 1 << 20, tasks=1, unique=True)
    assert np.concatenate(list(Runs(folders, PAIR, 0, 1 << 20).rows())).tolist() == [(2, 1), (5, 1), (5, 2)]


@pytest.mark.parametrize("memory", [64, 64 * 10, 1 << 20])
def test_reading_beside_ascending_keys(tmp_path, memory):
    rng = np.random.default_rng(2)
    rows = records(PAIR, key=rng.integers(0, 50, 120), other=rng.integers(0, 9, 120))
    reader = KeyReader(Runs(written(tmp_path, rows, hash_cuts(1), memory), PAIR, 0, memory))
    for low in range(0, 60, 6):
        wanted = rows[(rows["key"] >= low) & (rows["key"] < low + 6)]
        assert sorted(reader.take(low + 6).tolist()) == sorted(wanted.tolist())


def test_nodes_sort_in_input_order_and_lead_back():
    assert node_of(0, 5) < node_of(1, 0) < node_of(1, 2**40 - 1) < node_of(2, 0)
    assert (shard_of(node_of(7, 123)), row_of(node_of(7, 123))) == (7, 123)
    assert shard_cuts(3).tolist() == [node_of(1, 0), node_of(2, 0)]


def test_ids_are_found_by_row(tmp_path):
    writer = IdWriter(tmp_path)
    ids = [f"päth\n{n}.jsonl:{n * 7}" for n in range(3000)]
    for start in range(0, 3000, 700):
        writer.add(ids[start : start + 700])
    writer.close()
    assert [read_id(tmp_path, row) for row in (0, 1023, 1024, 2999)] == [ids[row] for row in (0, 1023, 1024, 2999)]
    with pytest.raises(DataError, match="there is no document 3000"):
        read_id(tmp_path, 3000)


def test_damaged_files_are_named(tmp_path):
    rows = records(PAIR, key=np.arange(100), other=np.arange(100))
    folders = written(tmp_path, rows, hash_cuts(1), 1 << 20, tasks=1)
    run = folders[0] / "run-00000.bin"
    run.write_bytes(run.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"too short: 0 of 1 records") as error:
        list(Runs(folders, PAIR, 0, 1 << 20).rows())
    assert error.value.where == f"{run}, byte 1584"
    (folders[0] / "runs.npy").unlink()
    with pytest.raises(DataError, match="no usable table"):
        Runs(folders, PAIR, 0, 1 << 20)
