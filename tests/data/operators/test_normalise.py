"""Normal form, mending, line ends, invisible characters; and that the shortcuts never skip a text that needs a step."""

from __future__ import annotations

import random
import re
import sys
import unicodedata
from typing import Any

import pytest

from swift.core.errors import UsageError
from swift.data.engine.document import document_from
from swift.data.engine.operator import OPERATORS, Context
from swift.data.engine.tally import Tally
from swift.data.operators import normalise
from swift.data.operators.normalise import Normalise


def cleaned(text: str, **settings: Any) -> tuple[str, dict[str, int]]:
    operator = Normalise(**settings)
    operator.check()
    operator.open(Context())
    tally = Tally()
    (document,) = operator.run([document_from({"text": text}, "f:1")], tally)
    return document.text, dict(tally.changes)


@pytest.mark.parametrize(
    ("text", "expected", "changes"),
    [
        ("plain text\n", "plain text\n", []),
        ("cafe\u0301", "café", ["unicode_form"]),
        ("\u1100\u1161", "가", ["unicode_form"]),
        ("caf\u00c3\u00a9 and “quotes”", "café and “quotes”", ["encoding"]),
        ("Itâ€™s here", "It’s here", ["encoding"]),
        ("РџСЂРёРІРµС‚ РјРёСЂ", "Привет мир", ["encoding"]),
        ("a\r\nb\rc\u2028d\x85e", "a\nb\nc\nd\ne", ["line_ends"]),
        ("one page\fnext page\vline", "one page\nnext page\nline", ["line_ends"]),
        ("葛\U000e0100城市", "葛\U000e0100城市", []),  # the variant is part of the name
        ("a\x00b\x07c\x7fd\x9be\tf", "abcde\tf", ["control_characters"]),
        ("a\u200bb\ufeffc\u00add\u2060e", "abcde", ["zero_width"]),
        ("a\u200db and 👩\u200d💻 and می\u200cخواهم", "ab and 👩\u200d💻 and می\u200cخواهم", ["zero_width"]),
        ("Ärger, naïve, Straße, ¿qué?, “a”–b… 你好。", "Ärger, naïve, Straße, ¿qué?, “a”–b… 你好。", []),
        ("l’État, à côté; São Paulo; Þór", "l’État, à côté; São Paulo; Þór", []),
        ("half \ud800 of a pair", "half \ud800 of a pair", []),
    ],
)
def test_default_steps(text: str, expected: str, changes: list[str]) -> None:
    assert cleaned(text) == (expected, dict.fromkeys(changes, 1))


@pytest.mark.parametrize(
    ("text", "expected", "settings"),
    [
        ("ﬁne ①", "fine 1", {"form": "NFKC"}),
        ("cafe\u0301", "cafe\u0301", {"form": "none"}),
        ("a\r\nb", "a\r\nb", {"line_ends": False}),
        ("a\x00b", "a\x00b", {"control_characters": False}),
        ("a\u200bb", "a\u200bb", {"zero_width": False}),
        ("caf\u00c3\u00a9", "caf\u00c3\u00a9", {"fix_encoding": False}),
        ("a  \nb \t", "a\nb", {"trailing_spaces": True}),
        ("a\n\n\n\nb", "a\n\nb", {"blank_lines": True}),
        ("  a \n", "a", {"strip": True}),
    ],
)
def test_each_setting(text: str, expected: str, settings: dict[str, Any]) -> None:
    assert cleaned(text, **settings)[0] == expected


def test_only_suspicious_lines_are_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    operator = Normalise()
    operator.open(Context())
    real = operator._ftfy.fix_encoding
    monkeypatch.setattr(operator._ftfy, "fix_encoding", lambda line: seen.append(line) or real(line))
    text = "one good line é\n" * 3 + "one caf\u00c3\u00a9\n" + "good\n"
    (document,) = operator.run([document_from({"text": text}, "f:1")], Tally())
    assert seen == ["one caf\u00c3\u00a9\n"]
    assert document.text == text.replace("\u00c3\u00a9", "é")


def test_the_question_about_the_unicode_form_misses_no_character() -> None:
    """A character that NFC changes, or that may join the one before it, must count as a suspect."""
    suspect = normalise._SUSPECTS["unicode_form"]
    joins = {0x1161 + i for i in range(21)} | {0x11A8 + i for i in range(27)}  # Hangul vowels and finals
    for code in range(sys.maxunicode + 1):
        character = chr(code)
        pieces = unicodedata.decomposition(character)
        if pieces and not pieces.startswith("<") and len(pieces.split()) == 2:
            joins.add(int(pieces.split()[1], 16))
    for code in range(sys.maxunicode + 1):
        character = chr(code)
        changes = unicodedata.normalize("NFC", character) != character
        if changes or code in joins or unicodedata.combining(character):
            assert suspect.search(character), f"U+{code:04X}"


def test_shortcuts_change_nothing() -> None:
    """The same steps on every text, without any question first."""
    rng = random.Random(5)
    alphabet = [
        *"ab \n\t.\v\f",
        "\r",
        "\r\n",
        "\x00",
        "\x1f",
        "\x7f",
        "\x85",
        "\x9f",
        "é",
        "e\u0301",
        "\u0301",
        "你",
        "’",
    ]
    alphabet += [
        "\u200b",
        "\u200c",
        "\u200d",
        "\ufeff",
        "\u2028",
        "\u00ad",
        "가",
        "\u1100",
        "\u1161",
        "😀",
        "\ud800",
        "م",
    ]
    for _ in range(1500):
        text = "".join(rng.choices(alphabet, k=rng.randrange(25)))
        expected = re.sub("\r\n?|[\x0b\x0c\x85\u2028\u2029]", "\n", text)
        expected = re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f]", "", expected)
        expected = re.sub("[\u00ad\u200b\u2060-\u2064\ufeff]", "", expected)
        expected = re.sub("(?<=[\t -\u052f])[\u200c\u200d]+(?=[\t -\u052f])", "", expected)
        expected = unicodedata.normalize("NFC", expected)
        assert cleaned(text, fix_encoding=False)[0] == expected, ascii(text)


def test_every_text_of_a_conversation() -> None:
    row = {"messages": [{"role": "user", "content": "a\r\n"}, {"role": "assistant", "content": "b\x00"}]}
    operator = OPERATORS["normalise"]()
    operator.open(Context())
    (document,) = operator.run([document_from(row, "f:1")], Tally())
    assert document.texts == ["a\n", "b"]


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(UsageError, match="form"):
        Normalise(form="NFQ").check()  # type: ignore[arg-type]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("a" + " " * 300_000 + "b", {"trailing_spaces": True}),
        ("a" + "\u0301\u0316" * 150_000 + "b", {}),
        ("\u0301\u0316" * 150_000, {"form": "NFKC"}),
    ],
)
def test_long_runs_take_no_time(text: str, settings: dict[str, Any]) -> None:
    assert len(cleaned(text, **settings)[0]) >= len(text) - 1


@pytest.mark.parametrize("marks", [1, 400, 999, 1000])
def test_runs_of_marks_are_sorted(marks: int) -> None:
    text = "x" * 77 + "\u0301\u0316" * (marks // 2) + "\u0301" * (marks % 2) + "e\u0301 tail"
    assert cleaned(text)[0] == unicodedata.normalize("NFC", text)
