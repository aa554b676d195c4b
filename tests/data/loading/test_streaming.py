"""What is found out about streamed files before step 1, and how settings become mixtures."""

import gzip
import json
import math

import numpy as np
import pytest
from length_encoder import LengthEncoder
from streams import Prepared, write_shards

from swift.config.data import DataConfig, TemplateConfig
from swift.core.errors import DataError, UsageError
from swift.data.loading import streaming
from swift.data.loading.batch import Layout
from swift.data.loading.flow import StoredFlow
from swift.data.loading.loader import TrainLoader
from swift.data.loading.mixer import ShareSchedule
from swift.data.loading.mixture import ALL, FIRST, ONCE, Documents, Mixture
from swift.data.loading.streaming import open_stream
from swift.data.loading.train_set import Place, PreparedSet, mixture_of
from swift.data.sources import parse_source


def opened(*texts, saved=None, from_main=False, **settings):
    data = DataConfig(dataset=list(texts), streaming=True, **settings)
    sources = [parse_source(text) for text in texts]
    return open_stream(
        sources, data, TemplateConfig(max_length=64), LengthEncoder(), seed=1, saved=saved, from_main=from_main
    )


@pytest.fixture
def folder(tmp_path):
    write_shards(tmp_path / "data", "a", [300, 200], seed=1, texts={0: "long", 400: "5 6"})
    return tmp_path / "data"


def test_small_files_are_counted(folder):
    stream = opened(str(folder))
    assert [(facts.rows, facts.exact) for facts in stream.facts] == [(500.0, True)]
    outlook = stream.loader(Layout(4), Place(), None).outlook(0)
    assert not outlook.exact  # one row of the sample is too long
    assert outlook.units == pytest.approx(500, rel=0.02)
    packed = stream.loader(Layout(4, packing_length=64), Place(), None).outlook(0)
    assert packed.units == pytest.approx(500 * 15.5 / 64, rel=0.15)


def test_empty_files_among_others_count_as_none(folder, tmp_path):
    (folder / "b-empty.jsonl").write_text("")
    assert (opened(str(folder)).facts[0].rows, opened(str(folder)).facts[0].exact) == (500, True)
    (tmp_path / "empty").mkdir()
    for name in "ab":
        (tmp_path / "empty" / f"{name}.jsonl").write_text("")
    with pytest.raises(DataError, match="empty"):
        opened(str(folder), str(tmp_path / "empty"))


def test_a_file_that_breaks_off_in_the_sample_is_left_where_asked(folder):
    packed = gzip.compress((folder / "a-000.jsonl").read_bytes())
    (folder / "b.jsonl.gz").write_bytes(packed[:40])
    with pytest.raises(DataError) as caught:
        opened(str(folder))
    assert "b.jsonl.gz" in caught.value.where
    facts = opened(str(folder), on_bad_shard="skip").facts[0]
    assert facts.rows == pytest.approx(500, rel=0.3)


def test_large_and_packed_files_are_estimated(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "COUNT_BYTES", 0)
    plain = opened(str(folder)).facts[0]
    assert not plain.exact
    assert plain.rows == pytest.approx(500, rel=0.1)
    (tmp_path / "packed").mkdir()
    lines = b"".join(json.dumps({"text": str(2 + n % 7), "id": n}).encode() + b"\n" for n in range(90_000))
    (tmp_path / "packed/x.jsonl.gz").write_bytes(gzip.compress(lines))
    packed = opened(str(tmp_path / "packed")).facts[0]
    assert not packed.exact and packed.rows > 0


