"""A teacher's best tokens on disk: what goes in comes out, and nothing else is taken for it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from swift.core.errors import DataError
from swift.data.token_files.shards import checksum
from swift.methods.topk_store import BestTokens, StoreHeader, TopkStore, TopkWriter, at_temperature, finish_store

K = 3


def examples(count: int, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        length = int(draw.integers(2, 9))
        weights = draw.integers(0, 2, length).astype(np.float32)
        made.append((draw.integers(0, 900, length).astype(np.int32), weights))
    return made


def best_of(example: tuple[np.ndarray, np.ndarray], vocab_size: int) -> BestTokens:
    draw = np.random.default_rng(int(example[0].sum()))
    shape = (int(np.count_nonzero(example[1][1:])), K)
    return BestTokens(draw.integers(0, vocab_size, shape), np.sort(draw.normal(-4, 2, shape))[:, ::-1].clip(max=-0.01))


def write(folder: Path, made: list, header: StoreHeader, part: int = 0) -> None:
    writer = TopkWriter(folder, header, part=part)
    for example in made:
        writer.add(*example, best_of(example, header.vocab_size))
    writer.close()


@pytest.mark.parametrize(("vocab_size", "precision", "width"), [(65536, "float16", 4), (70000, "float32", 8)])
def test_what_goes_in_comes_out(tmp_path, vocab_size, precision, width):
    header = StoreHeader(K, vocab_size, precision=precision, teacher="big")
    made = examples(20)
    for part in range(2):
        write(tmp_path, made[part::2], header, part)
    finish_store(tmp_path, parts=2)
    store = TopkStore(tmp_path)
    store.verify()
    assert store.header == header
    targets = sum(int(np.count_nonzero(weights[1:])) for _, weights in made)
    assert sum(p.stat().st_size for p in tmp_path.glob("*.ids")) * 2 == targets * K * width
    for example in reversed(made):
        expected, found = best_of(example, vocab_size), store.read(*example)
        assert np.array_equal(found.ids, expected.ids) and found.ids.dtype == np.int64
        assert found.logps.dtype == np.float32
        np.testing.assert_allclose(found.logps, expected.logps, rtol=2**-11 if precision == "float16" else 1e-7)


def test_other_data_is_refused(tmp_path):
    made = examples(6)
    write(tmp_path, made[:5], StoreHeader(K, 1000))
    finish_store(tmp_path)
    store = TopkStore(tmp_path)
    ids, weights = made[0]
    for other in ((ids + 1, weights), (ids, weights * 0.5 + 1), made[5]):
        with pytest.raises(DataError, match="belong to other data"):
            store.read(*other)
    sums = np.array([checksum(*example) for example in made], np.uint64)
    store.require(sums[:5])
    with pytest.raises(DataError, match="1 of 6 examples"):
        store.require(sums)


def test_repeated_examples_are_written_once(tmp_path):
    made = examples(3)
    writer = TopkWriter(tmp_path, StoreHeader(K, 1000))
    for example in made * 2:
        writer.add(*example, best_of(example, 1000))
        assert example in writer
    writer.close()
    finish_store(tmp_path)
    assert len(TopkStore(tmp_path)) == 3


def test_unfinished_and_damaged_folders_are_refused(tmp_path):
    header = StoreHeader(K, 1000)
    with pytest.raises(DataError, match="is missing"):
        TopkStore(tmp_path / "none")
    writer = TopkWriter(tmp_path, header)
    example = next(e for e in examples(20) if e[1][1:].any())
    writer.add(*example, best_of(example, 1000))
    writer.drop()
    with pytest.raises(DataError, match="part 0 of 1 isn't finished"):
        finish_store(tmp_path)
    with pytest.raises(DataError, match="unfinished"):
        TopkStore(tmp_path)
    write(tmp_path, [example], header)
    write(tmp_path, [example], StoreHeader(K, 1000, temperature=2.0), part=1)
    with pytest.raises(DataError, match="different settings"):
        finish_store(tmp_path, parts=2)
    finish_store(tmp_path)
    path = tmp_path / "00000.logps"
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(DataError, match="isn't what was written"):
        TopkStore(tmp_path).verify()
    path.write_bytes(content[:-2])
    with pytest.raises(DataError, match=f"has {len(content) - 2} bytes of {len(content)}"):
        TopkStore(tmp_path)
    TopkWriter(tmp_path, header).drop()  # writing again makes it unfinished
    with pytest.raises(DataError, match="unfinished"):
        TopkStore(tmp_path)


def test_what_can_not_be_stored_is_refused(tmp_path):
    writer = TopkWriter(tmp_path, StoreHeader(2, 50))
    ids, weights = np.array([1, 2, 3]), np.array([0, 1, 1], np.float32)
    logps = np.array([[-1.0, -2.0], [-1.0, -math.inf]])
    good = np.array([[1, 2], [3, -1]])
    for best, message in (
        (BestTokens(good[:1], logps[:1]), "2 targets"),
        (BestTokens(good + 48, logps), "token 50 isn't"),
        (BestTokens(good, logps + 2), "no log-prob"),
        (BestTokens(good, logps * math.nan), "no log-prob"),
    ):
        with pytest.raises(DataError, match=message):
            writer.add(ids, weights, best)
    writer.add(ids, weights, BestTokens(good, logps))
    writer.close()
    finish_store(tmp_path)
    found = TopkStore(tmp_path).read(ids, weights)
    assert found.logps[1].tolist() == [-1.0, -math.inf] and found.ids[0].tolist() == [1, 2]


def test_temperatures():
    logits, k = np.array([[2.0, 1.0, 0.5, -1.0]]), 3
    logps = logits - np.log(np.exp(logits).sum())
    assert at_temperature(logps, 1.0, 1.0, tail=True) is logps
    got = np.exp(at_temperature(logps, 1.0, 2.0, tail=False)[:, :k])
    expected = np.exp(logits / 2)[:, :k]
    np.testing.assert_allclose(got / got.sum(), expected / expected.sum())
    with pytest.raises(DataError, match="temperature 1 and the loss has 2"):
        at_temperature(logps, 1.0, 2.0, tail=True)
