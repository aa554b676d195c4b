"""Gopher, C4, FineWeb, repetition, symbols and lengths: each rule against the paper's formula and at its threshold."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import pytest

from swift.core.errors import UsageError
from swift.data.engine.document import Document, document_from
from swift.data.engine.operator import OPERATORS, Context
from swift.data.engine.tally import Tally
from swift.data.operators import c4, length, quality, repetition  # noqa: F401

PROSE = (
    "The quick brown fox jumps over the lazy dog and runs to the edge of the forest.\n"
    "There it waits until evening, because it knows that hunters have gone home by then.\n"
    "When the moon rises, it walks back with a full stomach and sleeps for many hours.\n\n"
    "In the morning a farmer finds small footprints near his hens, but none of them is missing.\n"
)
CHINESE = (
    "机器学习是人工智能的一个分支，它研究如何让计算机从数据中学习规律。\n"
    "近年来，深度学习在图像识别、语音识别和自然语言处理等领域取得了巨大的进步。\n"
    "训练一个大型模型需要大量的数据，所以数据的质量非常重要，清洗数据是第一步。\n\n"
    "这篇文章介绍了几种常用的清洗方法，并且比较了它们的速度和效果，希望对读者有所帮助。\n"
)


def documents(*texts: str) -> list[Document]:
    return [document_from({"text": text}, f"f:{i}") for i, text in enumerate(texts)]


def run(name: str, texts: list[str], **settings: Any) -> tuple[list[str], Tally]:
    operator = OPERATORS[name](**settings)
    operator.check()
    operator.open(Context())
    tally = Tally()
    kept = operator.run(documents(*texts), tally)
    return [document.id for document in kept], tally


def reason(name: str, text: str, **settings: Any) -> str | None:
    """Why a text is dropped, or None."""
    _, tally = run(name, [text], **settings)
    return next(iter(tally.dropped), None)


THAI = (
    "การเรียนรู้ของเครื่องเป็นสาขาหนึ่งของปัญญาประดิษฐ์ ซึ่งศึกษาว่าคอมพิวเตอร์เรียนรู้จากข้อมูลได้อย่างไร\n"
    "การฝึกแบบจำลองขนาดใหญ่ต้องใช้ข้อมูลจำนวนมาก ดังนั้นคุณภาพของข้อมูลจึงสำคัญมากสำหรับผลลัพธ์ที่ดี\n"
    "บทความนี้แนะนำวิธีทำความสะอาดข้อมูลหลายวิธี และเปรียบเทียบความเร็วกับผลลัพธ์ของแต่ละวิธีด้วย\n"
)
ALL = ("gopher_quality", "gopher_repetition", "fineweb_quality", "c4_quality", "symbol_ratio")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("text", [PROSE, CHINESE], ids=["english", "chinese"])
def test_prose_stays(name: str, text: str) -> None:
    assert reason(name, text) is None


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gopher_quality", {}),
        ("gopher_repetition", {}),
        ("fineweb_quality", {"min_line_end_share": None}),
        ("c4_quality", {"require_line_end": False, "min_sentences": None}),
    ],
)
def test_thai_stays_with_the_settings_that_the_manual_names(name: str, settings: dict[str, Any]) -> None:
    assert reason(name, THAI, **settings) is None
    _, tally = run(name, [THAI], **settings)
    assert not tally.changes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the fox and the dog " * 9, "words"),
        ("The and of " + "it is a an to " * 30, "mean_word_length"),
        ("the and " + "uncharacteristically " * 60, "mean_word_length"),
        (PROSE + " #tag" * 12, "hashes_per_word"),
        (PROSE.replace(" of ", " ... ").replace(" the ", " … ") + "... " * 5, "ellipses_per_word"),
        ("\n".join("- " + line for line in PROSE.splitlines() if line), "bullet_lines"),
        (PROSE.replace("forest.", "forest...").replace("then.", "then…"), "ellipsis_lines"),
        (PROSE + " 1234" * 20, "alphabetic_words"),
        (re.sub(r"\b(the|be|to|of|and|that|have|with)\b", "zum", PROSE, flags=re.I), "stop_words"),
    ],
)
def test_gopher_quality_drops_for_each_reason(text: str, expected: str) -> None:
    assert reason("gopher_quality", text) == expected


def naive_gopher(text: str) -> dict[str, float]:
    """Rae et al. 2021, A1.1, for text of a script with spaces."""
    words = text.split()
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return {
        "words": len(words),
        "mean_word_length": sum(map(len, words)) / len(words),
        "hashes_per_word": text.count("#") / len(words),
        "ellipses_per_word": len(re.findall(r"\.\.\.|…", text)) / len(words),
        "bullet_lines": sum(bool(re.match(r"•|[-*+](\s|$)", line)) for line in lines) / len(lines),
        "ellipsis_lines": sum(bool(re.search(r"(\.\.\.|…)$", line)) for line in lines) / len(lines),
        "alphabetic_words": sum(bool(re.search("[a-zA-Z]", word)) for word in words) / len(words),
    }


def naive_repetition(text: str) -> dict[str, float]:
    """Rae et al. 2021, table A1, for lines and paragraphs."""
    lines = [" ".join(line.split()) for line in text.split("\n") if line.strip()]
    raw = [line.strip() for line in text.split("\n") if line.strip()]
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]
    sizes = [sum(len(line.strip()) for line in part.split("\n")) for part in re.split(r"\n\s*\n", text) if part.strip()]
    again = [line in lines[:i] for i, line in enumerate(lines)]
    part_again = [part in paragraphs[:i] for i, part in enumerate(paragraphs)]
    total = sum(map(len, raw))
    return {
        "duplicate_lines": sum(again) / len(lines),
        "duplicate_line_characters": sum(len(line) for line, is_again in zip(raw, again) if is_again) / total,
        "duplicate_paragraphs": sum(part_again) / len(paragraphs),
        "duplicate_paragraph_characters": sum(s for s, is_again in zip(sizes, part_again) if is_again) / total,
    }


def english(rng: random.Random) -> str:
    words = ["the", "cat", "sat", "and...", "with", "#tag", "12", "of", "…", "mat.", "to", "be"]
    lines = [
        rng.choice(["", "- ", "• ", "  "]) + " ".join(rng.choices(words, k=rng.randrange(1, 8)))
        for _ in range(rng.randrange(2, 12))
    ]
    lines += rng.choices(["", *lines], k=rng.randrange(5))
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("name", "formula"), [("gopher_quality", naive_gopher), ("gopher_repetition", naive_repetition)]
)
def test_values_are_the_papers(name: str, formula: Any) -> None:
    """The sum over random texts of each metric, as the report's histogram has it."""
    rng = random.Random(3)
    texts = [english(rng) for _ in range(200)]
    _, tally = run(name, texts)
    expected: Counter[str] = Counter()
    for text in texts:
        expected.update(formula(text))
    for metric, total in expected.items():
        histogram = tally.histograms[metric]
        assert histogram.count == len(texts)
        assert histogram.total == pytest.approx(total, rel=1e-12), metric