def test_parquet_tells_its_rows(tmp_path, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(streaming, "COUNT_BYTES", 0)
    pq.write_table(pa.table({"text": ["5"] * 123}), tmp_path / "x.parquet")
    facts = opened(str(tmp_path / "x.parquet")).facts[0]
    assert (facts.rows, facts.exact) == (123.0, True)


def test_wanted_rows_need_no_counting(folder):
    facts = opened(f"{folder}#70").facts[0]
    assert (facts.rows, facts.exact) == (70.0, True)


def test_unknown_sizes_leave_the_length_open(folder, monkeypatch):
    monkeypatch.setattr(streaming, "size_of", lambda location: 0)
    monkeypatch.setattr(streaming, "is_url", lambda location: True)
    stream = opened(str(folder))
    assert stream.facts[0].rows is None
    outlook = stream.loader(Layout(4), Place(), None).outlook(0)
    assert outlook.units is None and "can't be known" in outlook.words


def test_what_was_found_is_kept_by_a_resumed_run(folder, monkeypatch):
    first = opened(str(folder))
    facts = json.loads(json.dumps(first.loader(Layout(4, packing_length=64), Place(), None).facts))
    monkeypatch.setattr(streaming, "_look_at", None)  # nothing is looked at again
    second = opened(str(folder), saved=facts)
    assert second.digest() == first.digest()
    loaders = [stream.loader(Layout(4, packing_length=64), Place(), facts) for stream in (first, second)]
    assert loaders[0].outlook(0) == loaders[1].outlook(0) and loaders[0].identity == loaders[1].identity


@pytest.mark.parametrize("change", ["changed", "added", "no longer part"])
def test_other_files_are_refused_by_name(change, folder):
    facts = opened(str(folder)).saved_facts()
    if change == "changed":
        (folder / "a-001.jsonl").write_text('{"text": "5"}\n')
    elif change == "added":
        (folder / "a-002.jsonl").write_text('{"text": "5"}\n')
    else:
        (folder / "a-001.jsonl").unlink()
    with pytest.raises(DataError, match=change) as caught:
        opened(str(folder), saved=facts)
    assert "a-00" in caught.value.where


def test_copies_on_other_machines_may_have_other_times_but_no_other_size(folder):
    main = opened(str(folder))
    (folder / "a-000.jsonl").touch()
    copy = opened(str(folder), saved=main.saved_facts(), from_main=True)
    assert copy.digest() == main.digest() and copy.saved_facts() == main.saved_facts()
    copy.loader(Layout(4), Place(), None).next_step()
    (folder / "a-000.jsonl").write_text('{"text": "5"}\n')
    with pytest.raises(DataError, match="not the same on all machines"):
        opened(str(folder), saved=main.saved_facts(), from_main=True)


def test_a_part_of_a_pass_needs_a_count(folder, monkeypatch):
    monkeypatch.setattr(streaming, "COUNT_BYTES", 0)
    with pytest.raises(UsageError, match="nobody has counted"):
        opened(str(folder), mix_epochs=[0.5]).loader(Layout(4), Place(), None)


SIZES = [100, 300]


@pytest.mark.parametrize(
    ("settings", "shares", "stopping", "passes"),
    [
        ({}, [0.25, 0.75], ONCE, (1, 1)),
        ({"interleave_prob": [0.9, 0.1]}, [0.9, 0.1], FIRST, (1, 1)),
        ({"interleave_prob": [9, 1], "stopping_strategy": ALL}, [0.9, 0.1], ALL, (math.inf, math.inf)),
        ({"mix_temperature": 2.0}, [1 / (1 + 3**0.5), 3**0.5 / (1 + 3**0.5)], FIRST, (1, 1)),
        ({"mix_epochs": [3.0, 1.0]}, [0.5, 0.5], ONCE, (3, 1)),
        ({"curriculum": {"weights": [[0, [1, 3]], [9, [1, 1]]]}}, [0.25, 0.75], FIRST, (1, 1)),
    ],
)
def test_settings_to_mixtures(settings, shares, stopping, passes):
    mixture = mixture_of(DataConfig(**settings), SIZES, 1.0)
    first = mixture.shares.at(0)
    assert [share / sum(first) for share in first] == pytest.approx(shares)
    assert (mixture.stopping, mixture.passes) == (stopping, passes)


@pytest.mark.parametrize("stopping", [FIRST, ALL, ONCE])
@pytest.mark.parametrize("passes", [(), (1, 2), (2.5, 1)])
@pytest.mark.parametrize("changing", [False, True])
def test_the_length_of_an_epoch_is_foretold(stopping, passes, changing):
    """Against drawing the documents one by one."""
    points = ((0.8, 0.2), (0.3, 0.7)) if changing else ((0.4, 0.6),)
    schedule = ShareSchedule((0, 30)[: len(points)], points)
    mixture = Mixture.of(schedule, stopping, passes, 4.0)
    flows = [StoredFlow(n, size, first=1000 * n, seed=0, shuffle=True) for n, size in enumerate(SIZES)]
    documents, count = Documents(flows, mixture), 0
    while documents.next() is not None:
        count += 1
    assert mixture.documents(SIZES) == pytest.approx(count, abs=3)


def test_the_length_is_foretold_where_a_quotient_is_rounded_down():
    """Steps of 100.3 documents: at step 167,272 the quotient of documents and that stays below the step."""
    schedule = ShareSchedule((0, 200_000), ((0.6, 0.4), (0.4, 0.6)))
    mixture = Mixture.of(schedule, ONCE, documents_per_step=100.3)
    assert mixture.documents([15_000_000, 15_000_000]) == pytest.approx(30_000_000)


@pytest.mark.parametrize("stopping", [FIRST, ALL, ONCE])
def test_a_source_without_examples_ends_no_epoch(stopping):
    mixture = Mixture.of(ShareSchedule.constant([0.5, 0.5]), stopping)
    flows = [StoredFlow(n, size, first=0, seed=0, shuffle=True) for n, size in enumerate([20, 0])]
    documents = Documents(flows, mixture)
    for _ in range(2):
        assert sorted(document.index for document in iter(documents.next, None)) == list(range(20))
    assert mixture.documents([20, 0]) == 20


def test_shares_of_nothing_but_empty_sources_are_refused():
    examples = Prepared([5] * 20)
    data = DataConfig(interleave_prob=[0.0, 1.0])
    with pytest.raises(DataError, match="no example left"):
        PreparedSet(examples, [20, 0], data, 1).loader(Layout(4), Place(), None)


def test_threads_that_make_batches_ahead_change_nothing():
    examples = Prepared(np.random.default_rng(0).integers(2, 30, 70))
    for packing_length in (0, 64):
        layout = Layout(3, 2, packing_length=packing_length)
        plain = TrainLoader(examples, layout, seed=5)
        ahead = TrainLoader(examples, layout, seed=5, workers=2, ahead=4)
        try:
            for _ in range(30):
                mine, theirs = ahead.next_step(), plain.next_step()
                assert [b.refs for b in mine] == [b.refs for b in theirs]
                assert ahead.state() == plain.state()
        finally:
            ahead.close()


def test_rows_of_one_large_file_mix_and_keep_their_names(folder, monkeypatch):
    """A file read in pieces: every row once, under the line it has in the file, and resumed exactly."""
    monkeypatch.setattr(streaming, "PIECE_BYTES", 500)
    path = folder / "a-000.jsonl"
    layout = Layout(10)

    def refs(loader, steps):
        return [str(ref) for _ in range(steps) for batch in loader.next_step() for ref in batch.refs]

    whole = refs(opened(str(path)).loader(layout, Place(), None), 30)
    assert sorted(whole) == sorted(f"{path}:{line}" for line in range(2, 301))  # row 1 is too long
    lines = [int(ref.rpartition(":")[2]) for ref in whole[:50]]
    assert max(lines) - min(lines) > 100
    begun = opened(str(path)).loader(layout, Place(), None)
    first = refs(begun, 11)
    state = json.loads(json.dumps(begun.state()))
    then = opened(str(path), saved=state["facts"]).loader(layout, Place(), state["facts"])
    then.load_state(state)
    assert first + refs(then, 19) == whole
