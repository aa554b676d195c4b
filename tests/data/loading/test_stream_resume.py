"""Resumed = uninterrupted, row by row: streamed and prepared, packed and not, mixed and not, on any number of ranks."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from streams import Setup, steps_of, write_shards

from swift.data.loading.batch import Layout
from swift.data.loading.mixer import ShareSchedule
from swift.data.loading.mixture import ALL, FIRST, ONCE, Mixture

GLOBAL = 6  # units per step on every number of ranks
RANKS = [(1, 1), (2, 2), (1, 2), (2, 1), (2, 3)]


def layout_for(world_size, packed):
    return Layout(1, GLOBAL // world_size, packing_length=64 if packed else 0)


@pytest.fixture
def sources(tmp_path):
    return [
        write_shards(tmp_path, "a", [40, 7, 25], seed=1, texts={3: "long", 30: "5 6 7", 31: "long", 60: "2 2"}),
        write_shards(tmp_path, "b", [21, 3], seed=2),
        write_shards(tmp_path, "c", [11], seed=3),
    ]


def setup_for(kind, mixed, sources, packed, workers=0):
    stored = kind == "map"
    if stored:
        sources = [np.random.default_rng(n).integers(2, 30, 40 - 9 * n) for n in range(3)]
    mixture = None
    if mixed:
        schedule = ShareSchedule((0, 6), ((0.6, 0.3, 0.1), (0.2, 0.3, 0.5)))
        mixture = Mixture.of(schedule, FIRST, documents_per_step=12.0)
    else:
        sources = sources[:1]
    return Setup(sources, layout_for(1, packed), mixture, stored, workers)


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
@pytest.mark.parametrize("mixed", [False, True], ids=["one", "mixed"])
def test_every_cut_and_every_number_of_ranks_gives_the_same_rows(kind, packed, mixed, sources):
    setup = setup_for(kind, mixed, sources, packed)
    steps = 16
    whole, _ = steps_of(setup, 1, steps)
    assert len({epoch for epoch, _ in whole}) >= 2
    for first, then in RANKS:
        for cut in (1, 6, 11):
            begun, state = steps_of(replace(setup, layout=layout_for(first, packed)), first, cut)
            rest, _ = steps_of(replace(setup, layout=layout_for(then, packed)), then, steps - cut, state)
            assert begun + rest == whole, f"{first} -> {then} ranks, cut after {cut} steps"


def test_worker_processes_change_nothing(sources):
    setup = setup_for("stream", True, sources, True)
    whole, _ = steps_of(setup, 1, 16)
    begun, state = steps_of(replace(setup, workers=2), 1, 7)
    rest, _ = steps_of(replace(setup, workers=1), 1, 9, state)
    assert begun + rest == whole
    assert steps_of(setup, 1, 9, state)[0] == rest


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_parts_of_passes_survive_a_resume(kind, sources):
    """One and a half passes over the first source, and two over the second, in an epoch."""
    setup = setup_for(kind, True, sources, False)
    mixture = Mixture.of(ShareSchedule.constant([0.6, 0.3, 0.1]), ONCE, (1.5, 2, 1))
    setup = replace(setup, mixture=mixture)
    whole, _ = steps_of(setup, 1, 50)
    for cut in (3, 11, 19, 27, 33):
        begun, state = steps_of(setup, 1, cut)
        assert begun + steps_of(setup, 1, 50 - cut, state)[0] == whole


def rows_per_epoch(steps, last_epoch):
    counts = [Counter() for _ in range(last_epoch + 1)]
    for epoch, refs in steps:
        if epoch <= last_epoch:
            counts[epoch].update(refs)
    return counts


@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_each_row_exactly_once_an_epoch(packed, ranks, sources):
    """All three sources together; the two rows that are too long never, rows of several examples with all of them."""
    setup = replace(setup_for("stream", False, sources, packed), sources=sources)
    setup = replace(setup, layout=layout_for(ranks, packed))
    steps, _ = steps_of(setup, ranks, 30)
    epochs = max(epoch for epoch, _ in steps)
    wanted = Counter(
        f"{p}:{n + 1}" for shards in sources for p in shards for n in range(len(p.read_text().splitlines()))
    )
    first = sources[0][0]
    for line in (4, 32):
        del wanted[f"{first}:{line}"]
    wanted[f"{first}:31"] = 3
    wanted[f"{sources[0][2]}:14"] = 2
    assert epochs >= 1
    orders = []
    for epoch, counts in enumerate(rows_per_epoch(steps, epochs - 1)):
        assert counts == wanted
        orders.append([ref for e, refs in steps if e == epoch for ref in refs])
    if len(orders) > 1:
        assert orders[0] != orders[1]


@pytest.mark.parametrize("then", [1, 3])
def test_another_batch_size_in_the_middle_loses_no_row(then, sources):
    setup = Setup(sources, Layout(2, 3))
    begun, state = steps_of(setup, 1, 4)
    rest, _ = steps_of(replace(setup, layout=Layout(1, then)), 1, 120 // then, state)
    counts = rows_per_epoch(begun + rest, 0)[0]
    rows = sum(len(p.read_text().splitlines()) for shards in sources for p in shards)
    assert len(counts) == rows - 2
    assert Counter(counts.values()) == {1: rows - 4, 3: 1, 2: 1}


def test_file_order_without_shuffling(sources):
    setup = Setup(sources[1:2], Layout(4, shuffle=False))
    steps, _ = steps_of(setup, 1, 6)
    wanted = [f"{p}:{n + 1}" for p in sources[1] for n in range(len(p.read_text().splitlines()))]
    assert [ref for _, refs in steps for ref in refs] == wanted


def test_rows_mix_over_files_and_inside_the_buffer(tmp_path):
    shards = write_shards(tmp_path, "x", [200] * 12)
    steps, _ = steps_of(Setup([shards], Layout(8), block=100), 1, 12)
    files = [ref.split("-")[-1][:3] for _, refs in steps for ref in refs]
    assert len(set(files)) == 8  # as many as are open at once
    lines = [int(ref.rpartition(":")[2]) for _, refs in steps for ref in refs]
    assert np.abs(np.diff(lines[:90])).mean() > 3


def test_a_limit_takes_the_same_rows_every_epoch_in_another_order(sources):
    setup = Setup(sources[:1], Layout(5), limits=[20])
    steps, _ = steps_of(setup, 1, 12)
    epochs = [[ref for e, refs in steps if e == epoch for ref in refs] for epoch in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    assert 17 <= len(epochs[0]) <= 24  # 20 rows, less those too long, plus further examples of one
    repeated, _ = steps_of(Setup(sources[2:], Layout(5), limits=[25]), 1, 5)
    counts = Counter(ref for _, refs in repeated for ref in refs)
    assert sum(counts.values()) == 25
    assert set(counts.values()) == {2, 3}


@pytest.mark.parametrize(
    ("stopping", "passes", "wanted"),
    [(FIRST, (), (11, 22, 11)), (ONCE, (), (72, 24, 11)), (ALL, (), (72, 144, 72)), (ONCE, (1, 2, 3), (72, 48, 33))],
)
def test_sources_that_end(stopping, passes, wanted, sources):
    """Shares 1:2:1 of sources with 72 (two too long, two with several examples), 24 and 11 rows."""
    mixture = Mixture.of(ShareSchedule.constant([0.25, 0.5, 0.25]), stopping, passes)
    steps, _ = steps_of(Setup(sources, Layout(1), mixture), 1, 420)
    rows = Counter()
    for epoch, refs in steps:
        if epoch == 0:
            rows.update(ref.rpartition("/")[2][0] for ref in refs)
    for name, count in zip("abc", wanted):
        assert abs(rows[name] - count) <= 2, (rows, wanted)


def test_an_example_that_waits_holds_no_others(sources):
    """Rows stay open for long; each example in them would keep the rows in memory that it was encoded with."""
    loader = setup_for("stream", False, sources, True).loader()
    loader.next_step()
    waiting = [item for _, row in loader._open.rows() for item in row]
    assert waiting and all(array.base is None for item in waiting for array in item.tokens()[:2])
    loader.close()
