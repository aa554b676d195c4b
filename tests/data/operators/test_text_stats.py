"""Words, lines and repetition: kernels, the plain form and the definitions spelt out once more must agree exactly."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from swift.data.operators import text_stats
from swift.data.operators.text_plain import BULLET_FLAG, C4_FLAG, ELLIPSIS_FLAG, END_FLAG, repeated_ngrams, words_of
from swift.data.operators.text_stats import CompiledAnalysis, PlainAnalysis, analyse

ALPHABET = [
    *"ab .\n,!?…-*•\u4f60\u597d。「」ก็ำdé\"') \u3000\u2028😀#1\r\t",
    "...",
    "- ",
    "\n\n",
    "\ud800",
    "ー",
    "\U00020000",
]


def random_texts(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    texts = ["".join(rng.choices(ALPHABET, k=rng.randrange(120))) for _ in range(count)]
    words = ["a", "bb", "c,", "d.", "你", "ab"]
    texts += [" ".join(rng.choices(words[: rng.randrange(2, 7)], k=rng.randrange(80))) for _ in range(count // 4)]
    lines = ["one line.", "another line", "- item", "", "  indented one", "你好。"]
    texts += ["\n".join(rng.choices(lines, k=rng.randrange(12))) for _ in range(count // 4)]
    return [*dict.fromkeys(["", " ", "\n", *texts])]


@pytest.mark.parametrize("seed", range(3))
def test_kernels_equal_the_plain_form(seed: int) -> None:
    texts = random_texts(seed, 600)
    compiled, plain = CompiledAnalysis(texts), PlainAnalysis(texts)
    np.testing.assert_array_equal(compiled.line_offsets, plain.line_offsets)
    np.testing.assert_array_equal(compiled.lines, plain.lines)
    assert compiled.columns.keys() == plain.columns.keys()
    for name, column in plain.columns.items():
        np.testing.assert_array_equal(compiled.columns[name], column, err_msg=name)
    rows = np.arange(len(texts))
    np.testing.assert_array_equal(compiled.ngrams(rows), plain.ngrams(rows))


def test_arrays_grow_with_short_words_and_lines() -> None:
    """More words, lines and paragraphs than the first guess from the number of bytes."""
    texts = ["a b " * 5000, "a\n" * 5000, "a\n\n" * 5000, "a" * 5000, "你" * 3000]
    compiled, plain = CompiledAnalysis(texts), PlainAnalysis(texts)
    for name, column in plain.columns.items():
        np.testing.assert_array_equal(compiled.columns[name], column, err_msg=name)
    assert compiled.columns["words"].tolist() == [10_000, 5000, 5000, 1, 3000]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Don't stop, now!", ["Don't", "stop,", "now!"]),
        ("你好，世界。", ["你", "好，", "世", "界。"]),
        ("《三体》 is by 刘慈欣", ["《三", "体》", "is", "by", "刘", "慈", "欣"]),
        ("用Python3写", ["用", "Python3", "写"]),
        ("กำลัง", ["ก", "ำ", "ลั", "ง"]),
        ("안녕 세상", ["안녕", "세상"]),
        ("-- … --", ["--", "…", "--"]),
        ("a\u00a0b\u2003c", ["a", "b", "c"]),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert words_of(text) == words
    assert CompiledAnalysis([text]).columns["words"].tolist() == [len(words)]
    assert CompiledAnalysis([text]).columns["word_characters"].tolist() == [sum(map(len, words))]


@pytest.mark.parametrize(
    ("line", "flags", "sentences"),
    [
        ("A sentence.", C4_FLAG | END_FLAG, 1),
        ("One. Two! Three?", C4_FLAG | END_FLAG, 3),
        ("Version 3.14 of it", 0, 0),
        ('He said "Yes." and left', 0, 1),
        ('"Really?"', C4_FLAG | END_FLAG, 1),
        ("And so on...", C4_FLAG | END_FLAG | ELLIPSIS_FLAG, 1),
        ("And so on…", C4_FLAG | END_FLAG | ELLIPSIS_FLAG, 1),
        ("• item", BULLET_FLAG, 0),
        ("- item", BULLET_FLAG, 0),
        ("-5 degrees", 0, 0),
        ("第一句。第二句！第三句", 0, 2),
        ("他说：“好。”", C4_FLAG | END_FLAG, 1),
        ("a list:", END_FLAG, 0),
    ],
)
def test_what_is_seen_of_a_line(line: str, flags: int, sentences: int) -> None:
    for kind in (CompiledAnalysis, PlainAnalysis):
        found = kind([f"  {line} \n"]).lines
        assert found[:, 3:5].tolist() == [[flags, sentences]]
        assert found[0, :2].tolist() == [2, 2 + len(line)]


def naive_ngram_characters(words: list[str]) -> list[int]:
    """The definition by marking words, with loops of another shape."""
    result = []
    for n in range(2, 11):
        grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
        counts = Counter(grams)
        marked: list[set[int]] = [set()]
        if n < 5:
            most = max(counts.values(), default=0)
            for gram, times in counts.items():
                if times == most and times > 1:
                    marked.append({i + k for i, other in enumerate(grams) if other == gram for k in range(n)})
        else:
            marked.append({i + k for i, gram in enumerate(grams) if gram in grams[:i] for k in range(n)})
        result.append(max(sum(len(words[i]) for i in group) for group in marked))
    return result


def test_repeated_ngrams_by_another_way() -> None:
    rng = random.Random(7)
    for _ in range(300):
        words = rng.choices(["a", "bb", "ccc", "dddd"], k=rng.randrange(40))
        expected = naive_ngram_characters(words)
        assert repeated_ngrams(words) == expected
        assert CompiledAnalysis([" ".join(words)]).ngrams(np.array([0])).tolist() == [expected]


def test_repeated_ngrams_by_hand() -> None:
    # "to be" twice in "to be or not to be": 8 of 13 characters; no 3-gram repeats
    assert repeated_ngrams(["to", "be", "or", "not", "to", "be"]) == [8, *[0] * 8]
    # eleven equal words: each n-gram occurs everywhere; the later ones cover all but the first word
    assert repeated_ngrams(["ab"] * 11) == [22, 22, 22, 20, 20, 20, 20, 20, 20]


def test_an_analysis_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    fresh = text_stats._fresh
    monkeypatch.setattr(text_stats, "_fresh", lambda texts: made.append(len(texts)) or fresh(texts))
    monkeypatch.setattr(text_stats, "_recent", [])
    texts = [f"text number {i}" for i in range(10)]
    whole = analyse(texts)
    part = analyse([texts[7], texts[2]])
    assert made == [10]
    assert part["characters"].tolist() == whole["characters"][[7, 2]].tolist()
    np.testing.assert_array_equal(part.lines(0), whole.lines(7))
    assert analyse([*texts[:3], "a new one"])["words"].tolist() == [3, 3, 3, 3]
    assert made == [10, 4]


def test_without_numba_the_plain_form_is_used_and_said_once(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr(text_stats, "has_numba", lambda: False)
    monkeypatch.setattr(text_stats, "_recent", [])
    monkeypatch.setattr(text_stats, "_told", False)
    warned: list[str] = []
    monkeypatch.setattr(text_stats.log, "warning", warned.append)
    assert isinstance(analyse(["a b"]).analysis, PlainAnalysis)
    assert isinstance(analyse(["c d"]).analysis, PlainAnalysis)
    assert len(warned) == 1 and "numba" in warned[0]


@pytest.mark.slow
def test_kernels_compile_where_no_cache_can_be_written(tmp_path: Path) -> None:
    """The module is copied to where numba may not write, and its user cache folder isn't writable either."""
    code = (
        "import numba.core.caching as caching\n"
        "caching.CacheImpl._locator_classes = []\n"
        "from swift.data.operators.text_stats import CompiledAnalysis\n"
        "print(CompiledAnalysis(['a b']).columns['words'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "[2]", done.stderr
