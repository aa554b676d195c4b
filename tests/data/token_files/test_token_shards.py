"""Token shards: what is written comes back, mapped, whatever the ids, weights and number of shards; damage is named."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swift.core.errors import DataError
from swift.data.rows import RowRef
from swift.data.token_files.shards import REF, Examples, checksum, open_folder, verify_folder
from swift.data.token_files.store import TokenDataset
from swift.data.token_files.writer import ShardWriter

Example = tuple[list[int], list[float]]


def batch(examples: list[Example], first_line: int = 1, file: int = 0) -> Examples:
    refs = np.array([(first_line + i, file) for i in range(len(examples))], dtype=REF)
    return Examples(
        np.array([i for ids, _ in examples for i in ids], np.int32),
        np.array([w for _, weights in examples for w in weights], np.float32),
        np.array([len(ids) for ids, _ in examples]),
        refs,
    )


def plain(ids: list[int]) -> Example:
    return ids, [0.0, *[1.0] * (len(ids) - 1)]


def write(folder: Path, examples: list[Example], vocab_size: int | None = 100, **settings: Any) -> TokenDataset:
    """Each example in a batch of its own."""
    writer = ShardWriter(folder, vocab_size, **settings)
    for number, example in enumerate(examples, 1):
        writer.add(batch([example], number))
    writer.close(["rows.jsonl"], {})
    return TokenDataset.load(folder)


def content(dataset: TokenDataset) -> list[Example]:
    return [(ids.tolist(), weights.tolist()) for ids, weights in dataset]


CASES: dict[str, tuple[list[Example], str]] = {
    "plain text": ([plain([1, 2, 3]), plain([4, 5])], "ones"),
    "masks": ([([1, 2, 3], [0, 0, 1]), plain([4, 5])], "uint8"),
    "masks after plain text": ([plain([1, 2, 3]), plain([4, 5]), ([6, 7, 8], [0, 0, 1]), plain([9, 9])], "uint8"),
    "scales": ([([1, 2, 3], [0, 0.25, 3])], "float32"),
    "scales after masks": ([([1, 2, 3], [0, 0, 1]), ([1, 2], [0, 0.5]), plain([1, 2])], "float32"),
    "scales after plain text": ([plain([1, 2, 3]), ([1, 2], [0, 0.5])], "float32"),
    "a trained first token": ([([1, 2], [1, 1])], "uint8"),
}


@pytest.mark.parametrize("shard_tokens", [1, 5, 1 << 20])
@pytest.mark.parametrize("case", CASES)
def test_what_is_written_comes_back(tmp_path: Path, case: str, shard_tokens: int) -> None:
    examples, kind = CASES[case]
    dataset = write(tmp_path / "d", examples, shard_tokens=shard_tokens)
    assert content(dataset) == examples
    assert dataset.lengths.tolist() == [len(ids) for ids, _ in examples] and dataset.lengths.dtype == np.int32
    assert [str(dataset.ref(i)) for i in range(len(examples))] == [f"rows.jsonl:{i + 1}" for i in range(len(examples))]
    trained = sum(w > 0 for _, weights in examples for w in weights)
    assert dataset.trained_tokens() == trained == open_folder(tmp_path / "d").manifest["trained_tokens"]
    assert dataset.select([0]).trained_tokens() == sum(w > 0 for w in examples[0][1])
    if shard_tokens > 100:
        assert open_folder(tmp_path / "d").manifest["shards"][0]["weights"] == kind
    assert len(dataset.shards) == (1 if shard_tokens > 100 else len(dataset.shards))
    verify_folder(tmp_path / "d")
    memory = TokenDataset.from_examples([batch(examples)], ["rows.jsonl"])
    assert content(memory) == examples
    assert memory.digest() == dataset.digest()  # wherever the tokens lie, and however they are cut into shards
    assert memory.trained_tokens() == trained


@pytest.mark.parametrize(("vocab_size", "width"), [(65_535, 2), (65_536, 2), (65_537, 4), (1 << 20, 4), (None, 4)])
def test_the_width_of_ids(tmp_path: Path, vocab_size: int | None, width: int) -> None:
    highest = (vocab_size or 1 << 31) - 1
    dataset = write(tmp_path / "d", [plain([0, 1, highest])], vocab_size)
    assert content(dataset) == [plain([0, 1, highest])]
    assert (tmp_path / "d" / "00000.bin").stat().st_size == 3 * width


def test_an_id_above_the_vocabulary_is_a_bug_and_not_another_id(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="doesn't fit"):
        write(tmp_path / "d", [plain([1, 65_536])], 65_536)


def test_shards_are_mapped_and_travel_by_name(tmp_path: Path) -> None:
    examples = [plain([i, i + 1, i + 2]) for i in range(400)]
    dataset = write(tmp_path / "d", examples, shard_tokens=300)
    assert len(dataset.shards) == 4
    arrays = [getattr(shard, name) for shard, _ in dataset.shards for name in ("ids", "offsets", "refs", "sums")]
    assert all(isinstance(array, np.memmap) and not array.flags.writeable for array in arrays)
    packed = pickle.dumps(dataset.select([399, 0]))
    assert len(packed) < 3000
    assert content(pickle.loads(packed)) == [examples[399], examples[0]]


def test_selections_joins_and_repetitions(tmp_path: Path) -> None:
    examples = [plain([i, i + 1]) for i in range(10)]
    one = write(tmp_path / "one", examples[:6], shard_tokens=4)
    two = write(tmp_path / "two", examples[6:])
    both = TokenDataset.join([one, two])
    assert content(both) == examples
    assert content(TokenDataset.join([one.select([5, 0]), two])) == [examples[5], examples[0], *examples[6:]]
    chosen = both.select([9, 0, 0, 3])
    assert content(chosen) == [examples[i] for i in (9, 0, 0, 3)]
    assert content(chosen.select([1, 3])) == [examples[0], examples[3]]
    assert chosen.num_tokens == 8 and chosen.trained_tokens() == 4
    chosen.save(tmp_path / "saved", vocab_size=100)
    again = TokenDataset.load(tmp_path / "saved")
    assert content(again) == content(chosen) and again.digest() == chosen.digest()
    assert [str(again.ref(i)) for i in range(4)] == [str(chosen.ref(i)) for i in range(4)]
    assert sum(len(shard) for shard, _ in again.shards) == 3  # what is repeated is stored once
    manifest = open_folder(tmp_path / "saved").manifest
    assert (manifest["examples"], manifest["tokens"]) == (4, 8)
    with pytest.raises(IndexError):
        again.tokens(4)


def test_rows_that_became_several_examples(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "d", 100, shard_tokens=4)
    refs = [(1, 0), (1, 0), (2, 0), (2, 1), (2, 1), (3, 1)]
    for number, ref in enumerate(refs):
        examples = batch([plain([number, 1])])
        examples.refs[:] = ref
        writer.add(examples)
    assert writer.close(["a", "b"], {})["rows"] == 4
    dataset = TokenDataset.load(tmp_path / "d")
    assert dataset.row_numbers().tolist() == [0, 0, 1, 2, 2, 3]  # also where a row reaches over the end of a shard
    assert str(dataset.ref(3)) == "b:2"


def test_rows_numbered_by_their_byte(tmp_path: Path) -> None:
    class Encoded:
        input_ids, loss_weights = np.array([1, 2], np.int32), np.array([0, 1], np.float32)
        notes = None

    refs = [RowRef("a.jsonl", 0, by_offset=True), RowRef("a.jsonl", 77, by_offset=True), RowRef("a.jsonl", 77)]
    memory = TokenDataset.from_encoded((Encoded(), ref) for ref in refs)
    memory.save(tmp_path / "d")
    loaded = TokenDataset.load(tmp_path / "d")
    assert [loaded.ref(i) for i in range(3)] == [memory.ref(i) for i in range(3)] == refs


def test_the_checksum_is_that_of_the_plain_formula() -> None:
    import hashlib
    import struct

    raw = struct.pack("<3i", 1, 70_000, 3) + struct.pack("<3f", 0, 1, 0.5)
    expected = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")
    assert checksum(np.array([1, 70_000, 3], np.uint32), np.array([0, 1, 0.5])) == expected


def test_an_unfinished_folder_is_nothing(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "d", 100)
    writer.add(batch([plain([1, 2])]))
    writer.drop()
    with pytest.raises(DataError, match="unfinished"):
        TokenDataset.load(tmp_path / "d")
    with pytest.raises(DataError, match="missing"):
        TokenDataset.load(tmp_path / "nowhere")


def test_a_folder_written_anew_is_unfinished_at_once(tmp_path: Path) -> None:
    write(tmp_path / "d", [plain([1, 2])])
    ShardWriter(tmp_path / "d", 100).drop()
    with pytest.raises(DataError, match="unfinished"):
        TokenDataset.load(tmp_path / "d")


@pytest.mark.parametrize("kind", ["bin", "idx", "weights", "refs", "sums"])
def test_torn_and_grown_files_are_named(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "d", [([1, 2, 3], [0, 0, 1]), plain([4, 5])])
    path = tmp_path / "d" / f"00000.{kind}"
    whole = path.read_bytes()
    for content_, words in ((whole[:-1], "cut off"), (whole + b"x", "has grown")):
        path.write_bytes(content_)
        with pytest.raises(DataError, match=words) as caught:
            TokenDataset.load(tmp_path / "d")
        assert str(path) in (caught.value.where or "") and "byte" in (caught.value.where or "")
    path.unlink()
    with pytest.raises(DataError, match="missing") as caught:
        TokenDataset.load(tmp_path / "d")
    assert str(path) in (caught.value.where or "")


@pytest.mark.parametrize("kind", ["bin", "idx", "weights", "sums"])
def test_a_flipped_bit_is_found_when_the_example_is_read(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "d", [([1, 2, 3], [0, 0, 1]), ([4, 5], [0, 1]), plain([6, 7])])
    path = tmp_path / "d" / f"00000.{kind}"
    damaged = bytearray(path.read_bytes())
    damaged[{"bin": 6, "idx": 8, "weights": 4, "sums": 8}[kind]] ^= 1  # of the second example
    path.write_bytes(damaged)
    with pytest.raises(DataError, match="isn't what was written") as caught:
        dataset = TokenDataset.load(tmp_path / "d")
        dataset.tokens(1)
    assert "00000.bin, byte" in (caught.value.where or "")
    if kind == "bin":
        assert "byte 6" in (caught.value.where or "")
    with pytest.raises(DataError, match="isn't what was written"):
        verify_folder(tmp_path / "d")


def test_a_flipped_bit_in_the_order_is_found_at_once(tmp_path: Path) -> None:
    """No example's checksum would miss it: another example would be taken in silence."""
    write(tmp_path / "all", [plain([n, n]) for n in range(9)]).select(np.array([3, 1, 2, 2])).save(tmp_path / "some")
    order = tmp_path / "some/order.idx"
    content = bytearray(order.read_bytes())
    content[8] ^= 1
    order.write_bytes(content)
    with pytest.raises(DataError, match="isn't what was written") as caught:
        TokenDataset.load(tmp_path / "some")
    assert caught.value.where == str(order)


