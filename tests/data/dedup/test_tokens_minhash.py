"""Tokens and signatures: the compiled and the numpy implementations against each other and against plain Python."""

from __future__ import annotations

import random

import numpy as np
import pytest

from swift.data.dedup import minhash, tokens

TEXTS = [
    "Hello World, this is a Test of naïve Ünïcode: “quotes”, 12ab_3",
    "中文文本测试，这里有一些字。ภาษาไทย mixed English テスト 한국어 단어",
    "",
    "…—!",
    "a b",
    "x" * 5000,
    "😀 emoji 𠀀𠀁 ok\0nul",
    "tab\tand\r\nlines ªº ¼",
]


def random_texts(count: int = 200) -> list[str]:
    rng = random.Random(3)
    sizes = [rng.randrange(9000) if n % 40 == 0 else rng.randrange(80) for n in range(count)]
    return ["".join(rng.choice("ab cd.é中ไ😀\n—,Z한") for _ in range(size)) for size in sizes]


def test_both_tokenisers_agree():
    buffer, borders = tokens.join_texts(TEXTS + random_texts())
    compiled, plain = tokens.tokenise(buffer, borders), tokens.tokenise_numpy(buffer, borders)
    for name in ("hashes", "starts", "ends", "offsets"):
        np.testing.assert_array_equal(getattr(compiled, name), getattr(plain, name), err_msg=name)
    assert len(compiled.hashes) > 10_000


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("It's 2 o'clock, Sir_Tom!", ["It", "s", "2", "o", "clock", "Sir", "Tom"]),
        ("naïve Ünder “quoted”", ["naïve", "Ünder", "quoted"]),
        ("中文，good字。", ["中", "文", "good", "字"]),
        ("ภาษา", ["ภ", "า", "ษ", "า"]),
        ("한국어 단어", ["한국어", "단어"]),
        ("ひらカタ", ["ひ", "ら", "カ", "タ"]),
        ("ｗｉｄｅ！x", ["ｗｉｄｅ", "x"]),
        ("𠀀𠀁", ["𠀀", "𠀁"]),
        (" \n—", []),
    ],
)
def test_where_tokens_begin_and_end(text, wanted):
    buffer, borders = tokens.join_texts([text])
    found = tokens.tokenise(buffer, borders)
    data = text.encode()
    assert [data[start:end].decode() for start, end in zip(found.starts, found.ends)] == wanted


def test_case_of_ascii_does_not_count_and_everything_else_does():
    buffer, borders = tokens.join_texts(["The END", "the end", "thé end", "then d"])
    found = tokens.tokenise(buffer, borders)
    rows = [found.hashes[found.offsets[i] : found.offsets[i + 1]].tolist() for i in range(4)]
    assert rows[0] == rows[1]
    assert rows[1][0] != rows[2][0]
    assert rows[1] != rows[3]


@pytest.mark.parametrize("ngram", [1, 2, 5])
def test_signatures_are_equal_without_numba(ngram, monkeypatch):
    texts = TEXTS + random_texts()
    compiled = minhash.signatures(texts, ngram, 112)
    monkeypatch.setattr(minhash, "has_numba", lambda: False)
    monkeypatch.setattr(minhash, "_PIECE_BYTES", 700)  # long texts in pieces
    monkeypatch.setattr(minhash, "_BLOCK_SHINGLES", 50)
    np.testing.assert_array_equal(compiled, minhash.signatures(texts, ngram, 112))


def test_signatures_are_the_least_hashes_of_the_set():
    """By the definition, in Python's integers, from the token hashes on."""
    text = "one two three one two three four 中文字符测试 five"
    buffer, borders = tokens.join_texts([text])
    hashes = tokens.tokenise(buffer, borders).hashes.tolist()

    def mix(x):
        for shift, factor in ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53)):
            x ^= x >> shift
            x = x * factor % 2**64
        return x ^ (x >> 33)

    shingles = set()
    for at in range(len(hashes) - 2):
        value = 0
        for token in hashes[at : at + 3]:
            value = (value * 0xD6E8FEB86659FD93 + token) % 2**64
        shingles.add(mix(value) >> 32)
    factors, shifts = minhash.permutations(40)
    wanted = [min((x * int(a) + int(b)) % 2**32 for x in shingles) for a, b in zip(factors, shifts)]
    assert minhash.signatures([text], 3, 40)[0].tolist() == wanted


def test_signatures_stay_what_they_are():
    """Files of earlier runs and other machines hold these numbers."""
    found = minhash.signatures(["the quick brown fox jumps over the lazy dog", "中文测试文本一二三"], 5, 4)
    assert found.tolist() == [
        [782729609, 147072581, 244914311, 594675554],
        [343542964, 139458236, 1994962169, 261964637],
    ]


def test_a_short_text_is_one_shingle_and_an_empty_one_none():
    short, same, longer, empty = minhash.signatures(["two words", "Two, words!", "two words more", "…"], 5, 16)
    assert (short == same).all()
    assert not (short == longer).any()
    assert (empty == minhash.EMPTY).all()


def test_the_share_of_equal_hashes_estimates_jaccard():
    """Unbiased, and with the variance of independent hashes: J (1 - J) / hashes."""
    rng = random.Random(0)
    hashes = 128
    for target in (0.3, 0.6, 0.9):
        errors = []
        for _ in range(300):
            size = 300
            common = int(2 * size * target / (1 + target))
            words = [f"w{rng.randrange(10**9)}" for _ in range(2 * size - common)]
            left, right = words[:size], words[size - common :]
            truth = common / len(words)
            found = minhash.signatures([" ".join(left), " ".join(right)], 1, hashes)
            errors.append(minhash.similarity(found[:1], found[1:])[0] - truth)
        deviation = (target * (1 - target) / hashes) ** 0.5
        assert abs(np.mean(errors)) < 4 * deviation / len(errors) ** 0.5
        assert 0.8 * deviation < np.std(errors) < 1.2 * deviation


def test_band_keys_agree_exactly_where_bands_do():
    rng = np.random.default_rng(0)
    left = rng.integers(0, 2**32, (50, 24), dtype=np.uint32)
    right = left.copy()
    changed = rng.integers(0, 24, 50)
    right[np.arange(50), changed] ^= 1
    keys, others = minhash.band_keys(left, 6, 4), minhash.band_keys(right, 6, 4)
    for row in range(50):
        assert [keys[row, band] == others[row, band] for band in range(6)] == [changed[row] // 4 != b for b in range(6)]
    assert len(np.unique(keys)) == 300
    swapped = minhash.band_keys(np.tile(np.arange(4, dtype=np.uint32), 6)[None], 6, 4)
    assert len(np.unique(swapped)) == 6  # the same hashes in another band are another key


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7, 0.8, 0.9])
def test_bands_are_chosen_near_the_threshold(threshold):
    bands, rows = minhash.choose_bands(threshold)
    assert bands * rows <= 128
    assert minhash.probability(threshold - 0.15, bands, rows) < 0.25
    assert minhash.probability(min(0.99, threshold + 0.12), bands, rows) > 0.8
