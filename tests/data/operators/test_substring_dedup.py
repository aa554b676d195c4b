"""Substring deduplication: both methods against brute force on small alphabets, where everything repeats."""

from __future__ import annotations

import random

import numpy as np
import pytest
from dedup_runs import Runner, run_texts

from swift.core.errors import UsageError
from swift.data.dedup import windows
from swift.data.dedup.suffixes import window_ranks
from swift.data.engine.document import document_from
from swift.data.operators.substring_dedup import SubstringDedup


def brute_force(shards: list[list[str]], length: int) -> list[list[str]]:
    """Every window looked up in a dict; a code point goes if all its bytes do."""
    first: dict[bytes, tuple[int, int, int]] = {}
    kept = []
    for shard, texts in enumerate(shards):
        left = []
        for row, text in enumerate(texts):
            data = text.encode()
            covered = [False] * len(data)
            for at in range(len(data) - length + 1):
                place = first.setdefault(data[at : at + length], (shard, row, at))
                if place[:2] != (shard, row) or at >= place[2] + length:
                    covered[at : at + length] = [True] * length
            out, done = "", 0
            for letter in text:
                size = len(letter.encode())
                out += "" if all(covered[done : done + size]) else letter
                done += size
            if out.strip() or not text.strip():
                left.append(out)
        kept.append(left)
    return kept


def random_shards(seed: int, alphabet: str) -> list[list[str]]:
    rng = random.Random(f"{seed}{alphabet}")
    return [
        ["".join(rng.choice(alphabet) for _ in range(rng.randrange(60))) for _ in range(rng.randrange(6))]
        for _ in range(rng.choice([1, 2, 3]))
    ]


@pytest.mark.parametrize("length", [2, 3, 7, 12])
@pytest.mark.parametrize("alphabet", ["ab", "aéè中丮", "abcdefgh "])
def test_both_methods_against_brute_force(tmp_path, monkeypatch, alphabet, length):
    cut = 0
    for seed in range(4):
        shards = random_shards(seed, alphabet)
        wanted = brute_force(shards, length)
        cut += wanted != shards
        for number, (method, memory, piece) in enumerate(
            (("hashes", 1 << 20, 1 << 18), ("hashes", 300, 5), ("suffix_array", 1 << 20, 1))
        ):
            monkeypatch.setattr(windows, "PIECE", piece)
            operator = SubstringDedup(min_length=length, method=method)
            found, _ = run_texts(operator, shards, tmp_path / f"{seed}-{number}", memory=memory, backwards=bool(number))
            assert found == wanted, (seed, method, memory)
    assert cut or (length, len(alphabet)) in {(7, 9), (12, 9), (12, 5)}


def test_little_memory_and_other_partitions_give_the_same(tmp_path):
    rng = random.Random(0)
    stretches = ["".join(rng.choice("abcdefgh ") for _ in range(120)) for _ in range(6)]
    texts = ["".join(rng.choice([*stretches, f"<{rng.random()}>"]) for _ in range(6)) for _ in range(14)]
    shards = [texts[:9], texts[9:]]
    wanted = run_texts(SubstringDedup(min_length=60), shards, tmp_path / "a")
    assert wanted[1].changes["repeated_stretch"] > 4
    for number, (partitions, memory) in enumerate(((1, 20_000), (5, 64 << 20), (3, 10_000))):
        folder = tmp_path / str(number)
        operator = SubstringDedup(min_length=60, partitions=partitions)
        assert run_texts(operator, shards, folder, memory=memory, batch=3) == wanted
        if memory < 50_000:
            assert len(np.load(folder / "windows/0/runs.npy")) > 1
    assert run_texts(SubstringDedup(min_length=60, method="suffix_array"), shards, tmp_path / "s") == wanted