def test_a_value_at_the_threshold_stays() -> None:
    """Gopher's and the repetition rules drop above, FineWeb's at the threshold."""
    twelve = "the cat and dog " * 3
    assert reason("gopher_quality", twelve, min_words=12) is None
    assert reason("gopher_quality", twelve, min_words=13) == "words"
    lines = "\n".join(["a line that comes again"] * 2 + [f"line number {i} stands alone" for i in range(2)])
    off: dict[str, Any] = dict.fromkeys([f"max_top_{n}gram_share" for n in (2, 3, 4)])
    off |= dict.fromkeys([f"max_duplicate_{n}gram_share" for n in range(5, 11)])
    off["max_duplicate_line_character_share"] = None
    assert reason("gopher_repetition", lines, max_duplicate_line_share=0.25, **off) is None
    assert reason("gopher_repetition", lines, max_duplicate_line_share=0.2499, **off) == "duplicate_lines"
    half = "A line that ends as a sentence does, with a full stop.\nand one that goes on and on and on and on"
    assert reason("fineweb_quality", half, min_line_end_share=0.5) == "line_ends"
    assert reason("fineweb_quality", half, min_line_end_share=0.49) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n".join(["one line of text that is long enough and ends well."] * 5), "duplicate_lines"),
        (
            "\n\n".join([f"{i} unlike any other line of it" for i in range(5)] + ["twice the same paragraph"] * 5),
            "duplicate_lines",
        ),
        ("buy shoes " * 30, "top_2gram"),
        (" ".join(f"word{i} buy cheap shoes now" for i in range(12)), "top_2gram"),
    ],
)
def test_repetition_drops(text: str, expected: str) -> None:
    assert reason("gopher_repetition", text) == expected


