"""Cutting texts into words, sentences and protected spans: nothing gets lost, nothing protected is cut."""

from __future__ import annotations

import random

import pytest

from swift.data.augment.text import (
    PROTECTABLE,
    Words,
    capitalised,
    is_latin,
    kept_spans,
    like,
    paragraphs,
    sentences,
    uncapitalised,
)


def protected(text: str, *kinds: str) -> list[str]:
    return [text[a:b] for a, b in kept_spans(text, kinds or PROTECTABLE)]


@pytest.mark.parametrize(
    ("kind", "text", "spans"),
    [
        ("code", "Use `rm -rf x` or ``a`b``.", ["`rm -rf x`", "``a`b``"]),
        ("code", "See\n```py\nx = 1\n\ny\n```\nend", ["```py\nx = 1\n\ny\n```"]),
        ("code", "Open\n~~~\nnever closed\nmore", ["~~~\nnever closed\nmore"]),
        ("code", "a\n```\nx\n```\nb\n```\ny\n```", ["```\nx\n```", "```\ny\n```"]),
        ("url", "See https://a.b/c?d=1&e=2. Or www.x.org, or mail me@x.org!", [
            "https://a.b/c?d=1&e=2", "www.x.org", "me@x.org",
        ]),
        ("number", "3.5 or 20% of $6.50 on 2026-11-30, GPT-4 v2 +7", [
            "3.5", "20%", "$6.50", "2026-11-30", "GPT-4", "v2", "+7",
        ]),
        ("number", "我有3只猫，2026年", ["3", "2026"]),
        ("placeholder", "Hi {{NAME}}, {user.name} and ${HOME} %s %(x)d", [
            "{{NAME}}", "{user.name}", "${HOME}", "%s", "%(x)d",
        ]),
        ("special", "<|im_start|>user <image> </s> [INST] a < b", ["<|im_start|>", "<image>", "</s>", "[INST]"]),
        ("latex", r"$x^2$ is \frac{a}{b}, \(y\), \[z\], $$w$$ at $5 and $6", [
            "$x^2$", r"\frac{a}{b}", r"\(y\)", r"\[z\]", "$$w$$",
        ]),
        ("latex", "\\begin{align*}a\\\\b\\end{align*} x", ["\\begin{align*}a\\\\b\\end{align*}"]),
    ],
)  # fmt: skip
def test_protected_spans(kind, text, spans):
    assert protected(text, kind) == spans


def test_words_in_many_scripts():
    text = "Don’t re-use: naïve café हिन्दी में 我喜欢 ไทย 한국어 café ٣ ok"
    words = Words.of(text)
    assert str(words) == text
    assert list(words.values) == [
        "Don’t", "re-use", "naïve", "café", "हिन्दी", "में", "我", "喜", "欢", "ไ", "ท", "ย", "한국어", "café", "٣", "ok",
    ]  # fmt: skip


def test_what_is_protected_is_no_free_word():
    words = Words.of("Read {{X}} and `a b` now")
    assert [words.parts[place] for place in range(1, len(words.parts), 2)] == ["Read", "{{X}}", "and", "`a b`", "now"]
    assert list(words.values) == ["Read", "and", "now"]
    assert "X" in list(Words.of("Read {{X}}", protect=()).values)


def test_shortcuts_for_plain_texts_change_nothing():
    """An ASCII text is cut as the same text with one more letter that forces the general way."""
    draw = random.Random(8)
    pieces = [*(piece for piece in PIECES if piece.isascii()), "don't", "a-b", "x_y", "v2", "see ", "`a`", "$x$ "]
    for _ in range(800):
        text = "".join(draw.choice(pieces) for _ in range(draw.randrange(20)))
        fast, general = Words.of(text), Words.of("Ä\n" + text)
        assert general.parts == ["", "Ä", "\n" + fast.parts[0], *fast.parts[1:]]
        assert general.free == [1, *(place + 2 for place in fast.free)]


def test_sentences():
    text = "  Hi there. Dr. Smith (aged 3.5) came late. He saw `a. b` e.g. once! 你好。再见！Ok?  "
    found, gaps = sentences(text)
    assert found == [
        "Hi there.",
        "Dr. Smith (aged 3.5) came late.",
        "He saw `a. b` e.g. once!",
        "你好。",
        "再见！",
        "Ok?",
    ]
    assert gaps[0] + "".join(a + b for a, b in zip(found, gaps[1:])) == text
    assert sentences("") == ([], [""])
    assert sentences("no end") == (["no end"], ["", ""])


def test_paragraphs_keep_blocks_whole():
    text = "One.\nTwo.\n\n```\nx\ny\n```\nThree.\n"
    pieces = paragraphs(text)
    assert "".join(piece for piece, _ in pieces) == text
    assert [piece for piece, free in pieces if free] == ["One.", "Two.", "Three."]


def test_starts_of_sentences():
    words = Words.of("The cat. A dog, Mr. Big: yes\nNo")
    starts = [words.parts[place] for place in words.free if words.starts_sentence(place)]
    assert starts == ["The", "A", "yes", "No"]


def test_casing():
    assert [like("word", model) for model in ("old", "Old", "OLD", "I")] == ["word", "Word", "WORD", "Word"]
    assert [uncapitalised(word) for word in ("The", "I", "I'm", "NASA", "McCoy", "Über", "")] == [
        "the", "I", "I'm", "NASA", "McCoy", "über", "",
    ]  # fmt: skip
    assert capitalised("éa") == "Éa"


def test_latin():
    assert is_latin("Le chat été") and not is_latin("Это кот") and not is_latin("我喜欢") and not is_latin("12 !")


PIECES = [
    "word", "Ä", "हि", "我", "ไ", "`", "```", "\n", "\n```\n", "$", "\\", "\\[", "{{", "}}", "<|", "|>", "<", ">", "[A",
    "]", " ", ".", "。", "'", "’", "-", "3", "@", "www.", "\u0301", "\u200d", "\ud83d\ude00", "\x00", "(", ")",
    "\t", "\r\n", "Dr.", "\u2028",
]  # fmt: skip


def test_any_text_is_put_together_again():
    draw = random.Random(5)
    for _ in range(1500):
        text = "".join(draw.choice(PIECES) for _ in range(draw.randrange(30)))
        assert str(Words.of(text)) == text
        found, gaps = sentences(text)
        assert gaps[0] + "".join(a + b for a, b in zip(found, gaps[1:], strict=True)) == text
        assert "".join(piece for piece, _ in paragraphs(text)) == text


@pytest.mark.parametrize(
    "unit", ["`", "$a ", "\\[", "{{", "<", "1", "```\n", "a.b@", "\\begin{a}", "word ", ". ", "a-", "[A"]
)
def test_openings_without_ends(unit):
    """A pattern that looked on without bound would take quadratic time: hours, and the suite's own limit ends it."""
    text = unit * (60_000 // len(unit))
    assert str(Words.of(text)) == text
    found, gaps = sentences(text)
    assert gaps[0] + "".join(a + b for a, b in zip(found, gaps[1:], strict=True)) == text


@pytest.mark.timeout(10)
def test_a_row_of_dots_takes_no_time():
    text = "Contents" + "." * 200_000 + "7 is here. Next."
    assert sentences(text)[0] == [text[:-6], "Next."]