def test_the_first_occurrence_stays_and_the_ledger_names_it(tmp_path):
    line = "a sentence that everybody copies from everybody else; "
    shards = [["x", "start " + line + "end"], [line + "other"]]
    found, tally = run_texts(SubstringDedup(min_length=30), shards, tmp_path)
    assert found == [shards[0], ["other"]]
    assert tally.samples["repeated_stretch"][0]["note"].startswith("first in f0:2; now: other")
    assert tally.histograms["repeated_share"].count == 1


def test_a_run_of_one_letter_keeps_its_beginning(tmp_path):
    assert run_texts(SubstringDedup(min_length=4), [["a" * 50]], tmp_path)[0] == [["aaaa"]]


def test_words_count_whatever_is_between_them(tmp_path):
    shards = [["one two  three four\nfive"], ["zero one\ttwo three\n\nfour six", "two three five"]]
    for method in ("hashes", "suffix_array"):
        found, _ = run_texts(SubstringDedup(unit="words", min_length=3, method=method), shards, tmp_path / method)
        assert found == [shards[0], ["zero six", "two three five"]]


def test_documents_above_a_share_are_dropped(tmp_path):
    shards = [["abcdefghij"], ["xx abcdefghij", "a text of its own, abcdefghij"]]
    found, tally = run_texts(SubstringDedup(min_length=8, max_share=0.5), shards, tmp_path)
    assert found == [["abcdefghij"], ["a text of its own,"]]  # the space was there before, too
    assert tally.dropped == {"mostly_repeated": 1}
    assert tally.samples["mostly_repeated"][0]["id"] == "f1:1"


def test_a_conversation_is_dropped_rather_than_left_with_an_empty_turn(tmp_path):
    answer = "the very same answer, word for word"
    chats = [
        {"messages": [{"role": "user", "content": f"question {n}"}, {"role": "assistant", "content": text}]}
        for n, text in enumerate([answer, answer, answer + " and more"])
    ]
    shards = [[document_from(chat, f"f:{n}") for n, chat in enumerate(chats)]]
    runner = Runner(shards, tmp_path)
    kept = runner.run(SubstringDedup(min_length=20))[0]
    assert [document.texts for document in kept] == [["question 0", answer], ["question 2", " and more"]]
    assert runner.tally.dropped == {"only_repeated": 1}


def test_a_corpus_too_large_for_suffixes_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"sorting the suffixes of 5000 bytes needs 390.6 KiB") as error:
        run_texts(SubstringDedup(method="suffix_array"), [["x" * 5000]], tmp_path, memory=1 << 16)
    assert error.value.fix is not None
    assert "method: hashes" in error.value.fix


@pytest.mark.parametrize("width", [1, 2, 5, 8, 13])
def test_ranks_are_the_order_of_windows(width):
    data = np.frombuffer(random.Random(1).randbytes(300), dtype=np.uint8) % 3
    found = [bytes(data[n : n + width]) for n in range(len(data) - width + 1)]
    order = {window: rank for rank, window in enumerate(sorted(set(found)))}
    assert window_ranks(data, width).tolist() == [order[window] for window in found]


@pytest.mark.parametrize("width", [2, 5, 16, 37])
def test_hashes_tell_windows_apart_and_equal_windows_share_their_anchor(width):
    data = np.frombuffer(random.Random(2).randbytes(2000), dtype=np.uint8) % 2
    found = [bytes(data[n : n + width]) for n in range(len(data) - width + 1)]
    high, low = windows.window_hashes(data, width)
    for lane in (high, low):
        assert len(set(lane.tolist())) == len(set(found))
        assert len({(window, value) for window, value in zip(found, lane.tolist())}) == len(set(found))
    least = windows.least_anchors(data, width).tolist()
    assert len(set(zip(found, least))) == len(set(found))
    assert set(least) == set(windows.anchors(data, width).tolist())


def test_settings_that_cannot_be_meant():
    with pytest.raises(UsageError, match="min_length is 1"):
        SubstringDedup(min_length=1).check()
    with pytest.raises(UsageError, match="max_share is"):
        SubstringDedup(max_share=1.5).check()