def test_offsets_that_cannot_be(tmp_path: Path) -> None:
    write(tmp_path / "d", [plain([1, 2, 3]), plain([4, 5])])
    np.array([0, 9, 5], "<i8").tofile(tmp_path / "d" / "00000.idx")
    with pytest.raises(DataError, match="offsets") as caught:
        TokenDataset.load(tmp_path / "d")
    assert "00000.idx" in (caught.value.where or "")


def test_another_format_and_a_damaged_manifest(tmp_path: Path) -> None:
    write(tmp_path / "d", [plain([1, 2])])
    path = tmp_path / "d" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 1}))
    with pytest.raises(DataError, match="format is 1"):
        TokenDataset.load(tmp_path / "d")
    path.write_text("{")
    with pytest.raises(DataError, match="can't be read"):
        TokenDataset.load(tmp_path / "d")


def test_a_view_copies_nothing(tmp_path: Path) -> None:
    examples = [plain([i, i + 1, i + 2]) for i in range(10)]
    one = write(tmp_path / "a" / "one", examples[:6], shard_tokens=9)
    two = write(tmp_path / "b" / "two", examples[6:])
    for name, dataset in {
        "whole": TokenDataset.join([one, two]),
        "some": TokenDataset.join([one, two]).select([7, 0, 0, 5]),
    }.items():
        dataset.save_view(tmp_path / name)
        loaded = TokenDataset.load(tmp_path / name)
        assert content(loaded) == content(dataset) and loaded.digest() == dataset.digest()
        assert [str(loaded.ref(i)) for i in range(len(loaded))] == [str(dataset.ref(i)) for i in range(len(dataset))]
        assert not list((tmp_path / name).glob("*.bin"))
        assert content(pickle.loads(pickle.dumps(loaded))) == content(dataset)
        again = loaded.select([0, 2])  # a view of a view
        again.save_view(tmp_path / f"{name}-again")
        assert content(TokenDataset.load(tmp_path / f"{name}-again")) == content(again)
        verify_folder(tmp_path / name)