@pytest.mark.parametrize("n", range(5, 11))
def test_each_duplicate_ngram_rule_drops(n: int) -> None:
    """A sentence of n words said again and again among fresh words breaks the rule for n, and that for n + 1 not."""
    rng = random.Random(n)
    said = [f"said{k}" for k in range(n)]
    words = [w for _ in range(8) for w in (*said, *(f"w{rng.randrange(10**9)}" for _ in range(2)))]
    off: dict[str, Any] = dict.fromkeys([f"max_top_{k}gram_share" for k in (2, 3, 4)])
    off |= {f"max_duplicate_{k}gram_share": None for k in range(5, 11)}
    share = f"max_duplicate_{n}gram_share"
    assert reason("gopher_repetition", " ".join(words), **{**off, share: 0.1}) == f"duplicate_{n}gram"
    if n < 10:
        assert reason("gopher_repetition", " ".join(words), **{**off, f"max_duplicate_{n + 1}gram_share": 0.0}) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n".join(f"Menu entry number {i} of this page without end" for i in range(9)), "line_ends"),
        ("\n".join([f"Short line {i}." for i in range(9)]), "short_lines"),
        (PROSE + PROSE.splitlines()[0] + "\n", "duplicate_line_characters"),
        ("", "line_ends"),
    ],
)
def test_fineweb_drops(text: str, expected: str) -> None:
    assert reason("fineweb_quality", text) == expected


def test_fineweb_short_lines_of_chinese() -> None:
    """Twenty characters are a sentence in Chinese, and a fragment in English."""
    chinese = "\n".join(f"第{i}个句子大约有二十个汉字，所以它不算短。" for i in range(5))
    assert reason("fineweb_quality", chinese, max_duplicate_line_character_share=None) is None
    assert reason("fineweb_quality", "\n".join(f"{i} lines of twenty five." for i in range(5))) == "short_lines"


# --- C4 ---


def test_c4_removes_lines_and_counts_them_by_reason() -> None:
    good = [line for line in PROSE.splitlines() if line]
    text = "\n".join(
        [
            "Home",
            good[0],
            "  " + good[1] + "[1]",
            "Please turn on JavaScript to see this page, thank you.",
            "By reading on you accept our privacy policy and more.",
            "Four words it has.",
            good[2],
            "no end mark here but words",
        ]
    )
    operator = OPERATORS["c4_quality"]()
    operator.open(Context())
    tally = Tally()
    (kept,) = operator.run(documents(text), tally)
    assert kept.text == "\n".join(good[:3])
    assert dict(tally.changes) == {
        "citation": 1,
        "line_without_end": 2,
        "short_line": 1,
        "javascript_line": 1,
        "policy_line": 1,
    }
    assert tally.histograms["sentences"].total == 3


def test_c4_leaves_a_text_without_faults_as_it_is() -> None:
    operator = OPERATORS["c4_quality"]()
    operator.open(Context())
    (kept,) = operator.run(documents(PROSE), Tally())
    assert kept.text == PROSE


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PROSE + "int main() { return 0; }\n", "curly_bracket"),
        (PROSE + "Lorem Ipsum dolor sit amet, and so on and on.\n", "lorem_ipsum"),
        ("Only two sentences are in here. This is the second one.\n", "too_few_sentences"),
        ("nothing of this ends\nwith a mark at all of it\n", "too_few_sentences"),
    ],
)
def test_c4_drops_pages(text: str, expected: str) -> None:
    assert reason("c4_quality", text) == expected


def test_c4_blocked_words_are_whole_words(tmp_path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("# a list\nhen\nblue moon\n坏词\n")
    assert reason("c4_quality", PROSE, blocked_words=str(words)) is None  # it has "hens" and "then"
    assert reason("c4_quality", PROSE + "A Hen, here.", blocked_words=str(words)) == "blocked_word"
    assert reason("c4_quality", PROSE + "Once in a blue moon.", blocked_words=str(words)) == "blocked_word"
    assert reason("c4_quality", CHINESE + "这里有坏词。", blocked_words=str(words)) == "blocked_word"
    with pytest.raises(UsageError, match="can't be read"):
        reason("c4_quality", PROSE, blocked_words=str(tmp_path / "none.txt"))


def test_c4_leaves_the_turns_of_a_conversation_whole() -> None:
    row = {"messages": [{"role": "user", "content": "no end mark"}, {"role": "assistant", "content": PROSE}]}
    operator = OPERATORS["c4_quality"]()
    operator.open(Context())
    (kept,) = operator.run([document_from(row, "f:1")], Tally())
    assert kept.texts == ["no end mark", PROSE]
    row["messages"][1]["content"] = "a { b"
    assert operator.run([document_from(row, "f:1")], Tally()) == []


def test_c4_with_all_rules_off_keeps_everything_but_empty_texts() -> None:
    off = {"min_sentences": None, "min_words_per_line": None, "require_line_end": False}
    assert reason("c4_quality", "x", **off) is None
    assert reason("c4_quality", " \n", **off) == "no_line_left"


# --- symbols, length ---


@pytest.mark.parametrize("piece", [3, 1 << 20])
def test_symbol_ratio_by_hand(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "_PIECE", piece)
    _, tally = run("symbol_ratio", ["ab1 2$ 你😀\n"], max_symbol_share=1.0, max_digit_share=1.0, min_letter_share=0.0)
    histograms = tally.histograms
    assert histograms["letters"].total == pytest.approx(3 / 7)  # a b 你
    assert histograms["digits"].total == pytest.approx(2 / 7)
    assert histograms["symbols"].total == pytest.approx(2 / 7)
    assert reason("symbol_ratio", "ab$$", max_symbol_share=0.4) == "symbols"
    assert reason("symbol_ratio", "abcdefg123", max_digit_share=0.2) == "digits"
    assert reason("symbol_ratio", "abc   456", max_digit_share=1, min_letter_share=0.51) == "letters"
    assert reason("symbol_ratio", "abc   45", max_digit_share=1, min_letter_share=0.51) is None


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"min_characters": 4}, [1, 2]),
        ({"max_characters": 4}, [0, 1]),
        ({"min_words": 3}, [1, 2]),
        ({"max_lines": 1}, [0, 1]),
        ({"min_lines": 2, "max_words": 3}, [2]),
    ],
)
def test_length(settings: dict[str, int], kept: list[int]) -> None:
    ids, _ = run("length", ["ab", "你好吗。", "a b\n\nccc"], **settings)
    assert ids == [f"f:{i}" for i in kept]


def test_a_document_has_one_reason_and_all_its_values() -> None:
    _, tally = run("length", ["a b\nc"], max_characters=1, max_words=1, max_lines=1)
    assert dict(tally.dropped) == {"characters": 1}
    assert {name: h.total for name, h in tally.histograms.items()} == {"characters": 5, "words": 3, "lines": 2}
    assert "characters 5, allowed: up to 1" in tally.samples["characters"][0]["note"]


def test_batches_dont_matter() -> None:
    rng = random.Random(1)
    texts = [english(rng) * rng.randrange(1, 4) for _ in range(60)] + [CHINESE, PROSE, ""]
    for name in ALL:
        whole, whole_tally = run(name, texts, **({"min_words": 5} if name == "gopher_quality" else {}))
        operator = OPERATORS[name](**({"min_words": 5} if name == "gopher_quality" else {}))
        operator.open(Context())
        tally, kept = Tally(), []
        rows = documents(*texts)
        for i in range(0, len(rows), 7):
            kept += [document.id for document in operator.run(rows[i : i + 7], tally)]
        assert kept == whole
        assert tally.dropped == whole_tally.dropped
        assert tally.changes == whole_tally.changes
        assert {k: h.buckets for k, h in tally.histograms.items()} == {
            k: h.buckets for k, h in whole_tally.histograms.items()
        }


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("gopher_quality", {"min_words": 10, "max_words": 9}, "min_words"),
        ("gopher_quality", {"max_bullet_line_share": 1.5}, "max_bullet_line_share"),
        ("gopher_quality", {"stop_words": ["the"]}, "min_stop_words"),
        ("gopher_repetition", {"max_top_2gram_share": -0.1}, "max_top_2gram_share"),
        ("fineweb_quality", {"short_line_characters": 0}, "short_line_characters"),
        ("c4_quality", {"min_sentences": -1}, "min_sentences"),
        ("symbol_ratio", {"max_digit_share": 30}, "max_digit_share"),
        ("length", {}, "no bound"),
        ("length", {"min_lines": 3, "max_lines": 2}, "min_lines"),
    ],
)
def test_settings_that_cant_be_meant(name: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        OPERATORS[name](**settings).check()
